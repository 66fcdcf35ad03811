"""One piece of a connector pipeline: the interface of RLlib's `ConnectorV2`."""

import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np

from rollflow.nodes.connectors.agents import (
    Episodes as Episodes,
)
from rollflow.nodes.connectors.agents import (
    episode_key,
    is_keyed_by_episode,
    paired_with_items,
    single_agent_episodes,
)
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.tree import leaves_of, map_tree

Batch = dict[str, Any]


class ConnectorV2(abc.ABC):
    """A transformation of a batch, of episodes, or of both; a subclass overrides `__call__`.

        input_observation_space    what the piece before leaves the observations in; setting it recomputes
        input_action_space         `observation_space` and `action_space`, what this piece leaves them in

    Further constructor arguments are a subclass's own; `get_ctor_args_and_kwargs()` gives back what was given.

    Three class attributes tell the pipeline what it may do:

        columnar            `__call__` takes a sequence of episodes that carries its columns and may use those. A
                            subclass that overrides `__call__` says so anew, or gets a plain list of episodes
        changes_episodes    `__call__` may write to the episodes, so it has to see the last observation of those that
                            have ended
        replaces_episodes   `__call__` may put others into the list of episodes, so all pieces get that list

    and one, of the class or of an instance, what it needs:

        lookback            steps that `__call__` looks back in an episode; a rollout keeps at least as many when it
                            cuts fragments
    """

    columnar: ClassVar[bool] = False
    changes_episodes: ClassVar[bool] = True
    replaces_episodes: ClassVar[bool] = False
    lookback: int = 0

    _name: str | None = None
    _ctor_args: tuple[Any, ...]
    _ctor_kwargs: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__ and "columnar" not in cls.__dict__:
            cls.columnar = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        piece = super().__new__(cls)
        piece._ctor_args, piece._ctor_kwargs = args, kwargs
        return piece

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise TypeError(f"{self.name} takes no argument named {' or '.join(map(repr, kwargs))}")
        self._input_observation_space = input_observation_space
        self._input_action_space = input_action_space
        self._observation_space: gym.Space[Any] | None = None
        self._action_space: gym.Space[Any] | None = None
        # Worked out when first asked for: a subclass's constructor, which may be needed for that, is still to run.
        self._spaces_known = False

    @abc.abstractmethod
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
        """Transform a batch, which may be changed in place, and return it or another one.

        rl_module      the module that the pipeline stands before or after
        batch          column -> items; becomes the module's input, or the environments'
        episodes       one per slot of the vector environment, or, before a learner, the chunks of a train batch; each
                       a `SingleAgentEpisode` or a `MultiAgentEpisode`; what is to last beyond this batch is written
                       here
        explore        whether actions are to be sampled
        shared_data    what pieces tell each other, also from env-to-module to module-to-env
        metrics        where custom figures may be logged
        """

    @property
    def name(self) -> str:
        """What the piece is called in a pipeline: its class's name, unless set."""
        return self._name or type(self).__name__

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    # Spaces

    def recompute_output_observation_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        """The space that this piece leaves observations in; the same unless overridden. Called by position."""
        return input_observation_space

    def recompute_output_action_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        """The space that this piece leaves actions in; the same unless overridden. Called by position."""
        return input_action_space

    @property
    def input_observation_space(self) -> gym.Space[Any] | None:
        """What the piece before leaves the observations in."""
        return self._input_observation_space

    @input_observation_space.setter
    def input_observation_space(self, space: gym.Space[Any] | None) -> None:
        self._input_observation_space = space
        self._recompute_spaces()

    @property
    def input_action_space(self) -> gym.Space[Any] | None:
        """What the piece before leaves the actions in."""
        return self._input_action_space

    @input_action_space.setter
    def input_action_space(self, space: gym.Space[Any] | None) -> None:
        self._input_action_space = space
        self._recompute_spaces()

    @property
    def observation_space(self) -> gym.Space[Any] | None:
        """What this piece leaves the observations in."""
        self._know_spaces()
        return self._observation_space

    @observation_space.setter
    def observation_space(self, space: gym.Space[Any] | None) -> None:
        self._know_spaces()
        self._observation_space = space

    @property
    def action_space(self) -> gym.Space[Any] | None:
        """What this piece leaves the actions in."""
        self._know_spaces()
        return self._action_space

    @action_space.setter
    def action_space(self, space: gym.Space[Any] | None) -> None:
        self._know_spaces()
        self._action_space = space

    def set_input_spaces(self, observation_space: gym.Space[Any] | None, action_space: gym.Space[Any] | None) -> None:
        """Set both input spaces, and recompute once."""
        self._input_observation_space, self._input_action_space = observation_space, action_space
        self._recompute_spaces()

    def _know_spaces(self) -> None:
        if not self._spaces_known:
            self._recompute_spaces()

    def _recompute_spaces(self) -> None:
        self._spaces_known = True
        observation_space: Any = self._input_observation_space
        action_space: Any = self._input_action_space
        if observation_space is not None:
            self._check_space(observation_space, "input_observation_space is")
            self._observation_space = self.recompute_output_observation_space(observation_space, action_space)
            self._check_space(self._observation_space, "recompute_output_observation_space returned")
        if action_space is not None:
            self._check_space(action_space, "input_action_space is")
            self._action_space = self.recompute_output_action_space(observation_space, action_space)
            self._check_space(self._action_space, "recompute_output_action_space returned")

    def _check_space(self, space: Any, told: str) -> None:
        if not isinstance(space, gym.Space):
            raise ConnectorError(f"{self.name}: {told} {space!r}, {type(space).__name__}, expected a gymnasium space")

    # State

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What this piece has learnt from the data that came by; nothing unless overridden."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave. Raises ConnectorError for a state where the piece has none."""
        self._check_state(state)
        if state:
            raise ConnectorError(
                f"{self.name} has no state, but is given one with {sorted(map(str, state))}: is it another piece's?"
            )

    def reset_state(self) -> None:  # noqa: B027  (a piece without state has nothing to forget)
        """Forget what has been learnt."""

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """This piece's state and those of its copies elsewhere as one; unless overridden, the first one given."""
        return states[0] if states else self.get_state()

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the constructor was called with: `type(piece)(*args, **kwargs)` is another one like it."""
        return self._ctor_args, dict(self._ctor_kwargs)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise ConnectorError(f"{self.name}: the state is {state!r}, expected a dict, as get_state gives it")

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
        """All single-agent episodes of a list, and those of the agents of its multi-agent ones, one after the other.

            agents_that_stepped_only    of multi-agent episodes, without the agents that have no observation at the
                                        last env step; a single agent acts in every step
            zip_with_batch_column       makes it pairs of an episode and its item: from a list with one for each of
                                        them, or from a dict whose items are taken in order: `(episode id,) -> items`,
                                        `(multi-agent episode's id, agent id, module id) -> items`

        Agents come in the order of their first observations. Raises ValueError where the column does not fit.
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
        module id). Raises ConnectorError where the column is there in another form.
        """
        _items_of(batch, column, single_agent_episode).append(item_to_add)

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
        ConnectorError where `num_items` is not the number of items.
        """
        count = len(items_to_add) if isinstance(items_to_add, list) else len(leaves_of(items_to_add)[0])
        if count != num_items:
            raise ConnectorError(f"column '{column}': num_items is {num_items}, but there are {count} items to add")
        items = _items_of(batch, column, single_agent_episode)
        if isinstance(items_to_add, list):
            items.extend(items_to_add)
        else:
            items.append(map_tree(lambda leaf: np.asarray(leaf).view(BatchedArray), items_to_add))

    @staticmethod
    def foreach_batch_item_change_in_place(
        batch: Batch, column: str | list[str] | tuple[str, ...], func: Callable[..., Any]
    ) -> None:
        """Replace every item of a column, or of several together, by `func(item, episode id, agent id, module id)`.

        The ids are None where the batch does not have them. For several columns `item` is a tuple with one item of
        each, and so must be what `func` returns. Raises ConnectorError for an unknown column, and for columns that do
        not have the same episodes, as many items of each, or lists of items; nothing is changed then, nor when `func`
        raises.
        """
        columns = [column] if isinstance(column, str) else list(column)
        for name in columns:
            if name not in batch:
                raise ConnectorError(f"the batch has no column '{name}'; columns: {', '.join(batch) or 'none'}")
        keys, *others = (list(batch[name]) if isinstance(batch[name], Mapping) else [None] for name in columns)
        for name, theirs in zip(columns[1:], others, strict=True):
            if set(theirs) != set(keys):
                raise ConnectorError(f"column '{name}' has items of {theirs}, column '{columns[0]}' of {keys}")
        changed: list[tuple[list[Any], list[Any]]] = []
        for key in keys:
            lists = [batch[name] if key is None else batch[name][key] for name in columns]
            _check_lists(columns, key, lists)
            ids = (*(() if key is None else key), None, None, None)[:3]
            if isinstance(column, str):
                changed.append((lists[0], [func(item, *ids) for item in lists[0]]))
                continue
            made = [_one_for_each(columns, func(items, *ids)) for items in zip(*lists, strict=True)]
            changed += [(items, [values[i] for values in made]) for i, items in enumerate(lists)]
        for items, values in changed:
            items[:] = values

    @staticmethod
    def switch_batch_from_column_to_module_ids(batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """`column -> module id -> data` as `module id -> column -> data`."""
        switched: dict[str, dict[str, Any]] = {}
        for column, by_module in batch.items():
            for module_id, data in by_module.items():
                switched.setdefault(module_id, {})[column] = data
        return switched

    def __repr__(self) -> str:
        return f"<{self.name}>"


class BatchedArray(np.ndarray[Any, Any]):
    """An array whose first axis runs over several items: what `add_n_batch_items` was given as one."""


def _check_lists(columns: list[str], key: Any, lists: list[Any]) -> None:
    """Raise ConnectorError unless all columns have lists of one length under a key."""
    of = "" if key is None else f" of {key}"
    for column, items in zip(columns, lists, strict=True):
        if not isinstance(items, list):
            raise ConnectorError(f"column '{column}'{of} is {type(items).__name__}, expected a list of items")
        if len(items) != len(lists[0]):
            raise ConnectorError(
                f"column '{column}' has {len(items)} items{of}, column '{columns[0]}' {len(lists[0])}; expected as many"
            )


def _one_for_each(columns: list[str], made: Any) -> tuple[Any, ...]:
    if not isinstance(made, tuple | list) or len(made) != len(columns):
        raise ConnectorError(f"the function returned {made!r}, expected a tuple of one item for each of {columns}")
    return tuple(made)


def _is_by_module(batch: Batch) -> bool:
    """Whether a batch in list form is `module id -> column -> items`."""
    return any(
        isinstance(data, dict)
        and not is_keyed_by_episode(data)
        and any(isinstance(items, list) or is_keyed_by_episode(items) for items in data.values())
        for data in batch.values()
    )


def _items_of(batch: Batch, column: str, episode: SingleAgentEpisode | None) -> list[Any]:
    """The list that items of this column (and episode) are in, made where there is none."""
    if column not in batch and _is_by_module(batch):
        raise ConnectorError(
            f"column '{column}' can't be added: the batch is by module already ({', '.join(map(str, batch))}); pieces "
            "that add columns stand before AgentToModuleMapping"
        )
    if episode is None:
        items = batch.setdefault(column, [])
    else:
        by_episode = batch.setdefault(column, {})
        if not isinstance(by_episode, dict):
            raise ConnectorError(
                f"column '{column}' is {type(by_episode).__name__}, expected a dict from episodes to lists of items"
            )
        items = by_episode.setdefault(episode_key(episode), [])
    if not isinstance(items, list):
        raise ConnectorError(f"column '{column}' is {type(items).__name__}, expected a list of items")
    return items
