"""Exploration: pieces that change the module's actions, by as much as a schedule says, and schedules."""

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_number, checking_constructor
from rollflow.nodes.connectors.common.tensors import as_array, tensor_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.connectors.module_to_env.action_pieces import NormalizeAndClipActions, refuse_unusable
from rollflow.nodes.modules.distribution import distribution_for
from rollflow.stream.data.columns import RULED_OUT, Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.space import nearest
from rollflow.stream.fragments.live_episode import LaneEpisodes

Schedule = Callable[[int], float]
ACTION_NOISE = "action_noise"
"""Column of the noise that was added to each action, where later noise depends on it."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Schedule from `begin` at step 0 to `end` at step `steps`, in a straight line, and `end` from there on.

    Raises ValueError for numbers below 0, and for what is none.
    """

    begin: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        checked_number("begin", self.begin, least=0)
        checked_number("end", self.end, least=0)
        checked_count("steps", self.steps, 0)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.begin + (self.end - self.begin) * min(1.0, step / max(self.steps, 1))


@dataclass(kw_only=True, eq=False, repr=False)
class _Exploration(ConnectorV2):
    """Base of pieces that explore by a schedule: a number, or a function of the lane's vector steps so far.

    A lane's steps are those of the run: a lane that begins anew, or joins, goes on where the run is. Without
    exploration (`explore=False`) nothing changes. Raises ValueError for a schedule that is neither. Raises
    ConnectorError for a value outside the piece's range, for actions that the piece is not for, and where
    `actions_for_env` is made already.

    is_normalized    True if a later piece scales actions from -1 … 1 to the environments' bounds
    """

    columnar = True
    pipelines = ("module-to-env",)
    changes_episodes = False
    limits: ClassVar[dict[str, Any]]  # of the schedule's values, as `checked_number` takes them
    action_spaces: ClassVar[tuple[type[Space], ...]]
    takes: ClassVar[str]  # the column that the actions are made of
    is_normalized = False

    schedule: float | Schedule

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            checked_number("schedule", self.schedule, noun="a function of steps, or a number", **self.limits)

    def value(self, step: int) -> float:
        """The schedule's value after so many vector steps of a lane."""
        value: Any = self.schedule
        try:
            if callable(value):
                value = value(step)
                value = value if isinstance(value, int | float) else float(value)  # a scalar of numpy or torch
            return checked_number(f"the schedule's value at step {step}", value, **self.limits)
        except (ValueError, TypeError) as error:
            raise ConnectorError(f"{self.name}: {error}") from None

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: SharedData = None,
        **kwargs: Any,
    ) -> Batch:
        if not explore or not batch:
            return batch
        own = getattr(rl_module, "action_space", None)
        space: Any = own if isinstance(own, gym.Space) else self._input_action_space
        if self.takes not in batch or not isinstance(space, self.action_spaces):
            kinds = " or ".join(kind.__name__ for kind in self.action_spaces)
            raise ConnectorError(
                f"{self.name} is for one {kinds} action and a module that gives '{self.takes}'; the action space is "
                f"{space}, and the batch has {sorted(batch)}"
            )
        if Columns.ACTIONS_FOR_ENV in batch:
            raise _too_late(self, f"a piece that made '{Columns.ACTIONS_FOR_ENV}'")
        shared = {} if shared_data is None else shared_data
        if self.takes == Columns.ACTION_DIST_INPUTS:  # a piece before this one may have changed them
            refuse_unusable(_rows(batch[self.takes]), shared, episodes, distribution_for(space))
        self._explore(batch, episodes, space, self.value(shared.get("step", 0)), shared.get("generator"))
        return batch

    @abc.abstractmethod
    def _explore(
        self, batch: Batch, episodes: Episodes, space: Any, value: float, generator: torch.Generator | None
    ) -> None:
        """Change the batch's actions, which the module chose in a space."""


