"""Workers that somebody else kills or stops, at any moment: what they have made stands in a chunk or is counted."""

import os
import random
import signal
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from doomed import Doomed, check_chunks, lives_of, rewards_by_slot
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from left_behind import held_here
from numbered import NumberedModule

from rollflow.nodes import Rollout
from rollflow.stream import Fragment

pytestmark = pytest.mark.slow

SLOTS, LENGTH = 4, 8
LONGEST_PAUSE_S = 0.3  # between two strikes


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rollflow.nodes.backoff.FIRST_S", 0.01)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Setting(NamedTuple):
    """How a rollout is drawn, and what strikes its workers."""

    strikes: list[str]
    workers: int
    prefetch: int
    longest: int
    stalls: bool
    seed: int


drawn_settings = st.builds(
    Setting,
    strikes=st.lists(st.sampled_from(["kill", "kill", "stop"]), min_size=1, max_size=3),
    workers=st.integers(1, 2),
    prefetch=st.integers(0, 2),
    longest=st.sampled_from([3, 50]),
    stalls=st.booleans(),
    seed=st.integers(0, 1000),
)


class Tells(Doomed):
    """Says in whose process it is, once it has been stepped."""

    def __init__(self, slot: int, log: Path, **kwargs: Any) -> None:
        super().__init__(slot, log, "", 0, 0, **kwargs)

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        if self.life == 1:
            (self.log_path.parent / f"pid {os.getpid()}").touch()
        return answer


class Striker(threading.Thread):
    """Kills or stops workers at moments of its own; one is stopped only once its environments have made a step.

    others    children of this process that are no workers, such as multiprocessing's own
    """

    def __init__(self, drawn: Setting, log: Path, others: set[int]) -> None:
        super().__init__(daemon=True)
        self._strikes, self._log, self._others = drawn.strikes, log, others
        self._rng = random.Random(drawn.seed)
        self._pause = threading.Event()
        self.has_ended = threading.Event()

    def run(self) -> None:
        for strike in self._strikes:
            self._pause.wait(self._rng.uniform(0, LONGEST_PAUSE_S))
            while not (alive := self._workers(has_stepped=strike == "stop")):
                self._pause.wait(0.005)
            os.kill(self._rng.choice(alive), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[strike])
        self.has_ended.set()

    def _workers(self, *, has_stepped: bool) -> list[int]:
        children = [child for child in psutil.Process().children() if child.pid not in self._others]
        pids = [child.pid for child in children if child.status() != psutil.STATUS_STOPPED]
        return sorted(pid for pid in pids if not has_stepped or (self._log / f"pid {pid}").exists())


def struck(drawn: Setting, where: Any, log: Path) -> tuple[list[Fragment], int]:
    """The fragments of a rollout whose workers are struck, and how many transitions it counts as lost."""
    makers = [partial(Tells, slot, log, lengths=(1, drawn.longest)) for slot in range(SLOTS)]
    options: Any = {"lanes": 2, "workers": drawn.workers, "prefetch": drawn.prefetch, "seed": drawn.seed}
    options |= {"fragment_length": LENGTH, "step_timeout": 1.0, "module": NumberedModule()}
    fragments: list[Fragment] = []
    others = {child.pid for child in psutil.Process().children()}
    with Rollout(makers, where=where, **options) as rollout:
        striker = Striker(drawn, log, others)
        striker.start()
        given, after = iter(rollout.fragments()), [0, 0]
        while min(after) < 3:
            fragments.append(next(given))
            made_ahead = rollout.num_steps - sum(fragment.num_steps for fragment in fragments)
            assert made_ahead <= (1 + drawn.prefetch) * SLOTS * LENGTH
            if drawn.stalls:
                striker.has_ended.wait(LONGEST_PAUSE_S)
            after[fragments[-1].lane] += striker.has_ended.is_set()
        rollout.drain()
        fragments += given
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
        counted = rollout.lost
        lost = counted.pop("workers", 0)
        assert counted == {}
    striker.join()
    return fragments, lost


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_workers_may_be_struck_at_any_moment(where: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(drawn=drawn_settings)
    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    def holds(drawn: Setting) -> None:
        log = tmp_path_factory.mktemp("log")
        before = held_here()
        fragments, lost = struck(drawn, where, log)
        check(fragments, lost, log, per_life=1 if where == "processes" else LENGTH + 1)
        del fragments
        assert held_here() == before

    holds()


def check(fragments: list[Fragment], lost: int, log: Path, per_life: int) -> None:
    """Conservation and continuity; the others have gone on."""
    for lane in (0, 1):
        sequences = sorted(fragment.sequence for fragment in fragments if fragment.lane == lane)
        assert sequences == list(range(len(sequences)))
        assert len(sequences) >= 3
    check_chunks(fragments)
    seen = {slot: lives_of(rewards) for slot, rewards in rewards_by_slot(fragments).items()}
    made = {slot: Doomed.lives(log, slot) for slot in range(SLOTS)}
    missing = sum(map(sum, made.values())) - sum(map(sum, seen.values()))
    assert 0 <= missing <= lost <= per_life * sum(map(len, made.values()))
    for slot in range(SLOTS):
        left = iter(seen[slot])
        steps = next(left, None)
        for life in made[slot]:  # each is seen but for its end, one after the other
            if steps is not None and life - per_life <= steps <= life:
                steps = next(left, None)
            else:
                assert life <= per_life
        assert steps is None
