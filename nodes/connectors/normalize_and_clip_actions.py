"""Actions brought into the environments' bounds."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.tree import Tree

Bring = Callable[[Any], Any]


class NormalizeAndClipActions(ConnectorV2):
    """Adds `actions_for_env`, and leaves `actions` as the module chose them.

        normalize_actions    take them from -1 … 1 to low … high, and clip; goes before `clip_actions`
        clip_actions         clip them to low … high

    Only bounded Boxes change, also inside a Dict or Tuple. Where nothing changes no column is added.
    """

    columnar = True
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        normalize_actions: bool,
        clip_actions: bool,
        **kwargs: Any,
    ) -> None:
        self.normalize_actions = normalize_actions
        self.clip_actions = clip_actions
        self._bring: Bring | None = None
        super().__init__(input_observation_space, input_action_space, **kwargs)

    def recompute_output_action_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        bounded = any(map(_is_bounded, _boxes(input_action_space)))
        changes = bounded and (self.normalize_actions or self.clip_actions)
        self._bring = self._bringer(input_action_space) if changes else None
        return input_action_space

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        bring = self._bring
        if bring is None or Columns.ACTIONS_FOR_ENV in batch:
            return batch
        actions = batch[Columns.ACTIONS]
        if isinstance(actions, list):
            batch[Columns.ACTIONS_FOR_ENV] = [bring(action) for action in actions]
        elif isinstance(actions, dict) and all(isinstance(key, tuple) for key in actions):
            batch[Columns.ACTIONS_FOR_ENV] = {key: [bring(x) for x in items] for key, items in actions.items()}
        else:
            batch[Columns.ACTIONS_FOR_ENV] = bring(actions)
        return batch

    def _bringer(self, space: gym.Space[Any]) -> Bring:
        """What is done to an action, or to a tree of arrays `any[N, ...]` of them."""
        if isinstance(space, spaces.Dict):
            parts = {key: self._bringer(part) for key, part in space.items()}
            return lambda actions: {key: bring(actions[key]) for key, bring in parts.items()}
        if isinstance(space, spaces.Tuple):
            several = [self._bringer(part) for part in space]
            return lambda actions: tuple(bring(action) for bring, action in zip(several, actions, strict=True))
        if not isinstance(space, spaces.Box) or not _is_bounded(space):
            return _unchanged
        low, high = space.low, space.high
        if not self.normalize_actions:
            return lambda actions: np.clip(actions, low, high)
        return lambda actions: np.clip(low + (np.asarray(actions) + 1.0) * (high - low) / 2.0, low, high).astype(
            space.dtype
        )


def _boxes(space: gym.Space[Any]) -> list[spaces.Box]:
    if isinstance(space, spaces.Dict):
        return [box for part in space.values() for box in _boxes(part)]
    if isinstance(space, spaces.Tuple):
        return [box for part in space for box in _boxes(part)]
    return [space] if isinstance(space, spaces.Box) else []


def _is_bounded(box: spaces.Box) -> bool:
    return bool(np.isfinite(box.low).all() and np.isfinite(box.high).all())


def _unchanged(actions: Tree) -> Tree:
    return actions
