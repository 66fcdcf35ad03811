"""Lane: slots that step together, and the fragment that they are filling.

One lane is one message in the ring. It always stands at a `row` of its fragment: that row has an observation, and its
action is yet to be computed. A vector step is

    record_actions(...)    write the module's actions into row `row`
    record_step(...)       write the environments' answer; `row` moves on by one
    episodes               connector pieces read the new row and may write it back
    episodes.settle(space) a piece's turn is over: what it wrote is in the dtypes of its space
    commit()               the row is final; a full fragment may now be cut

Pieces that rewrite observations may change the type of the `obs` column, in its first row. Each one is given what the
environment, or the piece before it, gave, in that one's own type.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.blocks import BlockLayout, BlockPool, PrivateBlock, SharedBlock
from rollflow.stream.data.column import Column, write_row
from rollflow.stream.data.columns import ONE_EACH, Columns
from rollflow.stream.data.errors import ColumnError, EnvError, more_than_one
from rollflow.stream.data.infos import SlotInfos, copied
from rollflow.stream.data.space import is_columnar, row_of
from rollflow.stream.data.tree import Tree, kind_of, leaves_of, map_tree
from rollflow.stream.fragments.fragment import RECORDED, Final, Fragment, FragmentLayout, Loss
from rollflow.stream.fragments.live_episode import EndedEpisodes, LaneEpisodes, LiveEpisode

F = TypeVar("F", bound=Fragment)
_BOOL = np.dtype(np.bool_)


class LaneBlocks:
    """Memory for columns of a lane that another process writes to.

    names    of the columns; without `actions` the environments get `actions_for_env` alone
    """

    def __init__(self, layout: BlockLayout, names: Sequence[str]) -> None:
        self.names = names
        self.pool = BlockPool(layout.size, SharedBlock)
        self.index = -1
        self.columns: dict[str, Column] = {}
        self._layout = layout

    def next_columns(self) -> dict[str, Column]:
        """Columns in a block of their own, which becomes the current one; the contents are undefined."""
        self.index, block = self.pool.take()
        self.columns = self._layout.columns(block)
        return {name: self.columns[name] for name in self.names}

    def observations(self, row: int) -> Tree:
        """Observations that the environments wrote for a row of the current block, a tree of arrays any[N, ...]."""
        return self.columns[Columns.OBS].row(row)


class LaneColumns:
    """Makes the columns of one fragment after the other; their memory is reused once nothing refers to it.

    memory       memory of the columns that another process writes to; None: there are none
    is_shared    whether columns of all fragments but the first lie in shared memory
    """

    def __init__(self, layout: FragmentLayout, memory: LaneBlocks | None, *, is_shared: bool = False) -> None:
        self._layout = layout
        self._memory = memory
        self._is_shared = is_shared
        self._rows = layout.lookback + layout.num_rows
        self._blocks: tuple[BlockLayout, BlockPool[Any]] | None = None  # of columns that are not in `memory`
        self._in_blocks: dict[str, Tree] = {}  # name -> dtypes and shapes of such a column
        self._made: list[Column] = []  # such columns, of the last fragment
        self._types: dict[int, tuple[gym.Space[Any], Column | None]] = {}

    def first(self, observation_space: gym.Space[Any]) -> dict[str, Column]:
        """The columns of the first fragment, without the extra outputs, whose types follow from the first step."""
        slots = self._layout.num_slots
        types: dict[str, Tree] = {
            Columns.ACTIONS: row_of(self._layout.action_space, slots),
            Columns.REWARDS: np.zeros(slots, np.float32),
            Columns.TERMINATEDS: np.zeros(slots, np.bool_),
            Columns.TRUNCATEDS: np.zeros(slots, np.bool_),
            Columns.POLICY_VERSION: np.zeros(slots, np.int64),
        }
        columns = {Columns.OBS: self.observations(observation_space)}
        columns |= {name: self._empty(name, row, self._rows) for name, row in types.items()}
        return columns if self._memory is None else columns | self._memory.next_columns()

    def observations(self, space: gym.Space[Any]) -> Column:
        """A new column for observations in a space."""
        return self._empty(Columns.OBS, row_of(space, self._layout.num_slots), self._rows + 1)

    def refusal(
        self, error: ColumnError, declared: gym.Space[Any] | None, observations: Tree, count: int
    ) -> ColumnError:
        """The error for observations, a tree of arrays `any[count, ...]`, that pieces left and the column refused.

        error       the column's own
        declared    the space that the pieces have declared, if the column has another since they fit none; else None
        """
        text = None if declared is None else self.observations(declared).mismatch(observations, count)
        refusal = ColumnError(text or str(error))
        refusal.add_note(
            "connector pieces wrote these observations into the episodes; a piece that changes their shape or dtype "
            "says so by recompute_output_observation_space"
        )
        return refusal

    def type_of(self, space: gym.Space[Any]) -> Column | None:
        """A column for observations in a space that has no rows, to convert others by; None: the space has no columns.

        It is made once for each space.
        """
        known = self._types.get(id(space))
        if known is None:
            row = row_of(space, self._layout.num_slots) if is_columnar(space) else None
            made = None if row is None else self._empty(Columns.OBS, row, 0)
            known = self._types[id(space)] = space, made
        return known[1]

    def fits(self, space: gym.Space[Any], observations: Tree, count: int) -> bool:
        """True if a column for a space takes observations, a tree of arrays `any[count, ...]`."""
        column = self.type_of(space)
        return column is not None and column.mismatch(observations, count) is None

    def fitting(self, space: gym.Space[Any], observations: Tree, count: int) -> Tree | None:
        """Observations any[count, ...] as a column for a space takes them; None if it does not."""
        column = self.type_of(space)
        return None if column is None else column.fitting(observations, count)

    def cast(self, space: gym.Space[Any], observations: Tree, count: int) -> Tree:
        """Observations any[count, ...] that fit a space, in its dtypes."""
        column = self.type_of(space)
        assert column is not None
        return column.cast(observations, count)

    def extra(self, name: str, values: Tree) -> Column:
        """A new column for an output with `values`, a tree of arrays `any[N, ...]`. Raises ColumnError for others."""
        slots = self._layout.num_slots
        row = map_tree(np.asarray, values)
        for leaf in leaves_of(row):
            if leaf.shape[:1] != (slots,) or leaf.dtype.hasobject:
                raise ColumnError(
                    f"output '{name}' is {leaf.dtype}{list(leaf.shape)}, expected numbers with a leading axis of "
                    f"{slots}, one row per slot"
                ).see("module")
            if name in ONE_EACH and leaf.ndim > 1:
                raise ColumnError(more_than_one(name, leaf.shape, (slots,))).see("module")
        return self._empty(name, row, self._rows)

    def like(self, old: Mapping[str, Column], *, are_written: bool) -> dict[str, Column]:
        """The columns of the next fragment, with the types of the last one's.

        are_written    whether environments write observations straight into their column
        """
        columns = {} if self._memory is None else self._memory.next_columns()
        if not are_written:
            columns.pop(Columns.OBS, None)  # pieces rewrite observations: these are of another type
        rest = {name: column for name, column in old.items() if name not in columns}
        # Types change with the first step, which adds outputs and may retype observations: these are other columns.
        if self._made != list(rest.values()):
            rows = {name: (column.row(0), len(column)) for name, column in rest.items()}
            kinds = {name: kind_of(row) for name, (row, _) in rows.items()}
            if self._blocks is None or self._in_blocks != kinds:
                self._in_blocks = kinds
                layout = BlockLayout(rows)
                self._blocks = layout, BlockPool(layout.size, SharedBlock if self._is_shared else PrivateBlock)
        assert self._blocks is not None
        layout, pool = self._blocks
        made = layout.columns(pool.take()[1])
        self._made = [made[name] for name in rest]
        columns |= made
        return {name: columns[name] for name in old}

    def _empty(self, name: str, row: Tree, rows: int) -> Column:
        """A new column with zeros; the lookback is never written in the first fragment."""
        return Column(name, map_tree(lambda leaf: np.zeros((rows, *leaf.shape), leaf.dtype), row))


def outputs_error(whose: str, expected: Iterable[str], outputs: Mapping[str, Tree]) -> ColumnError:
    """The error for a step's outputs that have other names than `actions` and those expected."""
    names = {Columns.ACTIONS, *expected}
    missing, new = sorted(names - set(outputs)), sorted(set(outputs) - names)
    return ColumnError(
        f"{whose} changed between steps: missing {missing}, new {new}; every step must give {sorted(names)}"
    )


