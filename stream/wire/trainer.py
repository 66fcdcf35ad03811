"""A trainer's end of a connection to a source, and what it remembers of it from one connection to the next."""

from rollflow.stream.errors import WireError
from rollflow.stream.wire.connection import Event
from rollflow.stream.wire.gateway_end import GatewayEnd
from rollflow.stream.wire.handshake import Hello, LaneGrant
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


class TrainerSession:
    """A trainer's memory of one source.

    token     16 random bytes of the source's, which it comes back with
    taken     number of the last fragment that has come, with all before it
    done      of the last one that the trainer has moved on from, with all before it
    kept      of the last one that it never wants again, with all before it
    missed    how many were skipped: whoever went on from here before has told the source that it may forget them
    window    how many fragments beyond `done` the source may send; None: any number
    """

    def __init__(self, token: bytes, taken: int = 0) -> None:
        self.token = token
        self.taken = self.done = self.kept = taken
        self.missed = 0
        self.window: int | None = None
        self.is_welcomed = bool(taken)

    def take(self, number: int, *, may_skip: bool, count: int = 1) -> None:
        """Take down that so many have come. Raises WireError where they are not the next, or were not asked for."""
        last = number + count - 1
        if number <= self.taken or (number > self.taken + 1 and not may_skip):
            raise WireError(f"fragment {number}, expected {self.taken + 1}", "number")
        skipped = number - self.taken - 1
        if skipped:
            self.missed += skipped if self.taken else 0
            self.done, self.kept = max(self.done, number - 1), max(self.kept, number - 1)
        if self.window is not None and last > self.done + self.window:
            raise WireError(
                f"fragment {last}, expected at most {self.done + self.window}: {self.window} beyond the last that is "
                "done",
                "credit",
            )
        self.taken = last

    def miss(self, last: int) -> None:
        """Take down that nothing comes above a number: what is missing below it, somebody else has had."""
        if last > self.taken:
            self.missed += last - self.taken if self.taken else 0
            self.taken = self.done = self.kept = last


class TrainerConnection(GatewayEnd):
    """A trainer's end.

    Events: Hello, once the source has proved itself, which is to be answered with `welcome` or `refuse`; then every
    Fragment, Lent or Series of the stream once, in their order, Receipt, Come, Aside, Finished, Block and Forget;
    Goodbye; Broken.
    """

    roles = "trainer", "rollout"

    def __init__(self, *, software: str, nonce: bytes, secret: bytes | None, limits: Limits, now: float) -> None:
        super().__init__(software=software, nonce=nonce, secret=secret, limits=limits, now=now)
        self._session: TrainerSession | None = None
        self._is_first = True  # fragment of this connection

    def welcome(self, session: TrainerSession) -> None:
        """Take the source in, with the session that its Hello names. Raises WireError where there is none to answer."""
        slots = 1 if self.hello is None else self.hello.num_envs
        grant = LaneGrant(0, slots, 0, session.taken)
        self._welcome(session.token, resumed=session.is_welcomed, credits=0, lanes=(grant,))
        self._session = session
        session.is_welcomed = True

    def tell(self, news: Settings | Weights | Done | Free) -> None:
        """Send something, whose arrays must stay as they are until sent. Raises WireError when not running."""
        self._check_running(news.kind)
        self._send(news)

    def _check(self, hello: Hello) -> None:
        if hello.role != "source":
            raise WireError(f"hello.role is {hello.role!r}, expected 'source': this is a trainer", "role")

    def _take_running(self, message: Message) -> list[Event]:
        if self._session is None:
            return []  # a goodbye has been said in the handshake
        if isinstance(message, Fragment | Lent | Series):
            count = message.count if isinstance(message, Series) else 1
            self._session.take(message.number, may_skip=self._is_first, count=count)
            self._is_first = False
            return [message]
        if isinstance(message, Receipt | Come | Aside | Finished | Block | Forget):
            return [message]
        raise WireError(f"{message.kind} from a source, expected fragment, receipt or finished", "order")
