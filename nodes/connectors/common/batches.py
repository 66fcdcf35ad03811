"""Batches: arrays become tensors and back, lists of items arrays, agents' items those of modules.

A piece with `module_by_module` is called once for each module.
"""

import abc
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import optree
import torch
from gymnasium import spaces

from rollflow.nodes.connectors.connector_v2 import (
    Batch,
    BatchedArray,
    ColumnPiece,
    ConnectorV2,
    Episodes,
    SharedData,
    Space,
)
from rollflow.nodes.connectors.list_form import episode_key, id_in_keys, is_keyed_by_episode, single_agent_episodes
from rollflow.nodes.modules.rl_module import is_stateful, max_seq_len_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID as DEFAULT_MODULE_ID, MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import FragmentEpisodes
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.live_episode import LaneEpisodes

ALIGNED_BYTES = 16

DEVICE = "device"
"""Key in `shared_data` of the device that a lane's tensors stay on; it is there for such lanes alone."""

CHOSEN_BY = "chosen_by"
"""Key in `shared_data`, for a lane on a device, of the type of the distributions that its actions are chosen by."""


@dataclass(kw_only=True, eq=False, repr=False)
class NumpyToTensor(ColumnPiece):
    """Turns every array of the batch into a torch tensor of the same dtype, without a copy if possible.

        pin_memory    True: through page-locked memory, from which copies to a GPU need not be waited for
        device        of the tensors; None leaves them in main memory

    Infos stay as they are. So does the whole batch, or a module's part of it, without an `rl_module` or with one whose
    `framework` is not "torch". Raises ConnectorError, naming the column, for an array that has no numbers in it.
    """

    pin_memory: bool = False
    device: Any = None

    def __post_init__(self) -> None:
        self.device = None if self.device is None else torch.device(self.device)

    @property
    def is_elsewhere(self) -> bool:
        """True if the tensors are anywhere but in ordinary main memory."""
        return self.pin_memory or not (self.device is None or self.device.type == "cpu")

    def __call__(
        self, *, rl_module: Any, batch: Batch, episodes: Any = None, shared_data: SharedData = None, **kwargs: Any
    ) -> Batch:
        if rl_module is None:
            return batch
        are_live = isinstance(episodes, LaneEpisodes)
        memorized = shared_data.get(MEMORIZED) if shared_data else None
        if memorized is not None and batch.keys() <= memorized.keys():  # by module ids
            for module, columns in batch.items():
                self._convert(columns, module_of(rl_module, module), are_live=are_live)
            return batch
        return self._convert(batch, rl_module, are_live=are_live)

    def _convert(self, batch: Batch, rl_module: Any, *, are_live: bool) -> Batch:
        if getattr(rl_module, "framework", "torch") != "torch":
            return batch
        if are_live and Columns.OBS in batch:
            batch[Columns.OBS] = map_tree(_writable, batch[Columns.OBS])
        return self.converted(batch)

    def converted(self, batch: Batch) -> Batch:
        """The batch itself, whose arrays have become tensors, whatever its module is."""
        for column, data in batch.items():
            try:
                if type(data) is np.ndarray:
                    batch[column] = self._tensor(data)
                elif column != Columns.INFOS:
                    batch[column] = map_tree(self._leaf, data)
            except TypeError as error:
                raise ConnectorError(f"column '{column}' can't become a tensor: {error}") from None
        return batch

    def _leaf(self, leaf: Any) -> Any:
        return self._tensor(leaf) if isinstance(leaf, np.ndarray) else leaf

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = tensor_of(array)
        if self.pin_memory:
            tensor = tensor.pin_memory()
        return tensor if self.device is None else tensor.to(self.device, non_blocking=self.pin_memory)


