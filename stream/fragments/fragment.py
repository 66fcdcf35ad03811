"""A fragment: T vector steps of one lane, in time-major columns; the unit that leaves a rollout.

Rows are counted over the whole column. With a lookback of H rows, N slots and T vector steps:

    row          0 … H-1          H … H+T-1                         H+T
    obs          the last H of    observation before step           observation after
                 the fragment     row - H                           the last step
                 before
    all others   the same         what step row - H did             (no such row)

A transition is (obs[row], actions[row], rewards[row], obs[row + 1]). Under gymnasium's SAME_STEP and DISABLED modes the
last observation of an episode is in `finals`: obs[row + 1] is the next episode's first. Under NEXT_STEP the row after
an end only resets: it is *dead*, no transition.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.blocks import SpareMemory
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.infos import copied
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.data.tree import Tree, concatenate_trees, kind_of, map_tree, tree_at
from rollflow.stream.episodes.buffer import BufferAndOne, InfosWindow, LookbackBuffer
from rollflow.stream.episodes.single_agent import REWARD_SPACE, SealedEpisode, SingleAgentEpisode
from rollflow.stream.observe.svg import array_table


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """Properties that all fragments of a lane share."""

    num_slots: int
    num_rows: int  # T
    lookback: int  # H
    action_space: gym.Space[Any]
    resets_next_step: bool  # a dead row follows each episode's end
    episode_id: Callable[[int, int], str]  # (slot, how many episodes the slot had before) -> id
    spare: SpareMemory = field(default_factory=SpareMemory, repr=False, compare=False)  # of what is gathered


@dataclass(frozen=True, slots=True, eq=False)
class ChunkIndex:
    """Positions of a fragment's C chunks, none of them empty: slot by slot, within a slot by time."""

    slot: NDArray[np.int64]  # i64[C]
    number: NDArray[np.int64]  # i64[C]  how many episodes the slot had before this one
    start: NDArray[np.int64]  # i64[C]  row of the first transition
    stop: NDArray[np.int64]  # i64[C]  row after the last transition
    t_started: NDArray[np.int64]  # i64[C]  episode steps before `start`
    lookback: NDArray[np.int64]  # i64[C]  rows before `start` that belong to the same episode, at most H
    terminated: NDArray[np.bool_]  # bool[C]
    truncated: NDArray[np.bool_]  # bool[C]


