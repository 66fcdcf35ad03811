"""Action distributions over gymnasium's spaces, made from a module's `action_dist_inputs`.

`torch.distributions` checks its arguments at every step; these don't, and take as few torch operations as they can.

    space            inputs, f32[B, D]                         action
    Discrete(n)      n logits                                  space's dtype[B]
    MultiDiscrete    all parts' logits, end to end             space's dtype[B, *shape]
    MultiBinary      one logit for each                        i8[B, *shape]
    Box of floats    means, then logarithms of deviations      space's dtype[B, *shape]
    Dict, Tuple      all parts' inputs, end to end             dict or tuple of those

A logit of `RULED_OUT` or less rules its action out: -inf, the least finite float, and -1e9, which is often written.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rollflow.stream.data.columns import RULED_OUT
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.space import leaves_within
from rollflow.stream.data.tree import Tree, leaves_of, library_of

_LOG_SQRT_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_DRAWN, _DRAWN_THERE = 1 << 15, 1 << 19  # numbers at a time: arrays, tensors
_SMALLEST = np.finfo(np.float32).tiny
_ONE_HALF, _LOG_SQRT_TWO_PI_TENSOR = torch.tensor([0.5, _LOG_SQRT_TWO_PI], device="cpu")
_HALF = (torch.float16, torch.bfloat16)


class Distribution(Protocol):
    """Batch of B distributions over actions; an action's own shape is in the table above."""

    def sample(self, generator: torch.Generator | None = None) -> Tree:
        """One action for each of the batch, any[B, ...] or a tree of those."""

    def logp(self, value: Tree) -> Tensor:
        """Log-probability (or density) of each action, f32[B]."""

    def entropy(self) -> Tensor:
        """Entropy in nats, f32[B]."""

    def kl(self, other: Any) -> Tensor:
        """Kullback-Leibler divergence KL(self ‖ other), in nats, f32[B]."""

    def to_deterministic(self) -> "Deterministic":
        """The likeliest action."""


@dataclass(frozen=True, slots=True)
class DistributionType:
    """Maker of distributions over one action space; a module's `get_…_action_dist_cls()` returns it.

    required_input_dim    D, the length of the last axis of `action_dist_inputs`
    """

    space: gym.Space[Any]
    required_input_dim: int
    _make: Callable[[Tensor], Distribution]

    def from_logits(self, logits: Tensor) -> Distribution:
        """Make it from `action_dist_inputs`, f32[B, D]; half precision becomes single.

        Raises ModuleError for another width, and for whole numbers.
        """
        if not logits.ndim or logits.shape[-1] != self.required_input_dim:
            raise ModuleError(
                f"'action_dist_inputs' has shape {list(logits.shape)}, expected a last axis of "
                f"{self.required_input_dim} for actions in {self.space}"
            ).see("distribution")
        if logits.dtype is not torch.float32:
            if not logits.is_floating_point():
                raise ModuleError(
                    f"'action_dist_inputs' is {logits.dtype}{list(logits.shape)}, expected {torch.float32}"
                ).see("distribution")
            logits = logits.float() if logits.dtype in _HALF else logits
        return self._make(logits)

    @property
    def is_categorical(self) -> bool:
        """True if it makes a `Categorical` of the logits as they are."""
        return isinstance(self._make, partial) and self._make.func is Categorical


