"""Pieces that make actions of a forward pass's output: sampling, items one by one, bounds, and exploration."""

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import checked_count, checked_number, checking_constructor
from rollflow.nodes.connectors.common.batches import (
    CHOSEN_BY,
    DEVICE,
    MEMORIZED,
    FusedPieces,
    array_of,
    as_array,
    module_by_module,
    module_of,
    tensor_of,
)
from rollflow.nodes.connectors.common.episode_columns import TIME_RANK_ADDED
from rollflow.nodes.connectors.connector_v2 import Batch, ColumnPiece, ConnectorV2, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import (
    episode_key,
    id_in_keys,
    is_keyed_by_episode,
    map_column,
    single_agent_episodes,
    space_of_agent,
)
from rollflow.nodes.modules.distribution import (
    Categorical,
    DiagGaussian,
    DistributionType,
    JointRaces,
    Races,
    distribution_for,
    without_choice,
)
from rollflow.nodes.modules.rl_module import RLModule
from rollflow.stream.data.columns import RULED_OUT, Columns
from rollflow.stream.data.errors import ConnectorError, ModuleError
from rollflow.stream.data.space import ARRAYS, Numerics, nearest, whole_bounds
from rollflow.stream.data.tree import Tree, leaves_of, map_tree, stack_trees
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.fragments.live_episode import LaneEpisodes

RACES = "races"
"""Key in `shared_data` of the lane's `Races`."""

_FEW = 128  # numbers
_OUTPUTS = {Columns.ACTIONS, Columns.ACTION_DIST_INPUTS}


class ActionPiece(ColumnPiece):
    """Base of built-in pieces between the module and the environments."""

    pipelines = ("module-to-env",)


class GetActions(ActionPiece):
    """Adds `actions`, `any[N, ...]`, and `action_logp`, f32[N], if the module gave `action_dist_inputs` alone.

    With `explore` actions are sampled, else they are the likeliest. Sampling uses the generator in
    `shared_data["generator"]`, or the faster `Races` in `shared_data["races"]` for plain logits of one Discrete action.

    The distribution is that of the module's `get_exploration_action_dist_cls()` or `get_inference_action_dist_cls()`,
    else that of the module's `action_space`, or this piece's. Actions that the module gave itself are passed on.
    `action_dist_inputs` may be tensors or arrays: arrays become tensors for a `DistributionType`, and are passed to a
    distribution from elsewhere as they are. Outputs by module id are handled by `rl_module[module id]`.

    Raises ModuleError when the output has neither `actions` nor `action_dist_inputs`, and when a logit is NaN or +inf,
    or all of a slot's actions are ruled out, by logits of -1e9 or less. So it does for an action of the module that is
    NaN. For a lane on a device no number is looked at here.
    """

    _made: DistributionType | None = None  # of this piece's action space

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: SharedData = None,
        **kwargs: Any,
    ) -> Batch:
        shared_data = {} if shared_data is None else shared_data
        if _OUTPUTS.isdisjoint(batch) and _is_by_module(batch, shared_data):
            rows = _rows_by_module(episodes, shared_data)
            for module_id, output in batch.items():
                module = module_of(rl_module, module_id)
                self._act(module, output, bool(explore), shared_data, rows.get(module_id, []))
        else:
            self._act(rl_module, batch, bool(explore), shared_data, episodes)
        return batch

    def _act(
        self, rl_module: Any, batch: Batch, explore: bool, shared_data: dict[str, Any], episodes: Episodes
    ) -> None:
        looks = DEVICE not in shared_data
        if Columns.ACTIONS in batch:
            if looks and (slots := slots_with_nan(batch[Columns.ACTIONS])):
                raise _unusable(Columns.ACTIONS, "is NaN", slots, shared_data, episodes, rl_module)
            return
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if logits is None:
            raise ModuleError(
                f"the output of {type(rl_module).__name__} has {sorted(batch)}, expected '{Columns.ACTIONS}' or "
                f"'{Columns.ACTION_DIST_INPUTS}'"
            ).see("module")
        array = None if isinstance(logits, torch.Tensor) else _as_array(logits)
        if looks and array is None and not logits.is_cpu:  # generators and environments are on the CPU
            batch[Columns.ACTION_DIST_INPUTS] = logits = logits.cpu()
        agent_id = getattr(episodes[0], "agent_id", None) if isinstance(episodes, list) and episodes else None
        distribution_type = self.distribution_type(rl_module, explore=explore, agent_id=agent_id)
        if array is not None and isinstance(distribution_type, DistributionType):
            floats = array.dtype.kind == "f" and array.dtype.isnative  # other numbers become f32
            logits = tensor_of(array if floats else array.astype(np.float32))
        distribution: Any = distribution_type.from_logits(logits)
        races = shared_data.get(RACES)
        if looks and explore and races is not None and type(distribution) is Categorical and _is_plain(logits):
            actions, logp = distribution.sample_with_logp(races)
            if not are_usable(logits.numpy(), logp, may_mask(rl_module)):
                refuse_unusable(logits, shared_data, episodes, distribution_type, rl_module)
        else:
            if looks:
                refuse_unusable(logits, shared_data, episodes, distribution_type, rl_module)
            else:
                shared_data[CHOSEN_BY] = distribution_type
            if not explore:
                distribution = distribution.to_deterministic()
            if isinstance(distribution_type, DistributionType):
                has_races, generator = not looks and type(distribution) is Categorical, shared_data.get("generator")
                actions = distribution.sample_tensors(races)[0] if has_races else distribution.sample(generator)
            else:  # from elsewhere, without generators
                actions = distribution.sample()
            logp = None
            if explore and isinstance(distribution_type, DistributionType) and Columns.ACTION_LOGP not in batch:
                logp = distribution.logp(actions)
                if looks:
                    refuse_infinite(logp, shared_data, episodes, rl_module)
        batch[Columns.ACTIONS] = actions
        if Columns.ACTION_LOGP not in batch:
            batch[Columns.ACTION_LOGP] = distribution.logp(actions) if logp is None else logp

    def distribution_type(self, rl_module: Any, *, explore: bool, agent_id: Any = None) -> Any:
        """The maker of the module's distributions. Raises ModuleError if neither module nor piece has a space.

        agent_id    of one of the module's agents; None: of a single agent
        """
        name = "get_exploration_action_dist_cls" if explore else "get_inference_action_dist_cls"
        get = getattr(rl_module, name, None)
        if get is not None:
            return get()
        own, made = getattr(rl_module, "action_space", None), self._made
        space = own if isinstance(own, gym.Space) else space_of_agent(self.action_space, agent_id)
        if space is None:
            raise ModuleError(f"{type(rl_module).__name__} has no {name}(), and GetActions was given no action space")
        if made is None or made.space is not space:
            made = self._made = distribution_for(space)
        return made


