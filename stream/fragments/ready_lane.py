"""ReadyLane: slots of which some are answered for at a time, each in a row of its own.

A source takes actions for the slots that it answered for last, and then answers for whichever are ready. So a turn has
K of the N slots:

    record_actions(...)    write the module's actions into the rows of the turn's slots
    record_step(...)       write the answers for the slots of the next turn; each moves on by one row
    episodes               those of the turn's slots, in the order of the answers

A fragment begins and ends where every slot is answered for: with its last turn the lane receives all that is under
way, so that it is of one policy version. A lane that runs ahead waits for none: the newest observation and action of a
slot that is under way move to the next fragment, in which its step ends.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.infos import SlotInfos, copied, info_of
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.fragments.lane import Lane, check_reset_rewards
from rollflow.stream.fragments.live_episode import EndedEpisodes, LaneEpisodes

Slots = NDArray[np.int64]
_NO_FLAT: tuple[Any, ...] = None, None, None
_Array = np.ndarray
_FLAGS = (Columns.TERMINATEDS, Columns.TRUNCATEDS)


class SlotAnswers(NamedTuple):
    """Answers for K slots, none of them twice, as `ReadyLane.record_step` takes them."""

    observations: Tree  # any[K, ...], arrays that the source does not write to again
    rewards: NDArray[Any]  # number[K]
    terminateds: NDArray[np.bool_]  # bool[K]
    truncateds: NDArray[np.bool_]  # bool[K]
    infos: Mapping[str, Any]  # gymnasium's vector form, over the K slots
    slots: Slots  # i64[K]
    # Last observations any[E, ...] of those that ended, and infos over the K slots, where `observations` has the next
    # episodes' first.
    final: tuple[Tree, Mapping[str, Any]] | None = None


class ReadyLane(Lane):
    """The N slots of a lane whose source answers for some of them at a time.

    layout     of fragments of T vector steps, under NEXT_STEP autoreset. A slot makes at most 2T steps in a fragment,
               which has T·N answers, or fewer if a slot has made so many: it has rows for them. If the lane runs
               ahead, the last turn may bring it a few more. First observations after a loss are no such answers
    receive    gives the next answers for slots that are under way, as `record_step` takes them; None: of none, but some
               have been given up meanwhile

    at         i64[N] row of each slot's newest observation. All is written by `row * N + slot`, as one number: for a
               few slots that takes half of the time
    actions    the turn's slots, i64[K], and the actions `any[K, ...]` that their environments are stepped with next
    """

    def __init__(
        self,
        index: int,
        layout: FragmentLayout,
        observation_space: gym.Space[Any],
        receive: Callable[[], SlotAnswers | None],
        *,
        is_shared: bool = False,
    ) -> None:
        super().__init__(index, replace(layout, num_rows=2 * layout.num_rows), observation_space, is_shared=is_shared)
        self._receive = receive
        self._num_ahead: float = 0  # fragments, the first ones, at whose ends none is waited for
        self._answers = self._answers_before = self._turns = 0  # answers in the fragment, in those before, and turns
        self._places = self.everyone + layout.lookback * layout.num_slots  # row * N + slot, of all slots
        self._turn: Any = self._places.copy()  # of the turn's slots, as `_index_of` gives them
        # By the number of slots in a turn: columns by name, with their rows end to end, dtype, and shape of the values.
        self._flat: dict[int, dict[str, tuple[Any, ...]]] = {}
        self._resets = np.zeros(layout.num_slots, np.bool_)  # slots whose next answer is a first observation
        self._lost, self._gone = self._resets.copy(), self._resets.copy()  # of those, that stay in their rows; for good
        self._came: list[Slots] = []  # slots whose answer has come since the turn began
        self.held: deque[SlotAnswers] = deque()  # answers that have come, and are recorded in later turns
        self._finals: list[tuple[Slots, Tree]] = []  # slots whose episodes those have ended, and last observations
        self._final_infos = SlotInfos(count=layout.num_slots)  # that go with these
        self._begin_fragment()

    def run_ahead(self, num_fragments: int | None) -> None:
        """Wait at no fragment's end for slots that are under way, but at that of the last of so many (None: no end)."""
        self._num_ahead = math.inf if num_fragments is None else num_fragments - 1
        self._set_end()

    @property
    def at(self) -> Slots:
        at: Slots = self._places // self.layout.num_slots
        return at

    @property
    def actions(self) -> tuple[Slots, Tree]:
        return self.episodes.slots, self._actions

    @actions.setter
    def actions(self, actions: Tree) -> None:
        self._actions = actions

    @property
    def steps_under_way(self) -> int:
        """Number of transitions that the turn's actions make, but for those that have been answered for."""
        return int(np.count_nonzero(self._under_way[self.episodes.slots]))

    @property
    def in_flight(self) -> int:
        """Number of transitions that slots outside of the turn are making; 0 once no more actions are sent."""
        return 0 if self.has_stopped else int(np.count_nonzero(self._under_way)) - self.steps_under_way

    @property
    def _under_way(self) -> NDArray[np.bool_]:
        """bool[N]: slots that make a transition, once the turn's actions are sent."""
        under_way = ~self._resets
        for slots in self._came:
            under_way[slots] = False
        return under_way

    # Recording

    def record_actions(self, outputs: Mapping[str, Tree]) -> None:
        """Write `actions` and every extra output, trees of arrays `any[K, ...]`, for the turn's slots; see `Lane`."""
        if outputs.keys() != self._outputs:
            self._take_outputs(outputs)
        self._put(self._turn, len(self.episodes.slots), outputs)
        if self.policy_version != self._version_written or self.at_start:
            self._version_written = version = self.policy_version
            versions = self.fragment.columns[Columns.POLICY_VERSION].tree
            # Later rows are written too, but for actions that are under way.
            first = self._places + self.layout.num_slots
            first[self.episodes.slots] -= self.layout.num_slots
            versions[np.arange(versions.size).reshape(versions.shape) >= first] = version

    def record_step(self, *answers: Any) -> None:
        """Write answers, as `SlotAnswers` has them; their slots are the next turn's.

        With the last answers of a fragment that is not ahead, all that is under way is received: the turn has every
        slot.
        """
        self._take_in(answers)
        parts: Sequence[tuple[Slots, Tree]] = ((answers[5], answers[0]),)
        self._turns += 1
        if self._answers >= self._enough or (self._turns >= self._look_at and self._has_filled_rows()):
            self.is_full = True
            if not self._is_ahead:
                parts = (*parts, *self._received(answers[5]))
        self._begin_turn(parts)
        self.vector_steps = (self._answers_before + self._answers) // self.layout.num_slots

    def _has_filled_rows(self) -> bool:
        """True if a slot has made as many steps as it has rows for; else there are turns in which none can."""
        left = self._last_row - int(self._places.max()) // self.layout.num_slots
        self._look_at = self._turns + left
        return not left

    def take_rest(self) -> bool:
        """Receive all that is under way, since no more actions will be sent; False: nothing is.

        The turn has the slots that were under way: of the others all has been seen.
        """
        parts = self._received(self.episodes.slots)
        if parts:
            self._begin_turn(parts)
        self.has_stopped = True
        return bool(parts)

    def stop(self, *, is_sent: bool) -> None:
        """Count the steps that are under way as made, those of the turn if its actions are sent: none is answered."""
        self.num_steps += self.in_flight + (self.steps_under_way if is_sent else 0)
        self.has_stopped = True

    def lose(self, reason: str, slots: Slots) -> int:  # type: ignore[override]  # of some slots
        """End the open episodes of slots, i64[K], whose environments were lost, as `Lane.lose` does.

        The next answer for each of them is a first observation, with a reward of 0. Returns the number of transitions
        that they were making, or were to make with the turn's actions.
        """
        lost = slots[self._under_way[slots]]
        self._end_lost(lost, reason)
        self._lost[lost] = self._resets[lost] = True
        return len(lost)

    def give_up(self, slots: Slots) -> None:
        """Wait for slots, i64[K], that have been lost, no more: there are no answers for them."""
        self._gone[slots] = True

    @property
    def num_left(self) -> int:
        """Number of slots that have not been given up."""
        return int(np.count_nonzero(~self._gone))

    def _take_in(self, answers: tuple[Any, ...]) -> None:
        """Write all but the observations of answers, and move their slots on."""
        _, rewards, terminateds, truncateds, infos, slots, final = answers
        places, count, were_reset = self._places[slots], len(slots), self._resets[slots]
        index = _index_of(places)
        self._rewards[index] = rewards
        after, has_begun, made = places + self.layout.num_slots, 1 in were_reset.tobytes(), count
        if has_begun:
            at_reset = were_reset.nonzero()[0]
            begun = slots[at_reset]
            check_reset_rewards(begun, rewards[at_reset])
            self.num_steps -= len(begun)
            if 1 in self._lost.tobytes():
                after -= self.layout.num_slots * self._lost[slots]
                made -= int(np.count_nonzero(self._lost[slots]))
                self._version_written = -1  # in their rows is that of the actions that were lost
                self._lost[begun] = False
            self.episode_start[begun] = after[at_reset] // self.layout.num_slots
            self.episode_number[begun] += 1
            self._resets[begun] = False
        # What raised so far was not taken in: it counts as under way.
        self.at_start = self._typing = False
        self._places[slots] = after
        self._came.append(slots)
        self._answers += made
        self.num_steps += count
        if 1 in terminateds.tobytes() or 1 in truncateds.tobytes():
            if has_begun:
                made_steps = ~were_reset
                terminateds, truncateds = terminateds & made_steps, truncateds & made_steps
            self._put(index, count, {Columns.TERMINATEDS: terminateds, Columns.TRUNCATEDS: truncateds})
            done = (terminateds | truncateds).nonzero()[0]
            if final is None:
                self._resets[slots[done]] = True
            else:
                self._finals.append((slots[done], final[0]))
                for place in done.tolist():
                    self._final_infos.of_slots[int(slots[place])] = copied(info_of(final[1], place))
        if infos:
            self._keep_infos(slots, infos)

    def _received(self, turn: Slots) -> list[tuple[Slots, Tree]]:
        """Take in all answers for slots outside of a turn, i64[K]: their slots and observations."""
        received = list[tuple[Slots, Tree]]()
        for answers in self._answers_without(turn):
            self._take_in(answers)
            received.append((answers.slots, answers.observations))
        return received

    def _answers_without(self, turn: Slots) -> Iterator[SlotAnswers]:
        """All answers for slots outside of a turn, i64[K]: those that are held, and those that are received."""
        awaited = ~self._gone
        awaited[turn] = False
        while (awaited & ~self._gone).any():
            answers = self.held.popleft() if self.held else self._receive()
            if answers is not None:
                awaited[answers.slots] = False
                yield answers

    def _begin_turn(self, parts: Sequence[tuple[Slots, Tree]]) -> None:
        """Begin a turn of answers' slots, whose newest observations are to be recorded."""
        slots, observations = joined_answers(parts, self.layout.num_slots)
        self._turn, is_settled = _index_of(self._places[slots]), self.observation_space is self.observation_spaces[0]
        if is_settled:
            observations = self._put(self._turn, len(slots), {Columns.OBS: observations})
        else:
            observations = self.columns.cast(self.observation_spaces[0], observations, len(slots))
        if self._finals:
            ended, last = joined_answers(self._finals, self.layout.num_slots)
            before, infos = (self.episode_start.copy(), self.episode_number.copy()), self._final_infos
            self.ended = EndedEpisodes(self, ended, last, self.at[ended] - 1, *before, infos)
            self._finals, self._final_infos = [], SlotInfos(count=self.layout.num_slots)
        self.episodes = LaneEpisodes(self, slots, observations, is_settled=is_settled)
        self._came.clear()

    def _take_observations(self, observations: Tree) -> None:
        self._begin_turn([(self.everyone, observations)])

    def _put(self, index: Any, count: int, given: Mapping[str, Tree]) -> Tree:
        """Write columns' values, any[count, ...], to the places of an index; those of the last, in its dtypes."""
        flat, values = self._flat[count], None
        for name, values in given.items():
            rows, dtype, shape = flat.get(name) or _NO_FLAT
            if type(values) is _Array and values.dtype is dtype and values.shape == shape:
                rows[index] = values
                continue
            column = self.fragment.columns[name]
            values = column.cast(values, count)
            if type(column.tree) is _Array:
                rows = _end_to_end(column.tree)
                flat[name] = rows, rows.dtype, values.shape
            for leaf, value in zip(leaves_of(column.tree), leaves_of(values), strict=True):
                _end_to_end(leaf)[index] = value
        return values

    def _keep_infos(self, slots: Slots, infos: Mapping[str, Any]) -> None:
        for place, (slot, row) in enumerate(zip(slots.tolist(), self.at[slots].tolist(), strict=True)):
            if info := info_of(infos, place):
                self._infos_in(self.fragment, row).of_slots[slot] = copied(info)

    # Reading and writing by connector pieces

    def shown_with(self, slot: int) -> LaneEpisodes | None:  # type: ignore[override]  # slots that are under way
        shown = super().shown_with(slot)
        return shown if shown.shows(slot) else None

    def rows_of(self, slots: Slots) -> Slots:  # type: ignore[override]
        rows: Slots = self._places[slots] // self.layout.num_slots
        return rows

    def row_of(self, slot: int) -> int:
        return int(self._places[slot]) // self.layout.num_slots

    def has_ended(self, slot: int) -> bool:
        return super().has_ended(slot) or bool(self._resets[slot])

    def try_record(self, slot: int, observation: Tree) -> bool:
        return False  # what the episodes show is no view of the column

    def _write(self, column: Column, slots: Slots, values: Tree) -> None:
        rows = self.rows_of(slots)
        column.write_items(rows, slots, values)
        self.episodes.show(column.items(rows, slots), is_settled=True)

    # A lane that goes on from another one's state

    def hold_answers(self) -> None:
        """Receive all that is under way, and hold it for the next turns: no slot makes a step then."""
        if not self.has_stopped:
            self.held.extend(list(self._answers_without(self.episodes.slots)))

    @property
    def num_rows(self) -> int:
        return int(self.at.max()) - self.layout.lookback

    @property
    def dead(self) -> NDArray[np.bool_]:
        """bool[N]: slots whose next step, after the answers that are held, only resets them."""
        dead = self._resets & ~self._lost
        for answers in self.held:
            dead[answers.slots] = (answers.terminateds | answers.truncateds) & (answers.final is None)
        return dead

    def get_state(self) -> dict[str, Any]:
        """Where its slots stand at the gate, in plain form, but for what is held."""
        return {
            "turn": self.episodes.slots.copy(),
            "at": self.at,
            "resets": self._resets.copy(),
            "lost": self._lost.copy(),
            "answers": [self._answers_before, self._answers],
            "at_start": self.at_start,
        }

    def set_state(self, state: Mapping[str, Any], held: Sequence[SlotAnswers]) -> None:
        """Have slots stand as those of another one did that gave this state. After `go_on`."""
        self._places, turn = state["at"] * self.layout.num_slots + self.everyone, state["turn"]
        self._resets, self._lost = state["resets"].copy(), state["lost"].copy()
        self._answers_before, self._answers = state["answers"]
        self._look_at, self.at_start, self.row = 0, state["at_start"], self.layout.lookback
        self.held.extend(held)
        self._set_end()
        self._turn = _index_of(self._places[turn])
        self.episodes = LaneEpisodes(self, turn, self._column.items(self.rows_of(turn), turn), is_settled=True)

    def begin_anew(self, reason: str) -> None:
        self.held.clear()
        self.lose(reason, self.everyone)
        self.is_restored = False

    def reset(self, observations: Tree, infos: Mapping[str, Any]) -> None:
        if not self._resets.any():
            super().reset(observations, infos)
            return
        # It was to go on from another one.
        no, at_start, count = np.zeros(self._shape, np.bool_), self.at_start, self._answers
        self._take_in((observations, np.zeros(self._shape), no, no, infos, self.everyone, None))
        self.at_start, self._answers = at_start, count
        self._take_observations(observations)

    # Fragments

    def cut(self) -> Fragment:
        """Return the fragment, read-only, with zeros behind each slot's last step, and begin the next one."""
        old, lookback, stops = self.fragment, self.layout.lookback, self.at
        new, _ = self._next(stops, Fragment)
        new.episode_start[self._resets] = lookback + 1 - self._lost[self._resets]
        new.episode_number[self._resets] += 1
        first, last = stops.min(), stops.max()
        beyond = np.arange(first, last)[:, None] >= stops
        for name, column in old.columns.items():
            is_obs = int(name == Columns.OBS)
            for leaf in leaves_of(column.tree):
                leaf[first + is_obs : last + is_obs][beyond] = 0
        old.seal_at(stops)
        self._places = self.everyone + lookback * self.layout.num_slots
        self._turn = _index_of(self._places[self.episodes.slots])
        self._begin_fragment()
        self.at_start, self.is_full = True, False
        return old

    def _begin_fragment(self) -> None:
        """Count the answers of a fragment from now on."""
        self._set_end()
        self._answers_before, self._answers, self._turns = self._answers_before + self._answers, 0, 0
        self._look_at = self.layout.num_rows  # up to which no slot has filled its rows
        self._rewards, self._flat = self.fragment.columns[Columns.REWARDS].tree.reshape(-1), defaultdict(dict)

    def _set_end(self) -> None:
        """Set the number of answers at which the fragment is full."""
        layout, self._is_ahead = self.layout, self.sequence < self._num_ahead
        # Where the others are waited for, no more actions are sent once they make the fragment full.
        self._enough = layout.num_slots * layout.num_rows // 2 - (0 if self._is_ahead else layout.num_slots - 1)

    def release(self) -> None:
        super().release()
        self.has_stopped, self._flat, self._rewards = True, {}, np.empty(0, np.float32)
        self._finals.clear()
        self.held.clear()


def _end_to_end(leaf: NDArray[Any]) -> NDArray[Any]:
    """The rows of an array any[rows, N, ...] end to end: any[rows * N, ...]."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _index_of(places: Slots) -> Any:
    """Places, i64[K], as an index: a slice if it is one, which is read and written in a fraction of the time."""
    if len(places) != 1:
        return places
    place = places.item()
    return slice(place, place + 1)


def joined_answers(parts: Sequence[tuple[Slots, Tree]], num_slots: int) -> tuple[Slots, Tree]:
    """The slots of answers, and their observations; ascending if they are of several, or of all slots."""
    if len(parts) == 1 and len(parts[0][0]) < num_slots:
        return parts[0]
    slots = np.concatenate([each for each, _ in parts])
    order = slots.argsort()
    return slots[order], map_tree(lambda leaf: leaf[order], concatenate_trees([each for _, each in parts]))
