"""Where a rollout goes when that is left to it."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numbered import NumberedModule

from rollflow.nodes import Rollout
from rollflow.nodes.probe import Measured, choose


def measured(slots: int, env: float, forward: float, per_row: float = 0.0, **more: Any) -> Measured:
    return Measured(slots, env, more.pop("waits", 0.0), lambda rows: forward + per_row * rows, **more)


@pytest.mark.parametrize(
    ("case", "where", "lanes"),
    [
        (measured(64, 33e-6, 40e-6, is_vectorized=True), "inline", None),  # cheap, and vectorized already
        (measured(1, 8e-6, 35e-6), "inline", None),
        (measured(8, 8e-6, 35e-6), "inline", None),  # cheap: handing over costs more
        (measured(64, 100e-6, 50e-6), "rollouts", 2),
        (measured(32, 50e-6, 300e-6, 140e-6), "rollouts", 2),  # pixels on processors
        (measured(16, 5e-3, 40e-6, waits=0.99), "threads", 16),  # waiting costs nothing
    ],
)
def test_the_place_follows_from_what_the_parts_take(case: Measured, where: str, lanes: int | None) -> None:
    choice = choose(case, cores=2)
    assert (choice.where, choice.lanes) == (where, lanes)
    assert choice.why.startswith(f"where='{where}': an environment's step takes {case.env * 1e6:.0f} µs")


def test_more_cores_are_used_by_more_workers() -> None:
    choice = choose(measured(64, 1e-3, 50e-6), cores=8)
    assert choice.workers is not None
    assert choice.workers >= 7  # one core may be kept for the forward pass


def test_a_module_on_a_device_is_not_copied() -> None:
    assert choose(measured(32, 500e-6, 300e-6), cores=8).where == "rollouts"
    choice = choose(measured(32, 500e-6, 300e-6, on_cpu=False), cores=8)
    assert (choice.where, choice.workers) == ("processes", 7)


def test_one_core_keeps_what_does_not_wait_inline() -> None:
    assert choose(measured(64, 1e-3, 50e-6), cores=1).where == "inline"


class Waits(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(7)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.01)  # what is measured: that time passes without work
        return np.zeros(3, np.float32), 0.0, False, False, {}


def test_an_environment_that_waits_is_measured_and_put_into_threads() -> None:
    options: Any = {"module": NumberedModule(), "num_envs": 4, "num_fragments": 1, "fragment_length": 3, "seed": 0}
    with Rollout(Waits, where="auto", **options) as rollout:
        assert len(list(rollout.fragments())) == 4
        told = rollout.explain()
    assert "4 lanes × 1 slot, a thread each" in told
    assert "where='threads': an environment's step takes " in told


def test_what_is_here_already_stays_here() -> None:
    with Rollout(gym.make_vec("CartPole-v1", num_envs=3), where="auto") as rollout:
        assert "where='inline': these vector environments are here already" in rollout.explain()


def test_what_was_asked_for_stays() -> None:
    with Rollout(Waits, where="auto", lanes=2, num_envs=4, module=NumberedModule()) as rollout:
        assert "2 lanes × 2 slots, a thread each" in rollout.explain()