def _is_by_module(batch: Batch, shared_data: dict[str, Any]) -> bool:
    """True for several modules' outputs, by module id, which may be empty if no agent is to act."""
    if not batch:
        return MEMORIZED in shared_data
    return all(isinstance(each, dict) and not _OUTPUTS.isdisjoint(each) for each in batch.values())


def _rows_by_module(episodes: Episodes, shared_data: dict[str, Any]) -> dict[Any, list[Any]]:
    """Module id -> the known episodes of the agents that its rows are of."""
    pairs = {
        (*episode_key(each), None)[:2]: each  # without agents: (episode id, None)
        for each in single_agent_episodes(episodes, stepped_only=True)
    }
    memorized = shared_data.get(MEMORIZED, {})
    return {module: [pairs[row] for row in rows if row in pairs] for module, rows in memorized.items()}


def _as_array(logits: Any) -> NDArray[Any]:
    """Logits that are no tensor as an array. Raises ModuleError for anything but numbers, and without a batch axis."""
    try:
        array = np.asarray(logits)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise ModuleError(
            f"'{Columns.ACTION_DIST_INPUTS}' is {type(logits).__name__}, expected a tensor or an array of numbers with "
            "one row per slot"
        )
    return array


def _is_plain(logits: Any) -> bool:
    """True for a tensor f32[N, n] in main memory."""
    if not isinstance(logits, torch.Tensor) or not logits.is_cpu or logits.ndim != 2:
        return False
    return logits.dtype is torch.float32 and not logits.requires_grad


def may_mask(rl_module: Any) -> bool:
    """False for a module that is known to rule no action out by a finite logit, so that nobody need look for it."""
    return bool(getattr(rl_module, "masks_actions", True))


def rules_all_out(logits: NDArray[Any]) -> bool:
    """True if one of the rows, f32[N, n] of one Discrete action, rules out every action."""
    if not len(logits) or np.minimum.reduce(logits, axis=None) > RULED_OUT:  # none is: in a third of the time
        return False
    return not np.minimum.reduce(np.maximum.reduce(logits, axis=-1)) > RULED_OUT


def are_usable(logits: NDArray[np.float32], logp: NDArray[np.float32], may_mask: bool) -> bool:
    """False if logits, f32[N, n] of one Discrete action, may be NaN or +inf, or rule every action of a row out.

    logp        f32[N]  log-probabilities of actions sampled from them
    may_mask    whether finite logits may rule actions out
    """
    if 0 < logits.size <= _FEW:  # then Python is quicker than numpy
        numbers = logits.ravel().tolist()
        if min(numbers) > RULED_OUT and sum(numbers) < np.inf:
            return True
    return bool(np.add.reduce(logp) > -np.inf) and not (may_mask and rules_all_out(logits))


def refuse_unusable(
    logits: Any, shared_data: dict[str, Any], episodes: Episodes, distribution_type: Any, module: Any = None
) -> None:
    """Raise ModuleError for logits that are NaN or +inf, or rule out every action, with the slots.

    logits               any[N, D], a tensor or an array
    distribution_type    of the actions
    module               that gave them; None: it is not known

    The text adds which of these slots' observations are not finite: then the module is not to blame; else which of its
    weights are not.
    """
    array = array_of(logits) if isinstance(logits, torch.Tensor) else np.asarray(logits)
    # The least and the largest are cheap, and NaN if any is; some actions may be ruled out, but not all.
    if float(np.minimum.reduce(array, axis=None)) > RULED_OUT and np.maximum.reduce(array, axis=None) < np.inf:
        return
    rows = array.reshape(len(array), -1)
    space = distribution_type.space if isinstance(distribution_type, DistributionType) else None
    is_nan, no_choice, is_inf = np.isnan(rows).any(1), without_choice(rows, space), rows.max(1) == np.inf
    for fault, bad in (("is NaN", is_nan), ("rules out every action", no_choice), ("is +inf", is_inf)):
        slots = np.flatnonzero(bad).tolist()
        if slots:
            raise _unusable(Columns.ACTION_DIST_INPUTS, fault, slots, shared_data, episodes, module)


