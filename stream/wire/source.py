"""A source's end of a connection to a trainer, and what it remembers from one connection to the next.

Fragments are numbered 1, 2, … over the whole stream, whatever their lanes. A trainer says in its Welcome which is the
last that it has; the source goes on behind that. So each is taken once, however often connections break.
"""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.connection import Event
from rollflow.stream.wire.handshake import Hello, Welcome
from rollflow.stream.wire.host_end import HostEnd
from rollflow.stream.wire.limits import Limits
from rollflow.stream.wire.message import Message
from rollflow.stream.wire.running import (
    Aside,
    Block,
    Come,
    Done,
    Finished,
    Forget,
    Fragment,
    Free,
    Lent,
    Receipt,
    Series,
    Settings,
    Weights,
)


class SourceSession:
    """A source's memory.

    token    16 random bytes to come back with
    given    number of the last fragment of the stream, whether it has been sent or not
    done     of the last one that the trainer has moved on from, with all before it
    kept     of the last one that it never wants again, with all before it
    """

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.given = self.done = self.kept = 0

    def take(self, done: Done) -> None:
        """Take down how far the trainer is: to be called once what came before it has been done."""
        self.done, self.kept = max(self.done, done.number), max(self.kept, done.kept)


class SourceConnection(HostEnd):
    """A source's end; its Hello, of role "source", is what it sends first.

    session    the source's memory, the same for one connection after another
    next       number of the fragment that is to be sent next, once the Welcome has come

    Events: Welcome; then Settings, Weights, Free, and Done, which is for `SourceSession.take`; Goodbye; Broken.
    """

    roles = "rollout", "trainer"

    def __init__(
        self, hello: Hello, session: SourceSession, *, secret: bytes | None, limits: Limits, now: float
    ) -> None:
        super().__init__(hello, secret=secret, limits=limits, now=now)
        self.session = session
        self.next = 0

    def send(self, fragment: Fragment | Lent | Series) -> None:
        """Send the next fragment, or several, whose arrays stay as they are until it is sent, or as long as it is lent.

        Raises WireError where it is another one, is larger than the trainer takes, or the connection is not running.
        """
        self._check_running(fragment.kind)
        last = fragment.number + (fragment.count if isinstance(fragment, Series) else 1) - 1
        if fragment.number != self.next:
            raise WireError(f"fragment {fragment.number}, expected {self.next}", "number")
        if last > self.session.given:
            raise WireError(f"fragment {last}, expected {self.session.given} at most", "number")
        self._send(fragment)
        self.next = last + 1

    def tell(self, news: Receipt | Come | Aside | Finished | Block | Forget) -> None:
        """Say something beside the fragments. Raises WireError where the connection is not running."""
        self._check_running(news.kind)
        self._send(news)

    def _begin(self, welcome: Welcome) -> None:
        session = self.session
        if welcome.session != session.token:
            raise WireError("welcome.session is not the one in the hello", "session")
        if len(welcome.lanes) != 1:
            raise WireError(f"welcome.lanes has {len(welcome.lanes)} entries, expected 1, of the stream", "session")
        has = welcome.lanes[0].number
        if has > session.given:
            raise WireError(
                f"welcome.lanes: the trainer has {has} fragments of this stream, expected at most {session.given}",
                "session",
            )
        self.next = max(has, session.kept) + 1
        session.done = session.kept  # until it says: it may have been started again, and want the rest once more

    def _take_running(self, message: Message) -> list[Event]:
        match message:
            case Done():
                if not message.kept <= message.number < self.next:
                    raise WireError(
                        f"done {message.number}, of which {message.kept} are kept, expected kept <= done < "
                        f"{self.next}, the next to be sent",
                        "number",
                    )
                return [message]
            case Settings() | Weights() | Free():
                return [message]
            case _:
                raise WireError(f"{message.kind} to a source, expected settings, weights or done", "order")
