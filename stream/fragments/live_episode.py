"""Live episodes: the ongoing episodes of a lane, as views of its columns that move on with it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, EpisodeError
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.tree import Tree, kind_of, library_of, map_tree, stack_trees
from rollflow.stream.episodes.buffer import Indices, LookbackBuffer
from rollflow.stream.episodes.single_agent import SingleAgentEpisode, refusal
from rollflow.stream.fragments.fragment import Final

if TYPE_CHECKING:
    from rollflow.stream.fragments.lane import SlotLane


class LiveEpisode(SingleAgentEpisode):
    """The ongoing episode of one slot: reading it reads the lane's columns, `set_…` writes them.

    It is always the slot's current episode, and its current chunk begins where the lane's fragment does. To keep the
    data, copy them: `SingleAgentEpisode.from_state(episode.get_state())`. Only environments add steps.
    """

    add_env_reset = add_env_step = concat_episode = refusal("only the environments of its rollout add to it")

    def __init__(self, lane: "SlotLane", slot: int) -> None:
        # The constructor of the base class is not called: it would store data that are read from the lane here.
        self._lane, self._slot = lane, slot
        self.agent_id = self.module_id = None
        self.lane, self.slot = lane.index, slot
        self.observations = _LiveObservations(lane, slot)
        self.infos = _LiveInfos(lane, slot)
        self.actions = _LiveColumn(lane, slot, Columns.ACTIONS, lane.layout.action_space)
        self.rewards = _LiveColumn(lane, slot, Columns.REWARDS)

    @property
    def id_(self) -> str:  # type: ignore[override]
        """The id of the slot's current episode."""
        return self._lane.layout.episode_id(self._slot, self._lane.number_of(self._slot))

    @property
    def multi_agent_episode_id(self) -> str | None:
        """The id of the environment's episode, of several agents."""
        return self._lane.parent_of(self._slot)

    @property
    def custom_data(self) -> dict[Any, Any]:  # type: ignore[override]
        """A dict that belongs to the episode, and is copied to its chunks."""
        return self._lane.custom_data.setdefault((self._slot, self._lane.number_of(self._slot)), {})

    @property
    def extra_model_outputs(self) -> dict[str, LookbackBuffer]:  # type: ignore[override]
        """Buffers over the columns of the module's extra outputs, `any[n, ...]` each."""
        lane, slot = self._lane, self._slot
        return {name: _LiveColumn(lane, slot, name) for name in lane.fragment.extra_columns}

    @property
    def t(self) -> int:  # type: ignore[override]
        """Steps since the episode's reset."""
        return self._lane.row_of(self._slot) - self._lane.start_of(self._slot)

    @property
    def t_started(self) -> int:  # type: ignore[override]
        """Steps since the episode's reset when the lane's fragment began."""
        return max(0, self._lane.layout.lookback - self._lane.start_of(self._slot))

    @property
    def is_terminated(self) -> bool:  # type: ignore[override]
        """True if the last step terminated the episode; the lane shows an ended episode once, before its reset."""
        return self._lane.has_ended(self._slot) and self._flag(Columns.TERMINATEDS)

    @property
    def is_truncated(self) -> bool:  # type: ignore[override]
        """True if the last step truncated the episode."""
        return self._lane.has_ended(self._slot) and self._flag(Columns.TRUNCATEDS)

    def settle(self, space: gym.Space[Any] | None) -> None:
        """End the turn of a piece over all episodes that it is shown: see `LaneEpisodes.settle`."""
        self._lane.settle(space)

    def _flag(self, name: str) -> bool:
        lane, slot = self._lane, self._slot
        return bool(lane.fragment.columns[name].tree[lane.row_of(slot) - 1, slot])