def refuse_infinite(logp: Any, shared_data: dict[str, Any], episodes: Episodes, module: Any = None) -> None:
    """Raise ModuleError for log-probabilities, f32[N, ...], that are not finite, as of deviations that are 0 or inf."""
    rows = np.isfinite(array_of(logp) if isinstance(logp, torch.Tensor) else np.asarray(logp))
    if not rows.all():
        slots = np.flatnonzero(~rows.reshape(len(rows), -1).all(1)).tolist()
        fault = "is not finite, as where a logarithm of a deviation is below -88 or above 88,"
        raise _unusable(Columns.ACTION_LOGP, fault, slots, shared_data, episodes, module)


def slots_with_nan(actions: Tree) -> list[int]:
    """Slots whose action, in a tree of arrays or tensors any[N, ...], has a NaN."""
    slots: set[int] = set()
    for leaf in leaves_of(actions):
        array = array_of(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
        if array.dtype.kind == "f" and array.ndim and np.isnan(np.add.reduce(array, axis=None)):  # one sum is cheap
            slots.update(np.flatnonzero(np.isnan(array.reshape(len(array), -1)).any(1)).tolist())
    return sorted(slots)


def _unusable(
    column: str, fault: str, slots: list[int], shared_data: dict[str, Any], episodes: Episodes, module: Any
) -> ModuleError:
    error = ModuleError(
        f"'{column}' {fault} in lane {shared_data.get('lane', 0)}, vector step {shared_data.get('step', 'unknown')}, "
        f"{_named(episodes, slots)}{_blamed(episodes, slots, module)}"
    )
    if fault == "is NaN":
        error.nan_slots = episodes.slots[slots].tolist() if isinstance(episodes, LaneEpisodes) else slots
    return error.see("not a number")


def _named(episodes: Episodes, slots: list[int]) -> str:
    """The rows in words: slots, or agents."""
    if isinstance(episodes, LaneEpisodes):
        return episodes.lane.named(episodes.slots[slots].tolist())
    rows = [episodes[slot] for slot in slots if slot < len(episodes)] if isinstance(episodes, list) else []
    agents = [each for each in rows if each.agent_id is not None]
    named = [f"agent '{each.agent_id}' of episode '{each.multi_agent_episode_id}'" for each in agents]
    return ", ".join(named) or f"slot {', '.join(map(str, slots))}"


def _blamed(episodes: Episodes, slots: list[int], module: Any) -> str:
    """The slots, of these, whose observations are not finite, or the module's weights that are not, in words."""
    observed = [slot for slot in slots if slot < len(episodes)]
    bad = [slot for slot in observed if not _is_finite(episodes[slot].get_observations(-1))]
    if not bad:
        return weights_blamed(module)
    return f": the observation itself is not finite in {_named(episodes, bad)}, expected numbers"


def weights_blamed(module: Any) -> str:
    """The module's weights that are not finite, in words."""
    weights = module.named_parameters() if isinstance(module, torch.nn.Module) else ()
    names = [name for name, weight in weights if not bool(weight.isfinite().all())]
    return f": weights are not finite: {', '.join(names)}; expected numbers" if names else ""


def _is_finite(observation: Any) -> bool:
    leaves = [np.asarray(leaf) for leaf in leaves_of(observation)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves if leaf.dtype.kind in "fc")


# Items one by one, by agents, and as rows for the environments


class UnBatchToIndividualItems(ColumnPiece):
    """Turns trees of arrays `any[N, ...]` into `(episode id,) -> [item]`, in the episodes' order.

    A batch by module ids becomes `module id -> column -> (episode id, agent id, module id) -> [item]`. The order is
    that which `AgentToModuleMapping` keeps in `shared_data`. Arrays stay if all pieces after this one work with
    columns. Raises ConnectorError if a column does not have one row per episode.
    """

    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        memorized = (shared_data or {}).get(MEMORIZED)
        if memorized is not None and batch.keys() <= memorized.keys():  # by module ids
            for module, columns in batch.items():
                keys = [
                    (episode_id,) if agent_id is None else (episode_id, agent_id, module)
                    for episode_id, agent_id in memorized[module]
                ]
                batch[module] = {column: _unbatched(column, data, keys) for column, data in columns.items()}
            return batch
        if isinstance(episodes, LaneEpisodes):
            return batch
        keys = [episode_key(episode) for episode in single_agent_episodes(episodes, stepped_only=True)]
        for column, data in batch.items():
            batch[column] = _unbatched(column, data, keys)
        return batch


def _unbatched(column: str, data: Tree, keys: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Any]]:
    for leaf in leaves_of(data):
        if np.shape(leaf)[:1] != (len(keys),):
            raise ConnectorError(
                f"column '{column}' has an array of shape {list(np.shape(leaf))}, expected {len(keys)} rows: "
                "one per episode"
            )
    return {key: [map_tree(lambda leaf, i=i: leaf[i], data)] for i, key in enumerate(keys)}


