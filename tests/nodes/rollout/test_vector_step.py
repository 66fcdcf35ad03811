"""The Python work of one vector step does not depend on the number of slots."""

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, create_empty_array

from rollflow import RLModule, Rollout, Watch

NESTED = gym.spaces.Dict(
    {
        "a": gym.spaces.Box(-1, 1, (3,), np.float32),
        "b": gym.spaces.Tuple([gym.spaces.Discrete(4), gym.spaces.MultiBinary(2)]),
    }
)
ACTIONS = gym.spaces.Dict({"turn": gym.spaces.Discrete(3), "push": gym.spaces.Box(-1, 1, (2,), np.float32)})


class Vectorized(VectorEnv[Any, Any, Any]):
    """Every slot's episode ends at every seventh step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, observations: gym.Space[Any], actions: gym.Space[Any]) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = observations, actions
        self.observation_space, self.action_space = batch_space(observations, num_envs), batch_space(actions, num_envs)
        self._observations = create_empty_array(observations, num_envs, fn=np.zeros)
        self._steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._observations, {}

    def step(self, actions: Any) -> Any:
        self._steps += 1
        ends = np.full(self.num_envs, self._steps % 8 == 7)
        rewards = np.full(self.num_envs, self._steps % 8 != 0, float)
        return self._observations, rewards, ends, np.zeros(self.num_envs, bool), {}


class Policy(RLModule):
    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        first = torch.utils._pytree.tree_leaves(batch["obs"])[0]
        width = self.get_exploration_action_dist_cls().required_input_dim
        return {"action_dist_inputs": torch.zeros(len(first), width), "vf_preds": torch.zeros(len(first))}


def calls_of_a_fragment(num_envs: int, observations: gym.Space[Any], actions: gym.Space[Any]) -> Counter[str]:
    """Count the calls of each function, Python's or C's, while the second fragment is made."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    env = Vectorized(num_envs, observations, actions)
    # The stall doctor would have fragments looked at now and then.
    with Rollout(env, module=Policy(), fragment_length=40, seed=0, watch=Watch(stall_after=None)) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        gc.disable()  # a collection in the middle would call what has nothing to do with it
        sys.setprofile(count)
        try:
            next(fragments)
        finally:
            sys.setprofile(None)
            gc.enable()
    return calls


@pytest.mark.parametrize(
    ("observations", "actions"),
    [(gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(2)), (NESTED, ACTIONS)],
    ids=["flat", "nested"],
)
@pytest.mark.parametrize("slots", [(2, 10), (18, 50)], ids=["few", "many"])  # few logits are looked at by Python
def test_no_function_is_called_more_often_for_more_slots(slots: Any, observations: Any, actions: Any) -> None:
    few, many = (calls_of_a_fragment(count, observations, actions) for count in slots)
    assert sum(few.values()) > 40
    assert many == few
