"""The interface of a connector piece, RLlib's `ConnectorV2`: read this file to write one.

A piece transforms the batch that goes into a module, comes out of it, or is learnt from. The smallest one:

    class HalvesRewards(ConnectorV2):
        changes_episodes = False

        def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
            for chunk in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
                self.add_n_batch_items(batch, "half", chunk.get_rewards() / 2, len(chunk), chunk)
            return batch

`__call__` takes by name what it uses of the arguments that `ConnectorV2.__call__` describes. A piece that leaves
observations or actions in another space overrides `recompute_output_observation_space` or
`recompute_output_action_space`. One that learns from the data overrides `get_state`, `set_state`, `reset_state` and
`merge_states`. One that works on whole columns, and not episode by episode, sets `columnar = True`. Its `episodes` may
be `LaneEpisodes` while acting, or `FragmentEpisodes` before a learner: `OneHotObservations` and `ClipRewards` show how.
A file goes beside the pieces of the same pipeline, and its name into `rollflow/nodes/__init__.py`.
"""

import abc
import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.connectors.list_form import (
    BatchedArray as BatchedArray,
    Episodes as Episodes,
    Space as Space,
    change_items,
    check_is_space,
    items_of,
    paired_with_items,
    single_agent_episodes,
)
from rollflow.nodes.connectors.state_watch import StateWatch, check_same
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

Batch = dict[str, Any]
SharedData = dict[str, Any] | None
_BUILT_IN = "rollflow.nodes.connectors."  # reviewed pieces: those with state declare it


class _PieceSpace:
    """Attribute of a piece: a space. Setting one that the piece before leaves recomputes the piece's own spaces."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._is_input = f"_{name}", name.startswith("input_")

    def __get__(self, piece: Any, owner: Any = None) -> Space | None:
        if piece is None:
            return None
        if not self._is_input:
            piece._know_spaces()
        space: Space | None = getattr(piece, self._name)
        return space

    def __set__(self, piece: Any, space: Space | None) -> None:
        if not self._is_input:
            piece._know_spaces()
        setattr(piece, self._name, space)
        if not piece._is_made:
            piece._spaces_given[self._name] = space
        elif self._is_input:
            piece._recompute_spaces()


class _PieceType(abc.ABCMeta):
    """Type of pieces, which recomputes the spaces after the constructor; output spaces that this has set stay."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        piece = super().__call__(*args, **kwargs)
        attributes = vars(piece)
        made_by_constructor = attributes.pop("_spaces_given")
        piece._recompute_spaces()
        attributes.update(made_by_constructor, _is_made=True)
        # CPython reads attributes much slower once `vars` has been asked for, but not from a dict like this one.
        piece.__dict__ = dict(attributes)
        return piece