def distribution_for(space: gym.Space[Any]) -> DistributionType:
    """Distribution over a space. Raises ModuleError for a space that has none here."""
    if isinstance(space, spaces.Discrete):
        make: Callable[[Tensor], Distribution] = partial(Categorical, start=int(space.start), dtype=_dtype_of(space))
        return DistributionType(space, int(space.n), make)
    if isinstance(space, spaces.MultiDiscrete):
        return DistributionType(space, int(space.nvec.sum()), partial(MultiCategorical, space=space))
    if isinstance(space, spaces.MultiBinary):
        return DistributionType(space, math.prod(space.shape), partial(Bernoulli, shape=space.shape))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        make = partial(DiagGaussian, shape=space.shape, dtype=_dtype_of(space))
        return DistributionType(space, 2 * math.prod(space.shape), make)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = dict(space.items()) if isinstance(space, spaces.Dict) else dict(enumerate(space))
        parts = {key: distribution_for(part) for key, part in named.items()}
        width = sum(part.required_input_dim for part in parts.values())
        as_tuple = isinstance(space, spaces.Tuple)
        return DistributionType(space, width, partial(MultiDistribution, types=parts, as_tuple=as_tuple))
    raise ModuleError(
        f"no distribution over {space}; expected Discrete, MultiDiscrete, MultiBinary, a Box of floats, or a Dict or "
        "Tuple of those, or a module that gives 'actions' itself; whole numbers are Discrete or MultiDiscrete ones"
    ).see("distribution")


def places_of_inputs(space: gym.Space[Any]) -> Iterator[tuple[gym.Space[Any], int]]:
    """(space, place of its first input) of a space of actions, or of each part of a Dict or Tuple."""
    begin = 0
    for leaf in leaves_within(space, "action"):
        yield leaf.space, begin
        begin += distribution_for(leaf.space).required_input_dim


