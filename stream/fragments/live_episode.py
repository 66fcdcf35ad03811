"""Live episodes: the ongoing episodes of a lane, as views of its columns that move on with it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, EpisodeError
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.tree import Tree, kind_of, map_tree, stack_trees
from rollflow.stream.episodes.buffer import Indices, LookbackBuffer
from rollflow.stream.episodes.single_agent import SingleAgentEpisode, refusal

if TYPE_CHECKING:
    from rollflow.stream.fragments.lane import Lane


class LiveEpisode(SingleAgentEpisode):
    """The ongoing episode of one slot: reading it reads the lane's columns, `set_…` writes them.

    It is always the slot's current episode, and its current chunk begins where the lane's fragment does. To keep the
    data, copy them: `SingleAgentEpisode.from_state(episode.get_state())`. Only environments add steps.
    """

    add_env_reset = add_env_step = concat_episode = refusal("only the environments of its rollout add to it")

    def __init__(self, lane: "Lane", slot: int) -> None:
        # The constructor of the base class is not called: it would store data that are read from the lane here.
        self._lane, self._slot = lane, slot
        self.agent_id = self.module_id = self.multi_agent_episode_id = None
        self.lane, self.slot = lane.index, slot
        self.observations = _LiveObservations(lane, slot)
        self.infos = _LiveInfos(lane, slot)
        self.actions = _LiveColumn(lane, slot, Columns.ACTIONS, lane.layout.action_space)
        self.rewards = _LiveColumn(lane, slot, Columns.REWARDS)

    @property
    def id_(self) -> str:  # type: ignore[override]
        """The id of the slot's current episode."""
        return self._lane.layout.episode_id(self._slot, int(self._lane.episode_number[self._slot]))

    @property
    def custom_data(self) -> dict[Any, Any]:  # type: ignore[override]
        """A dict that belongs to the episode, and is copied to its chunks."""
        number = int(self._lane.episode_number[self._slot])
        return self._lane.custom_data.setdefault((self._slot, number), {})

    @property
    def extra_model_outputs(self) -> dict[str, LookbackBuffer]:  # type: ignore[override]
        """Buffers over the columns of the module's extra outputs, `any[n, ...]` each."""
        lane, slot = self._lane, self._slot
        return {name: _LiveColumn(lane, slot, name) for name in lane.fragment.extra_columns}

    @property
    def t(self) -> int:  # type: ignore[override]
        """Steps since the episode's reset."""
        return self._lane.row - int(self._lane.episode_start[self._slot])

    @property
    def t_started(self) -> int:  # type: ignore[override]
        """Steps since the episode's reset when the lane's fragment began."""
        return max(0, self._lane.layout.lookback - int(self._lane.episode_start[self._slot]))

    @property
    def is_terminated(self) -> bool:  # type: ignore[override]
        """True if the last step terminated the episode; the lane shows an ended episode once, before its reset."""
        return self._lane.has_ended(self._slot) and self._flag(Columns.TERMINATEDS)

    @property
    def is_truncated(self) -> bool:  # type: ignore[override]
        """True if the last step truncated the episode."""
        return self._lane.has_ended(self._slot) and self._flag(Columns.TRUNCATEDS)

    def settle(self, space: gym.Space[Any] | None) -> None:
        """End the turn of a piece over all of the lane's episodes: see `Lane.settle`."""
        self._lane.settle(space)

    def _flag(self, name: str) -> bool:
        return bool(self._lane.fragment.columns[name].tree[self._lane.row - 1, self._slot])


