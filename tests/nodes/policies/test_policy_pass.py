"""A pass past the lane gives what one through it gives, and is one forward pass."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from property_examples import examples

from rollflow import Policy, RLModule
from rollflow.nodes import DefaultModule
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.tree import equal_trees

SPACE = gym.spaces.Box(-1, 1, (4,), np.float32)
ACTIONS: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(3, start=2, dtype=np.int32),
    "box": gym.spaces.Box(-1, 1, (4,), np.float32),
    "dict": gym.spaces.Dict(left=gym.spaces.Discrete(2), right=gym.spaces.MultiBinary(3)),
}


class Counted(RLModule):
    """Takes the observation, as a view, for the action, and counts its passes."""

    def setup(self) -> None:
        self.passes = 0

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        if torch.isnan(batch["obs"]).any():
            raise ArithmeticError("no number")
        return {"actions": batch["obs"][:]}


def counted() -> Policy:
    return Policy(Counted(SPACE, ACTIONS["box"]), observation_space=SPACE, action_space=ACTIONS["box"])


@settings(max_examples=examples(30))
@given(
    actions=st.sampled_from(list(ACTIONS)),
    explore=st.booleans(),
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=12),
    seed=st.integers(0, 2**31),
)
def test_a_pass_past_the_lane_gives_the_same(actions: str, explore: bool, sizes: list[int], seed: int) -> None:
    module = DefaultModule(SPACE, ACTIONS[actions], model_config={"fcnet_hiddens": (8,)})
    spaces: dict[str, Any] = {"observation_space": SPACE, "action_space": ACTIONS[actions]}
    past, through = (Policy(module, explore=explore, seed=seed, **spaces) for _ in range(2))
    through.env_to_module.fuses = through.module_to_env.fuses = False
    rng = np.random.default_rng(seed)
    for size in sizes:
        observations = rng.normal(size=(size, 4)).astype(np.float32)
        assert equal_trees(past.act_batch(observations), through.act_batch(observations))
        assert equal_trees(past.outputs, through.outputs)


@pytest.mark.parametrize("size", [1, 3])
def test_each_call_is_one_forward_pass(size: int) -> None:
    policy = counted()
    for step in range(1, 70):
        policy.act_batch(np.zeros((size, 4), np.float32))
        assert policy.module.passes == step


def test_an_action_stays_as_it_is_while_others_are_made() -> None:
    policy = counted()
    actions = [policy.act(np.full(4, step / 8, np.float32)) for step in range(8)]
    np.testing.assert_array_equal(actions, np.repeat(np.arange(8), 4).reshape(8, 4) / 8)


def test_a_batch_may_be_a_list_of_observations() -> None:
    policy, observations = counted(), np.arange(12, dtype=np.float32).reshape(3, 4) / 12
    for rows in (list(observations), observations.tolist()):
        np.testing.assert_array_equal(policy.act_batch(rows), observations)
    with pytest.raises(PolicyError, match="0 observations for 0 sessions"):
        policy.act_batch([])


def test_a_pass_that_fails_says_of_what_and_the_next_one_is_made() -> None:
    policy = counted()
    policy.act(np.zeros(4, np.float32))
    with pytest.raises(ArithmeticError) as caught:
        policy.act(np.full(4, np.nan, np.float32))
    assert any("'obs' [1, 4]" in note for note in caught.value.__notes__)
    np.testing.assert_array_equal(policy.act(np.ones(4, np.float32)), np.ones(4))
