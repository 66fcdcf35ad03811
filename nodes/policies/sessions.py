"""Sessions of a policy: which lane has the memory of each, and lanes for those that act together."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from rollflow.nodes.policies.session_lane import SessionLane
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.stream.data.errors import PolicyError

Ids = tuple[Hashable, ...]
_MOST_SIZES = 256  # lanes of different sizes that are kept


class SessionGroup(NamedTuple):
    """Sessions that act together: their lane, and the stage before the forward pass that follows it."""

    lane: SessionLane
    prepare: EnvToModule


class Sessions:
    """Finds or makes the lane in which the sessions of a call stand side by side.

    make          makes a group of the sessions named
    remembers     False: nothing of a session matters to its next step, so any lane of as many slots will do

    A call with the same sessions as an earlier one goes on in their lane. Other calls take the sessions' memory over
    into a lane of their own.
    """

    def __init__(self, make: Callable[[Ids], SessionGroup], *, remembers: bool = True) -> None:
        self._make, self._remembers = make, remembers
        self._of_size: dict[int, SessionGroup] = {}  # where nothing is remembered
        self._homes: dict[Hashable, tuple[SessionGroup, int]] = {}  # group and slot
        self._groups: dict[Ids, SessionGroup] = {}  # those that have all their sessions still
        self._lost: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def ids(self) -> tuple[Hashable, ...]:
        """All sessions that have a memory."""
        return tuple(self._homes)

    def group(self, ids: Ids) -> SessionGroup:
        """The group of these sessions, in their order.

        Raises PolicyError for a session that comes twice, and for one whose memory was lost.
        """
        if not self._remembers:
            return self._any_of_size(ids)
        group = self._groups.get(ids)
        return self._gathered(ids) if group is None else group

    def reset(self, session: Hashable) -> None:
        """Begin a new episode with the session's next observation."""
        self._lost.discard(session)
        home = self._homes.get(session)
        if home is not None:
            home[0].lane.begins.add(home[1])

    def forget(self, session: Hashable) -> None:
        """Release the memory of a session."""
        self._lost.discard(session)
        home = self._homes.pop(session, None)
        if home is not None:
            self._groups.pop(home[0].lane.sessions, None)

    def lose(self, group: SessionGroup) -> None:
        """Give up the memory of a group's sessions, which a failure left half written."""
        self._groups.pop(group.lane.sessions, None)
        if not self._remembers:
            self._of_size.clear()
            return
        for session in group.lane.sessions:
            self._homes.pop(session, None)
            self._lost.add(session)

    def _any_of_size(self, ids: Ids) -> SessionGroup:
        self._check(ids)
        count = len(ids)
        group = self._of_size.get(count)
        if group is None:
            if len(self._of_size) >= _MOST_SIZES:
                self._of_size.clear()
            group = self._of_size[count] = self._make(tuple(range(count)))
        return group

    def _gathered(self, ids: Ids) -> SessionGroup:
        self._check(ids)
        group = self._make(ids)
        moves: dict[int, tuple[SessionLane, list[int], list[int]]] = {}
        for slot, session in enumerate(ids):
            home = self._homes.get(session)
            if home is not None and not home[0].lane.is_fresh:
                _, theirs, ours = moves.setdefault(id(home[0].lane), (home[0].lane, [], []))
                theirs.append(home[1])
                ours.append(slot)
        for lane, theirs, ours in moves.values():
            group.lane.adopt(lane, theirs, ours)
        for slot, session in enumerate(ids):
            before = self._homes.get(session)
            if before is not None:
                self._groups.pop(before[0].lane.sessions, None)
            self._homes[session] = group, slot
        self._groups[ids] = group
        return group

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
