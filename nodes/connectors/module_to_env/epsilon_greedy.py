"""Epsilon-greedy exploration, and schedules of how much is explored."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.tensors import as_array, tensor_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, SharedData, Space
from rollflow.nodes.connectors.list_form import is_keyed_by_episode
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError

Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Linear:
    """Schedule from `begin` at step 0 to `end` at step `steps`, in a straight line, and `end` from there on."""

    begin: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.begin + (self.end - self.begin) * min(1.0, step / max(self.steps, 1))


class EpsilonGreedy(ConnectorV2):
    """Takes the action with the largest of `action_dist_inputs`, or with probability epsilon any action.

        schedule    epsilon: a number from 0 to 1, or a function of the lane's vector steps so far, such as `Linear`

    For one Discrete action, whose `action_dist_inputs` any[N, n] may be Q-values. Those of -inf are never taken.
    `action_logp`, f32[N], becomes that of this choice. Without exploration (`explore=False`) it changes nothing.

    Each worker and host counts its lanes' steps itself, so that epsilon need not be sent. Raises ValueError for a
    schedule that is neither, ConnectorError for other actions, and for a value outside 0 … 1.
    """

    columnar = True
    pipelines = ("module-to-env",)
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        schedule: float | Schedule,
    ) -> None:
        if not callable(schedule) and not (isinstance(schedule, int | float) and 0.0 <= schedule <= 1.0):
            raise ValueError(f"schedule is {schedule!r}, expected a number from 0 to 1, or a function of steps")
        self.schedule = schedule
        super().__init__(input_observation_space, input_action_space)

    def epsilon(self, step: int) -> float:
        """The probability of an action at random, after so many vector steps of a lane."""
        value = self.schedule(step) if callable(self.schedule) else self.schedule
        if not 0.0 <= value <= 1.0:
            raise ConnectorError(f"{self.name}: the schedule gives {value} at step {step}, expected 0 … 1")
        return float(value)

    def __call__(
        self, *, batch: Batch, explore: bool | None = None, shared_data: SharedData = None, **kwargs: Any
    ) -> Batch:
        if not explore or not batch:
            return batch
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if logits is None or not isinstance(self.input_action_space, gym.spaces.Discrete | None):
            raise ConnectorError(
                f"{self.name} is for one Discrete action and a module that gives '{Columns.ACTION_DIST_INPUTS}'; the "
                f"action space is {self.input_action_space}, and the batch has {sorted(batch)}"
            )
        shared = {} if shared_data is None else shared_data
        values = _rows(logits)
        actions, logp = self._choose(values, self.epsilon(shared.get("step", 0)), shared.get("generator"))
        batch[Columns.ACTIONS] = _like(batch[Columns.ACTIONS], actions)
        batch[Columns.ACTION_LOGP] = _like(batch[Columns.ACTION_LOGP], logp)
        return batch

    def _choose(
        self, values: NDArray[Any], epsilon: float, generator: torch.Generator | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Actions i64[N], and their log-probabilities f32[N], from values any[N, n]."""
        there = values > -np.inf
        greedy = values.argmax(1)
        draws = torch.rand((2, len(values)), generator=generator, dtype=torch.float64).numpy()
        # The k-th of the allowed actions, for k drawn from 0 up to their number.
        allowed = there.cumsum(1)
        anything = (allowed > (draws[1] * allowed[:, -1])[:, None].astype(np.int64)).argmax(1)
        chosen = np.where(draws[0] < epsilon, anything, greedy)
        with np.errstate(divide="ignore"):
            logp = np.log((1.0 - epsilon) * (chosen == greedy) + epsilon / allowed[:, -1])
        start = self.input_action_space.start if isinstance(self.input_action_space, gym.spaces.Discrete) else 0
        return chosen + int(start), logp.astype(np.float32)


def _rows(column: Any) -> NDArray[Any]:
    """A column's items, in whatever form, as one array any[N, ...]."""
    if is_keyed_by_episode(column):
        column = [item for items in column.values() for item in items]
    return np.stack([as_array(item) for item in column]) if isinstance(column, list) else as_array(column)


def _like(column: Any, values: NDArray[Any]) -> Any:
    """Values any[N] in the form of a column that they take the place of."""
    if is_keyed_by_episode(column):
        rest = iter(values)
        return {key: [next(rest) for _ in items] for key, items in column.items()}
    if isinstance(column, list):
        return list(values)
    return tensor_of(values.astype(as_array(column).dtype)) if torch.is_tensor(column) else values.astype(column.dtype)
