"""Brings actions into the environments' bounds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, SharedData, Space
from rollflow.nodes.connectors.list_form import is_keyed_by_episode
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.space import items_in, nearest, whole_bounds

PASSED_ON = "actions_passed_on"
"""Key in `shared_data`, True where the environments get `actions` themselves."""

Bring = Callable[[Any], Any]


@dataclass(kw_only=True, eq=False, repr=False)
class NormalizeAndClipActions(ConnectorV2):
    """Adds `actions_for_env`, and leaves `actions` as the module chose them.

        normalize_actions    scale from -1 … 1 to low … high, and clip; goes before `clip_actions`
        clip_actions         clip to low … high

    Of several agents the action space is a Dict by agent ids, or the same for all.

    Boxes alone change, also inside a Dict or Tuple. A Box that is bounded on all sides can be normalized; any other is
    clipped to the bounds it has. Floats for a Box of whole numbers become the nearest ones in its bounds; to be
    normalized they have to be floats, of a module whose own action space is a Box of floats. Where nothing changes both
    columns have the same items. Without either option no column is added. An `actions_for_env` of another piece stays
    as it is.
    """

    columnar = True
    pipelines = ("module-to-env",)
    changes_episodes = False

    normalize_actions: bool
    clip_actions: bool

    def __post_init__(self) -> None:
        self._bring: Bring | None = None  # set with the spaces; below, by agents
        self._of_agents: dict[Any, Bring | None] = {}

    @property
    def changes_actions(self) -> bool:
        """True if actions in this space are changed at all."""
        if not self._spaces_known:  # no call: this is asked at every vector step
            self._recompute_spaces()
        return self._bring is not None

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self._bring = self._bringer(input_action_space)
        parts = input_action_space.spaces if isinstance(input_action_space, spaces.Dict) else {}
        self._of_agents = {agent_id: self._bringer(part) for agent_id, part in parts.items()}
        return input_action_space

    def __call__(self, *, batch: Batch, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        self._know_spaces()
        bring, is_there = self._bring, Columns.ACTIONS_FOR_ENV in batch
        if shared_data is not None:
            shared_data[PASSED_ON] = bring is None and not is_there
        if is_there or not batch or not (self.normalize_actions or self.clip_actions):  # no batch: no agent acts
            return batch
        actions = batch[Columns.ACTIONS]
        try:
            batch[Columns.ACTIONS_FOR_ENV] = same_items(actions) if bring is None else self._for_env(actions, bring)
        except ConnectorError:
            raise
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(
                f"{self.name}: '{Columns.ACTIONS}' are {_described(actions)}, expected actions in the environments' "
                f"space, {self.input_action_space}; where the module chooses in another space, a piece before this one "
                f"makes '{Columns.ACTIONS_FOR_ENV}' of '{Columns.ACTIONS}': give it as module_to_env_connector"
            ) from error
        return batch

    def _for_env(self, actions: Any, bring: Bring) -> Any:
        if isinstance(actions, list):
            return [bring(action) for action in actions]
        if isinstance(actions, dict) and all(isinstance(key, tuple) for key in actions):
            return {key: self._brought(key, items) for key, items in actions.items()}
        return bring(actions)

    def _brought(self, key: tuple[Any, ...], items: list[Any]) -> list[Any]:
        """Actions under the key of an episode, or of an agent of one."""
        bring = self._bring
        if len(key) > 1:
            bring = self._of_agents.get(key[1], bring)
        return [bring(action) for action in items] if bring else items

    def _bringer(self, space: Space) -> Bring | None:
        """The change to an action, or to a tree of arrays `any[N, ...]` of them; None: nothing changes."""
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
        if not isinstance(space, spaces.Box):
            return None
        return self.float_bringer(space, np) if space.dtype.kind == "f" else self._whole_bringer(space)

    def float_bringer(self, box: spaces.Box, xp: Any) -> Bring | None:
        """The change to actions any[..., *shape] of a Box of floats; None: nothing changes.

        xp    numpy or torch, whichever the actions are of
        """
        low, high, bounded = xp.asarray(box.low), xp.asarray(box.high), np.isfinite(np.stack([box.low, box.high]))
        if self.normalize_actions and bounded.all():
            return lambda actions: xp.asarray(
                xp.clip(low + (xp.asarray(actions) + 1.0) * (high - low) / 2.0, low, high), dtype=low.dtype
            )
        return (lambda actions: xp.clip(actions, low, high)) if self.clip_actions and bounded.any() else None

    def _whole_bringer(self, box: spaces.Box) -> Bring | None:
        """`float_bringer` for a Box of whole numbers, which is always bounded."""
        bounds = whole_bounds(box)
        low, high = bounds

        def clip(actions: Any) -> Any:
            values = np.asarray(actions)
            return nearest(box, values, bounds) if values.dtype.kind == "f" else items_in(box, values)

        def normalize(actions: Any) -> Any:
            values = np.asarray(actions)
            if values.dtype.kind != "f":
                raise ConnectorError(
                    f"{self.name}: '{Columns.ACTIONS}' are {values.dtype}{list(values.shape)}, expected floats from -1 "
                    f"to 1 to be normalized for {box}: of a module whose own action_space is a Box of floats"
                )
            return nearest(box, low + (values + 1.0) * (high / 2.0 - low / 2.0), bounds)

        return normalize if self.normalize_actions else clip if self.clip_actions else None


def _described(actions: Any) -> str:
    """The dtype and shape of actions, or of the first ones of a column in list form, with the keys around them."""
    while isinstance(actions, list) or is_keyed_by_episode(actions):
        actions = next(iter(actions.values() if isinstance(actions, dict) else actions), None)
    if isinstance(actions, dict):
        return "{" + ", ".join(f"{key!r}: {_described(part)}" for key, part in actions.items()) + "}"
    if isinstance(actions, tuple):
        return f"({', '.join(map(_described, actions))})"
    array = np.asarray(actions)
    return f"{array.dtype}{list(array.shape)}"


def same_items(actions: Any) -> Any:
    """The actions; lists of them are copied."""
    if isinstance(actions, dict) and all(isinstance(key, tuple) for key in actions):
        return {key: list(items) for key, items in actions.items()}
    return list(actions) if isinstance(actions, list) else actions


@dataclass(kw_only=True, eq=False, repr=False)
class ClipActions(NormalizeAndClipActions):
    """`NormalizeAndClipActions` that clips alone: adds `actions_for_env`, and leaves `actions` as they were chosen."""

    normalize_actions: bool = field(default=False, init=False)
    clip_actions: bool = field(default=True, init=False)
