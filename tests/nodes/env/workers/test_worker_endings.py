"""What a worker process is called, and its end when it has done its work."""

import atexit
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Rollout
from rollflow.nodes import OnProcesses, RandomModule


@pytest.mark.slow
@pytest.mark.parametrize("place", ["processes", OnProcesses(num_hosts=1)], ids=["worker", "host"])
def test_lists_of_processes_say_what_one_is(place: Any) -> None:
    before = set(psutil.pids())
    with Rollout("CartPole-v1", where=place, module=RandomModule, fragment_length=4) as rollout:
        next(rollout.fragments())
        made = [each for each in psutil.process_iter() if each.pid not in before]
        assert ("rollflow-worker" if place == "processes" else "rollout-host") in [each.name() for each in made]


class TakenApart:
    """Says when the interpreter takes apart what it has loaded."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "taken apart")
        self.open = open

    def __del__(self) -> None:
        self.open(self.path, "w").close()


class Leaves(NumberedEnv):
    """Has something called at the exit of its process, and leaves something loaded."""

    def __init__(self, slot: int, folder: Path) -> None:
        super().__init__(slot)
        atexit.register((folder / "called at exit").touch)
        sys.left_by_env = TakenApart(folder)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_worker_calls_what_is_to_be_called_at_its_exit_and_takes_nothing_apart(where: Any, tmp_path: Path) -> None:
    rollout = Rollout(
        partial(Leaves, 0, tmp_path), where=where, workers=1, module=NumberedModule(), fragment_length=4, seed=0
    )
    with rollout:
        next(iter(rollout.fragments()))
    assert [path.name for path in tmp_path.iterdir()] == ["called at exit"]
