import math
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from torch import distributions as reference

from rollflow.nodes.modules.distribution import Races, TensorRaces, distribution_for
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

FLOATS = st.floats(-10, 10, width=32)


def rows(width: int, count: int = 3) -> st.SearchStrategy[torch.Tensor]:
    """f32[count, width], whose numbers hypothesis draws (and makes equal, zero or extreme)."""
    row = st.lists(FLOATS, min_size=width, max_size=width)
    return st.lists(row, min_size=count, max_size=count).map(torch.tensor)


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def drawn(space: gym.Space[Any]) -> Any:
    made = distribution_for(space)
    return made.from_logits(torch.randn(6, made.required_input_dim, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("as_tuple", [False, True], ids=["Dict", "Tuple"])
def test_a_dict_and_a_tuple_lay_their_inputs_end_to_end(as_tuple: bool) -> None:
    one, other = spaces.Discrete(2, start=1), spaces.Box(-9, 9, (1,))
    made = distribution_for(spaces.Tuple([one, other]) if as_tuple else spaces.Dict({"a": one, "b": other}))
    assert made.required_input_dim == 4
    distribution = made.from_logits(torch.tensor([[math.log(0.25), math.log(0.75), 1.0, math.log(2.0)]]))
    likeliest = distribution.to_deterministic().sample()
    assert type(distribution.sample()) is type(likeliest) is (tuple if as_tuple else dict)
    number, mean = likeliest if as_tuple else (likeliest["a"], likeliest["b"])
    assert (number.tolist(), mean.tolist()) == ([2], [[1.0]])
    density = math.log(0.75) - math.log(2 * math.sqrt(2 * math.pi))
    assert distribution.logp(likeliest).item() == pytest.approx(density)
    expected = -0.25 * math.log(0.25) - 0.75 * math.log(0.75) + 0.5 * math.log(2 * math.pi * math.e * 4)
    assert distribution.entropy().item() == pytest.approx(expected)
    other_inputs = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5) - math.log(2.0) + 2.0
    assert distribution.kl(made.from_logits(other_inputs)).item() == pytest.approx(divergence)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_samples_lie_in_their_space(space: gym.Space[Any]) -> None:
    distribution = drawn(space)
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


def categoricals(*sizes: int) -> Any:
    """What makes torch's distributions over the parts of logits."""
    return lambda logits: [reference.Categorical(logits=part) for part in logits.double().split(sizes, -1)]


def bits(logits: torch.Tensor) -> Any:
    return [reference.Bernoulli(logits=part[:, 0]) for part in logits.double().split(1, -1)]


# Space, torch's distributions over its parts, and the part of every action
WHOLE_NUMBERS: dict[str, tuple[gym.Space[Any], Any, list[tuple[int, ...]]]] = {
    "Discrete": (spaces.Discrete(4, start=7), categoricals(4), [(n,) for n in range(4)]),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3], start=[7, 7]), categoricals(2, 3), list(np.ndindex(2, 3))),
    "MultiDiscrete 2d": (
        spaces.MultiDiscrete([[2], [3]], start=[[7], [7]]),
        categoricals(2, 3),
        list(np.ndindex(2, 3)),
    ),
    "MultiBinary": (spaces.MultiBinary(2), bits, list(np.ndindex(2, 2))),
}


@pytest.mark.parametrize("kind", WHOLE_NUMBERS)
@given(logits=rows(5), others=rows(5))
def test_whole_numbers_agree_with_torchs_on_any_logits(kind: str, logits: torch.Tensor, others: torch.Tensor) -> None:
    space, torchs, actions = WHOLE_NUMBERS[kind]
    made = distribution_for(space)
    logits, others = logits[:, : made.required_input_dim], others[:, : made.required_input_dim]
    ours, theirs, their_others = made.from_logits(logits), torchs(logits), torchs(others)
    for numbers in actions:
        action = torch.tensor([numbers] * 3) + (0 if kind == "MultiBinary" else 7)
        expected = [each.log_prob(torch.tensor(float(n)).double()) for each, n in zip(theirs, numbers, strict=True)]
        agree(ours.logp(action.reshape(3, *space.shape)), sum(expected).float())
    agree(ours.entropy(), sum(each.entropy() for each in theirs).float())
    expected = [reference.kl_divergence(*pair) for pair in zip(theirs, their_others, strict=True)]
    agree(ours.kl(made.from_logits(others)), sum(expected).float())


@given(rows(2), rows(2), rows(2), rows(2))
def test_a_gaussian_agrees_with_torchs_on_any_inputs(
    mean: torch.Tensor, other_mean: torch.Tensor, spread: torch.Tensor, value: torch.Tensor
) -> None:
    made = distribution_for(spaces.Box(-1, 1, (2,)))
    log_std, other_log_std = spread / 4, -spread / 5
    theirs = reference.Normal(mean, log_std.exp())
    others = reference.Normal(other_mean, other_log_std.exp())
    ours = made.from_logits(torch.cat([mean, log_std], -1))
    agree(ours.logp(value), theirs.log_prob(value).sum(-1))
    agree(ours.entropy(), theirs.entropy().sum(-1))
    expected = reference.kl_divergence(theirs, others).sum(-1)
    agree(ours.kl(made.from_logits(torch.cat([other_mean, other_log_std], -1))), expected)


