import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as reference

from rollflow.nodes import RLModule, distribution_for
from rollflow.stream import ModuleError

SPACES = {
    "Discrete": spaces.Discrete(3, start=5),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiDiscrete 2d": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "MultiBinary": spaces.MultiBinary(4),
    "Box": spaces.Box(-1, 1, (2, 3), np.float32),
    "scalar Box": spaces.Box(-1, 1, (), np.float64),
    "Dict": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)])}),
}


def drawn(space: gym.Space[Any], seed: int = 0, count: int = 6) -> tuple[Any, torch.Tensor]:
    made = distribution_for(space)
    logits = torch.randn(count, made.required_input_dim, generator=torch.Generator().manual_seed(seed))
    return made.from_logits(logits), logits


def test_a_categorical_by_hand() -> None:
    made = distribution_for(spaces.Discrete(2))
    distribution = made.from_logits(torch.log(torch.tensor([[0.25, 0.75]])))
    assert distribution.logp(torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    assert distribution.entropy().item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    even = made.from_logits(torch.zeros(1, 2))
    assert distribution.kl(even).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert distribution.to_deterministic().sample().tolist() == [1]


def test_a_gaussian_by_hand() -> None:
    distribution = distribution_for(spaces.Box(-9, 9, (1,))).from_logits(torch.tensor([[1.0, math.log(2.0)]]))
    assert distribution.logp(torch.tensor([[3.0]])).item() == pytest.approx(-0.5 - math.log(2 * math.sqrt(2 * math.pi)))
    assert distribution.entropy().item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 4))
    assert distribution.to_deterministic().sample().tolist() == [[1.0]]


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_samples_lie_in_their_space(space: gym.Space[Any]) -> None:
    distribution, _ = drawn(space)
    for action in (distribution.sample(), distribution.to_deterministic().sample()):
        for i in range(6):
            one = torch.utils._pytree.tree_map(lambda leaf, i=i: leaf[i].numpy()[()], action)
            if isinstance(space, spaces.Box):
                assert (one.shape, one.dtype) == (space.shape, space.dtype)
            elif isinstance(space, spaces.Dict):
                assert one["a"] in space["a"]
                assert one["b"][1] in space["b"][1]
            else:
                assert one in space
        assert distribution.logp(action).shape == (6,)