class LaneEpisodes(Sequence[SingleAgentEpisode]):
    """The ongoing episode of every slot of a lane, N in all. Episodes are made on first use, and then kept.

    A connector piece that loops over the sequence gets episodes. One that asks for columns gets all slots at once.
    """

    _slots: Any = slice(None)  # slots of the lane that are shown

    def __init__(self, lane: "Lane") -> None:
        self.lane = lane
        self._made: list[SingleAgentEpisode] | None = None

    def __len__(self) -> int:
        return self.lane.layout.num_slots

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = [LiveEpisode(self.lane, slot) for slot in range(len(self))]
        return self._made[index]

    def env_slots(self) -> NDArray[np.int64]:
        """i64[N]: the environment of each episode, as a slot of the lane."""
        return np.arange(len(self))

    def observations(self) -> Tree:
        """The latest observation of every slot: a tree of read-only arrays `any[N, ...]`.

        `set_observations` replaces them.
        """
        return map_tree(_read_only, self.newest())

    def newest(self) -> Tree:
        """As `observations`, not read-only: torch shares its memory then. For pieces that don't write to it."""
        return self.lane.observations()

    def set_observations(self, observations: Tree) -> None:
        """Replace the latest observation of every slot by a tree of arrays `any[N, ...]`."""
        self.lane.set_observations(observations)

    def settle(self, space: gym.Space[Any] | None) -> None:
        """End the turn of a piece that leaves observations in this space: see `Lane.settle`."""
        self.lane.settle(space)

    def recent_observations(self, count: int) -> Tree:
        """Every slot's last `count` observations, oldest first: a tree of new arrays `any[N, count, ...]`.

        Observations before the episode's first, or before the lookback, are zeros. Earlier ones are as the last piece
        has left them. Raises ValueError where their dtypes or shapes are not those of the latest ones.
        """
        latest = self.newest()
        if count == 1:
            return map_tree(lambda leaf: leaf[:, None].copy(), latest)
        earlier = self.recent(Columns.OBS, count - 1)
        ours, theirs = kind_of(latest), kind_of(map_tree(lambda past: past[:, 0], earlier))
        if ours != theirs:
            raise ValueError(f"the latest are {ours}, those before them {theirs}")
        return map_tree(lambda past, leaf: np.concatenate([past, leaf[:, None]], axis=1), earlier, latest)

    def recent(self, name: str, count: int) -> Tree:
        """A column's values at the last `count` steps, oldest first: a tree of new arrays `any[N, count, ...]`.

        Steps before the episode's first, or before the lookback, are zeros.
        """
        stop, before = self.lane.row, ~self.steps_there(count)
        start = max(stop - count, 0)

        def window(leaf: NDArray[Any]) -> NDArray[Any]:
            rows = leaf[start:stop, self._slots].swapaxes(0, 1)
            padded = np.zeros((len(before), count, *leaf.shape[2:]), leaf.dtype)
            padded[:, count - rows.shape[1] :] = rows
            padded[before] = 0
            return padded

        return map_tree(window, self.lane.fragment.columns[name].tree)

    def previous(self, name: str) -> Tree | None:
        """A column's values at the step before: a tree of read-only arrays `any[N, ...]`.

        Meaningless for slots that have just begun an episode: see `just_begun`. None if there is no step before, and
        for outputs of the module at the first step. Raises ColumnError where there is no column of this name.
        """
        values = self.values_before(name)
        if values is not None:
            return map_tree(_read_only, values)
        if name not in self._columns and not self.just_begun().all():  # a step before has made all columns
            raise ColumnError(f"there is no column '{name}', expected one of {', '.join(self._columns)}").see("piece")
        return None

    def values_before(self, name: str) -> Tree | None:
        """As `previous`, not read-only, and None for a column that there is not: for the engine's own pieces."""
        column = self._columns.get(name)
        return None if column is None or not self.lane.row else column.row(self.lane.row - 1)

    @property
    def _columns(self) -> Mapping[str, Column]:
        return self.lane.fragment.columns

    def just_begun(self) -> NDArray[np.bool_]:
        """bool[N]: whether the slot's latest observation is its episode's first."""
        begun: NDArray[np.bool_] = self.lane.episode_start >= self.lane.row
        return begun

    def steps_there(self, count: int) -> NDArray[np.bool_]:
        """bool[N, count]: which of the last `count` steps `recent` has values of, rather than zeros."""
        begin = np.maximum(self.lane.episode_start[self._slots], 0)
        there: NDArray[np.bool_] = np.arange(self.lane.row - count, self.lane.row) >= begin[:, None]
        return there


class EndedEpisodes(LaneEpisodes):
    """The K episodes of a lane that ended in its last step, each with its last observation."""

    def __init__(self, lane: "Lane", slots: Sequence[int]) -> None:
        super().__init__(lane)
        self.slots = self._slots = list(slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Any) -> Any:
        slots = self.slots[index]
        return [self.lane.episodes[slot] for slot in slots] if isinstance(slots, list) else self.lane.episodes[slots]

    def env_slots(self) -> NDArray[np.int64]:
        """i64[K]: the environment of each ended episode, as a slot of the lane."""
        return np.array(self.slots, np.int64)

    def newest(self) -> Tree:
        """The last observation of each ended episode, a tree of arrays `any[K, ...]`."""
        return stack_trees([self.lane.observation(slot) for slot in self.slots])

    def set_observations(self, observations: Tree) -> None:
        """Replace the last observation of each ended episode by a tree of arrays `any[K, ...]`."""
        for i, slot in enumerate(self.slots):
            self.lane.set_observation(slot, map_tree(lambda leaf, i=i: leaf[i], observations))

    def values_before(self, name: str) -> Tree | None:
        every = super().values_before(name)
        return None if every is None else map_tree(lambda leaf: leaf[self.slots], every)

    def just_begun(self) -> NDArray[np.bool_]:
        """bool[K]: all False, since an episode that has ended has made a step."""
        return np.zeros(len(self), np.bool_)