class LaneEpisodes(Sequence[SingleAgentEpisode]):
    """The ongoing episodes of K slots of a lane, with their latest observations, which pieces may rewrite.

    A connector piece that loops over the sequence gets episodes. One that asks for columns gets all slots at once.

    slots           i64[K] ascending: slots of the lane that are shown
    is_settled      whether the latest observations are recorded as they are
    is_rewritten    whether a piece has written any since these episodes were made
    space           that the last piece that has written leaves observations in; None: not known
    counted         bool[K] on a device, if all slots are shown: those whose observations are meant; None: all are
    """

    counted: Any = None
    is_repeated = False  # True: last observations are not known, and those recorded before stand for them

    def __init__(
        self,
        lane: "SlotLane",
        slots: NDArray[np.int64],
        observations: Tree,
        *,
        is_settled: bool,
        dtypes_of: gym.Space[Any] | None = None,
    ) -> None:
        self.lane, self.slots = lane, slots
        self.space: gym.Space[Any] | None = None
        self.is_rewritten = False
        self._made: list[SingleAgentEpisode] | None = None
        self._is_written = False  # by a piece whose turn is not over
        self.show(observations, is_settled=is_settled, dtypes_of=dtypes_of)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Any) -> Any:
        if self._made is None:
            self._made = [self.lane.live(slot) for slot in self.slots.tolist()]
        return self._made[index]

    def show(self, observations: Tree, *, is_settled: bool, dtypes_of: gym.Space[Any] | None = None) -> None:
        """Set the latest observations, a tree of arrays `any[K, ...]` that is not written to.

        dtypes_of    space that they need no conversion to; None: not known
        """
        self._latest: Tree | None = observations  # None: it is yet to be taken out of the row that is shown
        self.is_settled, self._dtypes_of = is_settled, dtypes_of
        self._items: list[Tree] | None = None  # the same slot by slot, while pieces write single ones

    def show_row(self, column: Column, row: int) -> None:
        """Show a row of the lane's column: recorded as it is, and taken out of it if somebody asks for it."""
        self._latest = self._items = self._dtypes_of = None
        self._shown, self.is_settled = (column, row), True

    def observations(self) -> Tree:
        """The latest observation of every slot: a tree of read-only arrays `any[K, ...]`.

        `set_observations` replaces them.
        """
        return map_tree(_read_only, self.newest())

    def newest(self) -> Tree:
        """As `observations`, not read-only: torch shares its memory then. For pieces that don't write to it.

        Raises ColumnError if pieces have left observations of different shapes.
        """
        if self._items is not None:
            self._latest, self._items = self._stacked(self._items), None
        if self._latest is None:
            column, row = self._shown
            self._latest = column.row(row)
        return self._latest

    def set_observations(self, observations: Tree) -> None:
        """Replace the latest observation of every slot by a tree of arrays `any[K, ...]`."""
        self._latest, self._items, self.is_settled = observations, None, False
        self._is_written = self.is_rewritten = True

    def observation(self, slot: int) -> Tree:
        """The latest observation of one slot, any[...]; if its episode has just ended, the last one."""
        place = self._places[slot]
        return self._items[place] if self._items is not None else map_tree(lambda leaf: leaf[place], self.newest())

    def set_observation(self, slot: int, observation: Tree) -> None:
        """Replace the latest observation of one slot, any[...]; if its episode has just ended, the last one."""
        if self._items is None:
            if self.is_settled and self.lane.try_record(slot, observation):
                return
            latest = self.newest()
            self._items = [map_tree(lambda leaf, i=i: leaf[i], latest) for i in range(len(self))]
        self._items[self._places[slot]] = observation
        self.is_settled, self._is_written, self.is_rewritten = False, True, True

    def shows(self, slot: int) -> bool:
        """True if `slot` is one of the slots."""
        return slot in self._places

    def settle(self, space: gym.Space[Any] | None) -> None:
        """End the turn of a connector piece: convert what it has written to the dtypes of its space.

        space    that the piece leaves observations in; None: not known

        Observations that do not fit the space stay as they are.
        """
        if self.is_settled:
            return
        is_written, self._is_written = self._is_written, False
        if is_written:
            self.space, self._dtypes_of = space, None
        elif space is not self.lane.observation_space or space is self._dtypes_of:
            return
        if space is None:
            return
        fitting = self.lane.columns.fitting(space, self.newest(), len(self))
        if fitting is not None:
            self.lane.convert(self, space, fitting, is_written=is_written)

    def recent_observations(self, count: int) -> Tree:
        """Every slot's last `count` observations, oldest first: a tree of new arrays `any[K, count, ...]`.

        Observations before the episode's first, or before the lookback, are zeros. Earlier ones are as the last piece
        has left them. Raises ValueError if their dtypes or shapes are not those of the latest ones.
        """
        latest = self.newest()
        if count == 1:
            return map_tree(lambda leaf: library_of(leaf).concatenate([leaf[:, None]]), latest)
        earlier = self.recent(Columns.OBS, count - 1)
        ours, theirs = kind_of(latest), kind_of(map_tree(lambda past: past[:, 0], earlier))
        if ours != theirs and self.steps_there(count - 1).any():
            raise ValueError(f"the latest are {ours}, those before them {theirs}")
        if ours != theirs:  # before the first step the column may have another type
            repeated = map_tree(lambda leaf: library_of(leaf).stack([leaf] * (count - 1), axis=1), latest)
            earlier = map_tree(lambda leaf: library_of(leaf).zeros_like(leaf), repeated)
        return map_tree(lambda past, leaf: library_of(leaf).concatenate([past, leaf[:, None]], axis=1), earlier, latest)

    def recent(self, name: str, count: int) -> Tree:
        """A column's values at the last `count` steps, oldest first: a tree of new arrays `any[K, count, ...]`.

        Steps before the episode's first, or before the lookback, are zeros.
        """
        rows, row = self._rows_before(count), self._row
        before = rows < np.maximum(self.lane.starts_of(self.slots), 0)[:, None]
        rows, slots = np.maximum(rows, 0), self.slots[:, None]

        def window(leaf: NDArray[Any]) -> NDArray[Any]:
            taken: NDArray[Any]
            if row is None or row < count:
                taken = leaf[rows, slots]
            else:
                taken = leaf[row - count : row].swapaxes(0, 1).copy()
            taken[before] = 0
            return taken

        return map_tree(window, self._columns[name].tree)

    def previous(self, name: str) -> Tree | None:
        """A column's values at the step before: a tree of read-only arrays `any[K, ...]`.

        Meaningless for slots that have just begun an episode: see `just_begun`. None if there is no step before, and
        for outputs of the module at the first step. Raises ColumnError if there is no column of this name.
        """
        values = self.values_before(name)
        if values is not None:
            return map_tree(_read_only, values)
        if name not in self._columns and not self.just_begun().all():  # a step before has made all columns
            raise ColumnError(f"there is no column '{name}', expected one of {', '.join(self._columns)}").see("piece")
        return None

    def values_before(self, name: str) -> Tree | None:
        """As `previous`, not read-only, and None for a column that there is not: for the engine's own pieces."""
        column, row = self._columns.get(name), self._row
        if column is None:
            return None
        if row is not None:
            return column.row(row - 1) if row else None
        return column.items(np.maximum(self.lane.rows_of(self.slots) - 1, 0), self.slots)

    def just_begun(self) -> NDArray[np.bool_]:
        """bool[K]: whether the slot's latest observation is its episode's first."""
        begun: NDArray[np.bool_] = self.lane.starts_of(self.slots) >= self.lane.rows_of(self.slots)
        return begun

    def steps_there(self, count: int) -> NDArray[np.bool_]:
        """bool[K, count]: which of the last `count` steps `recent` has values of, rather than zeros."""
        begin = np.maximum(self.lane.starts_of(self.slots), 0)
        there: NDArray[np.bool_] = self._rows_before(count) >= begin[:, None]
        return there

    @property
    def _row(self) -> int | None:
        """The row of the latest observations, if all slots of the lane are shown and stand in one; else None."""
        if len(self) != self.lane.layout.num_slots:
            return None
        rows = self.lane.rows_of(self.slots)
        return rows if isinstance(rows, int) else None

    def _rows_before(self, count: int) -> NDArray[np.int64]:
        """Rows of the last `count` steps: i64[K, count], or i64[count] if they are the same for all slots."""
        rows = self.lane.rows_of(self.slots)
        before: NDArray[np.int64] = np.arange(-count, 0) + (rows if isinstance(rows, int) else rows[:, None])
        return before

    @property
    def _columns(self) -> Mapping[str, Column]:
        """The columns of the lane's fragment."""
        return self.lane.fragment.columns

    @cached_property
    def _places(self) -> dict[int, int]:
        """Place of each slot in `slots`."""
        return {slot: place for place, slot in enumerate(self.slots.tolist())}

    def _stacked(self, items: Sequence[Tree]) -> Tree:
        try:
            return stack_trees(items)
        except ValueError:
            each = reversed(list(zip(self.slots.tolist(), items, strict=True)))
            shapes = {str(map_tree(np.shape, item)): slot for slot, item in each}
            text = ", ".join(f"{shape} (slot {slot})" for shape, slot in shapes.items())
            raise ColumnError(
                f"lane {self.lane.index}, column 'obs': connector pieces left observations of different shapes: {text}"
            ).see("piece") from None