@given(st.integers(0, 2**31), st.integers(2, 6))
def test_a_categorical_agrees_with_torchs(seed: int, n: int) -> None:
    made = distribution_for(spaces.Discrete(n))
    generator = torch.Generator().manual_seed(seed)
    logits, others = torch.randn(2, 5, n, generator=generator) * 3
    ours, theirs = made.from_logits(logits), reference.Categorical(logits=logits)
    action = ours.sample(generator)
    torch.testing.assert_close(ours.logp(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    expected = reference.kl_divergence(theirs, reference.Categorical(logits=others))
    torch.testing.assert_close(ours.kl(made.from_logits(others)), expected, rtol=1e-4, atol=1e-5)


@given(st.integers(0, 2**31))
def test_a_gaussian_agrees_with_torchs(seed: int) -> None:
    made = distribution_for(spaces.Box(-1, 1, (3,)))
    generator = torch.Generator().manual_seed(seed)
    inputs, others = torch.randn(2, 5, 6, generator=generator)
    normals = [reference.Normal(each[:, :3], each[:, 3:].exp()) for each in (inputs, others)]
    ours, action = made.from_logits(inputs), made.from_logits(inputs).sample(generator)
    torch.testing.assert_close(ours.logp(action), normals[0].log_prob(action).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy(), normals[0].entropy().sum(-1))
    expected = reference.kl_divergence(*normals).sum(-1)
    torch.testing.assert_close(ours.kl(made.from_logits(others)), expected, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**31))
def test_bits_agree_with_torchs(seed: int) -> None:
    made = distribution_for(spaces.MultiBinary(4))
    generator = torch.Generator().manual_seed(seed)
    inputs, others = torch.randn(2, 5, 4, generator=generator)
    theirs = [reference.Bernoulli(logits=each) for each in (inputs, others)]
    ours, bits = made.from_logits(inputs), made.from_logits(inputs).sample(generator)
    torch.testing.assert_close(ours.logp(bits), theirs[0].log_prob(bits.float()).sum(-1))
    torch.testing.assert_close(ours.entropy(), theirs[0].entropy().sum(-1), rtol=1e-4, atol=1e-5)
    expected = reference.kl_divergence(*theirs).sum(-1)
    torch.testing.assert_close(ours.kl(made.from_logits(others)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["MultiDiscrete", "MultiDiscrete 2d", "Dict"])
def test_parts_are_independent(name: str) -> None:
    distribution, _ = drawn(SPACES[name])
    action, parts = distribution.sample(), distribution._parts
    if name == "Dict":
        expected = [part.logp(action[key]) for key, part in parts.items()]
        parts = parts.values()
    else:
        expected = [part.logp(action.flatten(1)[:, i]) for i, part in enumerate(parts)]
    torch.testing.assert_close(distribution.logp(action), sum(expected))
    torch.testing.assert_close(distribution.entropy(), sum(part.entropy() for part in parts))
    torch.testing.assert_close(distribution.kl(distribution), torch.zeros(6))


def test_samples_come_as_often_as_they_are_likely() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    distribution = distribution_for(spaces.Discrete(3)).from_logits(probabilities.log().expand(30_000, 3))
    counts = torch.bincount(distribution.sample(torch.Generator().manual_seed(0)), minlength=3)
    # 4 standard deviations of a count of 30,000
    assert (counts - 30_000 * probabilities).abs().max() < 4 * math.sqrt(30_000 * 0.25)


def test_an_action_that_is_ruled_out_never_comes() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]]).expand(5_000, 3)
    distribution = distribution_for(spaces.Discrete(3)).from_logits(logits)
    assert set(distribution.sample(torch.Generator().manual_seed(0)).tolist()) == {0, 2}
    assert torch.isfinite(distribution.entropy()).all()
    assert torch.isfinite(distribution.kl(distribution)).all()


def test_the_same_generator_gives_the_same_samples() -> None:
    for space in SPACES.values():
        distribution, _ = drawn(space)
        first, second = (distribution.sample(torch.Generator().manual_seed(3)) for _ in range(2))
        pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (first, second)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_the_likeliest_action_counts_as_certain() -> None:
    for space in SPACES.values():
        likeliest = drawn(space)[0].to_deterministic()
        assert likeliest.logp(likeliest.sample()).tolist() == [0.0] * 6


def test_inputs_of_another_width_are_refused() -> None:
    with pytest.raises(ModuleError, match=r"'action_dist_inputs' has shape \[4, 3\], expected a last axis of 2"):
        distribution_for(spaces.Discrete(2)).from_logits(torch.zeros(4, 3))


def test_a_space_without_a_distribution_is_named() -> None:
    with pytest.raises(ModuleError, match=r"no distribution over Text\(.*\); expected Discrete"):
        distribution_for(spaces.Text(3))


def test_a_module_makes_the_distribution_of_its_action_space() -> None:
    module = RLModule(action_space=spaces.Discrete(4))
    assert module.get_exploration_action_dist_cls().required_input_dim == 4
    module.action_space = spaces.Box(-1, 1, (3,))
    assert module.get_inference_action_dist_cls().required_input_dim == 6
    with pytest.raises(ModuleError, match="RLModule has no action_space"):
        RLModule().get_train_action_dist_cls()


def test_a_module_says_what_it_lacks() -> None:
    with pytest.raises(ModuleError, match="RLModule does not say how it goes forward: override _forward"):
        RLModule().forward_exploration({})

    class Policy(RLModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"actions": batch["obs"]}

    assert Policy()({"obs": 1}) == {"actions": 1}
    assert not Policy().is_stateful()
    with pytest.raises(ModuleError, match=r"Policy.forward_train gave \['actions'\], expected 'vf_preds'"):
        Policy().compute_values({"obs": 1})
