"""Environments with several agents that hang in the threads of their lanes are named, and so is what hangs."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from held_envs import LONGEST_S
from numbered_agents import NumberedAgents
from serial_module import SerialModule

from rollflow import MultiAgentRollout
from rollflow.nodes import ArrayStep, MultiAgentVectorEnv, RandomModule
from rollflow.stream import EnvError

Hold = Callable[[], Any]


class HeldAgents(NumberedAgents):
    """Waits in its second step, or in its second reset."""

    def __init__(self, slot: int, hold: Hold, at: str) -> None:
        super().__init__(slot, nested=0, length=3, at_once=True)
        self.hold, self.at, self.steps = hold, at, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.slot == 1 and self.at == "step" and self.steps == 2:
            self.hold()
        return super().step(actions)

    def reset(self, **options: Any) -> Any:
        if self.slot == 1 and self.at == "reset" and self.episode == 0:
            self.hold()
        return super().reset(**options)


class HeldVector(MultiAgentVectorEnv):
    """Waits in its second step: whether it resets there, nobody can tell."""

    num_envs, possible_agents = 1, ("a",)
    observation_spaces = action_spaces = dict.fromkeys(possible_agents, gym.spaces.Discrete(2))

    def __init__(self, hold: Hold) -> None:
        self.hold, self.steps, self.seen = hold, 0, [np.zeros((1, 1), np.int64)]

    def reset_arrays(self, seeds: Any) -> Any:
        return self.seen, ()

    def step_arrays(self, actions: Any) -> ArrayStep:
        self.steps += 1
        if self.steps == 2:
            self.hold()
        nobody = np.zeros(1, np.bool_)
        return ArrayStep(self.seen, [np.zeros((1, 1), np.float32)], nobody, nobody)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Waits until the test has ended; no thread is left then."""
    monkeypatch.setattr("rollflow.nodes.env.workers.thread_environments.CLOSE_TIMEOUT_S", 0.1)
    before, let_go = set(threading.enumerate()), threading.Event()
    yield partial(let_go.wait, LONGEST_S)
    let_go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONGEST_S)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("at", "timeouts", "reason"),
    [
        ("step", (1.0, 60.0), r"lane 1, vector step 1: no answer to a step within 1\.0 s"),
        ("reset", (60.0, 1.0), r"lane 1, vector step 2: no answer to a reset within 1\.0 s"),
    ],
)
def test_a_step_or_a_reset_that_hangs_is_given_up_after_its_own_time(
    at: str, timeouts: Any, reason: str, prefetch: int, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    makers = [partial(HeldAgents, slot, hold, at) for slot in range(2)]
    options: Any = {"step_timeout": timeouts[0], "reset_timeout": timeouts[1], "prefetch": prefetch, "seed": 0}
    rollout = MultiAgentRollout(makers, where="threads", module=SerialModule(), fragment_length=8, **options)
    with pytest.raises(EnvError, match=reason), rollout:
        list(rollout.fragments())
    assert "the environments of lanes [1] hang: their threads are left behind" in caplog.text
    made = rollout.num_steps + rollout.environments.unrecorded_steps
    assert sum(rollout.lost.values()) + rollout._rounds.handed_steps == made


@pytest.mark.slow
def test_a_vectorized_step_that_may_reset_has_both_times(hold: Hold, caplog: pytest.LogCaptureFixture) -> None:
    options: Any = {"step_timeout": 0.5, "reset_timeout": 0.75, "module": RandomModule, "seed": 0}
    rollout = MultiAgentRollout(HeldVector(hold), where="threads", **options)
    expected = r"no answer to a step within 1\.25 s, step_timeout and reset_timeout together: it may have reset"
    with pytest.raises(EnvError, match=expected), rollout:
        list(rollout.fragments())
    assert "the environments of lanes [0] hang" in caplog.text