def of_arrays(distribution: Any) -> Any:
    sampled, logp = distribution.sample_with_logp(races())
    np.testing.assert_allclose(logp, distribution.logp(torch.from_numpy(sampled)), rtol=1e-6)
    return sampled


def of_tensors(distribution: Any) -> Any:
    races_there = TensorRaces(torch.Generator().manual_seed(0))
    for _ in range(9):  # they are drawn anew meanwhile
        sampled, logp = distribution.sample_tensors(races_there)
        assert torch.equal(logp, distribution.logp(sampled))
    return sampled.numpy()


def by_torch(distribution: Any) -> Any:
    return distribution.sample(torch.Generator().manual_seed(0)).numpy()


@pytest.mark.parametrize(
    ("kind", "sample"),
    [*((kind, by_torch) for kind in WHOLE_NUMBERS), ("Discrete", of_arrays), ("Discrete", of_tensors)],
)
def test_actions_come_as_often_as_they_are_likely(kind: str, sample: Any) -> None:
    space, _, actions = WHOLE_NUMBERS[kind]
    made = distribution_for(space)
    inputs = torch.tensor([0.1, -1.0, 1.2, -torch.inf, 0.4])[: made.required_input_dim]
    distribution: Any = made.from_logits(inputs.expand(30_000, -1))
    sampled = sample(distribution)
    for numbers in actions:
        action = np.reshape(numbers, space.shape) + (0 if kind == "MultiBinary" else 7)
        chance = float(made.from_logits(inputs[None]).logp(torch.as_tensor(action)[None]).exp())
        share = (sampled == action).reshape(30_000, -1).all(1).mean()
        assert abs(share - chance) <= 4 * math.sqrt(chance * (1 - chance) / 30_000)


def test_samples_of_a_gaussian_have_its_means_deviations_and_no_correlation() -> None:
    mean, std = torch.tensor([-3.0, 5.0]), torch.tensor([0.5, 2.0])
    inputs = torch.cat([mean, std.log()]).expand(30_000, 4)
    made = distribution_for(spaces.Box(-1, 1, (2,)))
    z = (made.from_logits(inputs).sample(torch.Generator().manual_seed(0)) - mean) / std
    assert z.mean(0).abs().max() < 4 / math.sqrt(30_000)
    assert (z.var(0) - 1).abs().max() < 4 * math.sqrt(2 / 30_000)
    assert (z[:, 0] * z[:, 1]).mean().abs() < 4 / math.sqrt(30_000)


def test_an_action_that_is_ruled_out_never_comes() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]]).expand(5_000, 3)
    distribution = distribution_for(spaces.Discrete(3)).from_logits(logits)
    assert set(distribution.sample(torch.Generator().manual_seed(0)).tolist()) == {0, 2}
    assert torch.isfinite(distribution.entropy()).all()
    assert torch.isfinite(distribution.kl(distribution)).all()


def test_an_action_that_is_ruled_out_leaves_the_gradients_finite() -> None:
    made = distribution_for(spaces.Discrete(3))
    even, fewer = made.from_logits(torch.zeros(1, 3)), distribution_for(spaces.Discrete(2))
    # As if it were not there; both others are even over the two that are left, a constant less the entropy away.
    allowed = torch.tensor([[0.0, 1.0]], requires_grad=True)
    fewer.from_logits(allowed).entropy().sum().backward()
    masked = made.from_logits(torch.tensor([[0.5, -torch.inf, 0.5]]))
    for sign, other in ((1, None), (-1, even), (-1, masked)):
        logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
        distribution = made.from_logits(logits)
        (distribution.kl(other) if other else distribution.entropy()).sum().backward()
        assert logits.grad[0, 1] == 0
        torch.testing.assert_close(logits.grad[:, [0, 2]], sign * allowed.grad)


def test_a_bit_that_is_ruled_out_is_as_if_it_were_not_there() -> None:
    made, one_bit = distribution_for(spaces.MultiBinary(2)), distribution_for(spaces.MultiBinary(1))
    allowed = torch.tensor([[0.5]], requires_grad=True)
    logits = torch.tensor([[0.5, -torch.inf]], requires_grad=True)
    ours, alone = made.from_logits(logits), one_bit.from_logits(allowed)
    other = made.from_logits(torch.tensor([[-1.0, -torch.inf]]))
    other_alone = one_bit.from_logits(torch.tensor([[-1.0]]))
    for bit in (0, 1):
        agree(ours.logp(torch.tensor([[bit, 0]])), alone.logp(torch.tensor([[bit]])))
        assert ours.logp(torch.tensor([[bit, 1]])).tolist() == [-torch.inf]
    agree(ours.entropy(), alone.entropy())
    agree(ours.kl(other), alone.kl(other_alone))
    (ours.entropy() + ours.kl(other) + ours.logp(torch.tensor([[1, 0]]))).sum().backward()
    (alone.entropy() + alone.kl(other_alone) + alone.logp(torch.tensor([[1]]))).sum().backward()
    assert logits.grad[0, 1] == 0
    torch.testing.assert_close(logits.grad[:, :1], allowed.grad)
    assert made.from_logits(torch.zeros(1, 2)).kl(other).tolist() == [torch.inf]


