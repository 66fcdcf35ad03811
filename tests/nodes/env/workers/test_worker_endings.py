"""What a worker process is called, and its end when it has done its work."""

from typing import Any

import psutil
import pytest

from rollflow import Rollout
from rollflow.nodes import OnProcesses, RandomModule


@pytest.mark.slow
@pytest.mark.parametrize("place", ["processes", OnProcesses(num_hosts=1)], ids=["worker", "host"])
def test_lists_of_processes_say_what_one_is(place: Any) -> None:
    before = set(psutil.pids())
    with Rollout("CartPole-v1", where=place, module=RandomModule, fragment_length=4) as rollout:
        next(rollout.fragments())
        made = [each for each in psutil.process_iter() if each.pid not in before]
        assert ("rollflow-worker" if place == "processes" else "rollflow-host") in [each.name() for each in made]
