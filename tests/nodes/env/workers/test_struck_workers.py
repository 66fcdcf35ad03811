"""Workers that somebody else kills or stops, at any moment: what they have made stands in a chunk or is counted."""

import os
import re
import signal
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from ending_envs import Doomed, Tells, check_chunks, lives_of, rewards_by_slot
from hypothesis import Phase, given, settings, strategies as st
from leftovers import held_here, processes_of, shared_mappings
from numbered_module import NumberedModule
from property_examples import examples, strategies

from rollflow import Fragment, Rollout, Timeouts

pytestmark = [pytest.mark.slow, pytest.mark.wait_times(first_pause_s=0.01, close_s=0.5)]

SLOTS, LENGTH = 4, 8
STALL_S = 0.3  # that a slow consumer takes for a fragment
REASON = r"process \d+ was killed by SIGKILL|no answer to a (step|reset) within"


@pytest.fixture(autouse=True)
def _temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Strike(NamedTuple):
    """One strike at a worker: its kind and its moment.

    kind       "kill", "stop", or "pause": stopped, it goes on after as long as was waited
    steps      that are made first, since the strike before
    seconds    that are waited then
    worker     which of those that are alive, by a number
    """

    kind: str
    steps: int
    seconds: float
    worker: int


class Setting(NamedTuple):
    """Random settings of a rollout, and the strikes at its workers.

    at_drain, at_end    what strikes one when the rollout has just been drained, and all just before it is left
    """

    strikes: list[Strike]
    at_drain: str | None
    at_end: str | None
    workers: int
    prefetch: int
    longest: int
    stalls: bool
    seed: int


strike_drawn = strategies(kind=["kill", "kill", "pause", "stop"], steps=(0, 80))
strike_drawn |= strategies(seconds=st.one_of(st.floats(0, 0.003), st.floats(0, 0.4)), worker=(0, 1))
drawn_strikes = st.builds(Strike, **strike_drawn)


parts_drawn = strategies(strikes=st.lists(drawn_strikes, min_size=1, max_size=4), at_drain=[None, "kill", "stop"])
parts_drawn |= strategies(at_end=[None, "kill", "stop"], workers=(1, 2), prefetch=(0, 2), longest=[3, 50])
parts_drawn |= strategies(stalls=bool, seed=(0, 1000))
drawn_settings = st.builds(Setting, **parts_drawn)


class Workers:
    """The worker processes of a rollout, as somebody else would find them.

    log       where those are named whose environments have made a step
    others    children of this process that are no workers
    """

    def __init__(self, log: Path, others: set[int]) -> None:
        self._log, self._others = log, others

    def pids(self, *, have_stepped: bool = False) -> list[int]:
        """Return workers that are alive and not stopped; `have_stepped`: whose environments have made a step."""
        children = [child for child in processes_of() if child.pid not in self._others]
        alive = []
        for child in children:
            with suppress(psutil.NoSuchProcess):
                alive += [child.pid] * (child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
        return sorted(pid for pid in alive if not have_stepped or (self._log / f"pid {pid}").exists())


def strike(kind: str, pid: int) -> None:
    """Kill or stop a worker, unless it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


class Striker(threading.Thread):
    """Strikes workers of a rollout; one is stopped for good only once its environments have made a step."""

    def __init__(self, strikes: list[Strike], rollout: Rollout, workers: Workers) -> None:
        super().__init__(daemon=True)
        self._strikes, self._rollout, self._workers = strikes, rollout, workers
        self._pause = threading.Event()
        self.has_ended = threading.Event()

    def run(self) -> None:
        for each in self._strikes:
            goal = self._rollout.num_steps + each.steps
            while self._rollout.num_steps < goal:
                self._pause.wait(2e-4)
            self._pause.wait(each.seconds)
            while not (alive := self._workers.pids(have_stepped=each.kind == "stop")):
                self._pause.wait(0.005)
            pid = alive[each.worker % len(alive)]
            strike(each.kind, pid)
            if each.kind == "pause":
                self._pause.wait(each.seconds)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.has_ended.set()


def options_for(where: Any, **more: Any) -> dict[str, Any]:
    return {"lanes": 2, "where": where, "fragment_length": LENGTH, "module": NumberedModule(), **more}


def struck(drawn: Setting, where: Any, log: Path) -> tuple[list[Fragment], int]:
    """The fragments of a rollout whose workers are struck, and how many transitions it counts as lost."""
    makers = [partial(Tells, slot, log, lengths=(1, drawn.longest)) for slot in range(SLOTS)]
    options = options_for(
        where, workers=drawn.workers, prefetch=drawn.prefetch, seed=drawn.seed, timeouts=Timeouts(step=1.0)
    )
    fragments: list[Fragment] = []
    workers = Workers(log, {child.pid for child in processes_of()})
    with Rollout(makers, **options) as rollout:
        striker = Striker(drawn.strikes, rollout, workers)
        striker.start()
        given, after = iter(rollout.fragments()), [0, 0]
        while min(after) < 3:
            fragments.append(next(given))
            made_ahead = rollout.num_steps - sum(fragment.num_steps for fragment in fragments)
            assert made_ahead <= (1 + drawn.prefetch) * SLOTS * LENGTH
            if drawn.stalls:
                striker.has_ended.wait(STALL_S)
            after[fragments[-1].lane] += striker.has_ended.is_set()
        rollout.drain()
        if drawn.at_drain is not None:
            for pid in workers.pids()[:1]:
                strike(drawn.at_drain, pid)
        fragments += given
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
        counted = rollout.lost
        lost = counted.pop("workers", 0)
        assert counted == {}
        if drawn.at_end is not None:
            for pid in workers.pids():
                strike(drawn.at_end, pid)
    striker.join()
    return fragments, lost


@pytest.mark.hypothesis  # which are drawn within
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_workers_may_be_struck_at_any_moment(where: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(drawn=drawn_settings)
    @settings(max_examples=examples(3), phases=[Phase.explicit, Phase.generate])
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
    for fragment in fragments:
        told = [chunk.custom_data["lost"] for chunk in fragment.episodes() if "lost" in chunk.custom_data]
        for reason in (*told, *(loss.reason for loss in fragment.losses)):
            assert re.search(REASON, reason), reason
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


@pytest.mark.parametrize(("where", "most"), [("processes", 5), ("rollouts", 10)])
def test_memory_does_not_grow_with_workers_that_are_killed(where: str, most: int, tmp_path: Path) -> None:
    """Blocks of shared memory: `most` for a lane. Descriptors, but for a block's two: every loss would leave one."""
    makers = [partial(Tells, slot, tmp_path) for slot in range(SLOTS)]
    mapped, workers = shared_mappings(), Workers(tmp_path, {child.pid for child in processes_of()})
    descriptors: list[int] = []
    with Rollout(makers, **options_for(where, workers=1, prefetch=1, seed=0)) as rollout:
        given = iter(rollout.fragments())
        for _ in range(5):
            for _ in range(8):
                next(given)
            assert shared_mappings() - mapped <= 2 * most
            descriptors.append(len(os.listdir("/proc/self/fd")) - 2 * shared_mappings())
            strike("kill", workers.pids()[0])
            while not next(given).losses:
                pass
    assert max(descriptors) < descriptors[0] + 4