def _read_only(leaf: NDArray[Any]) -> NDArray[Any]:
    view = leaf.view()
    view.flags.writeable = False
    return view


class _LiveColumn(LookbackBuffer):
    """Buffer over one slot's part of a column of the current fragment, from the lookback up to the lane's row."""

    def __init__(self, lane: "Lane", slot: int, name: str, space: gym.Space[Any] | None = None) -> None:
        super().__init__(None, 0, space, name=name)
        self._lane, self._slot, self._column = lane, slot, name

    @property
    def lookback(self) -> int:
        return self._lane.layout.lookback - min(self._begin, self._lane.layout.lookback)

    @property
    def is_numpy(self) -> bool:
        return True

    @property
    def cut_away(self) -> int:
        return max(0, -int(self._lane.episode_start[self._slot]))

    @property
    def _begin(self) -> int:
        return max(0, int(self._lane.episode_start[self._slot]))

    def total(self) -> int:
        return self._lane.row - self._begin

    def item(self, position: int) -> Any:
        row, slot = self._begin + position, self._slot
        return map_tree(lambda leaf: leaf[row, slot], self._lane.fragment.columns[self._column].tree)

    def items(self, where: Any) -> Any:
        begin, slot = self._begin, self._slot
        rows = slice(where.start + begin, where.stop + begin) if isinstance(where, slice) else np.add(where, begin)
        return map_tree(lambda leaf: leaf[rows, slot], self._lane.fragment.columns[self._column].tree)

    def write(self, position: int, item: Any) -> None:
        column = self._lane.fragment.columns[self._column]
        column.write_slot(self._begin + position, self._slot, column.whole(item))

    def write_several(self, positions: Sequence[int], items: Any) -> None:
        if self.is_numpy:  # checked together: a fraction is refused before the first item is written
            items = self._stacked(items) if isinstance(items, list) else items
            items = self._lane.fragment.columns[self._column].whole(items)
        super().write_several(positions, items)


class _LiveObservations(_LiveColumn):
    """Buffer over one slot's observations: one more than steps, the last of which pieces may still rewrite."""

    def __init__(self, lane: "Lane", slot: int) -> None:
        super().__init__(lane, slot, Columns.OBS)

    def get(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        if type(indices) is int and indices == -1 and not neg_index_as_lookback and not one_hot_discrete:
            return self._lane.observation(self._slot)  # the most common read
        options: Any = {"fill": fill, "one_hot_discrete": one_hot_discrete}
        return super().get(indices, neg_index_as_lookback=neg_index_as_lookback, **options)

    def set(self, new_data: Any, at_indices: Indices = None, *, neg_index_as_lookback: bool = False) -> None:
        if type(at_indices) is int and at_indices == -1 and not neg_index_as_lookback:
            self._lane.set_observation(self._slot, new_data)
        else:
            super().set(new_data, at_indices, neg_index_as_lookback=neg_index_as_lookback)

    @property
    def space(self) -> gym.Space[Any] | None:
        return self._lane.observation_space

    @space.setter
    def space(self, space: gym.Space[Any] | None) -> None:
        """Do nothing: the space is that of the lane's column."""

    def total(self) -> int:
        return super().total() + 1

    def item(self, position: int) -> Any:
        if position == self.total() - 1:
            return self._lane.observation(self._slot)
        return super().item(position)

    def items(self, where: Any) -> Any:
        latest = self.total() - 1
        if self._lane.is_settled(self._slot) or (isinstance(where, slice) and where.stop <= latest):
            return super().items(where)
        positions = range(*where.indices(latest + 1)) if isinstance(where, slice) else where
        return stack_trees([self.item(position) for position in positions])

    def write(self, position: int, item: Any) -> None:
        if position == self.total() - 1:
            self._lane.set_observation(self._slot, item)
        else:
            super().write(position, item)


class _LiveInfos(_LiveColumn):
    """Buffer over one slot's infos: one more than steps."""

    def __init__(self, lane: "Lane", slot: int) -> None:
        super().__init__(lane, slot, Columns.INFOS)

    @property
    def is_numpy(self) -> bool:
        return False

    def total(self) -> int:
        return super().total() + 1

    def item(self, position: int) -> Any:
        return info_of(self._lane.infos_at(self._begin + position, self._slot), self._slot)

    def items(self, where: Any) -> Any:
        positions = range(*where.indices(self.total())) if isinstance(where, slice) else where
        return [self.item(position) for position in positions]

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError("infos of a rollout's episode are read-only")