class Categorical:
    """Distribution over `start … start + n - 1`, from logits f32[B, n]; -inf rules an action out."""

    __slots__ = ("_dtype", "_log_probs", "_start", "logits")

    def __init__(self, logits: Tensor, start: int = 0, dtype: torch.dtype = torch.int64) -> None:
        self.logits = logits
        self._start = start
        self._dtype = dtype
        self._log_probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Normalised logarithms of probabilities, f32[B, n]."""
        if self._log_probs is None:
            self._log_probs = torch.log_softmax(self.logits, -1)
        return self._log_probs

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        # The first to arrive in a race of exponentials with these rates is distributed by the softmax.
        race = torch.empty_like(self.logits).exponential_(generator=generator).log_()
        # By log_probs, which `logp` needs anyhow: beside very large logits the race would be rounded away.
        return self._numbered((self.log_probs - race).argmax(-1))

    def like(self, logits: Tensor) -> "Categorical":
        """A distribution over the same actions, from other logits f32[B, n]."""
        return Categorical(logits, self._start, self._dtype)

    def sample_with_logp(self, races: "Races | JointRaces") -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Actions, space's dtype[B], and their log-probabilities f32[B]: `sample` and `logp` in half the time.

        Takes logits on the CPU alone.
        """
        log_probs = torch.log_softmax(self.logits, -1).numpy()
        places = (log_probs + races.draw(log_probs.shape)).argmax(-1)
        logp = log_probs.reshape(-1).take(places + races.offsets)
        numbers = places + self._start if self._start else places
        return numbers if self._dtype is torch.int64 else torch.from_numpy(numbers).to(self._dtype).numpy(), logp

    def sample_tensors(self, races: "TensorRaces") -> tuple[Tensor, Tensor]:
        """Actions and their log-probabilities: `sample` and `logp`, by numbers that are drawn already."""
        log_probs = self.log_probs
        places = (log_probs + races.draw(log_probs)).argmax(-1, keepdim=True)
        return self._numbered(places.squeeze(-1)), log_probs.gather(-1, places).squeeze(-1)

    def likeliest_with_logp(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The likeliest actions, space's dtype[B], and zeros f32[B]: what `to_deterministic` gives, in less time.

        Takes logits on the CPU alone.
        """
        return self._numbered(self.logits.argmax(-1)).numpy(), np.zeros(len(self.logits), np.float32)

    def logp(self, value: Tensor) -> Tensor:
        numbers = value - self._start if self._start else value
        return self.log_probs.gather(-1, numbers.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        log_probs = self.log_probs
        return -_expected(log_probs, log_probs)

    def kl(self, other: "Categorical") -> Tensor:
        return _expected(self.log_probs, self.log_probs - other.log_probs)

    def to_deterministic(self) -> "Deterministic":
        return Deterministic(self._numbered(self.logits.argmax(-1)), self.logits.shape[:-1])

    def _numbered(self, places: Tensor) -> Tensor:
        numbers = places + self._start if self._start else places
        return numbers if self._dtype is torch.int64 else numbers.to(self._dtype)


class Races:
    """Random numbers for sampling by races of exponentials, drawn for many vector steps at a time.

    offsets    i64[B], start of each row in the flattened array that was drawn last
    """

    __slots__ = ("_at", "_count", "_drawn", "_offsets", "_random", "_shape", "offsets")

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._drawn: NDArray[np.float32] = np.empty(0, np.float32)
        self._at = self._count = 0  # of the next number, and numbers in a step
        self._shape: tuple[int, ...] = (0,)
        self._offsets: dict[tuple[int, ...], NDArray[np.int64]] = {}  # by shape
        self.offsets: NDArray[np.int64] = np.empty(0, np.int64)

    def draw(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Gumbel numbers, f32[B, n]: the action whose log-probability plus number is largest has won the race."""
        if shape != self._shape:
            # Shapes may change from step to step, with the agents that act: all of them share the numbers drawn.
            self._shape, self._count = shape, math.prod(shape)
            if shape not in self._offsets:
                self._offsets[shape] = np.arange(shape[0]) * shape[1]
            self.offsets = self._offsets[shape]
        begin = self._at
        end = self._at = begin + self._count
        if end > len(self._drawn):
            count = self._count
            drawn = self._random.standard_exponential(max(1, _DRAWN // count) * count, np.float32)
            # Without this floor, a drawn 0 would let an action win that is ruled out.
            np.log(np.maximum(drawn, _SMALLEST, out=drawn), out=drawn)
            self._drawn = np.negative(drawn, out=drawn)
            begin, end = 0, count
            self._at = count
        return self._drawn[begin:end].reshape(shape)

    def get_state(self) -> dict[str, Any]:
        """What is drawn next: the generator, and what is left of the numbers drawn, and their shape."""
        generator = self._random.bit_generator.state
        return {"generator": generator, "drawn": self._drawn[self._at :].copy(), "shape": self._shape}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Draw what another one would draw that gave this state."""
        self._random.bit_generator.state = state["generator"]
        self._drawn, self._at = state["drawn"].copy(), 0
        self._shape = (0,)


class JointRaces:
    """Races of several lanes, for a batch that has the rows of one lane after those of another.

    sizes      rows of each lane
    offsets    as in `Races`
    """

    __slots__ = ("_races", "_sizes", "offsets")

    def __init__(self, races: Sequence[Races], sizes: Sequence[int]) -> None:
        self._races, self._sizes = races, sizes
        self.offsets: NDArray[np.int64] = np.empty(0, np.int64)

    def draw(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Numbers of each lane, f32[B, n], as the lane would draw them by itself."""
        self.offsets = np.arange(shape[0]) * shape[1]
        drawn = [races.draw((size, shape[1])) for races, size in zip(self._races, self._sizes, strict=True)]
        return np.concatenate(drawn)


class TensorRaces:
    """`Races` in tensors, if a generator of torch draws: for one lane, whose vector steps are alike."""

    __slots__ = ("_drawn", "_generator")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._drawn: list[Tensor] = []

    def draw(self, like: Tensor) -> Tensor:
        """Gumbel numbers, f32[B, n], as many as there are log-probabilities."""
        if not self._drawn or self._drawn[-1].shape != like.shape:
            steps = max(1, _DRAWN_THERE // max(1, like.numel()))
            chance = torch.rand((steps, *like.shape), generator=self._generator, device=like.device)
            # Where torch's exponential numbers take a fifth of a step's time on the CPU, these take a twentieth.
            self._drawn = list(chance.clamp_min_(float(_SMALLEST)).log_().neg_().log_().neg_())
        return self._drawn.pop()

    def get_state(self) -> Tensor | None:
        """What is left of the numbers drawn, f32[n, B, n]; None: nothing is. The generator has a state of its own."""
        return torch.stack(self._drawn) if self._drawn else None

    def set_state(self, state: Tensor | None) -> None:
        """Draw what another one would draw that gave this state."""
        self._drawn = [] if state is None else list(state.to(self._generator.device))


class MultiDistribution:
    """Independent distributions, one for each part of a Dict or Tuple space."""

    __slots__ = ("_as_tuple", "_parts")

    def __init__(self, inputs: Tensor, types: Mapping[Any, DistributionType], as_tuple: bool) -> None:
        parts = torch.split(inputs, [each.required_input_dim for each in types.values()], -1)
        self._parts: Any = {key: each.from_logits(part) for (key, each), part in zip(types.items(), parts, strict=True)}
        self._as_tuple = as_tuple

    def sample(self, generator: torch.Generator | None = None) -> Tree:
        return self._joined({key: part.sample(generator) for key, part in self._parts.items()})

    def logp(self, value: Tree) -> Tensor:
        values = self._apart(value)
        return torch.stack([part.logp(values[key]) for key, part in self._parts.items()]).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self._parts.values()]).sum(0)

    def kl(self, other: Any) -> Tensor:
        return torch.stack([part.kl(other._parts[key]) for key, part in self._parts.items()]).sum(0)

    def to_deterministic(self) -> "Deterministic":
        likeliest = {key: part.to_deterministic() for key, part in self._parts.items()}
        batch_shape = next(iter(likeliest.values())).batch_shape
        return Deterministic(self._joined({key: part.action for key, part in likeliest.items()}), batch_shape)

    def _apart(self, value: Tree) -> Any:
        return value

    def _joined(self, actions: dict[Any, Tree]) -> Tree:
        return tuple(actions.values()) if self._as_tuple else actions


class MultiCategorical(MultiDistribution):
    """Independent categoricals, one for each number of a MultiDiscrete space."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, logits: Tensor, space: spaces.MultiDiscrete) -> None:
        starts = np.broadcast_to(space.start, space.nvec.shape).reshape(-1).tolist()
        parts = torch.split(logits, space.nvec.reshape(-1).tolist(), -1)
        self._parts = dict(enumerate(map(Categorical, parts, starts)))
        self._shape, self._dtype = space.nvec.shape, _dtype_of(space)

    def _apart(self, value: Tensor) -> Any:
        return value.flatten(-len(self._shape)).unbind(-1)

    def _joined(self, actions: dict[Any, Tree]) -> Tensor:
        return _shaped(torch.stack(list(actions.values()), -1), self._shape, self._dtype)


class Bernoulli:
    """Independent bits, from logits f32[B, D]; -inf rules a bit out."""

    __slots__ = ("_shape", "logits")

    def __init__(self, logits: Tensor, shape: tuple[int, ...]) -> None:
        self.logits = logits
        self._shape = shape

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        chance = torch.rand(self.logits.shape, generator=generator, device=self.logits.device)
        return _shaped(chance < self.logits.sigmoid(), self._shape, torch.int8)

    def logp(self, value: Tensor) -> Tensor:
        bits = value.flatten(-len(self._shape)).bool()
        return -functional.softplus(torch.where(bits, -self.logits, self.logits)).sum(-1)

    def entropy(self) -> Tensor:
        one, zero = functional.softplus(-self.logits), functional.softplus(self.logits)  # -log of each chance
        return self._expected(one, zero)

    def kl(self, other: "Bernoulli") -> Tensor:
        one = functional.softplus(-other.logits) - functional.softplus(-self.logits)
        zero = functional.softplus(other.logits) - functional.softplus(self.logits)
        return self._expected(one, zero)

    def to_deterministic(self) -> "Deterministic":
        return Deterministic(_shaped(self.logits > 0, self._shape, torch.int8), self.logits.shape[:-1])

    def _expected(self, one: Tensor, zero: Tensor) -> Tensor:
        """Expected sum over all bits, f32[B], if a one counts `one` and a zero counts `zero`, f32[B, D] each."""
        chances = torch.stack([self.logits.sigmoid(), torch.sigmoid(-self.logits)])
        return (chances * torch.stack([one, zero]).masked_fill(chances == 0.0, 0.0)).sum((0, -1))


class DiagGaussian:
    """Independent normal distributions, from means and logarithms of deviations, f32[B, 2 D]."""

    __slots__ = ("_dtype", "_shape", "log_std", "mean")

    def __init__(self, inputs: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.mean, self.log_std = inputs.chunk(2, -1)
        self._shape = shape
        self._dtype = dtype

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(self.mean.shape, generator=generator, device=self.mean.device, dtype=self.mean.dtype)
        return self._actions(self.mean + self.log_std.exp() * noise)

    def sample_with_logp(self, generator: torch.Generator) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Actions, space's dtype[B, *shape], and their log-densities f32[B]: `sample` and `logp`, to the bit.

        Takes f32 inputs on the CPU alone, and less than half the time: numpy's sums and products of few numbers are
        quicker than torch's. Only what numpy may round otherwise is done by torch.
        """
        mean, log_std = self.mean.numpy(), self.log_std.numpy()
        noise = torch.randn(mean.shape, generator=generator, device=self.mean.device, dtype=self.mean.dtype).numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # as torch has it, of deviations without bounds
            drawn = mean + self.log_std.exp().numpy() * noise
            actions: NDArray[Any] = self._actions(torch.from_numpy(drawn)).numpy()
            z = (actions.reshape(mean.shape).astype(np.float32, copy=False) - mean) * torch.exp(-self.log_std).numpy()
            surprise = torch.from_numpy(0.5 * z * z + log_std + _LOG_SQRT_TWO_PI).sum(-1)
        return actions, -surprise.numpy()

    def sample_tensors(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Actions and their log-densities of f32 inputs: `sample` and `logp`, to the bit, in half the time.

        A number of Python takes torch as long as three operations, since it is an f64 one. Has no gradients.
        """
        actions, mean, log_std = self.sample(generator), self.mean, self.log_std
        flat = actions if len(self._shape) == 1 and actions.dtype is mean.dtype else actions.reshape(mean.shape).float()
        z = (flat - mean).mul_(torch.exp(-log_std))
        surprise = torch.mul(z, _ONE_HALF).mul_(z).add_(log_std).add_(_LOG_SQRT_TWO_PI_TENSOR)
        return actions, surprise.sum(-1).neg_()

    def logp(self, value: Tensor) -> Tensor:
        flat = value.reshape(self.mean.shape).to(self.mean.dtype)
        z = (flat - self.mean) * torch.exp(-self.log_std)
        return -(0.5 * z * z + self.log_std + _LOG_SQRT_TWO_PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + _LOG_SQRT_TWO_PI).sum(-1)

    def kl(self, other: "DiagGaussian") -> Tensor:
        spread = torch.exp(2.0 * self.log_std) + (self.mean - other.mean) ** 2
        return (other.log_std - self.log_std + 0.5 * spread * torch.exp(-2.0 * other.log_std) - 0.5).sum(-1)

    def to_deterministic(self) -> "Deterministic":
        return Deterministic(self._actions(self.mean), self.mean.shape[:-1])

    def _actions(self, values: Tensor) -> Tensor:
        """Numbers any[B, D] as actions."""
        return _shaped(values, self._shape, self._dtype)


class Deterministic:
    """Distribution that always gives the same action; its log-probability counts as 0.

    action         any[*batch_shape, ...] or a tree of those: one for each of the batch
    batch_shape    the batch's axes: B, or B and T
    """

    __slots__ = ("action", "batch_shape")

    def __init__(self, action: Tree, batch_shape: tuple[int, ...]) -> None:
        self.action = action
        self.batch_shape = batch_shape

    def sample(self, generator: torch.Generator | None = None) -> Tree:
        return self.action

    def logp(self, value: Tree) -> Tensor:
        first = value
        while not torch.is_tensor(first):
            first = next(iter(first.values() if isinstance(first, Mapping) else first))
        return torch.zeros(self.batch_shape, device=first.device)


def _shaped(flat: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Actions any[..., D] as dtype[..., *shape]."""
    if flat.dtype is dtype and len(shape) == 1:  # at every vector step of most robots
        return flat
    return flat.reshape(*flat.shape[:-1], *shape).to(dtype)


def _dtype_of(space: gym.Space[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, space.dtype)).dtype


def _expected(log_probs: Tensor, values: Tensor) -> Tensor:
    """Expectation of values f32[B, n], f32[B]; an impossible action counts 0, even if its value is infinite."""
    # Filled in before the product: afterwards, the product's gradient would still be 0 times infinity.
    return (log_probs.exp() * values.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)


# Masks of actions: how a module says which ones are ruled out

ACTION_MASK = "action_mask"  # in a Dict of observations


def mask_logits(logits: Tensor, mask: Tree) -> Tensor:
    """Logits float[..., n] with those replaced that `mask` rules out, for Discrete and MultiDiscrete actions.

        mask    number or bool [..., n], 0 for an action that is ruled out; or a tuple of such parts, end to end

    They become the least finite float, so that losses stay finite; of float16 -inf. Observations without any action
    left, as in padded rows, may be learnt from: acting is what they are refused for.
    """
    least = torch.finfo(logits.dtype).min
    return logits.masked_fill(joined_mask(mask) == 0, least if least <= RULED_OUT else -torch.inf)


def joined_mask(mask: Tree) -> Tensor:
    """A mask [..., n] of its parts."""
    if isinstance(mask, Tensor):
        return mask
    joined: Tensor = torch.cat([torch.as_tensor(part) for part in leaves_of(mask)], -1)
    return joined


def mask_width(space: gym.Space[Any]) -> int | None:
    """Numbers in a mask, of a space of one axis, or of a Tuple of such; None for another space."""
    if isinstance(space, spaces.Tuple):
        widths = [mask_width(part) for part in space]
        return None if None in widths else sum(width for width in widths if width is not None)
    return space.shape[0] if space.shape is not None and len(space.shape) == 1 else None


def without_choice(rows: Any, space: gym.Space[Any] | None) -> Any:
    """The rows, bool[..., N], of logits float[..., N, D] that rule out every action; for no space those of -inf alone.

    They are a tensor if the logits are one.
    """
    xp = library_of(rows)
    rows = xp.asarray(rows, dtype=xp.float64)  # of which float16 has no `RULED_OUT`
    ruled_out = xp.amax(rows, -1) == -xp.inf
    for begin, end in () if space is None else _choices(space):
        ruled_out = ruled_out | (xp.amax(rows[..., begin:end], -1) <= RULED_OUT)
    return ruled_out


def _choices(space: gym.Space[Any]) -> Iterator[tuple[int, int]]:
    """Where the logits of each number of Discrete and MultiDiscrete actions begin and end, parts of others included."""
    for part, begin in places_of_inputs(space):
        sizes = [part.n] if isinstance(part, spaces.Discrete) else []
        if isinstance(part, spaces.MultiDiscrete):
            sizes = part.nvec.reshape(-1).tolist()
        for size in sizes:
            yield begin, begin + int(size)
            begin += int(size)
