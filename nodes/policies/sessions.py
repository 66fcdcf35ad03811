"""Sessions of a policy: which lane has the memory of each, and lanes for those that act together."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.fragments.fragment import FragmentLayout
from rollflow.stream.fragments.lane import Lane

_ROWS = 32  # vector steps until the columns are begun anew with their lookback
_MOST_SIZES = 256  # lanes of different sizes that are kept


class SessionLane(Lane):
    """The N sessions that act together, each with an episode of its own.

    sessions             one for each slot
    lookback             rows that the connector pieces look back
    observation_space    of what callers give
    action_space         of what the module chooses
    prepare              the stage before the forward pass, which follows this lane

    It stands either before its first observations, or at a row whose actions are recorded.
    """

    def __init__(
        self,
        sessions: Sequence[Hashable],
        lookback: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        prepare: EnvToModule,
    ) -> None:
        self.sessions, self.prepare = tuple(sessions), prepare
        layout = FragmentLayout(len(sessions), _ROWS, lookback, action_space, False, self._episode_id)
        super().__init__(0, layout, observation_space)
        self.is_fresh = True  # no observation has come yet, and no session was taken over
        self.begins: set[int] = set(range(len(sessions)))  # slots whose episodes begin with the next observation
        self._incoming = Column.empty(Columns.OBS, row_of(observation_space, len(sessions)), 1)
        self._leaves: tuple[Column, int, list[NDArray[Any]]] | None = None  # and the columns that they are of
        self._none_done = np.zeros(len(sessions), np.bool_)
        self._no_rewards = np.full(len(sessions), np.nan, np.float32)  # which is refused where a piece reads it

    @property
    def step(self) -> int:
        """The step of the run that the policy is from: its sessions are no part of that run, and make none."""
        return self.first_step

    def checked(self, observations: Tree) -> Tree:
        """The observations `any[N, ...]` in the dtypes of their space. Raises ColumnError where they don't fit."""
        self._incoming.write(0, observations)
        return map_tree(np.array, self._incoming.row(0))

    def take_observations(
        self, observations: Tree, rewards: NDArray[np.float32] | None, infos: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Take the next observation of every session.

        observations    any[N, ...], as `checked` gives them
        rewards         f32[N]  for the actions before; None: none came
        infos           N of them; None: they are empty
        """
        of_slots: Mapping[str, Any] = {} if infos is None else SlotInfos(infos)
        if self.is_fresh:
            self.is_fresh = False
            self.reset(observations, of_slots)
        else:
            rewards = self._no_rewards if rewards is None else rewards
            self.record_step(observations, rewards, self._none_done, self._none_done, of_slots)
            if self.begins:
                self._begin_episodes(np.array(sorted(self.begins)), self.row)
        self.begins.clear()

    def adopt(self, source: "SessionLane", theirs: list[int], ours: list[int]) -> None:
        """Go on with sessions of another lane: copy what their slots `theirs` remember into the slots `ours`."""
        self._begin_like(source)
        first, count = source.row - source.layout.lookback, self.row + 1
        to_slots, from_slots = np.array(ours), np.array(theirs)
        for leaf, from_leaf in zip(self._all_leaves(), source._all_leaves(), strict=True):
            for row in range(count):  # quicker than both axes at once
                leaf[row][to_slots] = from_leaf[first + row][from_slots]
        for row in range(count):
            self._adopt_infos(row, source.fragment.infos[first + row], theirs, ours)
        self.episode_start[ours] = source.episode_start[theirs] - first
        self.episode_number[ours] = source.episode_number[theirs]
        for slot, their_slot in zip(ours, theirs, strict=True):
            number = int(self.episode_number[slot])
            data = source.custom_data.get((their_slot, number))
            if data is not None:
                self.custom_data[slot, number] = data
            if their_slot not in source.begins:
                self.begins.discard(slot)

    def _all_leaves(self) -> list[NDArray[Any]]:
        """The leaves of all columns, in the order of the columns' names."""
        columns = self.fragment.columns
        known = self._leaves
        if known is None or known[0] is not columns[Columns.OBS] or known[1] != len(columns):
            leaves = [leaf for name in sorted(columns) for leaf in leaves_of(columns[name].tree)]
            self._leaves = known = columns[Columns.OBS], len(columns), leaves
        return known[2]

    def _adopt_infos(self, row: int, infos: Mapping[str, Any], theirs: list[int], ours: list[int]) -> None:
        if not isinstance(infos, SlotInfos):
            return
        own = self.fragment.infos[row]
        dicts = own.dicts if isinstance(own, SlotInfos) else [{} for _ in self.sessions]
        for slot, their_slot in zip(ours, theirs, strict=True):
            dicts[slot] = infos.of(their_slot)
        self.fragment.infos[row] = SlotInfos(dicts)

    def _begin_like(self, source: "SessionLane") -> None:
        """Give the columns the types that the other lane's have."""
        if not self.is_fresh:
            return
        self.is_fresh = False
        slots = self.layout.num_slots
        self.episode_number[:] = -1  # of sessions that begin here
        self._retype(source.observation_space)
        self._typing = False
        self._version_written = -1  # of rows that are still to come
        self.observation_spaces = source.observation_spaces
        first = {name: column.row(0) for name, column in source.fragment.columns.items()}
        like = {
            name: map_tree(lambda leaf: np.zeros((slots, *leaf.shape[1:]), leaf.dtype), first[name])
            for name in source._extra or ()
        }
        self._add_extra_columns(like)
        self._latest, self._settled = self._column.row(self.row), True

    def _episode_id(self, slot: int, number: int) -> str:
        return f"{self.sessions[slot]}/{number}"


Ids = tuple[Hashable, ...]


class Sessions:
    """Finds or makes the lane in which the sessions of a call stand side by side.

    make          makes a lane of the sessions named
    remembers     False: nothing of a session matters to its next step, so any lane of as many slots will do

    A call with the same sessions as an earlier one goes on in their lane. Other calls take the sessions' memory over
    into a lane of their own.
    """

    def __init__(self, make: Callable[[Ids], SessionLane], *, remembers: bool = True) -> None:
        self._make, self._remembers = make, remembers
        self._of_size: dict[int, SessionLane] = {}  # where nothing is remembered
        self._homes: dict[Hashable, tuple[SessionLane, int]] = {}  # lane and slot
        self._lanes: dict[Ids, SessionLane] = {}  # those that have all their sessions still
        self._lost: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """All sessions that have a memory."""
        return tuple(self._homes)

    def lane(self, ids: Ids) -> SessionLane:
        """The lane of these sessions, in their order.

        Raises PolicyError for a session that comes twice, and for one whose memory was lost.
        """
        if not self._remembers:
            return self._any_of_size(ids)
        lane = self._lanes.get(ids)
        return self._gathered(ids) if lane is None else lane

    def reset(self, session: Hashable) -> None:
        """Begin a new episode with the session's next observation."""
        self._lost.discard(session)
        home = self._homes.get(session)
        if home is not None:
            home[0].begins.add(home[1])

    def forget(self, session: Hashable) -> None:
        """Release the memory of a session."""
        self._lost.discard(session)
        home = self._homes.pop(session, None)
        if home is not None:
            self._lanes.pop(home[0].sessions, None)

    def lose(self, lane: SessionLane) -> None:
        """Give up the memory of a lane's sessions, which a failure left half written."""
        self._lanes.pop(lane.sessions, None)
        if not self._remembers:
            self._of_size.clear()
            return
        for session in lane.sessions:
            self._homes.pop(session, None)
            self._lost.add(session)

    def _any_of_size(self, ids: Ids) -> SessionLane:
        self._check(ids)
        count = len(ids)
        lane = self._of_size.get(count)
        if lane is None:
            if len(self._of_size) >= _MOST_SIZES:
                self._of_size.clear()
            lane = self._of_size[count] = self._make(tuple(range(count)))
        return lane

    def _gathered(self, ids: Ids) -> SessionLane:
        self._check(ids)
        made = self._make(ids)
        moves: dict[int, tuple[SessionLane, list[int], list[int]]] = {}
        for slot, session in enumerate(ids):
            home = self._homes.get(session)
            if home is not None and not home[0].is_fresh:
                _, theirs, ours = moves.setdefault(id(home[0]), (home[0], [], []))
                theirs.append(home[1])
                ours.append(slot)
        for lane, theirs, ours in moves.values():
            made.adopt(lane, theirs, ours)
        left: set[int] = set()  # lanes that have lost a session: a lane's name is as long as it has sessions
        for slot, session in enumerate(ids):
            before = self._homes.get(session)
            if before is not None and id(before[0]) not in left:
                left.add(id(before[0]))
                self._lanes.pop(before[0].sessions, None)
            self._homes[session] = made, slot
        self._lanes[ids] = made
        return made

    def _check(self, ids: Ids) -> None:
        if len(set(ids)) < len(ids):
            twice = next(session for session in ids if ids.count(session) > 1)
            raise PolicyError(f"session {twice!r} comes more than once in one call, expected each session once")
        for session in ids:
            if session in self._lost:
                raise PolicyError(
                    f"session {session!r} lost its memory when an earlier step of it failed; expected "
                    f"reset({session!r}) before its next observation"
                )