def test_an_action_that_only_the_other_rules_out_is_infinitely_far() -> None:
    made = distribution_for(spaces.Discrete(2))
    even, certain = made.from_logits(torch.zeros(1, 2)), made.from_logits(torch.tensor([[0.0, -torch.inf]]))
    assert even.kl(certain).tolist() == [torch.inf]
    assert certain.kl(even).item() == pytest.approx(math.log(2.0))
    assert certain.entropy().tolist() == [0.0]
    assert certain.logp(torch.tensor([1])).tolist() == [-torch.inf]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_numbers_have_the_type_of_their_space(dtype: Any) -> None:
    space = spaces.Discrete(3, start=2, dtype=dtype)
    distribution = distribution_for(space).from_logits(torch.tensor([[0.0, 1.0, 0.5]] * 2))
    won, won_logp = distribution.sample_with_logp(races())
    for action in (distribution.sample().numpy(), distribution.to_deterministic().sample().numpy(), won):
        assert action.dtype == dtype
        assert all(number in space for number in action)
    assert won_logp.dtype == np.float32
    assert distribution.logp(distribution.sample()).shape == (2,)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_worked_with_in_single(half: torch.dtype) -> None:
    for space in SPACES.values():
        made = distribution_for(space)
        logits = torch.randn(4, made.required_input_dim, generator=torch.Generator().manual_seed(0)).to(half)
        distribution, expected = made.from_logits(logits), made.from_logits(logits.float())
        action = expected.sample()
        assert distribution.logp(action).dtype == torch.float32
        assert torch.equal(distribution.logp(action), expected.logp(action))


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_what_makes_a_distribution_can_be_pickled(space: gym.Space[Any]) -> None:
    made = distribution_for(space)
    again = pickle.loads(pickle.dumps(made))
    assert again.space == space
    logits = torch.zeros(2, made.required_input_dim)
    assert torch.equal(again.from_logits(logits).entropy(), made.from_logits(logits).entropy())


def test_the_same_generator_gives_the_same_samples() -> None:
    for space in SPACES.values():
        distribution = drawn(space)
        first, second = (distribution.sample(torch.Generator().manual_seed(3)) for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_likeliest_action_counts_as_certain() -> None:
    for space in SPACES.values():
        likeliest = drawn(space).to_deterministic()
        assert likeliest.logp(likeliest.sample()).tolist() == [0.0] * 6
        assert likeliest.sample(torch.Generator()) is likeliest.sample() is likeliest.action


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("Discrete", 3),
        ("MultiDiscrete", 5),
        ("MultiDiscrete 2d", 11),
        ("MultiBinary", 4),
        ("Box", 12),
        ("scalar Box", 2),
        ("Dict", 8),
    ],
)
def test_every_space_names_its_width_and_refuses_another(name: str, width: int) -> None:
    made = distribution_for(SPACES[name])
    assert made.required_input_dim == width
    for wrong in (width - 1, width + 1):
        told = rf"has shape \[2, {wrong}\], expected a last axis of {width} for actions"
        with pytest.raises(ModuleError, match=told):
            made.from_logits(torch.zeros(2, wrong))


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Box(0, 9, (2,), np.uint8)], ids=["text", "whole numbers"])
def test_a_space_without_a_distribution_is_named(space: Any) -> None:
    with pytest.raises(ModuleError, match=r"no distribution over \w+\(.*\); expected Discrete, .*whole numbers are"):
        distribution_for(space)


def races(seed: int = 0) -> Races:
    return Races(np.random.default_rng(seed))


def test_races_are_drawn_anew_for_every_step_and_shape_and_by_their_seed() -> None:
    def drawn_by(seed: int) -> list[Any]:
        run = races(seed)
        return [run.draw(shape).copy() for shape in ((3, 2),) * 10_000 + ((1, 5), (3, 2), (20_000, 4), (20_000, 4))]

    rows = drawn_by(1)
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert all(np.isfinite(row).all() for row in rows)
    assert all(np.array_equal(one, other) for one, other in zip(rows, drawn_by(1), strict=True))
    assert not np.array_equal(rows[0], drawn_by(2)[0])


def test_races_of_shapes_that_take_turns_share_what_has_been_drawn() -> None:
    class Counted:
        def __init__(self) -> None:
            self.random, self.times = np.random.default_rng(0), 0

        def standard_exponential(self, *args: Any) -> Any:
            self.times += 1
            return self.random.standard_exponential(*args)

    counted = Counted()
    run = Races(counted)  # type: ignore[arg-type]
    rows = [run.draw((1 + number % 2, 3)).tobytes() for number in range(1000)]
    assert counted.times == 1
    assert len(set(rows)) == 1000
