"""One error refuses a maker that raises, wherever its environment was to step."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from ending_envs import Doomed
from leftovers import processes_of
from numbered_module import NumberedModule

from rollflow import MultiAgentRollout, Rollout
from rollflow.stream import EnvError

HERE, ELSEWHERE = ["inline", "threads", "auto"], ["processes", "rollouts"]


class LicenceError(Exception):
    """Can't be made out of its text."""

    def __init__(self, days: int, *, product: str) -> None:
        super().__init__(f"{product} has expired {days} days ago")


def broken(**kwargs: Any) -> Any:
    raise LicenceError(3, product="the simulator")


@pytest.fixture
def registered() -> Iterator[None]:
    """An environment that can't be made has an id."""
    gym.register("Broken-v0", entry_point=broken)
    yield
    del gym.registry["Broken-v0"]


TOLD = "LicenceError: the simulator has expired 3 days ago"


KINDS: dict[str, tuple[Any, Any, str]] = {
    "callables": (
        Rollout,
        [partial(gym.make, "CartPole-v1"), broken],
        "the callable for slot 1, expected to make a gymnasium.Env, raised",
    ),
    "id": (Rollout, "Broken-v0", "environment 'Broken-v0' can't be made:"),
    "several agents": (
        MultiAgentRollout,
        broken,
        "the callable for environment 0, expected to make a MultiAgentEnv, raised",
    ),
}


@pytest.mark.parametrize("where", [*HERE, *ELSEWHERE])
@pytest.mark.parametrize("kind", KINDS)
def test_one_error_refuses_what_raises(kind: str, where: Any, registered: None) -> None:
    rollout, env, told = KINDS[kind]
    before = processes_of()
    with pytest.raises(EnvError) as raised:
        rollout(env, where=where)
    assert str(raised.value) == f"{told} {TOLD}"
    check_cause(raised.value, where)
    assert processes_of() <= before


def check_cause(error: EnvError, where: str) -> None:
    """The error itself, or, of another process, where it was raised."""
    is_elsewhere = any(
        "in a worker process" in note and "in broken" in note for note in getattr(error, "__notes__", ())
    )
    assert is_elsewhere or isinstance(error.__cause__, LicenceError)
    if where != "auto":  # which may go elsewhere after it has tried the first one here
        assert is_elsewhere == (where in ELSEWHERE)


class FailsOnce(Doomed):
    """Is killed in its first life, and can't be made for the second."""

    def __init__(self, slot: int, log: Path) -> None:
        super().__init__(slot, log, "kill", 3, 1, lengths=(100, 100))
        if self.log_path.read_text().count("life") == 2:
            raise OSError("the port is still taken")


@pytest.mark.wait_times(first_pause_s=0.01)
@pytest.mark.slow
@pytest.mark.parametrize("where", ELSEWHERE)
def test_one_not_made_again_at_first_is_made_later(
    where: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"module": NumberedModule(), "fragment_length": 4, "num_fragments": 3, "seed": 0}
    with Rollout(partial(FailsOnce, 0, tmp_path), where=where, workers=1, **options) as rollout:
        fragments = list(rollout.fragments())
    assert len(fragments) == 3
    assert "raised OSError: the port is still taken" in caplog.text
    assert len(Doomed.lives(tmp_path, 0)) == 3