@checking_constructor(epsilon="schedule=…")
class EpsilonGreedy(_Exploration):
    """Takes the action with the largest of `action_dist_inputs`, or with probability epsilon any action.

        schedule    epsilon: a number from 0 to 1, or a function of the lane's vector steps so far, such as `Linear`

    For one Discrete action, whose `action_dist_inputs` any[N, n] may be Q-values. An action that is ruled out, by one
    of -1e9 or less as `mask_logits` does it, is never taken.
    `action_logp`, f32[N], becomes that of this choice. Without exploration (`explore=False`) it changes nothing.

    Raises ValueError for another schedule; ConnectorError for other actions, and for a value outside 0 … 1; ModuleError
    where every action is ruled out.
    """

    limits: ClassVar[dict[str, Any]] = {"least": 0.0, "most": 1.0}
    action_spaces = (gym.spaces.Discrete,)
    takes = Columns.ACTION_DIST_INPUTS

    def _explore(
        self, batch: Batch, episodes: Episodes, space: Any, value: float, generator: torch.Generator | None
    ) -> None:
        values = _rows(batch[Columns.ACTION_DIST_INPUTS]).astype(np.float64)
        there = values > RULED_OUT
        greedy = values.argmax(1)
        draws = torch.rand((2, len(values)), generator=generator, dtype=torch.float64).numpy()
        # The k-th of the allowed actions, for k drawn from 0 up to their number.
        allowed = there.cumsum(1)
        anything = (allowed > (draws[1] * allowed[:, -1])[:, None].astype(np.int64)).argmax(1)
        chosen = np.where(draws[0] < value, anything, greedy)
        with np.errstate(divide="ignore"):
            logp = np.log((1.0 - value) * (chosen == greedy) + value / allowed[:, -1])
        start = int(space.start)
        batch[Columns.ACTIONS] = _like(batch[Columns.ACTIONS], chosen + start)
        batch[Columns.ACTION_LOGP] = _like(batch[Columns.ACTION_LOGP], logp.astype(np.float32))


class Temperature(_Exploration):
    """Samples actions with the probabilities softmax(`action_dist_inputs` / temperature).

        schedule    the temperature: a number above 0, or a function of the lane's vector steps so far, such as `Linear`

    Above 1 actions are more random than the module has them, below 1 less. The `action_dist_inputs` any[N, n] of a
    Discrete action may be Q-values; those of a MultiDiscrete or MultiBinary one are logits. They stay as they are, and
    what they rule out by -1e9 or less is never taken.
    `action_logp`, f32[N], becomes that of this choice. Without exploration (`explore=False`) it changes nothing.

    Raises ValueError for another schedule; ConnectorError for other actions, and for a value that is not above 0.
    """

    limits: ClassVar[dict[str, Any]] = {"above": 0.0}
    action_spaces = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    takes = Columns.ACTION_DIST_INPUTS

    def _explore(
        self, batch: Batch, episodes: Episodes, space: Any, value: float, generator: torch.Generator | None
    ) -> None:
        inputs = tensor_of(_rows(batch[Columns.ACTION_DIST_INPUTS]))
        inputs = (inputs / value).masked_fill(inputs <= RULED_OUT, -torch.inf)
        distribution = distribution_for(space).from_logits(inputs)
        actions: Any = distribution.sample(generator)
        batch[Columns.ACTIONS] = _like(batch[Columns.ACTIONS], actions.numpy())
        batch[Columns.ACTION_LOGP] = _like(batch[Columns.ACTION_LOGP], distribution.logp(actions).numpy())


