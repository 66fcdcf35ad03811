"""Lanes that share a worker process: they take turns in its main thread, and none is late for another's turn."""

import threading
from functools import partial
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from small_env import SmallEnv
from together import Together

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule
from rollflow.nodes.env.workers.lane_status import LanePhase, LaneStatus
from rollflow.nodes.env.workers.watch import Activity, ActivityFlag
from rollflow.nodes.env.workers.worker_node import LaneLink, Worker, WorkerNode

BOX = gym.spaces.Box(-1, 1, (1,))


def seen() -> Any:
    assert threading.current_thread() is threading.main_thread()
    return np.zeros(1, np.float32)


class MainThreadEnv(SmallEnv):
    """Raises outside of the main thread, wherever it is called."""

    observation_space = BOX

    def __init__(self) -> None:
        seen()

    def look(self) -> Any:
        return seen()

    def close(self) -> None:
        seen()


def main_thread_agents() -> Together:
    """The same with an agent."""
    return Together({"a": MainThreadEnv()})


@pytest.mark.parametrize("where", ["processes", "rollouts"])
@pytest.mark.parametrize(("kind", "env"), [(Rollout, MainThreadEnv), (MultiAgentRollout, main_thread_agents)])
def test_all_lanes_of_a_worker_step_in_its_main_thread(kind: Any, env: Any, where: Any) -> None:
    options: Any = {"module": RandomModule, "fragment_length": 5, "num_fragments": 2, "seed": 0}
    with kind(env, num_envs=6, lanes=3, where=where, workers=1, **options) as rollout:
        fragments = list(rollout.fragments())
    assert sorted((fragment.lane, fragment.sequence, fragment.num_steps) for fragment in fragments) == [
        (lane, sequence, 10) for lane in range(3) for sequence in range(2)
    ]
    assert rollout.lost == {}


class Link(LaneLink):
    """The link to a lane of which the activity alone matters."""

    def __init__(self, index: int, phase: LanePhase) -> None:
        LaneStatus.__init__(self, index, phase)
        self.activity = ActivityFlag()

    def _reset(self) -> None: ...
    def step(self) -> None: ...
    def take(self, answer: Any) -> bool:
        return False


def test_a_lane_that_waits_for_its_turn_has_the_time_of_the_lane_that_has_it() -> None:
    links = [Link(0, LanePhase.RESETTING), Link(1, LanePhase.STEPPING)]
    links[0].worker = links[1].worker = Worker(list(links))
    progress = partial(WorkerNode.progress, Mock(remotes=links))
    assert progress(1) == (1, Activity.STEP)
    links[0].activity.set_at_work(True)
    waits = progress(1)
    assert waits == progress(0) == (0, Activity.RESET)
    links[0].activity.set_at_work(False)
    links[1].activity.set_at_work(True)
    assert progress(1) == (1, Activity.STEP) != waits  # its own time begins now