class RemoveSingleTsTimeRankFromBatch(ColumnPiece):
    """Removes from every column but `state_out` the time axis that `AddTimeDimToBatchAndZeroPad` added before.

    An item `any[1, ...]` becomes `any[...]`. Does nothing unless that piece has added one, by `shared_data`. Raises
    ConnectorError for a column that has no time axis of one step.
    """

    @module_by_module
    def __call__(self, *, batch: Batch, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if not shared_data or not shared_data.get(TIME_RANK_ADDED):
            return batch
        for column, data in batch.items():
            if column in (Columns.STATE_OUT, Columns.INFOS):
                continue
            batch[column] = map_column(data, partial(_without, column, 0), partial(_without, column, 1))
        return batch


def _without(column: str, axis: int, data: Tree) -> Tree:
    def taken(leaf: Any) -> Any:
        if leaf.ndim <= axis or leaf.shape[axis] != 1:
            expected = "[N, 1, ...]" if axis else "[1, ...]"
            raise ConnectorError(
                f"column '{column}' has shape {list(leaf.shape)}, expected {expected}: a stateful module's outputs "
                f"have a time axis, all but '{Columns.STATE_OUT}'"
            )
        return leaf[:, 0] if axis else leaf[0]

    return map_tree(taken, data)


class ModuleToAgentUnmapping(ConnectorV2):
    """Turns `module id -> column -> (episode id, agent id, module id) -> items` into `column -> keys -> items`.

    Items of one key under several modules come one after the other. Raises ConnectorError for a batch that is not by
    module ids and episodes.
    """

    columnar = False
    pipelines = ("module-to-env",)
    changes_episodes = False

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        unmapped: Batch = {}
        for module, columns in batch.items():
            if not isinstance(columns, dict):
                raise ConnectorError(f"'{module}' is {type(columns).__name__}, expected a module's columns, a dict")
            for column, data in columns.items():
                if not is_keyed_by_episode(data):
                    raise ConnectorError(
                        f"column '{column}' of module '{module}' is {type(data).__name__}, expected a dict from "
                        "episodes to lists of items: ModuleToAgentUnmapping stands behind UnBatchToIndividualItems"
                    )
                for key, items in data.items():
                    unmapped.setdefault(column, {}).setdefault(key, []).extend(items)
        return unmapped


_ACTIONS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)


class ListifyDataForVectorEnv(ActionPiece):
    """Turns `(episode id,) -> [item]` into lists with one item per slot, and actions into arrays `any[N, ...]`.

    With multi-agent episodes, `(episode id, agent id, module id) -> [item]` becomes a list with one dict per slot:
    agent id -> item. Actions do as well, also if no agent is to act: every dict is empty then.

    Columns that are arrays already, one row per slot, stay as they are. Raises ConnectorError for items of an unknown
    episode, an episode without its one item, and an agent that is to act without an action.
    """

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if not batch and _are_several_agents(episodes):
            return _by_slots(batch, episodes)
        for column, data in batch.items():
            if not is_keyed_by_episode(data):
                continue
            if _are_several_agents(episodes):
                return _by_slots(batch, episodes)
            keys = [episode_key(episode) for episode in single_agent_episodes(episodes, stepped_only=True)]
            if data.keys() != set(keys) or any(len(items) != 1 for items in data.values()):
                raise ConnectorError(
                    f"column '{column}' has {sum(map(len, data.values()))} items for episodes {list(data)}, expected "
                    f"one for each of {keys}"
                )
            items = [data[key][0] for key in keys]
            batch[column] = stack_trees(items) if column in _ACTIONS else items
        return batch


def _are_several_agents(episodes: Episodes) -> bool:
    return any(isinstance(episode, MultiAgentEpisode) for episode in episodes)


def _by_slots(batch: Batch, episodes: Episodes) -> Batch:
    """Columns in list form as lists with one dict per slot, or one item for a slot with a single agent."""
    slots = {id_in_keys(episode): slot for slot, episode in enumerate(episodes)}
    batch.setdefault(Columns.ACTIONS, {})
    for column, data in batch.items():
        if not isinstance(data, dict) or (data and not is_keyed_by_episode(data)):
            continue
        listed: list[Any] = [{} if isinstance(episode, MultiAgentEpisode) else None for episode in episodes]
        for key, items in data.items():
            slot = slots.get(key[0])
            if slot is None or len(items) != 1:
                raise ConnectorError(
                    f"column '{column}' has {len(items)} items for {key}, expected one for an agent of: "
                    f"{', '.join(map(str, slots))}"
                )
            if isinstance(episodes[slot], MultiAgentEpisode):
                listed[slot][key[1]] = items[0]
            else:
                listed[slot] = items[0]
        if column in _ACTIONS:
            _refuse_idle(column, listed, episodes)
        batch[column] = listed
    return batch


def _refuse_idle(column: str, listed: list[Any], episodes: Episodes) -> None:
    """Raise ConnectorError for an agent that is to act and has no action."""
    for slot, (item, episode) in enumerate(zip(listed, episodes, strict=True)):
        if isinstance(episode, MultiAgentEpisode):
            idle = sorted(map(str, episode.get_agents_to_act() - item.keys()))
            idler = f"agent '{idle[0]}' of episode '{episode.id_}' at env step {episode.env_t}" if idle else None
        else:
            idler = f"episode '{episode.id_}' at step {episode.t}" if item is None else None
        if idler is not None:
            raise ConnectorError(f"column '{column}' has no item for {idler}, slot {slot}, expected one: it is to act")