@dataclass(init=False, eq=False, repr=False)
class ConnectorV2(metaclass=_PieceType):
    """A transformation of a batch, of episodes, or of both; a subclass overrides `__call__`.

        input_observation_space,    the spaces that the piece before leaves; setting one recomputes
        input_action_space          `observation_space` and `action_space`. A constructor with spaces recomputes them
                                    before it returns
        observation_space,          the spaces that this piece leaves
        action_space

    A subclass may take further constructor arguments, in an `__init__` of its own or as fields of a dataclass, as
    `FrameStacking` does; `get_ctor_args_and_kwargs()` gives them back. Attributes of the class,
    or of an instance, describe it to the pipeline:

        columnar             `__call__` takes a sequence of episodes that carries its columns, and may use those. A
                             subclass that overrides `__call__` sets it anew, or gets a plain list of episodes
        changes_episodes     `__call__` may write to the episodes, so it has to see the last observation of those that
                             have ended
        on_device            `__call__` takes tensors on any device as well as arrays, and reads no number of them, for
                             which it would have to wait. A subclass of a user's sets it anew
        replaces_episodes    `__call__` may put others into the list of episodes, so all pieces get that list
        lookback             steps that `__call__` looks back in an episode; a rollout keeps at least as many when it
                             cuts fragments
        pipelines            the pipelines that it may stand in, by their `kind`; empty: in any
    """

    columnar = False
    on_device = False
    changes_episodes = True
    replaces_episodes = False
    lookback = 0
    pipelines = tuple[str, ...]()

    input_observation_space: _PieceSpace = _PieceSpace()
    input_action_space: _PieceSpace = _PieceSpace()
    observation_space = _PieceSpace()
    action_space = _PieceSpace()

    _name: str | None = field(default=None, init=False)
    is_of_user: ClassVar[bool] = False  # so it may hold state without declaring it, or make passes of the module
    _state_watch: StateWatch | None = field(default=None, init=False)
    _input_observation_space: Space | None = field(init=False)
    _input_action_space: Space | None = field(init=False)
    _observation_space: Space | None = field(init=False)
    _action_space: Space | None = field(init=False)
    _spaces_known: bool = field(init=False)
    _spaces_given: dict[str, Space | None] = field(init=False)  # while the constructor runs: those that it has set
    _ctor_args: tuple[Any, ...] = field(init=False)
    _ctor_kwargs: dict[str, Any] = field(init=False)
    _is_made = False  # by its constructor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "is_of_user" not in cls.__dict__:
            cls.is_of_user = not cls.__module__.startswith(_BUILT_IN)
        if cls.is_of_user and "__call__" in cls.__dict__ and "columnar" not in cls.__dict__:
            cls.columnar = False
        # What a user's subclass does besides `__call__` may be for arrays alone.
        if cls.is_of_user and "on_device" not in cls.__dict__:
            cls.on_device = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        piece = super().__new__(cls)
        piece._ctor_args, piece._ctor_kwargs = args, kwargs
        piece._input_observation_space = piece._input_action_space = None
        piece._observation_space = piece._action_space = None
        piece._spaces_known, piece._spaces_given = False, {}
        return piece

    def __init__(
        self, input_observation_space: Space | None = None, input_action_space: Space | None = None, **kwargs: Any
    ) -> None:
        if kwargs:
            raise TypeError(f"{self.name} takes no argument named {' or '.join(map(repr, kwargs))}")
        self._input_observation_space, self._input_action_space = input_observation_space, input_action_space
        with contextlib.suppress(Exception):  # attributes may still be missing: an error that lasts is raised later
            self._recompute_spaces()

    @abc.abstractmethod
    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: SharedData = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        """Transform a batch, which may be changed in place, and return it or another one.

        rl_module      the module that the pipeline stands before or after; in evaluation mode, also before a learner
        batch          column -> items or arrays; becomes the module's input, or the environments'
        episodes       one for each slot of the vector environment, or, before a learner, the chunks of a train batch;
                       each a `SingleAgentEpisode` or a `MultiAgentEpisode`. Changes that are to last beyond this batch
                       are written here
        explore        True if actions are to be sampled
        shared_data    notes from piece to piece, also from env-to-module to module-to-env
        metrics        logger of custom figures
        """

    @property
    def name(self) -> str:
        """The name in a pipeline: the class's name, unless set."""
        return self._name or type(self).__name__

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    # Spaces

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        """The space that this piece leaves observations in; the same unless overridden. Called by position."""
        return input_observation_space

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        """The space that this piece leaves actions in; the same unless overridden. Called by position."""
        return input_action_space

    def set_input_spaces(self, observation_space: Space | None, action_space: Space | None) -> None:
        """Set both input spaces, and recompute once."""
        self._input_observation_space, self._input_action_space = observation_space, action_space
        self._recompute_spaces()

    def _needed_space(self, kind: str) -> Space:
        """The input space of "observation" or "action". Raises ConnectorError if there is none yet."""
        space: Space | None = getattr(self, f"_input_{kind}_space")
        if space is None:
            raise ConnectorError(f"{type(self).__name__} has no input {kind} space: give it one, or a pipeline")
        return space

    def _know_spaces(self) -> None:
        if not self._spaces_known:
            self._recompute_spaces()

    def _recompute_spaces(self) -> None:
        watch = self._state_watch
        if watch is not None:
            watch.look(self, in_any_case=True)
        self._spaces_known = True
        try:
            self._work_out_spaces()
        except BaseException:
            self._spaces_known = False
            raise
        finally:
            if watch is not None:
                watch.begin(self)

    def _work_out_spaces(self) -> None:
        observation_space: Any = self._input_observation_space
        action_space: Any = self._input_action_space
        if observation_space is not None:
            check_is_space(observation_space, f"{self.name}: input_observation_space is")
            self._observation_space = self.recompute_output_observation_space(observation_space, action_space)
            check_is_space(self._observation_space, f"{self.name}: recompute_output_observation_space returned")
        if action_space is not None:
            check_is_space(action_space, f"{self.name}: input_action_space is")
            self._action_space = self.recompute_output_action_space(observation_space, action_space)
            check_is_space(self._action_space, f"{self.name}: recompute_output_action_space returned")

    # State

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The piece's state: all that it has learnt from the data; empty unless overridden.

        Raises StateError if it is not overridden, and the piece has changed its attributes while it ran in a
        pipeline: they would be lost. An override that returns `{}` declares that nothing of them has to last.
        """
        if self._state_watch is not None:
            self._state_watch.check(self)
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` gave. Raises ConnectorError for a state if the piece has none."""
        self._check_state(state)
        if state:
            given = f"is given a state with {sorted(map(str, state))}"
            if type(self).get_state is not ConnectorV2.get_state:
                raise ConnectorError(f"{self.name} {given}, and has a get_state but no set_state; expected both")
            raise ConnectorError(f"{self.name} has no state, but {given}: is it another piece's?")

    def reset_state(self) -> None:
        """Forget all that has been learnt."""

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state made of those of several copies; unless overridden, the first one.

        If whole rollouts run in workers, it gets the newest state of each lane, again and again. Every lane goes on
        from the result, so what one state has from another must not count twice.

        Raises StateError if it is not overridden, and the states differ: all but one would be lost.
        """
        check_same(self.name, states)
        return states[0] if states else self.get_state()

    def begin_state_watch(self) -> bool:
        """Watch a piece that declares no state and may have some, before its first call; True if it is watched now."""
        if self._state_watch is not None or not self.is_of_user:
            return False
        if type(self).get_state is not ConnectorV2.get_state:
            return False
        self._state_watch = StateWatch(self)
        return True

    def note_first_call(self) -> None:
        """Compare with the attributes as they are after the first call: what it has filled may be a cache."""
        if self._state_watch is not None:
            self._state_watch.begin(self)

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the constructor: `type(piece)(*args, **kwargs)` is another piece like this one."""
        return self._ctor_args, dict(self._ctor_kwargs)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise ConnectorError(f"{self.name}: the state is {shown(state)}, expected a dict, as get_state gives it")

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """(name, part) of the parts that have a state of their own."""
        return []

    # Episodes

    @staticmethod
    def single_agent_episode_iterator(
        episodes: Episodes,
        agents_that_stepped_only: bool = True,
        zip_with_batch_column: list[Any] | dict[tuple[Any, ...], list[Any]] | None = None,
    ) -> Iterator[Any]:
        """Iterate over the single-agent episodes of a list, those of the agents of its multi-agent ones included.

            agents_that_stepped_only    of multi-agent episodes, without the agents that have no observation at the last
                                        env step; a single agent acts in every step
            zip_with_batch_column       yield pairs of an episode and its item: from a list with one for each episode,
                                        or from a dict whose items are taken in order, `(episode id,) -> items` or
                                        `(multi-agent episode's id, agent id, module id) -> items`

        Agents come in the order of their first observations. Raises ValueError if the column does not fit.
        """
        alone = single_agent_episodes(episodes, agents_that_stepped_only)
        if zip_with_batch_column is None:
            yield from alone
        else:
            yield from paired_with_items(list(alone), zip_with_batch_column)

    # Batches in list form

    @staticmethod
    def add_batch_item(
        batch: Batch, column: str, item_to_add: Any, single_agent_episode: SingleAgentEpisode | None = None
    ) -> None:
        """Add one item to a column: `column -> [items]`, or `column -> (episode id,) -> [items]` with an episode.

        An episode that is one agent's part of a multi-agent episode has the key (multi-agent episode's id, agent id,
        module id). Raises ConnectorError if the column is there in another form.
        """
        items_of(batch, column, single_agent_episode).append(item_to_add)

    @staticmethod
    def add_n_batch_items(
        batch: Batch,
        column: str,
        items_to_add: Any,
        num_items: int,
        single_agent_episode: SingleAgentEpisode | None = None,
    ) -> None:
        """Add `num_items` items to a column, as `add_batch_item` does: a list, or a tree of arrays `any[n, ...]`.

        A tree of arrays is added as the one thing it is, which is much faster, and batched later on. Raises
        ConnectorError if `num_items` is not the number of items.
        """
        count = len(items_to_add) if isinstance(items_to_add, list) else len(leaves_of(items_to_add)[0])
        if count != num_items:
            raise ConnectorError(f"column '{column}': num_items is {num_items}, but there are {count} items to add")
        items = items_of(batch, column, single_agent_episode)
        if isinstance(items_to_add, list):
            items.extend(items_to_add)
        else:
            items.append(map_tree(lambda leaf: np.asarray(leaf).view(BatchedArray), items_to_add))

    def _add_of_episodes(
        self, batch: Batch, episodes: Episodes, items_of: Callable[[Any], Mapping[str, Any]], *, learns: bool
    ) -> None:
        """Add columns in list form, but those that are there: every episode's, before a learner one item for each step.

        items_of    (single-agent episode) -> column -> its items or, while acting, its newest item
        """
        there = set(batch)
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=not learns):
            for column, items in items_of(episode).items():
                if column not in there and learns:
                    self.add_n_batch_items(batch, column, items, len(episode), episode)
                elif column not in there:
                    self.add_batch_item(batch, column, items, episode)

    @staticmethod
    def foreach_batch_item_change_in_place(
        batch: Batch, column: str | list[str] | tuple[str, ...], func: Callable[..., Any]
    ) -> None:
        """Replace every item of a column, or of several together, by `func(item, episode id, agent id, module id)`.

        The ids are None if the batch does not have them. For several columns `item` is a tuple with one item of
        each, and so must be the result of `func`.

        Raises ConnectorError for an unknown column, and for columns with other episodes, other numbers of items, or no
        lists of items. Nothing is changed then, nor when `func` raises.
        """
        change_items(batch, column, func)

    @staticmethod
    def switch_batch_from_column_to_module_ids(batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Turn `column -> module id -> data` into `module id -> column -> data`."""
        switched: dict[str, dict[str, Any]] = {}
        for column, by_module in batch.items():
            for module_id, data in by_module.items():
                switched.setdefault(module_id, {})[column] = data
        return switched

    def __repr__(self) -> str:
        return f"<{self.name}>"


class ColumnPiece(ConnectorV2):
    """Base of built-in pieces that work on columns, of arrays or of tensors, and write to no episode."""

    columnar = True
    on_device = True
    changes_episodes = False


_OFFERED = ("rl_module", "batch", "episodes", "explore", "shared_data", "metrics")


class LambdaConnector(ConnectorV2):
    """A piece that calls a function.

        function             takes any of `rl_module`, `batch`, `episodes`, `explore`, `shared_data` and `metrics`, by
                             name; returns the batch, or None when it has changed that in place
        name                 name in a pipeline; None: the function's name
        columnar             True if the function takes columns with the episodes, as the class attribute
        changes_episodes     True if the function may write to the episodes, likewise
        lookback             steps that the function looks back in an episode
        observation_space    (observation space, action space) -> the space it leaves observations in; None: the same

    Raises ConnectorError for a function with any other argument.
    """

    is_of_user = True  # as its function is

    def __init__(
        self,
        function: Callable[..., Batch | None],
        *,
        name: str | None = None,
        columnar: bool = False,
        changes_episodes: bool = True,
        lookback: int = 0,
        observation_space: Callable[[Space, Space], Space] | None = None,
    ) -> None:
        super().__init__()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__) if name is None else name
        self.lookback = checked_count("lookback", lookback, 0)
        self.columnar, self.changes_episodes = columnar, changes_episodes
        self._recompute = observation_space
        self._wanted = _wanted(function, self.name)

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        if self._recompute is None:
            return input_observation_space
        return self._recompute(input_observation_space, input_action_space)

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        arguments = {"batch": batch, **kwargs}
        returned = self.function(**{name: arguments.get(name) for name in self._wanted})
        return batch if returned is None else returned


def _wanted(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConnectorError(f"{function!r} is no function with arguments of its own, expected such a one") from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _OFFERED
    wanted = tuple(parameter.name for parameter in parameters)
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    unknown = [each for each in required if each not in _OFFERED]
    if unknown or any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ConnectorError(
            f"function '{name}' takes ({', '.join(wanted)}), expected only, by name: {', '.join(_OFFERED)}"
        )
    return tuple(each for each in wanted if each in _OFFERED)