class TensorToNumpy(ColumnPiece):
    """Turns every tensor of the batch, however nested, into an array; those in main memory without a copy.

    numpy has no bfloat16: such tensors become f32, which holds the same numbers. Those of a lane on a device stay.
    """

    def __call__(self, *, batch: Batch, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        if shared_data and DEVICE in shared_data:
            return batch
        for column, data in batch.items():
            if type(data) is torch.Tensor:
                batch[column] = array_of(data)
            elif type(data) is not np.ndarray:
                batch[column] = map_tree(_leaf, data)
        return batch


def _writable(leaf: Any) -> Any:
    """A lane's row any[N, ...] that pieces are shown read-only as it is: torch shares no memory that is read-only."""
    memory = leaf.base if isinstance(leaf, np.ndarray) else None
    if memory is None or leaf.flags.writeable or not (isinstance(memory, np.ndarray) and memory.flags.writeable):
        return leaf
    view = leaf.view()
    view.flags.writeable = True
    return view


def _leaf(leaf: Any) -> Any:
    return array_of(leaf) if torch.is_tensor(leaf) else leaf


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The array as a tensor, without a copy if possible; its memory is as `aligned` has it."""
    # torch can't share what is read-only, of which it warns, or what runs backwards.
    shared = array.flags.writeable and (array.flags.c_contiguous or min(array.strides) >= 0)
    return aligned(torch.from_numpy(array if shared else array.copy()))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if its memory does not begin at a multiple of 16 bytes.

    Matrix products may round differently there: the same observation, in another row of a fragment, would give other
    last bits.
    """
    return tensor.clone() if tensor.data_ptr() % ALIGNED_BYTES else tensor


def as_array(leaf: Any) -> Any:
    """A tensor, an array or a number, `any[...]`, as an array."""
    return array_of(leaf) if torch.is_tensor(leaf) else np.asarray(leaf)


def array_of(tensor: torch.Tensor) -> Any:
    """The tensor as an array, without a copy if possible."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # requires grad, is not in main memory, or is of a dtype that numpy lacks
        here = tensor.detach().cpu()
        return (here.float() if here.dtype == torch.bfloat16 else here).numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class BatchIndividualItems(ColumnPiece):
    """Turns columns in list form into trees of arrays `any[B, ...]`, episode by episode in order.

    multi_agent    True if columns may be under module ids

    Items that were added as arrays are joined end to end. Columns that are arrays already stay as they are, and infos
    stay a list. Raises ConnectorError, naming the column, if items do not have one shape.
    """

    multi_agent: bool = False

    def __call__(self, *, rl_module: Any, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        for column, data in batch.items():
            if isinstance(data, np.ndarray | torch.Tensor):
                continue
            if self.multi_agent and isinstance(data, dict) and not is_keyed_by_episode(data):  # a module's columns
                for name, part in data.items():
                    if _is_list_form(part):
                        data[name] = _items(part) if name == Columns.INFOS else _batched(name, _items(part))
            elif _is_list_form(data):
                length = max_seq_len_of(rl_module) if Columns.SEQ_LENS in batch and column != Columns.INFOS else 1
                items = _items(data) if isinstance(data, list) else _in_episode_order(column, data, episodes, length)
                batch[column] = items if column == Columns.INFOS or not items else _batched(column, items)
        return batch


def _is_list_form(data: Any) -> bool:
    return isinstance(data, list) or is_keyed_by_episode(data)


def _items(data: Any) -> list[Any]:
    """The items of a column in list form, episode after episode."""
    return [item for items in data.values() for item in items] if isinstance(data, dict) else data


def _in_episode_order(
    column: str, data: dict[tuple[Any, ...], list[Any]], episodes: Episodes | None, length: int
) -> list[Any]:
    """The items of a column in the order of the episodes, which is that of all columns made from arrays.

    length    steps of an item, which is a row
    """
    chunks = list(single_agent_episodes(episodes or (), stepped_only=False))
    keys = [episode_key(chunk) for chunk in chunks]
    if data.keys() - set(keys) or any(len(chunk) and key not in data for key, chunk in zip(keys, chunks, strict=True)):
        return _items(data)  # not a column over these episodes
    data = {key: data.get(key, []) for key in keys}
    if len(data) == len(keys):
        return [item for key in keys for item in data[key]]
    # Chunks of one episode share a key and its items: one for each step or row, or one for each chunk.
    there = {key: sum(map(num_rows_of, items)) for key, items in data.items()}
    for wanted in ([-(-len(chunk) // length) for chunk in chunks], [1] * len(chunks)):
        sums = dict.fromkeys(data, 0)
        for key, count in zip(keys, wanted, strict=True):
            sums[key] += count
        if sums == there:
            return _dealt_out(data, keys, wanted)
    key = next(key for key in data if there[key] != sums[key])
    raise ConnectorError(
        f"column '{column}' has {there[key]} items under {key}, expected one for each step of that episode's "
        f"{keys.count(key)} chunks, or one for each chunk"
    )


def _dealt_out(data: dict[tuple[Any, ...], list[Any]], keys: list[tuple[Any, ...]], wanted: list[int]) -> list[Any]:
    left = {key: deque(items) for key, items in data.items()}
    ordered: list[Any] = []
    for key, count in zip(keys, wanted, strict=True):
        rows = 0
        while rows < count:
            item = left[key].popleft()
            rows += num_rows_of(item)
            ordered.append(item)
    return ordered


def num_rows_of(item: Tree) -> int:
    """The number of items that an item stands for: several if it came as arrays with a leading axis."""
    return len(leaves_of(item)[0]) if _is_batched(item) else 1


def _is_batched(item: Tree) -> bool:
    """True if an item stands for several; infos may be without a leaf."""
    return any(isinstance(leaf, BatchedArray) for leaf in leaves_of(item)[:1])


def with_leading_axis(item: Tree) -> Tree:
    """An item as a tree of plain arrays with a leading axis: its own one, or a new one."""
    if _is_batched(item):
        return map_tree(np.asarray, item)
    return map_tree(lambda leaf: np.asarray(leaf)[None], item)


def _batched(column: str, items: list[Any]) -> Tree:
    try:
        if any(map(_is_batched, items)):
            return concatenate_trees(list(map(with_leading_axis, items)))
        return stack_trees(items)
    except ValueError as error:
        shapes = sorted({str(map_tree(np.shape, item)) for item in items})
        raise ConnectorError(f"column '{column}': items of shapes {', '.join(shapes)} make no batch: {error}") from None


# By module

MEMORIZED = "memorized_map_structure"
"""Key in `shared_data` of a dict: module id -> keys of the items in the module's batch, in order."""


@dataclass(kw_only=True, eq=False, repr=False)
class AgentToModuleMapping(ConnectorV2):
    """Turns `column -> (episode id, agent id, module id) -> items` into `module id -> column -> items`, order kept.

        rl_module_specs               module id -> a description of the module; None: any module id is allowed
        agent_to_module_mapping_fn    (agent id, episode) -> module id, for items whose key has no module id. It maps
                                      Dict spaces by agent ids to Dict spaces by module ids as well, with None for the
                                      episode
        as_learner_connector          True for training. While acting, agents that are done, or did not step, are left
                                      out: they need not act

    Agents and modules without any item are left out. Items of an episode without agents go to the module
    "default_policy". `shared_data["memorized_map_structure"]` keeps the order of each module's items, the same in every
    column: module id -> [(episode id, agent id), …], one for each key.

    Raises ConnectorError for columns that are no longer in list form, and for modules not in `rl_module_specs`.
    """

    columnar = False
    changes_episodes = False

    rl_module_specs: Mapping[Any, Any] | None = None
    agent_to_module_mapping_fn: Callable[..., Any] | None = None
    as_learner_connector: bool = False

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        return self._by_modules(input_observation_space)

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        return self._by_modules(input_action_space)

    def __call__(self, *, batch: Batch, episodes: Episodes, shared_data: SharedData = None, **kwargs: Any) -> Batch:
        by_id = {id_in_keys(episode): episode for episode in episodes}
        to_act: dict[Any, set[Any]] = {}
        if not self.as_learner_connector:
            joint = (episode for episode in episodes if isinstance(episode, MultiAgentEpisode))
            to_act = {episode.id_: episode.get_agents_to_act() for episode in joint}
        modules: dict[tuple[Any, ...], Any] = {}  # in order of appearance
        for column, data in batch.items():
            if not is_keyed_by_episode(data):
                raise ConnectorError(
                    f"column '{column}' is {type(data).__name__}, expected a dict from episodes to lists of items: "
                    "AgentToModuleMapping stands before BatchIndividualItems"
                )
            for key in data:
                if key not in modules and any(map(num_rows_of, data[key])):
                    episode_id, agent_id, module_id = (*key, None, None)[:3]
                    if agent_id is not None and agent_id not in to_act.get(episode_id, {agent_id}):
                        continue
                    modules[key] = self._module(episode_id, agent_id, module_id, by_id)
        mapped: dict[Any, dict[str, list[Any]]] = {}
        memorized: dict[Any, list[tuple[Any, Any]]] = {}
        for key, module in modules.items():
            memorized.setdefault(module, []).append((*key, None)[:2])
            for column, data in batch.items():
                if key in data:
                    mapped.setdefault(module, {}).setdefault(column, []).extend(data[key])
        if shared_data is not None:
            shared_data[MEMORIZED] = memorized
        return mapped

    def _module(self, episode_id: Any, agent_id: Any, module_id: Any, by_id: Mapping[Any, Any]) -> Any:
        module = module_id
        if module is None and agent_id is not None and self.agent_to_module_mapping_fn is not None:
            module = self.agent_to_module_mapping_fn(agent_id, by_id.get(episode_id))
        if module is None:
            module = DEFAULT_MODULE_ID
        if self.rl_module_specs is not None and module not in self.rl_module_specs:
            raise ConnectorError(
                f"agent '{agent_id}' of episode '{episode_id}' is mapped to module '{module}', expected one of: "
                f"{', '.join(map(str, self.rl_module_specs))}"
            )
        return module

    def _by_modules(self, space: Space) -> Space:
        """The space of each module: that of the last of its agents."""
        choose, specs = self.agent_to_module_mapping_fn, self.rl_module_specs
        if choose is None or not isinstance(space, spaces.Dict) or (specs and specs.keys() == space.spaces.keys()):
            return space
        return spaces.Dict({choose(agent_id, None): part for agent_id, part in space.spaces.items()})


OF_MODULES = "of_modules"
"""Key in `shared_data` of entries that belong to one module: module id -> key -> value."""

_COLUMNAR = (LaneEpisodes, FragmentEpisodes)  # a tuple: faster than `|` at every vector step


@dataclass(kw_only=True, eq=False, repr=False)
class ActingOrLearning(ColumnPiece):
    """Base of pieces that stand in env-to-module pipelines and, with `as_learner_connector`, in learner pipelines."""

    as_learner_connector: bool = False


Call = TypeVar("Call", bound=Callable[..., Batch])


def module_by_module(call: Call) -> Call:
    """Decorate a piece's `__call__` so that it is called once for each module, if episodes have agents of modules.

    Each call gets the module, `rl_module[module id]`, the single-agent episodes of its agents, and its part of the
    batch. That part is `batch[module id]` if the batch is by modules already. Else it has the columns of the agents'
    items, which are joined again afterwards. Keys that a call sets in `shared_data` are seen by calls for the same
    module only.

    An `rl_module` that is not by ids serves all agents. A piece with `as_learner_connector=False` gets the agents that
    stepped. Episodes without a module, and their columns, pass through.

    Raises ConnectorError for a module that `rl_module` does not have, and for columns that can't be split by modules.
    """

    @functools.wraps(call)
    def called(self: Any, **kwargs: Any) -> Batch:
        episodes = kwargs["episodes"]
        if isinstance(episodes, _COLUMNAR) or not _have_modules(episodes):
            return call(self, **kwargs)
        return _for_each_module(call, self, **kwargs)

    return called  # type: ignore[return-value]


def _for_each_module(
    call: Any,
    piece: Any,
    *,
    rl_module: Any,
    batch: Batch,
    episodes: Episodes,
    shared_data: SharedData = None,
    **kwargs: Any,
) -> Batch:
    shared = {} if shared_data is None else shared_data
    memorized: Mapping[Any, list[tuple[Any, Any]]] = shared.get(MEMORIZED, {})
    mapped = {pair: module for module, pairs in memorized.items() for pair in pairs}
    groups: dict[Any, list[SingleAgentEpisode]] = {}
    for episode in single_agent_episodes(episodes, stepped_only=not getattr(piece, "as_learner_connector", True)):
        groups.setdefault(_module_id(episode_key(episode), mapped), []).append(episode)

    def called_for(module: Any, part: Batch, theirs: list[SingleAgentEpisode]) -> Batch:
        own = module_of(rl_module, module)
        try:
            return _with_own(shared, module, call, piece, rl_module=own, batch=part, episodes=theirs, **kwargs)
        except Exception as error:
            error.add_note(f"for module '{module}'")
            raise

    if batch and batch.keys() <= {*groups, *memorized}:
        for module, part in batch.items():
            batch[module] = called_for(module, part, _in_order(groups.get(module, []), memorized.get(module)))
        return batch
    parts = _parts(batch, list(groups), mapped)
    made = [called_for(module, parts[module], theirs) for module, theirs in groups.items()]
    return _joined(batch, made, [episode_key(each) for theirs in groups.values() for each in theirs])


def module_of(rl_module: Any, module_id: Any) -> Any:
    """The module of an id; one that is not by ids serves all. Raises ConnectorError for an unknown id."""
    if rl_module is None or not hasattr(rl_module, "__getitem__"):
        return rl_module
    try:
        return rl_module[module_id]
    except KeyError:
        there = ", ".join(map(str, rl_module.keys())) if hasattr(rl_module, "keys") else "others"
        raise ConnectorError(f"agents are mapped to module '{module_id}', expected one of: {there}") from None


def _have_modules(episodes: Episodes) -> bool:
    return any(isinstance(episode, MultiAgentEpisode) or episode.module_id is not None for episode in episodes)


def _module_id(key: tuple[Any, ...], mapped: Mapping[tuple[Any, Any], Any]) -> Any:
    """The module of the items under a key."""
    episode_id, agent_id, module_id = (*key, None, None)[:3]
    module = mapped.get((episode_id, agent_id), module_id)
    return DEFAULT_MODULE_ID if module is None else module


def _with_own(shared: dict[str, Any], module: Any, call: Any, *args: Any, **kwargs: Any) -> Batch:
    """Call with a copy of `shared_data` in which the module's own keys come first; new keys become its own."""
    theirs = {**shared, **shared.get(OF_MODULES, {}).get(module, {})}
    before = dict(theirs)
    made: Batch = call(*args, shared_data=theirs, **kwargs)
    new = {key: value for key, value in theirs.items() if key not in before or before[key] is not value}
    if new:
        shared.setdefault(OF_MODULES, {}).setdefault(module, {}).update(new)
    return made


def _in_order(episodes: list[SingleAgentEpisode], pairs: list[tuple[Any, Any]] | None) -> list[SingleAgentEpisode]:
    """Episodes in the order of their items in the module's batch; episodes without items are left out."""
    if pairs is None:
        return episodes
    places = {pair: place for place, pair in enumerate(pairs)}
    placed = [(places.get((*episode_key(episode), None)[:2], -1), episode) for episode in episodes]
    return [episode for place, episode in sorted(placed, key=lambda each: each[0]) if place >= 0]


def _parts(batch: Batch, modules: list[Any], mapped: Mapping[tuple[Any, Any], Any]) -> dict[Any, Batch]:
    """Module id -> its part of columns that are by agents."""
    parts: dict[Any, Batch] = {module: {} for module in modules}
    for column, data in batch.items():
        if len(modules) == 1:
            parts[modules[0]][column] = data
        elif is_keyed_by_episode(data):
            for key, items in data.items():
                parts.setdefault(_module_id(key, mapped), {}).setdefault(column, {})[key] = items
        elif modules and len(data):
            raise ConnectorError(
                f"column '{column}' is {type(data).__name__}, expected a dict from agents to lists of items: it is to "
                f"be told apart by modules ({', '.join(map(str, modules))})"
            )
    return parts


def _joined(batch: Batch, parts: list[Batch], keys: list[tuple[Any, ...]]) -> Batch:
    """The batch with the columns made of its parts, all with the agents in one order."""
    if len(parts) == 1:
        batch.update(parts[0])
        return batch
    made: dict[str, dict[Any, Any]] = {}
    for part in parts:
        for column, data in part.items():
            if not is_keyed_by_episode(data):
                raise ConnectorError(
                    f"column '{column}' was made {type(data).__name__} for one of {len(parts)} modules, expected a "
                    "dict from agents to lists of items"
                )
            made.setdefault(column, {}).update(data)
    for column, by_agent in made.items():
        whole = {**batch.get(column, {}), **by_agent}
        batch[column] = {key: whole[key] for key in dict.fromkeys([*whole, *keys]) if key in whole}
    return batch


# Pieces that are called as one

_UNKNOWN: Any = object()
_FEW_ROWS, _MOST_BYTES = 16, 1 << 20  # of columns whose rows become tensors at once


class FusedPieces(abc.ABC):
    """Pieces that are called as one. What the module alone decides, and not by a method of its own, is
    resolved once for it."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = pieces
        self._module: Any = _UNKNOWN
        self._resolved: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of modules that act in turns

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._pieces,)

    @abc.abstractmethod
    def make(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        """The batch that the pieces make; None: they are to be called."""

    def _known(self, module: Any) -> Any:
        """What has been resolved for a module before; None: nothing."""
        try:
            return self._resolved.get(module)
        except TypeError:  # of a kind that is not referred to weakly
            return None

    def _keep(self, module: Any, resolved: Any) -> None:
        with suppress(TypeError):
            self._resolved[module] = resolved


class FusedObservations(FusedPieces):
    """The pieces that make a batch of the newest observations."""

    _fits = False  # the module

    def make(
        self, rl_module: Any, batch: Batch, episodes: LaneEpisodes, explore: Any, shared_data: dict[str, Any]
    ) -> Batch | None:
        if batch:
            return None
        lane = episodes.lane
        if (
            rl_module is self._module
            and self._fits
            and episodes.is_settled
            and type(lane) is Lane
            and lane.episodes is episodes
        ):
            # The newest observations as they are recorded: tensors of all rows are made at once where they are small,
            # as views, which takes a third of the time.
            column, row = lane.fragment.columns[Columns.OBS], lane.row
            views = column.views
            if views is None:
                views = column.views = _views_of(column.tree)
            if type(views) is dict:
                return {Columns.OBS: {key: rows[row] for key, rows in views.items()}}
            if views:
                return {Columns.OBS: views[row]}
        return self.batch_of(rl_module, episodes.newest())

    def batch_of(self, rl_module: Any, observations: Tree) -> Batch | None:
        """The batch that the pieces make of observations, any[N, ...]; None if they are to be called."""
        if rl_module is not self._module:
            fits = self._known(rl_module)
            if fits is None:
                fits = self._fit(rl_module)
                self._keep(rl_module, fits)
            self._module, self._fits = rl_module, fits
        if not self._fits:
            return None
        if type(observations) is np.ndarray:
            return {Columns.OBS: aligned(torch.from_numpy(observations))} if observations.flags.carray else None
        if type(observations) is torch.Tensor:  # of a lane on a device
            return {Columns.OBS: observations}
        if type(observations) is dict and all(map(_is_usable, observations.values())):
            return {Columns.OBS: {key: aligned(torch.from_numpy(leaf)) for key, leaf in observations.items()}}
        leaves, structure = optree.tree_flatten(observations, none_is_leaf=True)
        if all(type(leaf) is torch.Tensor for leaf in leaves):
            return {Columns.OBS: observations}
        if not all(map(_is_usable, leaves)):
            return None
        return {Columns.OBS: structure.unflatten([aligned(torch.from_numpy(leaf)) for leaf in leaves])}

    def _fit(self, module: Any) -> bool:
        if self._pieces[0].as_learner_connector or self._pieces[-1].is_elsewhere:
            return False
        if len(self._pieces) > 3 and is_stateful(module):  # which it adds the states of
            return False
        return module is not None and getattr(module, "framework", "torch") == "torch"


def _views_of(tree: Tree) -> Any:
    """Tensors of all rows of an array any[rows, N, ...], or by key of a dict of them; () if they are made singly.

    They share one storage, all of which goes with a row that is pickled or copied deeply: hence small ones alone.
    """
    if type(tree) is dict:
        views = {key: _views_of(leaf) for key, leaf in tree.items()}
        return views if all(type(rows) is tuple and rows for rows in views.values()) else ()
    if not _is_usable(tree) or len(tree) < _FEW_ROWS or tree.nbytes > _MOST_BYTES or tree.strides[0] % ALIGNED_BYTES:
        return ()
    try:
        whole = torch.from_numpy(tree)
    except TypeError:  # there are no tensors of this dtype
        return ()
    return () if whole.data_ptr() % ALIGNED_BYTES else whole.unbind(0)


def _is_usable(leaf: Any) -> bool:
    """True for an array of which a tensor can be made without a copy."""
    return type(leaf) is np.ndarray and leaf.flags.carray