# Bounds

PASSED_ON = "actions_passed_on"
"""Key in `shared_data`, True where the environments get `actions` themselves."""

Bring = Callable[[Any], Any]


@dataclass(kw_only=True, eq=False, repr=False)
class NormalizeAndClipActions(ActionPiece):
    """Adds `actions_for_env`, and leaves `actions` as the module chose them.

        normalize_actions    scale from -1 … 1 to low … high, and clip; goes before `clip_actions`
        clip_actions         clip to low … high

    Of several agents the action space is a Dict by agent ids, or the same for all.

    Boxes alone change, also inside a Dict or Tuple. A Box that is bounded on all sides can be normalized; any other is
    clipped to the bounds it has. Floats for a Box of whole numbers become the nearest ones in its bounds; to be
    normalized they have to be floats, of a module whose own action space is a Box of floats. If nothing changes both
    columns have the same items. Without either option no column is added. An `actions_for_env` of another piece stays
    as it is.
    """

    normalize_actions: bool = False
    clip_actions: bool = True

    def __post_init__(self) -> None:
        self._bring: Bring | None = None  # set with the spaces; below, by agents
        self._on_device: tuple[Any, Bring | None] | None = None  # a device, and the change to actions there
        self._of_agents: dict[Any, Bring | None] = {}

    @property
    def changes_actions(self) -> bool:
        """True if actions in this space are changed at all."""
        if not self._spaces_known:  # no call: this is asked at every vector step
            self._recompute_spaces()
        return self._bring is not None

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self._bring, self._on_device = self.bringer(input_action_space), None
        parts = input_action_space.spaces if isinstance(input_action_space, spaces.Dict) else {}
        self._of_agents = {agent_id: self.bringer(part) for agent_id, part in parts.items()}
        return input_action_space

    def __call__(self, *, batch: Batch, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        self._know_spaces()
        bring, is_there = self._bring, Columns.ACTIONS_FOR_ENV in batch
        if shared_data is not None:
            shared_data[PASSED_ON] = bring is None and not is_there
            if bring is not None and DEVICE in shared_data:
                bring = self._bringer_on(shared_data[DEVICE])
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

    def _bringer_on(self, device: torch.device) -> Bring | None:
        """The change to tensors on a device, where the bounds lie as well."""
        if self._on_device is None or self._on_device[0] != device:
            with device:
                self._on_device = device, self.bringer(self._needed_space("action"), TENSORS)
        return self._on_device[1]

    def bringer(self, space: Space, numerics: Numerics = ARRAYS) -> Bring | None:
        """The change to an action, or to a tree of arrays `any[N, ...]` of them; None: nothing changes.

        numerics    of the actions: of arrays, or of tensors
        """
        if isinstance(space, spaces.Dict):
            named = {key: self.bringer(part, numerics) for key, part in space.items()}
            if not any(named.values()):
                return None
            return lambda actions: {key: bring(actions[key]) if bring else actions[key] for key, bring in named.items()}
        if isinstance(space, spaces.Tuple):
            several = [self.bringer(part, numerics) for part in space]
            if not any(several):
                return None
            return lambda actions: tuple(bring(x) if bring else x for bring, x in zip(several, actions, strict=True))
        if not isinstance(space, spaces.Box):
            return None
        return (self._float_bringer if space.dtype.kind == "f" else self._whole_bringer)(space, numerics)

    def _float_bringer(self, box: spaces.Box, numerics: Numerics) -> Bring | None:
        """The change to actions any[..., *shape] of a Box of floats; None: nothing changes."""
        xp = numerics[0]
        low, high, bounded = xp.asarray(box.low), xp.asarray(box.high), np.isfinite(np.stack([box.low, box.high]))
        if self.normalize_actions and bounded.all():
            return lambda actions: xp.asarray(
                xp.clip(low + (xp.asarray(actions) + 1.0) * (high - low) / 2.0, low, high), dtype=low.dtype
            )
        return (lambda actions: xp.clip(actions, low, high)) if self.clip_actions and bounded.any() else None

    def _whole_bringer(self, box: spaces.Box, numerics: Numerics) -> Bring | None:
        """`_float_bringer` for a Box of whole numbers, which is always bounded."""
        (xp, wide, in_type), bounds = numerics, whole_bounds(box)
        low, high = map(xp.asarray, bounds)

        def clip(actions: Any) -> Any:
            return in_type(box, actions, bounds)

        def normalize(actions: Any) -> Any:
            values = xp.asarray(actions)
            if not str(values.dtype).removeprefix("torch.").startswith("float"):
                raise ConnectorError(
                    f"{self.name}: '{Columns.ACTIONS}' are {values.dtype}{list(values.shape)}, expected floats from -1 "
                    f"to 1 to be normalized for {box}: of a module whose own action_space is a Box of floats"
                )
            return in_type(box, low + (wide(values) + 1.0) * (high / 2.0 - low / 2.0), bounds)

        return normalize if self.normalize_actions else clip if self.clip_actions else None


def _in_type(space: Space, actions: torch.Tensor, bounds: Any = None) -> torch.Tensor:
    """Items of a space without parts in its dtype: that of `ARRAYS` for tensors, which works out the bounds itself."""
    dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    if dtype.is_floating_point or not actions.is_floating_point():
        return actions.to(dtype)
    if not isinstance(space, spaces.Box):
        return actions.round().to(dtype)
    # Selected in i64, which more of torch's functions take, where that holds all of the numbers.
    wide: Any = np.uint64 if space.dtype == np.uint64 else np.int64
    ends = space.low.astype(wide), space.high.astype(wide), *whole_bounds(space)
    low, high, below, above = (torch.from_numpy(end).to(actions.device) for end in ends)
    numbers = actions.double().round()
    is_low, is_high = numbers <= below, numbers >= above
    inside = torch.where(is_low | is_high, 0.0, numbers).to(low.dtype)
    return torch.where(is_low, low, torch.where(is_high, high, inside)).to(dtype)


TENSORS: Numerics = torch, torch.Tensor.double, _in_type


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
    if is_keyed_by_episode(actions):
        return {key: list(items) for key, items in actions.items()}
    return list(actions) if isinstance(actions, list) else actions


@dataclass(kw_only=True, eq=False, repr=False)
class ClipActions(NormalizeAndClipActions):
    """`NormalizeAndClipActions` that clips alone: adds `actions_for_env`, and leaves `actions` as they were chosen."""

    normalize_actions: bool = field(default=False, init=False)
    clip_actions: bool = field(default=True, init=False)


Schedule = Callable[[int], float]


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
class _Exploration(ActionPiece):
    """Base of pieces that explore by a schedule: a number, or a function of the lane's vector steps so far.

    A lane's steps are those of the run: a lane that begins anew, or joins, goes on where the run is. Without
    exploration (`explore=False`) nothing changes. Raises ValueError for a schedule that is neither. Raises
    ConnectorError for a value outside the piece's range, for actions that the piece is not for, and if
    `actions_for_env` is made already.

    is_normalized    True if a later piece scales actions from -1 … 1 to the environments' bounds
    """

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
        if self.takes == Columns.ACTION_DIST_INPUTS and DEVICE not in shared:  # a piece before may have changed them
            refuse_unusable(_rows(batch[self.takes]), shared, episodes, distribution_for(space))
        elif self.takes == Columns.ACTION_DIST_INPUTS:
            shared[CHOSEN_BY] = distribution_for(space)
        self._explore(batch, space, self.value(shared.get("step", 0)), shared)
        return batch

    @abc.abstractmethod
    def _explore(self, batch: Batch, space: Any, value: float, shared: dict[str, Any]) -> None:
        """Change the batch's actions, which the module chose in a space: tensors on a device, or arrays."""


def _drawn(draw: Callable[..., torch.Tensor], shape: tuple[int, ...], shared: dict[str, Any]) -> Any:
    """Random numbers f64[*shape] that a function of torch draws: a tensor on the lane's device, or an array."""
    device = shared.get(DEVICE)
    drawn = draw(shape, generator=shared.get("generator"), dtype=torch.float64, device=device)
    return drawn.numpy() if device is None else drawn


@checking_constructor(epsilon="schedule=…")
class EpsilonGreedy(_Exploration):
    """Takes the action with the largest of `action_dist_inputs`, or with probability epsilon any action.

        schedule    epsilon: a number from 0 to 1, or a function of the lane's vector steps so far, such as `Linear`

    For one Discrete action, whose `action_dist_inputs` any[N, n] may be Q-values. An action that is ruled out, by one
    of -1e9 or less as `mask_logits` does it, is never taken.
    `action_logp`, f32[N], becomes that of this choice. Without exploration (`explore=False`) it changes nothing.

    Raises ValueError for another schedule; ConnectorError for other actions, and for a value outside 0 … 1; ModuleError
    if every action is ruled out.
    """

    limits: ClassVar[dict[str, Any]] = {"least": 0.0, "most": 1.0}
    action_spaces = (gym.spaces.Discrete,)
    takes = Columns.ACTION_DIST_INPUTS

    def _explore(self, batch: Batch, space: Any, value: float, shared: dict[str, Any]) -> None:
        xp = torch if DEVICE in shared else np
        values = xp.asarray(_rows(batch[Columns.ACTION_DIST_INPUTS], xp), dtype=xp.float64)
        greedy = values.argmax(1)
        explores, place = _drawn(torch.rand, (2, len(values)), shared)
        # The k-th of the allowed actions, for k drawn from 0 up to their number.
        allowed = xp.cumsum(values > RULED_OUT, 1)
        count = xp.asarray(allowed[:, -1], dtype=xp.float64)
        nth = xp.asarray(place * count, dtype=xp.int64)[:, None]
        anything = xp.asarray(allowed > nth, dtype=xp.int8).argmax(1)
        chosen = xp.where(explores < value, anything, greedy)
        with np.errstate(divide="ignore"):
            logp = xp.log((1.0 - value) * xp.asarray(chosen == greedy, dtype=xp.float64) + value / count)
        batch[Columns.ACTIONS] = _like(batch[Columns.ACTIONS], chosen + int(space.start), xp)
        batch[Columns.ACTION_LOGP] = _like(batch[Columns.ACTION_LOGP], xp.asarray(logp, dtype=xp.float32), xp)


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

    def _explore(self, batch: Batch, space: Any, value: float, shared: dict[str, Any]) -> None:
        xp: Any = torch if DEVICE in shared else np
        rows = _rows(batch[Columns.ACTION_DIST_INPUTS], xp)
        inputs = rows if xp is torch else tensor_of(rows)
        inputs = (inputs / value).masked_fill(inputs <= RULED_OUT, -torch.inf)
        distribution = distribution_for(space).from_logits(inputs)
        actions = distribution.sample(shared.get("generator"))
        for column, made in ((Columns.ACTIONS, actions), (Columns.ACTION_LOGP, distribution.logp(actions))):
            batch[column] = _like(batch[column], made if xp is torch else made.numpy(), xp)


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

    _there: tuple[Any, ...] = None, None, None  # a device, a Box, and its bounds as tensors there

    def _explore(self, batch: Batch, space: Any, value: float, shared: dict[str, Any]) -> None:
        xp: Any = torch if DEVICE in shared else np
        chosen = _rows(batch[Columns.ACTIONS], xp)
        box = self._input_action_space
        is_scaled = self.is_normalized and isinstance(box, gym.spaces.Box) and box.is_bounded()
        low, high = (-1.0, 1.0) if is_scaled else self._bounds(space, shared.get(DEVICE))
        noisy = chosen + value * _drawn(torch.randn, tuple(chosen.shape), shared)
        batch[Columns.ACTIONS] = _like(batch[Columns.ACTIONS], xp.clip(noisy, low, high), xp)
        batch.pop(Columns.ACTION_LOGP, None)

    def _bounds(self, space: gym.spaces.Box, device: torch.device | None) -> tuple[Any, Any]:
        if device is None:
            return space.low, space.high
        if self._there[:2] != (device, space):
            self._there = device, space, tuple(tensor_of(end).to(device) for end in (space.low, space.high))
        return self._there[2]  # type: ignore[no-any-return]


def arrange_exploration(pieces: Iterable[ConnectorV2]) -> None:
    """Tell the exploration among a pipeline's pieces, those of nested ones in their places, what comes behind it.

    Raises ConnectorError if it comes behind `NormalizeAndClipActions`: the environments would get nothing of it.
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


def _rows(column: Any, xp: Any = np) -> Any:
    """A column's items, in whatever form, as one array any[N, ...]; a tensor if `xp` is torch."""
    if xp is torch:
        return column
    if is_keyed_by_episode(column):
        column = [item for items in column.values() for item in items]
    return np.stack([as_array(item) for item in column]) if isinstance(column, list) else as_array(column)


def _like(column: Any, values: Any, xp: Any) -> Any:
    """Values any[N, ...] in the form and dtype of a column that they take the place of, rounded to whole numbers.

    xp    the values' library
    """
    if xp is torch:
        if column.is_floating_point():
            return values.to(column.dtype)
        return torch.round(values).to(column.dtype)
    dtype: Any = _rows(column).dtype
    if dtype.kind in "iu" and values.dtype.kind == "f":
        info = np.iinfo(dtype)
        values = nearest(gym.spaces.Box(info.min, info.max, values.shape[1:], dtype.type), values)
    values = values.astype(dtype)
    if is_keyed_by_episode(column):
        rest = iter(values)
        return {key: [next(rest) for _ in items] for key, items in column.items()}
    if isinstance(column, list):
        return list(values)
    return tensor_of(values) if torch.is_tensor(column) else values


_ACTED = {Columns.ACTIONS, Columns.ACTION_LOGP, Columns.ACTIONS_FOR_ENV}


class FusedActions(FusedPieces):
    """The pieces that sample actions from a module's output, and bring them into the environments' bounds."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        super().__init__(pieces)
        self._get, self._clip = pieces[0], pieces[-2]
        self._explore = False
        self._made: Any = None  # maker of distributions that the module gave last
        self._type: Any = None  # the same, if these are categorical ones, or normal ones over floats; else None
        self._is_categorical = False
        self._one: Categorical | None = None  # of categorical ones that `like` makes as well
        self._asks = True  # at every step: a module may say otherwise by a method of its own
        self._may_mask = True

    def make(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        if MEMORIZED in shared_data or TIME_RANK_ADDED in shared_data:
            return None
        if DEVICE in shared_data:
            return self._of_tensors(rl_module, batch, explore, shared_data)
        races, generator = shared_data.get(RACES), shared_data.get("generator")
        arrays, is_usable = self._acted(rl_module, batch, explore, races, generator)
        if not is_usable:
            refuse_unusable(batch[Columns.ACTION_DIST_INPUTS], shared_data, episodes, self._type, rl_module)
        if not is_usable and arrays is not None:
            refuse_infinite(arrays[Columns.ACTION_LOGP], shared_data, episodes, rl_module)
        return arrays

    def jointly(
        self, rl_module: Any, batch: Batch, sizes: Sequence[int], explore: Any, shared_data: Sequence[dict[str, Any]]
    ) -> Batch | None:
        """The batch that the pieces make for several lanes, in the rows of one batch.

        sizes, shared_data    of each lane

        None if each lane is to be run by itself, as if a lane's logits are refused.
        """
        if any(MEMORIZED in shared or TIME_RANK_ADDED in shared or DEVICE in shared for shared in shared_data):
            return None
        races: list[Any] = [shared.get(RACES) for shared in shared_data]
        joint = None if None in races else races[0] if len(races) == 1 else JointRaces(races, sizes)
        arrays, is_usable = self._acted(rl_module, batch, explore, joint, None)
        return arrays if is_usable else None

    def _acted(
        self,
        module: Any,
        batch: Batch,
        explore: Any,
        races: Races | JointRaces | None,
        generator: torch.Generator | None,
    ) -> tuple[Batch | None, bool]:
        """The batch with actions, and False if the inputs that they were sampled from may be unusable."""
        arrays: Batch = {}
        try:
            for name, value in batch.items():
                arrays[name] = value.numpy()
        except (AttributeError, RuntimeError, TypeError):  # nested, elsewhere, to be differentiated, of another type
            return None, True
        is_usable, changes = True, self._clip.changes_actions
        if changes and Columns.ACTIONS_FOR_ENV in arrays:
            return None, True
        if Columns.ACTIONS in arrays:  # the module has chosen
            chosen = arrays[Columns.ACTIONS]
            if chosen.dtype.kind == "f" and slots_with_nan(chosen):
                return None, True
        else:
            logits = batch.get(Columns.ACTION_DIST_INPUTS)
            if type(logits) is not torch.Tensor or logits.dtype is not torch.float32 or logits.ndim != 2:
                return None, True
            if self._asks or module is not self._module or explore is not self._explore:
                self._resolve(module, explore, logits)
            chance = races if self._is_categorical else generator
            if self._type is None or Columns.ACTION_LOGP in arrays:
                return None, True
            if chance is None and (explore or not self._is_categorical):
                return None, True
            is_usable = self._sample(arrays, logits, chance)
        if changes:
            try:
                self._clip(batch=arrays)
            except ConnectorError:  # which the piece raises again, and is named
                return None, True
        return arrays, is_usable

    def _of_tensors(self, module: Any, batch: Batch, explore: Any, shared_data: dict[str, Any]) -> Batch | None:
        """The batch of a lane on a device with actions; None if the pieces are to be called."""
        logits = batch.get(Columns.ACTION_DIST_INPUTS)
        if not explore or type(logits) is not torch.Tensor or logits.dtype is not torch.float32:
            return None
        if not _ACTED.isdisjoint(batch):
            return None
        if self._asks or module is not self._module or explore is not self._explore:
            self._resolve(module, explore, logits)
        if self._type is None:
            return None
        shared_data[CHOSEN_BY] = self._type
        chance = shared_data[RACES if self._is_categorical else "generator"]
        actions, logp = self._type.from_logits(logits).sample_tensors(chance)
        made = {**batch, Columns.ACTIONS: actions, Columns.ACTION_LOGP: logp}
        return self._clip(batch=made, shared_data=shared_data) if self._clip.changes_actions else made

    def _sample(self, arrays: Batch, logits: torch.Tensor, chance: Any) -> bool:
        """Add actions and their log-probabilities; False if the logits that they follow from may be unusable.

        chance    random numbers as the distribution takes them
        """
        given = arrays[Columns.ACTION_DIST_INPUTS]
        one = self._one if given.shape[1] == self._type.required_input_dim else None
        distribution: Any = self._type.from_logits(logits) if one is None else one.like(logits)
        if not self._explore:
            if self._is_categorical:
                actions, logp = distribution.likeliest_with_logp()
            else:
                actions, logp = distribution.to_deterministic().action.numpy(), np.zeros(len(given), np.float32)
            is_usable = bool(np.maximum.reduce(given, axis=None) < np.inf) and not rules_all_out(given)
        else:
            actions, logp = distribution.sample_with_logp(chance)
            if self._is_categorical:
                is_usable = are_usable(given, logp, self._may_mask)
            else:
                is_usable = bool(abs(np.add.reduce(logp)) < np.inf)
        arrays[Columns.ACTIONS], arrays[Columns.ACTION_LOGP] = actions, logp
        return is_usable

    def _resolve(self, module: Any, explore: Any, logits: torch.Tensor) -> None:
        known = None if module is self._module else self._known(module)
        if known is not None and known[0] is explore:
            self._module, self._asks = module, False
            self._explore, self._made, self._type, self._is_categorical, self._one, self._may_mask = known
            return
        made = self._get.distribution_type(module, explore=explore)
        if made is not self._made:
            one = made.from_logits(logits) if type(made) is DistributionType else None
            self._made, self._type = made, made if type(one) in (Categorical, DiagGaussian) else None
            self._is_categorical = type(one) is Categorical
            self._one = one if type(one) is Categorical and made.is_categorical else None
        name = "get_exploration_action_dist_cls" if explore else "get_inference_action_dist_cls"
        own = getattr(getattr(module, name, None), "__func__", None)
        self._asks = own is not getattr(RLModule, name)
        self._module, self._explore, self._may_mask = module, explore, may_mask(module)
        if not self._asks:
            known = explore, self._made, self._type, self._is_categorical, self._one, self._may_mask
            self._keep(module, known)