@dataclass(frozen=True, slots=True, eq=False)
class Final:
    """Last observations and infos of K episodes that have ended, if obs[row + 1] lacks them."""

    rows: NDArray[np.int64] | int  # i64[K] of the last steps, or the one row of all
    slots: NDArray[np.int64]  # i64[K]
    observations: Tree  # any[K, ...]
    infos: Mapping[str, Any]  # gymnasium's vector form, over all slots

    def keys(self) -> list[tuple[int, int]]:
        """Row and slot of each episode."""
        rows = np.broadcast_to(self.rows, self.slots.shape)
        return list(zip(rows.tolist(), self.slots.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """Loss of environments while they made the step of a row. New episodes begin in that row.

    An episode whose last step came before the fragment has no chunk here to mark as truncated. It ends with the chunk
    in the fragment before.
    """

    row: int
    slots: NDArray[np.int64]  # i64[K]
    cut: NDArray[np.int64]  # i64[C]  slots that made a step in the fragment before: that step is marked as truncated
    reason: str


@dataclass(frozen=True, slots=True)
class EpisodeIds:
    """Ids of a lane's episodes: unique to the run, and the same in every run with one seed.

    prefix    of this lane and no other
    """

    prefix: str
    _begun: Any = field(init=False, repr=False, compare=False)  # hash of what they all begin with

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begun", hashlib.blake2b(f"{self.prefix}/".encode(), digest_size=16))

    def __call__(self, slot: int, number: int) -> str:
        """The id of an episode of a slot that had `number` episodes before."""
        whole = self._begun.copy()
        whole.update(b"%d/%d" % (slot, number))
        return str(whole.hexdigest())

    def of_agents(self, part: int) -> "EpisodeIds":
        """Ids of the episodes of one part's agents, if these are ids of environments' episodes."""
        return EpisodeIds(f"{self.prefix}/agents/{part}")

    def __reduce__(self) -> Any:
        return EpisodeIds, (self.prefix,)


@dataclass(frozen=True, slots=True)
class NoFragment:
    """Word in place of a fragment that a lane, gone for good or absent, does not give, or not now."""

    index: int
    is_set_aside: bool = True  # it does not go on round the ring


RECORDED = (Columns.ACTIONS, Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS)
_NO_ROWS = np.empty(0, np.int64)
_FEW_BYTES = 1 << 16  # that caches hold
_NUMBERS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # by their bytes


class Fragment:
    """T vector steps of one lane. Built by a `Lane`; read-only once it is cut.

    Columns (`N` slots, `H` lookback rows, trees of arrays for nested spaces):

        obs                        space's dtype[H+T+1, N, ...]
        actions                    space's dtype[H+T, N, ...]   what the module chose
        rewards                    f32[H+T, N]
        terminateds, truncateds    bool[H+T, N]
        policy_version             i64[H+T, N]   weights the action was computed with
        one per extra output       any[H+T, N, ...]   action_logp, vf_preds, action_dist_inputs, …
    """

    origin: Origin | None = None  # which counts lost transitions; set at the cut
    envs: NDArray[np.int64] | None = None  # i64[C]: of whole episodes, the lane's slots that they are from
    device: Any = None  # of the columns' tensors; None: they are arrays

    def __init__(
        self,
        layout: FragmentLayout,
        lane: int,
        sequence: int,
        columns: dict[str, Column],
        episode_start: NDArray[np.int64] | None = None,
        episode_number: NDArray[np.int64] | None = None,
    ) -> None:
        self.layout = layout
        self.lane = lane
        self.sequence = sequence  # number of this fragment in its lane
        self.columns = columns
        self.observation_space: gym.Space[Any] | None = None
        self.num_rows = layout.num_rows
        first = np.zeros((2, layout.num_slots), np.int64)
        # i64[N] row at which the slot's first episode began, may be negative; None: 0
        self.episode_start = first[0] if episode_start is None else episode_start
        self.episode_number = first[1] if episode_number is None else episode_number  # i64[N]; None: 0
        self.finals: list[Final] = []
        # (row, slot) of an episode's first step -> a stateful module's state before it, a tree of arrays any[...]
        self.starts: dict[tuple[int, int], Tree] = {}
        self.losses: list[Loss] = []
        self.infos: list[Mapping[str, Any]] = [{}] * (layout.lookback + layout.num_rows + 1)
        self.custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        self._stops: NDArray[np.int64] | None = None  # where slots end in different rows

    @property
    def is_even(self) -> bool:
        """True if every slot ends with the last row; else what is behind a slot's `stops` has no meaning."""
        return self._stops is None

    @property
    def host(self) -> "Fragment":
        """The fragment with columns of arrays: this one."""
        return self

    @property
    def outline(self) -> "Fragment":
        """A fragment of arrays with its rewards, flags and chunks at least: this one."""
        return self

    @property
    def first_row(self) -> int:
        """The row of the first vector step: H."""
        return self.layout.lookback

    @property
    def last_row(self) -> int:
        """The row after the last vector step: H + T."""
        return self.layout.lookback + self.num_rows

    @property
    def stops(self) -> NDArray[np.int64]:
        """i64[N]: the row after the last transition of every slot."""
        return np.full(self.layout.num_slots, self.last_row) if self._stops is None else self._stops

    @property
    def num_steps(self) -> int:
        """Number of transitions, without dead rows and lookback."""
        return int((self.chunks.stop - self.chunks.start).sum())

    @property
    def is_empty(self) -> bool:
        """True if the fragment has no transition."""
        return not len(self.chunks.slot)

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the extra model outputs, `policy_version` among them."""
        return tuple(name for name in self.columns if name not in RECORDED and name != Columns.OBS)

    def stored_columns(self, extra: Sequence[str] | None, purpose: str) -> dict[str, Tree]:
        """Columns for a store: observations, what is recorded of each step, policy versions and extra outputs.

        extra      names of the outputs; None: all
        purpose    of an output, for errors, such as "which is to be written"

        Raises ColumnError for an output that is not there.
        """
        kept = self.extra_columns if extra is None else (*extra, Columns.POLICY_VERSION)
        names = (Columns.OBS, *RECORDED, *kept)
        if missing := [name for name in names if name not in self.columns]:
            outputs = ", ".join(self.extra_columns)
            raise ColumnError(f"the fragment has no output {missing[0]!r}, {purpose}; its outputs: {outputs}")
        return {name: self.columns[name].tree for name in names}

    @property
    def policy_version(self) -> int:
        """The oldest policy version that an action of this fragment was computed with; -1: there is no action."""
        if self.is_even:
            return int(self.column(Columns.POLICY_VERSION).min())
        return -1 if self.is_empty else int(self.gather(Columns.POLICY_VERSION).min())

    def policy_versions(self) -> Mapping[str, int]:
        """Module -> `policy_version`; "" stands for the only module."""
        return {"": self.policy_version}

    @property
    def nbytes(self) -> int:
        """Bytes in the columns."""
        return sum(column.nbytes for column in self.columns.values())

    def column(self, name: str) -> Tree:
        """The T rows of a column, without lookback: a tree of views `any[T, N, ...]`.

        Raises ColumnError for an unknown name.
        """
        return self._named(name).rows(self.first_row, self.last_row)

    def time_major(self) -> dict[str, Any]:
        """All columns of the T vector steps as trees of views `any[T, N, ...]`, and two more.

        new_obs      any[T, N, ...]   the observation after each step: of an episode that ends, its last one
        loss_mask    bool[T, N]       False for a row that is no transition, whose values have no meaning
        """
        made: dict[str, Any] = {name: self.column(name) for name in self.columns}
        slots, at = self.layout.num_slots, (self.chunks.stop - 1 - self.first_row, self.chunks.slot)
        new = map_tree(copied, self._named(Columns.OBS).rows(self.first_row + 1, self.last_row + 1))
        map_tree(lambda leaf, last: leaf.__setitem__(at, last), new, self.last_observations())
        are_whole, places = self.row_order
        mask = np.zeros((self.num_rows, slots), np.bool_)
        if are_whole:
            mask[:, places] = True
        else:
            mask.reshape(-1)[places] = True
        return made | {Columns.NEXT_OBS: new, Columns.LOSS_MASK: mask}

    def gather(self, name: str) -> Tree:
        """A column's rows, chunk by chunk: a tree of new arrays `any[num_steps, ...]`."""
        return map_tree(self.in_chunk_order, self.column(name))

    def in_chunk_order(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The transitions of `rows`, any[T, N, ...], chunk by chunk: a new array any[num_steps, ...]."""
        (are_whole, places), (num_rows, num_slots, *shape) = self.row_order, rows.shape
        is_all = are_whole and len(places) == num_slots
        if is_all and rows.nbytes < _FEW_BYTES:
            return np.array(rows.swapaxes(0, 1), order="C").reshape(num_rows * num_slots, *shape)  # a size may be 0
        spare, size = self.layout.spare, math.prod(shape)
        number = _NUMBERS.get(rows.itemsize * size)
        if are_whole and number is not None:
            numbers = rows.reshape(num_rows, num_slots, size).view(number)[..., 0]
            turned, step = spare.empty((len(places), num_rows), number), max(16, 4096 // max(1, num_slots))
            # Of all rows at a time a cache holds too few: that takes twice the time.
            for row in range(0, num_rows, step):
                block = numbers[row : row + step]
                turned[:, row : row + step] = (block if is_all else block.take(places, axis=1)).swapaxes(0, 1)
            return turned.view(rows.dtype).reshape(len(places) * num_rows, *shape)
        if are_whole:
            places = (places[:, None] + np.arange(num_rows) * num_slots).reshape(-1)
        made = spare.empty((len(places), *shape), rows.dtype)
        # All indices are valid; the mode "raise" would check each of them first.
        return rows.reshape(num_rows * num_slots, *shape).take(places, axis=0, out=made, mode="clip")

    def chunk_sums(self, name: str) -> NDArray[np.float64]:
        """f64[C]: the sum of a column's numbers over each chunk."""
        chunks = self.chunks
        lengths = chunks.stop - chunks.start
        if (lengths == self.num_rows).all():
            rows = self.column(name)
            if len(chunks.slot) < rows.shape[1]:  # the others' rows may never have been written
                rows = rows.take(chunks.slot, axis=1)
            sums: NDArray[np.float64] = np.add.reduce(rows, 0, np.float64)
            return sums
        return np.add.reduceat(self.gather(name), lengths.cumsum() - lengths, dtype=np.float64)

    def last_observations(self) -> Tree:
        """The observation after the last step of every chunk: a tree of new arrays `any[C, ...]`."""
        chunks = self.chunks
        observations = map_tree(lambda leaf: leaf[chunks.stop, chunks.slot], self.columns[Columns.OBS].tree)
        if self.finals:
            at = np.full((self.last_row + 1, self.layout.num_slots), -1)
            at[chunks.stop, chunks.slot] = np.arange(len(chunks.slot))
            for final in self.finals:
                places = at[final.rows + 1, final.slots]
                last = final.observations
                if places.min(initial=0) < 0:  # a view of one module's chunks has the ends of others as well
                    here = places >= 0
                    places, last = places[here], map_tree(lambda leaf, h=here: leaf[h], last)
                map_tree(lambda leaf, value, p=places: leaf.__setitem__(p, value), observations, last)
        return observations

    def last(self, name: str) -> Tree:
        """A column's value at the last step of every chunk: a tree of new arrays `any[C, ...]`."""
        chunks = self.chunks
        return map_tree(lambda leaf: leaf[chunks.stop - 1, chunks.slot], self._named(name).tree)

    def preceding(self, name: str) -> Tree:
        """A column's value at the step before every chunk: a tree of new arrays `any[C, ...]`.

        Meaningless for chunks without lookback: see `chunks.lookback`.
        """
        chunks = self.chunks
        return map_tree(lambda leaf: leaf[chunks.start - 1, chunks.slot], self._named(name).tree)

    def initial_states(self, like: Tree) -> tuple[Tree, NDArray[np.bool_]]:
        """The state before the first step of every chunk that begins an episode: a tree of new arrays `any[C, ...]`.

        like    one state: a tree of arrays any[...]

        Also gives bool[C]: the chunks whose state was recorded. It is zeros for all others.
        """
        chunks = self.chunks
        states = map_tree(lambda leaf: np.zeros((len(chunks.slot), *np.shape(leaf)), leaf.dtype), like)
        known = np.zeros(len(chunks.slot), np.bool_)
        for chunk in np.flatnonzero(chunks.t_started == 0).tolist() if self.starts else ():
            state = self.starts.get((int(chunks.start[chunk]), int(chunks.slot[chunk])))
            if state is not None:
                known[chunk] = True
                map_tree(lambda leaf, own, at=chunk: leaf.__setitem__(at, own), states, state)
        return states, known

    def record_starts(self, rows: NDArray[np.int64], slots: NDArray[np.int64], states: Tree) -> None:
        """Keep the states, any[K, ...], before first steps of episodes, in these rows and slots, i64[K] each."""
        for place, key in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
            self.starts[key] = tree_at(states, place)

    def hand_on_starts(self, new: "Fragment", stops: NDArray[np.int64], back: NDArray[np.int64]) -> None:
        """Give the next fragment the states of episodes whose first step is yet to come.

        stops, back    i64[N]  row after each slot's last step here, and the rows by which the next fragment is behind
        """
        goes = {key: state for key, state in self.starts.items() if key[0] >= stops[key[1]]}
        new.starts |= {(row - int(back[slot]), slot): state for (row, slot), state in goes.items()}
        self.starts = {key: state for key, state in self.starts.items() if key not in goes}

    def recent_observations(self, count: int) -> Tree:
        """The last `count` observations at every step, oldest first: a tree of new arrays `any[num_steps, count, ...]`.

        Steps are in chunk order. Observations before the episode's first, or before the lookback, are zeros.
        """
        chunks = self.chunks
        lengths = chunks.stop - chunks.start
        earliest, slot = np.repeat(chunks.start - chunks.lookback, lengths), np.repeat(chunks.slot, lengths)
        row = np.arange(len(slot)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(chunks.start, lengths)
        rows = row[:, None] + np.arange(1 - count, 1)  # i64[num_steps, count]
        before = rows < earliest[:, None]
        rows[before] = 0

        def windows(leaf: NDArray[Any]) -> NDArray[Any]:
            taken: NDArray[Any] = leaf[rows, slot[:, None]]
            taken[before] = 0
            return taken

        return map_tree(windows, self.columns[Columns.OBS].tree)

    @cached_property
    def chunks(self) -> ChunkIndex:
        """The positions of the chunks."""
        ended_slot, ended_row, gap = self._ends()
        slot, stop, number = np.arange(self.layout.num_slots), self.stops, self.episode_number
        start = np.maximum(self.episode_start, self.first_row)
        t_started = start - self.episode_start
        if len(ended_slot):
            # Each slot begins one chunk, and another at every end.
            per_slot = np.bincount(ended_slot, minlength=len(slot)) + 1
            heads = np.cumsum(per_slot) - per_slot
            closing = np.arange(len(ended_slot)) + ended_slot  # index of the chunk that each end closes
            begins, ends, (slot, t_started) = start, stop, (np.repeat(each, per_slot) for each in (slot, t_started))
            start, stop = np.empty_like(slot), np.empty_like(slot)
            start[heads], start[closing + 1] = begins, ended_row + gap
            stop[heads + per_slot - 1], stop[closing] = ends, ended_row + 1
            t_started[closing + 1] = 0
            number = number[slot] + np.arange(len(slot)) - heads[slot]
        has_ended = np.zeros(len(slot), bool)
        if len(ended_slot):
            has_ended[closing] = True
        keep = start < stop
        if np.count_nonzero(keep) < len(keep):
            fields = slot, number, start, stop, t_started, has_ended
            slot, number, start, stop, t_started, has_ended = (each[keep] for each in fields)
        terminated = truncated = has_ended
        if len(ended_slot):
            terminated = has_ended & self.columns[Columns.TERMINATEDS].tree[stop - 1, slot]
            truncated = has_ended & self.columns[Columns.TRUNCATEDS].tree[stop - 1, slot]
        return ChunkIndex(
            slot=slot,
            number=number,
            start=start,
            stop=stop,
            t_started=t_started,
            lookback=np.minimum(t_started, self.layout.lookback),
            terminated=terminated,
            truncated=truncated,
        )

    @cached_property
    def row_order(self) -> tuple[bool, NDArray[np.int64]]:
        """True and the slots of the chunks, i64[K], if all of their rows are transitions.

        Else False and `time * N + slot` of each transition, i64[num_steps], chunk by chunk.
        """
        chunks, slots = self.chunks, self.layout.num_slots
        lengths = chunks.stop - chunks.start
        total = int(lengths.sum())
        own = np.arange(slots) if total == self.num_rows * slots else np.unique(chunks.slot)
        if total == self.num_rows * len(own):
            return True, own
        begin = (chunks.start - self.first_row) * slots + chunks.slot
        before = np.zeros_like(begin)
        before[1:] = (begin + (lengths - 1) * slots)[:-1]  # last transition of the chunk before
        order = np.full(total, slots)  # distance to the transition before: one row within a chunk
        order[np.cumsum(lengths) - lengths] = begin - before
        return False, np.cumsum(order, out=order)

    def last_of(self, stop: int, slot: int) -> tuple[Tree, Mapping[str, Any]]:
        """The observation after a chunk's last step, a tree of arrays `any[...]`, and the vector infos with it.

        stop, slot    of the chunk, as in `chunks`
        """
        final = self._final_items.get((stop - 1, slot))
        if final is not None:
            return final
        return map_tree(lambda leaf: leaf[stop, slot], self.columns[Columns.OBS].tree), self.infos[stop]

    def env_slots(self, slot: Any, number: Any) -> Any:
        """The lane's slots that chunks are from: an int or i64[C], as the arguments are.

        slot, number    of a chunk, or of several, as in `chunks`
        """
        return slot if self.envs is None else self.envs[number]

    def times_of(self, index: int) -> NDArray[np.int64]:
        """i64[n + 1]: steps of the environment at the observations of chunk number `index`, counted from any one on."""
        begin = int(self.chunks.t_started[index])
        return np.arange(begin, begin + 1 + int(self.chunks.stop[index] - self.chunks.start[index]))

    def episodes(self) -> "FragmentEpisodes":
        """The chunks as a sequence of `SingleAgentEpisode`, made on demand."""
        return FragmentEpisodes([self])

    def chunk(self, index: int) -> SingleAgentEpisode:
        """Chunk number `index` of `chunks`, as an episode over views of the columns."""
        chunks = self.chunks
        return self._episode(
            *(int(each[index]) for each in (chunks.slot, chunks.number, chunks.start, chunks.stop, chunks.lookback)),
            terminated=bool(chunks.terminated[index]),
            truncated=bool(chunks.truncated[index]),
            t_started=int(chunks.t_started[index]),
        )

    def _episode(
        self, slot: int, number: int, start: int, stop: int, lookback: int, **flags: Any
    ) -> SingleAgentEpisode:
        # A chunk without a step has no final: the row before it may have ended another episode.
        final = self._final_items.get((stop - 1, slot)) if start < stop else None
        begin = start - lookback

        def buffer(name: str, space: gym.Space[Any] | None = None) -> LookbackBuffer:
            views = map_tree(lambda leaf: leaf[begin:stop, slot], self.columns[name].tree)
            return LookbackBuffer(views, lookback, space, name=name)

        episode = SealedEpisode(
            self.layout.episode_id(slot, number),
            observations=self._observations(slot, begin, stop, lookback, final),
            infos=InfosWindow(self.infos[begin : stop + 1], slot, lookback, None if final is None else final[1]),
            actions=buffer(Columns.ACTIONS, self.layout.action_space),
            rewards=buffer(Columns.REWARDS, REWARD_SPACE),
            extra_model_outputs={name: buffer(name) for name in self.extra_columns},
            **flags,
        )
        episode.custom_data.update(self.custom_data.get((slot, number), {}))
        if self.starts and not episode.t_started:
            episode.initial_state = self.starts.get((start, slot))
        episode.lane, episode.slot = self.lane, int(self.env_slots(slot, number))
        return episode

    def _ends(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
        """The slot, i64[E], and row, i64[E], of every end, slot by slot, and the rows from each to the next episode."""
        columns, rows = self.columns, slice(self.first_row, self.last_row)
        done = columns[Columns.TERMINATEDS].tree[rows] | columns[Columns.TRUNCATEDS].tree[rows]
        # Sorted by slots; `nonzero` of two axes is slower.
        ended = np.flatnonzero(done.T) if np.count_nonzero(done) else _NO_ROWS
        if not len(ended) and not self.losses:
            return ended, ended, 1
        slot = ended // max(1, self.num_rows)
        row = ended - slot * self.num_rows + self.first_row
        gap = 2 if self.layout.resets_next_step else 1
        return self._with_losses(slot, row, gap) if self.losses else (slot, row, gap)

    def _with_losses(
        self, slot: NDArray[np.int64], row: NDArray[np.int64], gap: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The result of `_ends` with the ends by loss merged in."""
        lost_slot = np.concatenate([loss.slots for loss in self.losses])
        lost_row = np.repeat([loss.row - 1 for loss in self.losses], [len(loss.slots) for loss in self.losses])
        # A truncation by loss is marked in the column too: it is one end, not two.
        marked = {(slot, loss.row - 1) for loss in self.losses for slot in loss.cut.tolist()}
        kept = np.array([end not in marked for end in zip(slot.tolist(), row.tolist(), strict=True)], np.bool_)
        slot, row = np.concatenate([slot[kept], lost_slot]), np.concatenate([row[kept], lost_row])
        gaps = np.concatenate([np.full(int(kept.sum()), gap), np.ones(len(lost_slot), np.int64)])
        order = np.lexsort((row, slot))
        return slot[order], row[order], gaps[order]

    def begin_after_loss(self, reason: str) -> None:
        """Record that the environments were lost before this fragment's first step: all open episodes ended."""
        slots = np.arange(self.layout.num_slots)
        self.losses.insert(0, Loss(self.first_row, slots, slots[:0], reason))
        self.episode_number = self.episode_number - 1  # the numbers of the lost episodes

    def seal(self, num_rows: int) -> None:
        """Set the length to the first `num_rows` vector steps, and make every column read-only."""
        self.num_rows = num_rows
        del self.infos[self.last_row + 1 :]
        for column in self.columns.values():
            column.seal()

    def end_at(self, stops: NDArray[np.int64]) -> None:
        """End every slot at the row in `stops`, i64[N]. No flag is set in later rows."""
        self._stops, self.num_rows = stops, int(stops.max()) - self.first_row

    def seal_at(self, stops: NDArray[np.int64]) -> None:
        """End every slot at the row in `stops`, i64[N], and make columns read-only."""
        self.end_at(stops)
        self.seal(self.num_rows)

    def describe(self) -> str:
        """A text of the fragment's lane and contents, for errors."""
        if self.envs is not None:
            return f"lane {self.lane}, {len(self.envs)} whole episodes, ended in fragment {self.sequence}"
        first = self.sequence * self.layout.num_rows
        steps = f"vector steps {first} to {first + self.num_rows}" if self.is_even else f"fragment {self.sequence}"
        return f"lane {self.lane}, {steps}"

    def __repr__(self) -> str:
        if self.envs is not None:
            held = f"{len(self.envs)} episodes, {self.num_rows} steps"
            return f"<WholeEpisodes {self.sequence} of lane {self.lane}: {held}>"
        slots = self.layout.num_slots
        size = f"{self.num_rows} vector steps × {slots} slot{'s' if slots != 1 else ''}"
        return f"<Fragment {self.sequence} of lane {self.lane}: {size}>"

    def _repr_html_(self) -> str:
        rows = np.arange(self.first_row, self.last_row)
        rewards = self.columns[Columns.REWARDS].tree[rows].mean(axis=1, where=rows[:, None] < self.stops)
        return array_table(repr(self), {name: column.tree for name, column in self.columns.items()}, rewards)

    def _observations(self, slot: int, begin: int, stop: int, lookback: int, final: Any) -> LookbackBuffer:
        end = stop + (final is None)
        views = map_tree(lambda leaf: leaf[begin:end, slot], self.columns[Columns.OBS].tree)
        buffer = LookbackBuffer(views, lookback, self.observation_space, name="observations")
        return buffer if final is None else BufferAndOne(buffer, final[0])

    def _named(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise ColumnError(f"{self!r} has no column '{name}'; columns: {', '.join(self.columns)}") from None

    @cached_property
    def _final_items(self) -> dict[tuple[int, int], tuple[Tree, Mapping[str, Any]]]:
        """(row, slot) of an end -> the episode's last observation, a tree of `any[...]`, and its vector infos."""
        return {
            key: (tree_at(final.observations, place), final.infos)
            for final in self.finals
            for place, key in enumerate(final.keys())
        }


class FragmentEpisodes(Sequence[SingleAgentEpisode]):
    """The C chunks of some fragments, fragment by fragment, as episodes that are made on demand.

    A learner piece that loops over the sequence gets episodes. One that asks for columns gets all rows at once.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = list(fragments)
        self._bounds = np.cumsum([len(fragment.chunks.slot) for fragment in self.fragments])
        self._made: dict[int, SingleAgentEpisode] = {}

    def __len__(self) -> int:
        return int(self._bounds[-1]) if self.fragments else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # raises IndexError as a list does
        episode = self._made.get(position)
        if episode is None:
            which = int(np.searchsorted(self._bounds, position, side="right"))
            before = int(self._bounds[which - 1]) if which else 0
            episode = self._made[position] = self.fragments[which].chunk(position - before)
        return episode

    @property
    def device(self) -> Any:
        """The device of the columns' tensors; None: they are arrays."""
        return self.fragments[0].device if self.fragments else None

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the extra model outputs that every fragment has, with the same structure, dtype and shape."""
        if len(self.fragments) < 2:
            return self.fragments[0].extra_columns if self.fragments else ()
        first, *others = (_kinds(fragment) for fragment in self.fragments)
        return tuple(name for name in first if all(kinds.get(name) == first[name] for kinds in others))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """i64[C]: steps of each chunk."""
        return np.concatenate([fragment.chunks.stop - fragment.chunks.start for fragment in self.fragments])

    def gather(self, name: str) -> Tree:
        """A column's rows of all chunks, end to end: a tree of new arrays `any[sum(lengths), ...]`."""
        return concatenate_trees([fragment.gather(name) for fragment in self.fragments])

    def last_observations(self) -> Tree:
        """The observation after each chunk's last step: a tree of new arrays `any[C, ...]`."""
        return concatenate_trees([fragment.last_observations() for fragment in self.fragments])

    def last(self, name: str) -> Tree:
        """A column's value at the last step of each chunk: a tree of new arrays `any[C, ...]`."""
        return concatenate_trees([fragment.last(name) for fragment in self.fragments])

    def preceding(self, name: str) -> Tree:
        """A column's value at the step before each chunk, `any[C, ...]`: see `Fragment.preceding`."""
        return concatenate_trees([fragment.preceding(name) for fragment in self.fragments])

    def initial_states(self, like: Tree) -> tuple[Tree, NDArray[np.bool_]]:
        """States before episodes' first steps, `any[C, ...]`, and which are known: see `Fragment.initial_states`."""
        parts = [fragment.initial_states(like) for fragment in self.fragments]
        return concatenate_trees([states for states, _ in parts]), np.concatenate([known for _, known in parts])

    def recent_observations(self, count: int) -> Tree:
        """The last `count` observations at every step, `any[steps, count, ...]`: see `Fragment.recent_observations`."""
        return concatenate_trees([fragment.recent_observations(count) for fragment in self.fragments])

    def chunk_index(self, field: str) -> NDArray[Any]:
        """One field of every fragment's `ChunkIndex`, end to end: `any[C]`."""
        return np.concatenate([getattr(fragment.chunks, field) for fragment in self.fragments])


def _kinds(fragment: Fragment) -> dict[str, Tree]:
    return {name: kind_of(fragment.columns[name].row(0)) for name in fragment.extra_columns}
