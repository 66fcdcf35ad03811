"""Actions brought into the environments' bounds."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns

Bring = Callable[[Any], Any]


class NormalizeAndClipActions(ConnectorV2):
    """Adds `actions_for_env`, and leaves `actions` as the module chose them.

        normalize_actions    take them from -1 … 1 to low … high, and clip; goes before `clip_actions`
        clip_actions         clip them to low … high

    Of several agents the action space is a Dict by agent ids, or the same for all.

    Boxes alone change, also inside a Dict or Tuple: those that are bounded on all sides can be normalized, and others
    are clipped to what bounds they have. Where nothing changes no column is added.
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
    ) -> None:
        self.normalize_actions = normalize_actions
        self.clip_actions = clip_actions
        self._bring: Bring | None = None  # known when the spaces are, and so are these, should they be by agents
        self._of_agents: dict[Any, Bring | None] = {}
        super().__init__(input_observation_space, input_action_space)

    @property
    def changes_actions(self) -> bool:
        """Whether actions in this space are changed at all."""
        self._know_spaces()
        return self._bring is not None

    def recompute_output_action_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        self._bring = self._bringer(input_action_space)
        parts = input_action_space.spaces if isinstance(input_action_space, spaces.Dict) else {}
        self._of_agents = {agent_id: self._bringer(part) for agent_id, part in parts.items()}
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
        self._know_spaces()
        bring = self._bring
        if bring is None or Columns.ACTIONS_FOR_ENV in batch:
            return batch
        if not batch:  # no agent acts
            return batch
        actions = batch[Columns.ACTIONS]
        if isinstance(actions, list):
            batch[Columns.ACTIONS_FOR_ENV] = [bring(action) for action in actions]
        elif isinstance(actions, dict) and all(isinstance(key, tuple) for key in actions):
            batch[Columns.ACTIONS_FOR_ENV] = {key: self._brought(key, items) for key, items in actions.items()}
        else:
            batch[Columns.ACTIONS_FOR_ENV] = bring(actions)
        return batch

    def _brought(self, key: tuple[Any, ...], items: list[Any]) -> list[Any]:
        """The actions under the key of an episode, or of an agent of one."""
        bring = self._bring
        if len(key) > 1:
            bring = self._of_agents.get(key[1], bring)
        return [bring(action) for action in items] if bring else items

    def _bringer(self, space: gym.Space[Any]) -> Bring | None:
        """What is done to an action, or to a tree of arrays `any[N, ...]` of them; None: nothing."""
        if isinstance(space, spaces.Dict):
            named = {key: self._bringer(part) for key, part in space.items()}
            if not any(named.values()):
                return None
            return lambda actions: {key: bring(actions[key]) if bring else actions[key] for key, bring in named.items()}
        if isinstance(space, spaces.Tuple):
            several = [self._bringer(part) for part in space]
            if not any(several):
                return None
            return lambda actions: tuple(bring(x) if bring else x for bring, x in zip(several, actions, strict=True))
        return self._box_bringer(space) if isinstance(space, spaces.Box) else None

    def _box_bringer(self, box: spaces.Box) -> Bring | None:
        low, high = box.low, box.high
        bounded = np.isfinite(np.stack([low, high]))
        if self.normalize_actions and bounded.all():
            return lambda actions: np.clip(low + (np.asarray(actions) + 1.0) * (high - low) / 2.0, low, high).astype(
                box.dtype
            )
        if self.clip_actions and bounded.any():
            return lambda actions: np.clip(actions, low, high)
        return None