class SlotLane:
    """Slots of a lane that have the same spaces, and the fragment that they are filling.

        index, layout         number of the lane, and layout of the fragments
        columns               makes the fragments' columns
        everyone              i64[N] all slots
        episode_start         i64[N] row of the first observation of the slot's episode
        episode_number        i64[N] number of episodes that the slot had before
        custom_data           (slot, number of its episode) -> data that pieces keep with the episode
        observation_space     of the `obs` column
        observation_spaces    spaces that observations may be in after pieces rewrite them, the environments' first
        num_steps             transitions recorded since the first reset
        ended                 episodes that ended in the last step, while pieces have not seen their last observations
        shown                 episodes that pieces are working on; None: pieces are not at work

    Raises ColumnError whenever an array does not fit its column.
    """

    device: Any = None  # of the columns' tensors; None: they are arrays
    whose = ""  # the agents, as errors name them
    fragment: Fragment
    shown: LaneEpisodes | None

    def __init__(
        self, index: int, layout: FragmentLayout, observation_space: gym.Space[Any], columns: LaneColumns
    ) -> None:
        self.index, self.layout, self.columns = index, layout, columns
        self.everyone = np.arange(layout.num_slots)
        self.episode_start, self.episode_number = self._of_each(layout.lookback), self._of_each(0)
        self.custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        self.observation_space = observation_space
        self.observation_spaces: Sequence[gym.Space[Any]] = (observation_space,)
        self.num_steps = 0
        self.ended: EndedEpisodes | None = None
        self._live: dict[int, LiveEpisode] = {}
        self._typing = True  # until the first step the obs column may take another type

    def rows_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """The rows i64[K] of slots' newest observations, or the one row where all slots stand."""
        raise NotImplementedError

    def row_of(self, slot: int) -> int:
        """The row of a slot's newest observation."""
        raise NotImplementedError

    def parent_of(self, slot: int) -> str | None:
        """The id of the multi-agent episode that the episode of a slot is a part of; None: of none."""
        return None

    def named(self, slots: Sequence[int]) -> str:
        """A text of some slots, for errors."""
        return f"slot {', '.join(map(str, slots))}"

    def record_states(self, slots: NDArray[np.int64], states: Tree) -> None:
        """Keep the states, any[K, ...], before the next steps of slots, i64[K], whose episodes begin with these."""
        rows = np.broadcast_to(self.rows_of(slots), slots.shape)
        self.fragment.record_starts(rows, slots, states)

    # Reading and writing by connector pieces

    def live(self, slot: int) -> LiveEpisode:
        """The episode that a slot shows, always the same object."""
        made = self._live.get(slot)
        if made is None:
            made = self._live[slot] = LiveEpisode(self, slot)
        return made

    def starts_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """i64[K]: rows of the first observations of the episodes that slots, i64[K], show."""
        starts = self.episode_start if self.ended is None else self.ended.starts
        return starts if len(slots) == len(starts) else starts[slots]

    def start_of(self, slot: int) -> int:
        """The row of the first observation of the episode that a slot shows."""
        ended = self._ended_with(slot)
        return int((self.episode_start if ended is None else ended.starts)[slot])

    def number_of(self, slot: int) -> int:
        """The number of episodes that a slot had before the one that it shows."""
        ended = self._ended_with(slot)
        return int((self.episode_number if ended is None else ended.numbers)[slot])

    def has_ended(self, slot: int) -> bool:
        """True if the episode that the slot shows ended with the last step."""
        return self._ended_with(slot) is not None

    def infos_at(self, row: int, slot: int) -> Mapping[str, Any]:
        """The vector infos that go with an observation of the episode that the slot shows."""
        ended = self._ended_with(slot)
        return self.fragment.infos[row] if ended is None or row != self.row_of(slot) else ended.infos

    def shown_with(self, slot: int) -> LaneEpisodes | None:
        """The episodes that pieces are working on, if the slot's is one of them."""
        shown = self.shown
        return shown if shown is not None and shown.shows(slot) else None

    def observation(self, slot: int) -> Tree:
        """The newest observation of one slot, any[...]; if its episode has just ended, the last one."""
        shown = self.shown_with(slot)
        if shown is not None:
            return shown.observation(slot)
        row = self.row_of(slot)
        return map_tree(lambda leaf: leaf[row, slot], self._column.tree)

    def set_observation(self, slot: int, observation: Tree) -> None:
        """Replace the newest observation of one slot, any[...]; if its episode has just ended, the last one."""
        shown = self.shown_with(slot)
        if shown is not None:
            shown.set_observation(slot, observation)
        else:
            self._column.write_slot(self.row_of(slot), slot, self._column.whole(observation))

    def is_settled(self, slot: int) -> bool:
        """True if the slot's newest observation is in the column."""
        shown = self.shown_with(slot)
        return shown is None or shown.is_settled

    def settle(self, space: gym.Space[Any] | None) -> None:
        """End the turn of a connector piece: see `LaneEpisodes.settle`."""
        if self.shown is not None:
            self.shown.settle(space)

    def convert(self, shown: LaneEpisodes, space: gym.Space[Any], fitting: Tree, *, is_written: bool) -> None:
        """Have episodes show observations in the dtypes of a space.

        fitting       the observations as a column for the space takes them, any[K, ...]
        is_written    whether the piece with this space has written them
        """
        shown.show(self.columns.cast(space, fitting, len(shown)), is_settled=False, dtypes_of=space)

    def try_record(self, slot: int, observation: Tree) -> bool:
        """Record an observation, any[...], in the place of a newest one that is settled; False: it can't be."""
        return False

    def commit_ended(self) -> None:
        """End the connector pieces' turn on the episodes that ended in the last step."""
        ended, self.ended = self.ended, None
        if ended is not None:
            self.fragment.finals.append(ended.final(self._column))

    def release(self) -> None:
        """Release all memory: no more steps are made. Drops the unfinished fragment, and the live episodes over it."""
        self.fragment.columns.clear()
        self.layout.spare.clear()
        self.columns, self.ended = LaneColumns(self.layout, None), None
        self._live.clear()

    # Inside

    def _infos_in(self, fragment: Fragment, row: int) -> SlotInfos:
        """The infos of a fragment's row, slot by slot."""
        there = fragment.infos[row]
        if not isinstance(there, SlotInfos):
            there = fragment.infos[row] = SlotInfos(count=self.layout.num_slots)
        return there

    def _copy_infos(self, new: Fragment, stops: NDArray[np.int64]) -> None:
        """Copy infos of the last H rows before `stops`, i64[N], and at these, into the first rows of a fragment."""
        lookback = self.layout.lookback
        first = int(stops.min()) - lookback
        for row, infos in enumerate(self.fragment.infos[first:], first):
            for slot, info in infos.of_slots.items() if isinstance(infos, SlotInfos) else ():
                if 0 <= (to := row - int(stops[slot]) + lookback) <= lookback:
                    self._infos_in(new, to).of_slots[slot] = info

    def _of_each(self, number: int) -> Any:
        """A number for each slot, i64[N]."""
        return np.full(self.layout.num_slots, number)

    @property
    def layouts(self) -> list[FragmentLayout]:
        """The layout of its fragments, alone."""
        return [self.layout]

    @property
    def _column(self) -> Column:
        return self.fragment.columns[Columns.OBS]

    def _ended_with(self, slot: int) -> EndedEpisodes | None:
        """The episodes that ended in the last step, if the slot shows one of them."""
        return self.ended if self.ended is not None and self.ended.shows(slot) else None

    def _record(self, shown: LaneEpisodes) -> None:
        """Record the observations that pieces have left in episodes.

        Before the first step the column takes the type of the space of the last piece that has written, or else of the
        last one of `observation_spaces` that they fit.
        """
        observations, declared = shown.newest(), None
        if self._typing:
            declared = self.observation_spaces[-1]
            spaces = (shown.space, *reversed(self.observation_spaces))
            fit = (each for each in spaces if each is not None and self.columns.fits(each, observations, len(shown)))
            self._retype(next(fit, self.observation_space))
        try:
            self._write(self._column, shown.slots, self._column.whole(observations))
        except ColumnError as error:
            raise self.columns.refusal(error, declared, observations, len(shown)) from None

    def _write(self, column: Column, slots: NDArray[np.int64], values: Tree) -> None:
        """Write values, any[K, ...], of slots' newest rows."""
        raise NotImplementedError

    def _retype(self, space: gym.Space[Any]) -> None:
        """Give the `obs` column the type of a space."""
        if space is not self.observation_space:
            self.observation_space = space
            self.fragment.columns[Columns.OBS] = self.columns.observations(space)

    def _fragment(self, sequence: int, columns: dict[str, Column], kind: type[F], **more: Any) -> F:
        """A new fragment that is filled next, of a class with some further arguments."""
        begun = self.episode_start.copy(), self.episode_number.copy()
        return kind(self.layout, self.index, sequence, columns, *begun, **more)

    def _take_rows(self, columns: Mapping[str, Tree], space: gym.Space[Any]) -> None:
        """Take the first rows of the fragment, with observations in a space: name -> tree of arrays any[n, N, ...]."""
        self._retype(space)
        self._typing = False
        for name, rows in columns.items():
            if name not in self.fragment.columns:
                like = map_tree(lambda leaf: leaf[:1].sum(0, dtype=leaf.dtype), rows)  # there may be no row
                self.fragment.columns[name] = self.columns.extra(name, like)
            self.fragment.columns[name].copy_rows(Column(name, rows), 0, len(leaves_of(rows)[0]))

    def _end_lost(self, slots: NDArray[np.int64], reason: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """End the episodes of slots, i64[K], with their newest observations: their environments were lost.

        Those that have a step in this fragment end as truncated. Returns these, i64[C], and their last steps' rows.
        """
        at, fragment = self.rows_of(slots), self.fragment
        rows = np.broadcast_to(at, slots.shape)
        has_step = np.maximum(self.episode_start[slots], fragment.first_row) < rows
        cut, ends = slots[has_step], rows[has_step] - 1
        fragment.columns[Columns.TRUNCATEDS].tree[ends, cut] = True
        # The first observations and infos of the next episodes will overwrite these.
        infos: Any = SlotInfos(count=self.layout.num_slots)
        if isinstance(at, int):
            infos, fragment.infos[at] = fragment.infos[at], infos
        for slot, row in () if isinstance(at, int) else zip(slots.tolist(), rows.tolist(), strict=True):
            there = fragment.infos[row]
            if isinstance(there, SlotInfos) and slot in there.of_slots:
                infos.of_slots[slot] = there.of_slots.pop(slot)
        if len(cut):
            fragment.finals.append(Final(ends, cut, self._column.items(ends + 1, cut), infos))
        for row in np.unique(rows).tolist():
            fragment.losses.append(Loss(row, slots[rows == row], cut[ends == row - 1], reason))
        for slot in cut.tolist():
            self.custom_data.setdefault((slot, int(self.episode_number[slot])), {})["lost"] = reason
        return cut, ends

    def _next(self, stops: Any, kind: type[F], **more: Any) -> tuple[F, Any]:
        """Begin the next fragment with the last H rows before `stops`, i64[N] or one of all slots, and those.

        A slot whose step is under way has its action there. Returns also the rows: an index of arrays [row, slot, ...].
        """
        old, lookback, back = self.fragment, self.layout.lookback, np.arange(-self.layout.lookback, 1)
        rows = (stops + back[:, None], self.everyone) if isinstance(stops, np.ndarray) else (stops + back,)
        self.episode_start -= stops - lookback
        new = self._fragment(old.sequence + 1, self.columns.like(old.columns, are_written=True), kind, **more)
        for name, column in new.columns.items():
            copy_rows(column.tree, old.columns[name].tree, rows)
            begin = lookback + (name not in (Columns.TERMINATEDS, Columns.TRUNCATEDS))
            for leaf in (each for each in leaves_of(column.tree) if each.dtype == np.bool_):
                leaf[begin:] = False  # what nobody writes is no end, nor a bool
        of_each = np.broadcast_to(stops, self.everyone.shape)
        self._copy_infos(new, of_each)
        self._hand_on(new, of_each)
        return new, rows

    def _hand_on(self, new: Fragment, stops: NDArray[np.int64]) -> None:
        """Begin the fragment `new` with what goes on from this one, whose slots end at the rows `stops`, i64[N]."""
        old, number = self.fragment, self.episode_number.tolist()
        old.observation_space = new.observation_space = self.observation_space
        old.custom_data = copy.deepcopy(self.custom_data)
        self.custom_data = {key: data for key, data in self.custom_data.items() if key[1] == number[key[0]]}
        old.hand_on_starts(new, stops, stops - self.layout.lookback)
        self.fragment = new


class Lane(SlotLane):
    """The N slots of one lane of environments with one agent each, all in one row.

    memory           memory of columns that another process writes to; None: this lane writes all
    is_shared        whether columns of all fragments but the first lie in shared memory

    row              row of the current observation, H … H+T
    at_start         True if the next vector step is the first of a fragment
    is_full          True if the fragment has its T vector steps
    is_first         True until outputs of the module have been recorded
    policy_version   version of the weights that the last forward pass used
    episodes         the slots' episodes
    batch            data between the stages: column name -> tree of arrays `any[N, ...]`, or a part of the
                     outputs of one forward pass over several lanes
    actions          that the environments are stepped with next, `any[N, ...]`
    shared_data      data between connector pieces, from env-to-module to module-to-env
    vector_steps     vector steps since the first reset
    first_step       vector steps that the run had made when this lane began
    is_set_aside     whether the environments are gone for good: the lane makes no further step
    has_stopped      whether no more actions are sent: what was under way has come, and is only to be recorded
    is_restored      whether it goes on from another one: its batch is made
    """

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        observation_space: gym.Space[Any],
        memory: LaneBlocks | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(index, layout, observation_space, self._new_columns(layout, memory, is_shared=is_shared))
        self.memory = memory
        self.policy_version = self._version_written = 0
        self._shape = (layout.num_slots,)
        self.row = layout.lookback
        self._last_row = layout.lookback + layout.num_rows  # the fragment is cut here
        self.at_start, self.is_full = True, False
        self._dead: NDArray[np.bool_] | None = None  # slots whose next step only resets them
        self._outputs: Set[str] | None = None  # names of what the module's stages give at every step
        self.is_first = True
        self.fragment = self._fragment(0, self.columns.first(observation_space), Fragment)
        self.batch: Any = {}
        self.actions: Tree = None
        self.shared_data: dict[str, Any] = {}
        self.vector_steps = self.first_step = 0
        self.is_set_aside = self.has_stopped = self.is_restored = False
        self.episodes = self._new_episodes(None)

    def _new_columns(self, layout: FragmentLayout, memory: LaneBlocks | None, *, is_shared: bool) -> LaneColumns:
        """What makes the columns of this lane's fragments."""
        return LaneColumns(layout, memory, is_shared=is_shared)

    def _new_episodes(self, observations: Tree) -> LaneEpisodes:
        """The episodes of all slots, which show observations, any[N, ...]."""
        return LaneEpisodes(self, self.everyone, observations, is_settled=False)

    @property
    def step(self) -> int:
        """The run's vector step that the lane stands at, by which schedules go."""
        return self.first_step + self.vector_steps

    @property
    def where(self) -> str:
        """The lane and its vector step, for errors."""
        return f"lane {self.index}, vector step {self.vector_steps}"

    @property
    def has_begun_again(self) -> bool:
        """True if a slot's first episode was followed by another."""
        return bool(self.episode_number.any())

    @property
    def sequence(self) -> int:
        """Number of the current fragment."""
        return self.fragment.sequence

    @property
    def num_rows(self) -> int:
        """Vector steps of the current fragment so far."""
        return self.row - self.layout.lookback

    @property
    def steps_under_way(self) -> int:
        """Number of transitions that the next vector step makes."""
        return self.layout.num_slots - (0 if self._dead is None else int(np.count_nonzero(self._dead)))

    # Recording

    def reset(self, observations: Tree, infos: Mapping[str, Any]) -> None:
        """Take the first observations: a tree of arrays `any[N, ...]`, and gymnasium's vector infos."""
        self.fragment.infos[self.row] = copied(infos)
        self._take_observations(observations)

    def record_actions(self, outputs: Mapping[str, Tree]) -> None:
        """Write `actions` and every extra output, trees of arrays `any[N, ...]`, into the current row.

        The first call fixes the names and types of the extra outputs; `policy_version` is added to them.
        """
        columns, row = self.fragment.columns, self.row
        if outputs.keys() != self._outputs:
            self._take_outputs(outputs)
        write_row(columns, row, outputs)
        if self.policy_version != self._version_written or self.at_start:
            # Later rows are written too: versions change seldom.
            columns[Columns.POLICY_VERSION].tree[row:] = self._version_written = self.policy_version

    def record_step(
        self,
        observations: Tree,
        rewards: NDArray[Any],
        terminateds: NDArray[np.bool_],
        truncateds: NDArray[np.bool_],
        infos: Mapping[str, Any],
        final: tuple[Tree, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the results of one vector step, and move on to the next row.

        observations               any[N, ...]  a tree; after an end as the autoreset mode defines it
        rewards                    number[N]
        terminateds, truncateds    bool[N]
        infos                      gymnasium's vector form
        final                      last observations any[K, ...] of the K slots that ended, in new arrays, and their
                                   infos, if `observations` already has the next episodes' first
        """
        columns, row, shape, done = self.fragment.columns, self.row, self._shape, None
        if (
            type(terminateds) is type(truncateds) is np.ndarray
            and terminateds.dtype is _BOOL is truncateds.dtype
            and terminateds.shape == shape == truncateds.shape
            # To look for a 1 in the bytes takes a fifth of the time that numpy takes to join the flags and to look.
            and 1 not in terminateds.tobytes()
            and 1 not in truncateds.tobytes()
        ):
            write_row(columns, row, {Columns.REWARDS: rewards})  # flags are False before
        else:
            answer = {Columns.REWARDS: rewards, Columns.TERMINATEDS: terminateds, Columns.TRUNCATEDS: truncateds}
            write_row(columns, row, answer)
            done = self._ends(row)
        if final is not None:
            final = final[0], copied(final[1])
        self._advance(copied(infos) if infos else {}, final, done)
        self._take_observations(observations)

    def replace_action(self, slot: int, action: Tree) -> None:
        """Record that a slot's environment took another action, any[...], than the current row's.

        Its log-probability is NaN: the policy did not choose it. Raises ColumnError if it does not fit the column.
        """
        columns, row = self.fragment.columns, self.row
        columns[Columns.ACTIONS].write_slot(row, slot, action)
        if Columns.ACTION_LOGP in columns:
            columns[Columns.ACTION_LOGP].tree[row, slot] = np.nan

    def take_step(self, infos: Mapping[str, Any], final: tuple[Tree, Mapping[str, Any]] | None = None) -> None:
        """Move on over a vector step whose results another process has written into the columns of `memory`.

        `infos` and `final` are as for `record_step`.
        """
        self._advance(infos, final, self._ends(self.row))
        self._take_written_observations()

    def take_reset(self, infos: Mapping[str, Any]) -> None:
        """Take first observations that another process has written."""
        self.fragment.infos[self.row] = infos
        self._take_written_observations()

    def lose(self, reason: str, *, is_under_way: bool = True) -> int:
        """End every open episode: the environments were lost.

        is_under_way    whether they were making the current row's step

        An episode that has a step in this fragment ends as truncated, with `reason` in its chunk's
        `custom_data["lost"]`. `fragment.losses` gets an entry. New episodes begin in the current row, whose
        observations come by `reset`. Returns the number of transitions under way.
        """
        row, fragment, dead = self.row, self.fragment, self._dead
        under_way = self.steps_under_way if is_under_way else 0
        if dead is not None:
            slots = dead.nonzero()[0]
            if row > fragment.first_row:  # the first observations of the new episodes will overwrite the last ones
                last = self._column.items(row, slots)
                fragment.finals.append(Final(row - 1, slots, last, fragment.infos[row]))
            self._begin_episodes(slots, row)  # which are lost before their first step
            self._dead = None
        self._end_lost(self.everyone, reason)
        self._column.views = None  # of a row that is shown again
        self._begin_episodes(self.everyone, row)
        return under_way

    def _ends(self, row: int) -> NDArray[np.bool_] | None:
        """bool[N]: the slots whose episodes end in a row; None: no slot's does."""
        columns = self.fragment.columns
        done = columns[Columns.TERMINATEDS].tree[row] | columns[Columns.TRUNCATEDS].tree[row]
        return done if 1 in done.tobytes() else None

    def _advance(
        self,
        infos: Mapping[str, Any],
        final: tuple[Tree, Mapping[str, Any]] | None,
        done: NDArray[np.bool_] | None,
    ) -> None:
        """Move on to the next row. `done` has the ends, bool[N]; None: there are none."""
        row = self.row
        self.row = following = row + 1
        self.num_steps += self.layout.num_slots
        self.vector_steps += 1
        if self.at_start:
            self.at_start = self._typing = False
        if following == self._last_row:
            self.is_full = True
        self.fragment.infos[following] = infos
        if self._dead is not None:
            done = self._wake(self._dead, done, row)
        if done is not None:
            if final is None:
                self._dead = done
            else:
                last, last_infos = final
                before = self.episode_start, self.episode_number
                self.ended = EndedEpisodes(self, done.nonzero()[0], last, row, *before, last_infos)

    # Reading and writing by connector pieces

    @property
    def shown(self) -> LaneEpisodes:  # type: ignore[override]
        """The episodes that pieces are working on: those that ended in the last step come first."""
        return self.episodes if self.ended is None else self.ended

    def shown_with(self, slot: int) -> LaneEpisodes:
        return self.episodes if self.ended is None or not self.ended.shows(slot) else self.ended

    def rows_of(self, slots: NDArray[np.int64]) -> int:
        return self.row

    def row_of(self, slot: int) -> int:
        return self.row

    def has_ended(self, slot: int) -> bool:
        return super().has_ended(slot) or (self._dead is not None and bool(self._dead[slot]))

    def convert(self, shown: LaneEpisodes, space: gym.Space[Any], fitting: Tree, *, is_written: bool) -> None:
        if shown is self.episodes and is_written and self._typing:
            self._retype(space)
        if shown is self.episodes and space is self.observation_space:
            self._write(self._column, shown.slots, fitting)
        else:
            super().convert(shown, space, fitting, is_written=is_written)

    def try_record(self, slot: int, observation: Tree) -> bool:
        return not self._typing and self._column.try_write_slot(self.row, slot, observation)

    def commit(self) -> None:
        """End the connector pieces' turn: the current row is final. Later rows must fit its type."""
        if not self.episodes.is_settled:
            self._record(self.episodes)

    def commit_ended(self) -> None:
        ended = self.ended
        super().commit_ended()
        if ended is not None:
            self._begin_episodes(ended.slots, self.rows_of(ended.slots))

    # A lane that goes on from another one's state

    @property
    def dead(self) -> NDArray[np.bool_]:
        """bool[N]: slots whose next step only resets them."""
        return np.zeros(self._shape, np.bool_) if self._dead is None else self._dead.copy()

    def go_on(self, columns: Mapping[str, Tree], space: int, num_rows: int, ended: NDArray[np.int64]) -> None:
        """Stand behind so many steps of the fragment, before the first step of this lane.

        columns    of the fragment so far, with its lookback: name -> tree of arrays any[n, N, ...]
        space      number of the space of observations
        ended      i64[K] slots whose next step only resets them
        """
        self._take_rows(columns, self.observation_spaces[space])
        outputs = columns.keys() - {*RECORDED, Columns.OBS, Columns.POLICY_VERSION}
        self._outputs = outputs | {Columns.ACTIONS} if outputs else None  # before its first step it had none
        self.row, self.at_start = self.layout.lookback + num_rows, not num_rows
        self._version_written = -1  # the rows that come have none
        if len(ended):
            self._dead = np.isin(self.everyone, ended)
        self.is_restored = True
        self.episodes.show_row(self._column, self.row)

    def begin_anew(self, reason: str) -> None:
        """End the open episodes of a lane that was to go on, and can't."""
        self.lose(reason, is_under_way=False)
        self.is_restored = False

    # Fragments

    def cut(self) -> Fragment:
        """Return the fragment, read-only, and begin the next one with the last H rows as its lookback."""
        old, lookback = self.fragment, self.layout.lookback
        rows = self.row - lookback  # steps made, and the row at which the last H rows begin
        columns = self.columns.like(old.columns, are_written=self.observation_space is self.observation_spaces[0])
        for name, column in columns.items():
            column.copy_rows(old.columns[name], rows, self.row + (name == Columns.OBS))
        if self.memory is None:
            columns[Columns.TERMINATEDS].tree[lookback:] = columns[Columns.TRUNCATEDS].tree[lookback:] = False
        self.episode_start -= rows
        new = self._fragment(old.sequence + 1, columns, Fragment)
        if self._dead is not None:
            new.episode_start[self._dead] = lookback + 1
            new.episode_number[self._dead] += 1
        new.infos[: lookback + 1] = old.infos[rows : self.row + 1]
        self._hand_on(new, np.full(self.layout.num_slots, self.row))
        old.seal(rows)
        self.row, self.at_start, self.is_full = lookback, True, False
        self.episodes.show_row(self._column, self.row)
        return old

    def leave(self) -> Fragment:
        """Return the last fragment, and release all memory: no more steps are made."""
        last = self.cut()
        self.release()
        return last

    def release(self) -> None:
        super().release()
        self.fragment.infos.clear()
        self.fragment.finals.clear()
        self.memory = None
        self.batch, self.actions, self.shared_data = {}, None, {}
        vars(self).pop("episodes", None)  # which refer to the lane

    # Inside

    def _take_outputs(self, outputs: Mapping[str, Tree]) -> None:
        """Add columns for the first outputs. Raises ColumnError for others than these later, and without actions."""
        if self._outputs is None:
            self._add_extra_columns(outputs)
        if outputs.keys() != self._outputs:
            raise outputs_error(f"lane {self.index}: the outputs", self._outputs or (), outputs)

    def _add_extra_columns(self, outputs: Mapping[str, Tree]) -> None:
        self._outputs, self.is_first = {Columns.ACTIONS, *outputs}, False
        for name in (name for name in outputs if name != Columns.ACTIONS):
            try:
                self.fragment.columns[name] = self.columns.extra(name, outputs[name])
            except ColumnError as error:
                raise ColumnError(f"lane {self.index}: {error}") from None

    def _take_written_observations(self) -> None:
        assert self.memory is not None
        if self.observation_space is self.observation_spaces[0]:
            self.episodes.show_row(self._column, self.row)
        else:
            self.episodes.show(self.memory.observations(self.row), is_settled=False)

    def _take_observations(self, observations: Tree) -> None:
        if self.observation_space is self.observation_spaces[0]:
            row, columns = self.row, self.fragment.columns
            write_row(columns, row, {Columns.OBS: observations})
            self.episodes.show_row(columns[Columns.OBS], row)
        else:
            given = self.columns.cast(self.observation_spaces[0], observations, self.layout.num_slots)
            self.episodes.show(given, is_settled=False)

    def _write(self, column: Column, slots: NDArray[np.int64], values: Tree) -> None:
        """Write the current row of the `obs` column."""
        column.write(self.row, values)
        self.episodes.show_row(column, self.row)

    def _wake(self, dead: NDArray[np.bool_], done: NDArray[np.bool_] | None, row: int) -> NDArray[np.bool_] | None:
        """Take `row` as a mere reset of the slots `dead`, bool[N]: no transition, and no end.

        Returns the ends `done`, bool[N], of the others; None: there are none.
        """
        slots = dead.nonzero()[0]
        if done is not None and 1 in done[slots].tobytes():
            for name in (Columns.TERMINATEDS, Columns.TRUNCATEDS):
                self.fragment.columns[name].tree[row, slots] = False
            done[slots] = False
        rewards = self.fragment.columns[Columns.REWARDS].tree[row][slots]
        check_reset_rewards(slots, rewards)
        self.num_steps -= len(slots)
        self.episode_start[slots] = row + 1
        self.episode_number += dead
        self._dead = None
        return done if done is not None and 1 in done.tobytes() else None

    def _begin_episodes(self, slots: NDArray[np.int64], rows: NDArray[np.int64] | int) -> None:
        self.episode_start[slots] = rows
        self.episode_number[slots] += 1


def copy_rows(new: Tree, old: Tree, rows: tuple[NDArray[np.int64], ...]) -> None:
    """Copy rows of `old`, a tree of arrays `any[n, N, ...]`, to the first rows of `new`.

    rows    i64[R, N] and the slots, i64[N], or i64[R] alone: of all slots the same
    """
    row, *slots = rows
    for leaf, source in zip(leaves_of(new), leaves_of(old), strict=True):
        leaf[: len(row)] = source[(np.minimum(row, len(source) - 1), *slots)]


def check_reset_rewards(slots: NDArray[np.int64], rewards: NDArray[Any]) -> None:
    """Raise EnvError if slots, i64[K], have a reward, number[K], of a step that was to be a mere reset."""
    if rewards.tobytes().strip(b"\0") and np.count_nonzero(rewards):
        place = int(rewards.nonzero()[0][0])
        raise EnvError(
            f"slot {slots[place]} gave a reward of {rewards[place]:g} in the step after the end of its episode, "
            "which under NEXT_STEP autoreset is a mere reset, with a reward of 0: its environment resets in the "
            "step that ends an episode; expected the mode SAME_STEP, with last observations in infos['final_obs']"
        ).see("autoreset")