class EndedEpisodes(LaneEpisodes):
    """The K episodes that a lane's last step has ended, with their last observations, until pieces have seen them.

    rows       i64[K]  rows of their last steps, or the one row of all
    starts     i64[N]  `episode_start` before the end
    numbers    i64[N]  `episode_number` before the end
    infos      vector infos of the last observations
    shown      slots that pieces see as ended; all at first
    """

    def __init__(
        self,
        lane: "SlotLane",
        slots: NDArray[np.int64],
        observations: Tree,
        rows: NDArray[np.int64] | int,
        starts: NDArray[np.int64],
        numbers: NDArray[np.int64],
        infos: Mapping[str, Any],
    ) -> None:
        super().__init__(lane, slots, observations, is_settled=False)
        self._is_written = True
        self.rows, self.starts, self.numbers, self.infos = rows, starts, numbers, infos
        self.shown = frozenset(slots.tolist())

    def shows(self, slot: int) -> bool:
        """True if the slot is shown as ended."""
        return slot in self.shown

    def settle(self, space: gym.Space[Any] | None) -> None:
        with suppress(ColumnError):  # different shapes: the next piece may make them equal, or `final` refuses them
            super().settle(space)

    def take(self, shown: LaneEpisodes) -> None:
        """Take the last observations as pieces have left them in `shown`, which may have ongoing episodes as well."""
        for slot in filter(self.shows, shown.slots.tolist()):
            self.set_observation(slot, shown.observation(slot))

    def repeat(self, column: Column) -> None:
        """Have the observations recorded before stand for the last ones, which pieces are not shown again."""
        self.is_repeated = True
        self.show(map_tree(lambda leaf: leaf[self.rows, self.slots], column.tree), is_settled=True)

    def final(self, column: Column) -> Final:
        """Record of the last observations, in the dtypes of their column. Raises ColumnError if they don't fit."""
        return Final(self.rows, self.slots, column.cast(column.whole(self.newest()), len(self)), self.infos)


