"""Connections between a source and its trainer, and their memories across connections.

Fragments are numbered 1, 2, … over the whole stream, whatever their lanes. A trainer's Welcome has the number of the
last fragment that it has got; the source goes on after it. So each is taken once, however often connections break.
"""

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec import messages
from rollflow.stream.wire.codec.handshake import LaneGrant, Welcome
from rollflow.stream.wire.codec.message import Message
from rollflow.stream.wire.connection import Event
from rollflow.stream.wire.ends import Acceptor, Initiator


class SourceSession:
    """A source's memory.

    token    16 random bytes that identify the session
    given    number of the last fragment of the stream, sent or not
    done     number of the last fragment such that the trainer has moved on from it and all before
    kept     number of the last fragment such that the trainer never wants it or any before again
    """

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.given = self.done = self.kept = 0

    def take(self, done: messages.Done) -> None:
        """Record how far the trainer is; to be called when events before this one have been handled."""
        self.done, self.kept = max(self.done, done.number), max(self.kept, done.kept)


class SourceConnection(Initiator):
    """A source's end, with a Hello of role "source". Constructed as an `Initiator`.

    next       number of the fragment that is to be sent next, once the Welcome has come

    Events: Welcome; then Settings, Weights, BlocksReleased, and Done, which is for `SourceSession.take`; at the end
    Goodbye or ConnectionBroken.
    """

    roles = "rollout", "trainer"
    takes = messages.Settings, messages.Weights, messages.BlocksReleased, messages.Done
    session: SourceSession
    next = 0

    def send(self, fragment: messages.Fragment | messages.Lent) -> None:
        """Send the next fragment, whose arrays must not change until they are sent, or while they are lent.

        Raises WireError if it is larger than the trainer takes, or the connection is not running.
        """
        self._check_running(fragment.kind)
        assert fragment.number == self.next <= self.session.given
        self._send(fragment)
        self.next += 1

    def _begin(self, welcome: Welcome) -> None:
        session = self.session
        if len(welcome.lanes) != 1:
            raise WireError(f"welcome.lanes has {len(welcome.lanes)} entries, expected 1, of the stream", "session")
        has = welcome.lanes[0].number
        if has > session.given:
            raise WireError(
                f"welcome.lanes: the trainer has {has} fragments of this stream, expected at most {session.given}",
                "session",
            )
        self.next = max(has, session.kept) + 1
        session.done = session.kept  # a restarted trainer may want later fragments again

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, messages.Done) and not message.kept <= message.number < self.next:
            raise WireError(
                f"done {message.number}, of which {message.kept} are kept, expected kept <= done < {self.next}, the "
                "next to be sent",
                "number",
            )
        return super()._take_running(message)


class TrainerSession:
    """A trainer's memory of one source.

    token     16 random bytes of the source that identify the session
    taken     number of the last fragment such that it and all before have come
    done      number of the last fragment such that the trainer has moved on from it and all before
    kept      number of the last fragment such that the trainer never wants it or any before again
    missed    number of skipped fragments, which the source forgot for an earlier trainer
    window    how many fragments beyond `done` the source may send; None: any number
    """

    def __init__(self, token: bytes, taken: int = 0) -> None:
        self.token = token
        self.taken = self.done = self.kept = taken
        self.missed = 0
        self.window: int | None = None
        self.is_welcomed = bool(taken)

    def grants(self) -> tuple[LaneGrant, ...]:
        """The stream in the form of a Welcome."""
        return (LaneGrant(0, 1, 0, self.taken),)

    def take(self, number: int, *, may_skip: bool) -> None:
        """Record a fragment. Raises WireError if it is not the next one, or beyond the window."""
        if number <= self.taken or (number > self.taken + 1 and not may_skip):
            raise WireError(f"fragment {number}, expected {self.taken + 1}", "number")
        skipped = number - self.taken - 1
        if skipped:
            self.missed += skipped if self.taken else 0
            self.done, self.kept = max(self.done, number - 1), max(self.kept, number - 1)
        if self.window is not None and number > self.done + self.window:
            raise WireError(
                f"fragment {number}, expected at most {self.done + self.window}: {self.window} beyond the last that is "
                "done",
                "credit",
            )
        self.taken = number

    def miss(self, last: int) -> None:
        """Record the last number of the stream: missing fragments up to it have gone to an earlier trainer."""
        if last > self.taken:
            self.missed += last - self.taken if self.taken else 0
            self.taken = self.done = self.kept = last


class TrainerConnection(Acceptor):
    """A trainer's end. Constructed as an `Acceptor`.

    Events:

        Hello                             the source has proved itself: answer with `welcome` or `refuse`
        Fragment, Lent                    the fragments of the stream, each once and in order
        BlocksReleased                    blocks in which nothing more will be lent
        LaneJoined, LaneLeft, Finished
        Goodbye, ConnectionBroken         the end
    """

    roles = "trainer", "rollout"
    accepts = "source"
    takes = (
        messages.Fragment,
        messages.Lent,
        messages.BlocksReleased,
        messages.LaneJoined,
        messages.LaneLeft,
        messages.Finished,
    )
    session: TrainerSession | None = None
    _is_first = True  # the next fragment is the first of this connection

    def _take_running(self, message: Message) -> list[Event]:
        if isinstance(message, messages.Fragment | messages.Lent):
            assert self.session is not None
            self.session.take(message.number, may_skip=self._is_first)
            self._is_first = False
        return super()._take_running(message)
