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
def registered() -> Iterator[str]:
    """The id of an environment that can't be made."""
    gym.register("Broken-v0", entry_point=broken)
    yield "Broken-v0"
    del gym.registry["Broken-v0"]


TOLD = "LicenceError: the simulator has expired 3 days ago"


@pytest.mark.slow
@pytest.mark.parametrize("where", [*HERE, *ELSEWHERE])
def test_a_callable_that_raises_is_refused_by_one_error(where: Any) -> None:
    before = processes_of()
    with pytest.raises(EnvError) as raised:
        Rollout([partial(gym.make, "CartPole-v1"), broken], where=where)
    assert str(raised.value) == f"the callable for slot 1, expected to make a gymnasium.Env, raised {TOLD}"
    check_cause(raised.value, where)
    assert processes_of() <= before


@pytest.mark.parametrize("where", [*HERE, "processes"])
def test_an_id_whose_environment_raises_is_refused_by_one_error(where: Any, registered: str) -> None:
    with pytest.raises(EnvError) as raised:
        Rollout(registered, where=where)
    assert str(raised.value) == f"environment 'Broken-v0' can't be made: {TOLD}"
    check_cause(raised.value, where)


@pytest.mark.parametrize("where", ["inline", "threads", "processes"])
def test_a_callable_for_several_agents_that_raises_is_refused_by_one_error(where: Any) -> None:
    with pytest.raises(EnvError) as raised:
        MultiAgentRollout(broken, where=where)
    assert str(raised.value) == f"the callable for environment 0, expected to make a MultiAgentEnv, raised {TOLD}"
    check_cause(raised.value, where)


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
def test_one_that_can_not_be_made_again_at_first_is_made_later(
    where: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"module": NumberedModule(), "fragment_length": 4, "num_fragments": 3, "seed": 0}
    with Rollout(partial(FailsOnce, 0, tmp_path), where=where, workers=1, **options) as rollout:
        fragments = list(rollout.fragments())
    assert len(fragments) == 3
    assert "raised OSError: the port is still taken" in caplog.text
    assert len(Doomed.lives(tmp_path, 0)) == 3