class GaussianNoise(_Exploration):
    """Adds normally distributed noise to `actions`, and clips the sums to the policy's own scale.

        schedule    the noise's deviation, in the units of `actions`: a number, 0 or more, or a function of the lane's
                    vector steps so far, such as `Linear`

    For actions any[N, ...] in a Box that the module gives itself, as those of DDPG and TD3. Their scale is -1 … 1 if a
    later `NormalizeAndClipActions(normalize_actions=True)` scales them; else that of the module's `action_space`, which
    is the environments' unless the module has its own. `action_logp` is taken out of the batch: it would be that of
    another action. Without exploration (`explore=False`) nothing changes.

    Raises ValueError for another schedule; ConnectorError for other actions, and for a negative value.
    """

    limits: ClassVar[dict[str, Any]] = {"least": 0.0}
    action_spaces = (gym.spaces.Box,)
    takes = Columns.ACTIONS

    def _explore(
        self, batch: Batch, episodes: Episodes, space: Any, value: float, generator: torch.Generator | None
    ) -> None:
        chosen = _rows(batch[Columns.ACTIONS])
        box = self._input_action_space
        is_scaled = self.is_normalized and isinstance(box, gym.spaces.Box) and box.is_bounded()
        low, high = (-1.0, 1.0) if is_scaled else (space.low, space.high)
        draws = value * torch.randn(chosen.shape, generator=generator, dtype=torch.float64).numpy()
        noisy = chosen + self._noise(batch, episodes, draws)
        batch[Columns.ACTIONS] = _like(batch[Columns.ACTIONS], np.clip(noisy, low, high))
        batch.pop(Columns.ACTION_LOGP, None)

    def _noise(self, batch: Batch, episodes: Episodes, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """The noise of this step, f64[N, ...], from fresh random numbers of the same shape."""
        return draws


@dataclass(kw_only=True, eq=False, repr=False)
class OrnsteinUhlenbeckNoise(GaussianNoise):
    """Adds noise to `actions` that drifts from step to step, and clips the sums to the policy's own scale.

        schedule    deviation of what is added to the noise in a step, in the units of `actions`: a number, 0 or more,
                    or a function of the lane's vector steps so far, such as `Linear`
        theta       share of the noise that is lost in a step, above 0 and up to 1; 1: `GaussianNoise`

    The noise of step t is (1 - theta) · noise of step t - 1 + deviation · a normal number. It begins each episode from
    0, and after many steps has the deviation / sqrt(1 - (1 - theta)²). It is recorded in the column `action_noise`,
    like `actions`, which is its memory. Else this piece is as `GaussianNoise`. Raises ValueError for another theta.
    """

    lookback = 1

    theta: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        self.theta = checked_number("theta", self.theta, above=0, most=1)

    def _noise(self, batch: Batch, episodes: Episodes, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        noise = (1.0 - self.theta) * _noise_before(episodes, draws.shape) + draws
        batch[ACTION_NOISE] = _like(batch[Columns.ACTIONS], noise, are_floats=True)
        return noise


def arrange_exploration(pieces: Iterable[ConnectorV2]) -> None:
    """Tell the exploration among a pipeline's pieces, those of nested ones in their places, what comes behind it.

    Raises ConnectorError where it comes behind `NormalizeAndClipActions`: the environments would get nothing of it.
    """
    before: list[_Exploration] = []
    maker: NormalizeAndClipActions | None = None
    for piece in pieces:
        if isinstance(piece, _Exploration):
            if maker is not None:
                raise _too_late(piece, maker.name)
            piece.is_normalized = False
            before.append(piece)
        elif isinstance(piece, NormalizeAndClipActions) and maker is None:
            if piece.normalize_actions or piece.clip_actions:  # else it makes nothing
                maker = piece
                for each in before:
                    each.is_normalized = piece.normalize_actions


def _too_late(piece: ConnectorV2, other: str) -> ConnectorError:
    return ConnectorError(
        f"{piece.name} stands behind {other}, so that the environments would get actions without it; expected it before"
    )


def _noise_before(episodes: Episodes, shape: tuple[int, ...]) -> NDArray[Any]:
    """The noise of the step before, any[N, ...], of this shape; zeros where an episode begins."""
    if isinstance(episodes, LaneEpisodes):
        before: Any = episodes.values_before(ACTION_NOISE)
        begins = episodes.just_begun().reshape(-1, *[1] * (len(shape) - 1))
        return np.zeros(shape) if before is None else np.where(begins, 0.0, before)
    alone = single_agent_episodes(episodes, stepped_only=True)
    zeros = np.zeros(shape[1:])
    return np.stack([each.get_extra_model_outputs(ACTION_NOISE, -1) if each.t else zeros for each in alone])


def _rows(column: Any) -> NDArray[Any]:
    """A column's items, in whatever form, as one array any[N, ...]."""
    if is_keyed_by_episode(column):
        column = [item for items in column.values() for item in items]
    return np.stack([as_array(item) for item in column]) if isinstance(column, list) else as_array(column)


def _like(column: Any, values: NDArray[Any], *, are_floats: bool = False) -> Any:
    """Values any[N, ...] in the form and dtype of a column that they take the place of, rounded to whole numbers.

    are_floats    True: as f32 where the column is of whole numbers
    """
    dtype: Any = _rows(column).dtype
    if dtype.kind in "iu" and are_floats:
        dtype = np.dtype(np.float32)
    elif dtype.kind in "iu" and values.dtype.kind == "f":
        info = np.iinfo(dtype)
        values = nearest(gym.spaces.Box(info.min, info.max, values.shape[1:], dtype.type), values)
    values = values.astype(dtype)
    if is_keyed_by_episode(column):
        rest = iter(values)
        return {key: [next(rest) for _ in items] for key, items in column.items()}
    if isinstance(column, list):
        return list(values)
    return tensor_of(values) if torch.is_tensor(column) else values
