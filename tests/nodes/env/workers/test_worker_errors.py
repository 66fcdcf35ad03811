"""Errors of workers that do whole rollouts, and weights and connector states that reach them at work."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from held_envs import Held, await_held, is_closed, let_go
from numbered_module import NumberedEnv, NumberedModule
from small_env import SmallEnv

from rollflow import MeanStdFilter, RLModule, Rollout, Timeouts


def test_the_newest_of_many_weights_published_during_one_step_is_used(tmp_path: Path) -> None:
    options: Any = {"module": NumberedModule(), "fragment_length": 5, "num_fragments": 4, "seed": 0}
    with Rollout(partial(Held, 0, tmp_path, steps=[7]), where="rollouts", prefetch=1, **options) as rollout:
        fragments = iter(rollout.fragments())
        assert next(fragments).policy_version == 0
        await_held(tmp_path, 0)
        for version in range(1, 401):
            rollout.publish({"weight": torch.tensor(float(version))})
        let_go(tmp_path, 0)
        second, third, fourth = fragments
    # The held step and those before it have the first; of the others, one at a time is on its way.
    assert second.column("weight")[:3, 0].tolist() == [0, 0, 0]
    assert third.policy_version == fourth.policy_version == 400
    np.testing.assert_array_equal(fourth.column("weight"), 400)


def test_a_worker_says_the_version_that_it_began_with() -> None:
    rollout = Rollout(
        partial(NumberedEnv, 0), where="rollouts", module=NumberedModule(), fragment_length=5, num_fragments=1, seed=0
    )
    rollout.publish({"weight": torch.tensor(1.0)})
    with rollout:
        [fragment] = rollout.fragments()
    np.testing.assert_array_equal(fragment.column("weight"), 1)
    np.testing.assert_array_equal(fragment.column("policy_version"), 1)


class Large(SmallEnv):
    """Has observations whose statistics are far more than a socket holds."""

    observation_space = gym.spaces.Box(-1, 1, (50_000,), np.float32)


class Constant(RLModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": torch.zeros(len(batch["obs"]), 2)}


@pytest.mark.slow
def test_large_statistics_of_connectors_reach_every_worker() -> None:
    options: Any = {"num_envs": 2, "workers": 2, "fragment_length": 2, "num_fragments": 3, "seed": 0}
    connector: Any = lambda env: MeanStdFilter()  # noqa: E731
    options |= {"env_to_module_connector": connector, "timeouts": Timeouts(step=5.0)}
    with Rollout(Large, where="rollouts", module=Constant(), **options) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.lost == {}
    assert sorted((fragment.lane, fragment.sequence) for fragment in fragments) == [
        (lane, sequence) for lane in range(2) for sequence in range(3)
    ]


def test_a_worker_in_the_middle_of_a_fragment_closes_its_environment(tmp_path: Path) -> None:
    maker = partial(Held, 0, tmp_path, steps=[3])
    options: Any = {"module": NumberedModule(), "fragment_length": 100_000, "prefetch": 1, "seed": 0}
    with Rollout(maker, where="rollouts", **options) as rollout:
        await_held(tmp_path, 0)
        let_go(tmp_path, 0)
    assert is_closed(tmp_path, 0)
    assert rollout.lost == {"closed": rollout.num_steps}