def _read_only(leaf: NDArray[Any]) -> NDArray[Any]:
    view = leaf.view()
    view.flags.writeable = False
    return view


class _LiveColumn(LookbackBuffer):
    """Buffer over one slot's part of a column of the current fragment, from the lookback up to the lane's row."""

    def __init__(self, lane: "SlotLane", slot: int, name: str, space: gym.Space[Any] | None = None) -> None:
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
        return max(0, -self._lane.start_of(self._slot))

    @property
    def _whole(self) -> Column:
        return self._lane.fragment.columns[self._column]

    @property
    def _begin(self) -> int:
        return max(0, self._lane.start_of(self._slot))

    def total(self) -> int:
        return self._lane.row_of(self._slot) - self._begin

    def item(self, position: int) -> Any:
        row, slot = self._begin + position, self._slot
        return map_tree(lambda leaf: leaf[row, slot], self._whole.tree)

    def items(self, where: Any) -> Any:
        begin, slot = self._begin, self._slot
        rows = slice(where.start + begin, where.stop + begin) if isinstance(where, slice) else np.add(where, begin)
        return map_tree(lambda leaf: leaf[rows, slot], self._whole.tree)

    def write(self, position: int, item: Any) -> None:
        self._whole.write_slot(self._begin + position, self._slot, self._whole.whole(item))

    def write_several(self, positions: Sequence[int], items: Any) -> None:
        if self.is_numpy:  # checked together: a fraction is refused before the first item is written
            items = self._stacked(items) if isinstance(items, list) else items
            items = self._whole.whole(items)
        super().write_several(positions, items)


class _LiveObservations(_LiveColumn):
    """Buffer over one slot's observations: one more than steps, the last of which pieces may still rewrite."""

    def __init__(self, lane: "SlotLane", slot: int) -> None:
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
        return stack_trees(self.single_items(where))

    def write(self, position: int, item: Any) -> None:
        if position == self.total() - 1:
            self._lane.set_observation(self._slot, item)
        else:
            super().write(position, item)


class _LiveInfos(_LiveColumn):
    """Buffer over one slot's infos: one more than steps."""

    def __init__(self, lane: "SlotLane", slot: int) -> None:
        super().__init__(lane, slot, Columns.INFOS)

    @property
    def is_numpy(self) -> bool:
        return False

    def total(self) -> int:
        return super().total() + 1

    def item(self, position: int) -> Any:
        return info_of(self._lane.infos_at(self._begin + position, self._slot), self._slot)

    items = LookbackBuffer.single_items

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError("infos of a rollout's episode are read-only")
