"""Pace gate: bounds how far a rollout may run ahead of its trainers, and keeps what they have not acknowledged."""

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.env.lane_source import LaneGate
from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.observe.waits import Wait
from rollflow.stream.wire import SESSION_BYTES, Done, Fragment, SenderSession, decode, encode
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

logger = logging.getLogger(__name__)

_NUMBER = field.whole(0, MOST_NUMBER)
# Settings by which a trainer wants a rollout's stream:
#   window    items that it takes beyond the last one that it is done with
#   ahead     fragments that a lane may have begun beyond that; 0: the trainer does not wait for the rollout yet;
#             None: any number in the window
#   version   of the newest published weights: the rollout is to act with these, or newer ones
#   needs     number of items that the trainer has to have at a time before it is done with any
#   stays     whether a rollout whose last fragment has come stays until all are acknowledged
#   cut       number of the checkpoint that it is to send its state for; None: it is asked for none
_ORDER = field.entries(
    window=_NUMBER,
    ahead=field.nullable(_NUMBER),
    version=_NUMBER,
    needs=_NUMBER,
    stays=field.flag,
    cut=field.nullable(_NUMBER),
)


# A message, its bytes, and its transitions, which are those of fragments with these origins.
Kept = tuple[Fragment, int, int, Sequence[Origin]]


class ResendBuffer(SenderSession):
    """Session of a source that keeps its messages until the trainer never wants them again. From any thread.

    max_bytes    that are kept

    nbytes       of all
    needs        how many there is room for, however large they are
    order        settings by which the trainer wants the stream; None: it has not been there yet
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(secrets.token_bytes(SESSION_BYTES))
        self.nbytes, self.needs = 0, 1
        self.order: Mapping[str, Any] | None = None
        self.max_bytes = checked_count("max_bytes", max_bytes, 1)
        self._entries: deque[Kept] = deque()  # the last of the stream
        self._lock = threading.Lock()
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._entries)

    def take_order(self, settings: Any) -> None:
        """Take a trainer's settings. Raises WireError for what is none."""
        self.order = order = _ORDER(settings, "settings")
        self.window, self.needs = order["window"], order["needs"]

    @property
    def is_full(self) -> bool:
        """True if there is as much as may be."""
        return self.nbytes >= self.max_bytes and len(self) >= self.needs

    def has_room(self, items: str) -> bool:
        """True if another may be added; logs once that more bytes than `max_bytes` are needed. `items` names them."""
        if self.is_full:
            return False
        if self.nbytes >= self.max_bytes and not self._has_warned:
            self._has_warned = True
            text = "the trainer needs %d %s at a time, of about %d bytes, more than max_bytes=%d: as many are kept"
            logger.warning(text, self.needs, items, self.nbytes * self.needs // max(1, len(self)), self.max_bytes)
        return True

    def add(self, message: Fragment, nbytes: int, steps: int, origins: Sequence[Origin] = ()) -> None:
        """Keep the next one; see `Kept`."""
        with self._lock:
            assert message.number == self.given + 1
            self._entries.append((message, nbytes, steps, origins))
            self.nbytes += nbytes
            self.given = message.number

    def get(self, number: int) -> Fragment:
        """One that is kept."""
        with self._lock:
            return self._entries[number - self.given - 1][0]

    def take(self, done: Done) -> None:
        """Record how far the trainer is, and forget what it never wants again."""
        super().take(done)
        with self._lock:
            while len(self._entries) > self.given - self.kept:
                self.nbytes -= self._entries.popleft()[1]

    def get_state(self) -> dict[str, Any]:
        """The items that are kept, encoded, and how far the trainer is."""
        with self._lock:
            counts = {"token": self.token.hex(), "done": self.done, "kept": self.kept, "given": self.given}
            frames = [np.frombuffer(b"".join(encode(message)), np.uint8) for message, *_ in self._entries]
            return {**counts, "items": [[frame, *each[1:3]] for frame, each in zip(frames, self._entries, strict=True)]}

    def go_on_from(self, state: Mapping[str, Any], origin: Callable[[int, tuple[int, int]], Origin]) -> None:
        """Keep the items of another rollout's buffer, as `get_state` gave them, under its token.

        origin    makes the origin of an item, of its transitions and its lane and number
        """
        with self._lock:
            self.token = bytes.fromhex(state["token"])
            self.done, self.kept, self.given = (state[name] for name in ("done", "kept", "given"))
            for data, nbytes, steps in state["items"]:
                message = decode(data.tobytes())
                assert isinstance(message, Fragment)
                self._entries.append((message, nbytes, steps, [origin(steps, (message.lane, message.number))]))
                self.nbytes += nbytes

    def held_back(self, items: str) -> str:
        """The reason for which a trainer that is there takes no more, for people; `items` names what it is sent."""
        if self.is_full:
            until = "acknowledges them, by ack() or by moving on" if self.done > self.kept else "moves on from them"
            return f"{self.nbytes} bytes are kept until it {until}; max_bytes is {self.max_bytes}"
        return f"it has {self.given - self.done} {items} that it has not moved on from"

    def later_than(self, number: int) -> list[Kept]:
        """Those with greater numbers."""
        with self._lock:
            later = min(len(self), max(0, self.given - number))
            return list(islice(self._entries, len(self) - later, None))


class PaceGate(LaneGate):
    """Gate that lets a lane begin a fragment once its trainer is there, waits for it, and its weights are in use.

    It also collects news of lanes, and gives each once: how many there are where they come and go, else which are gone.

    buffer     items that were given to the trainer
    name       of the trainer, in reports
    lanes      that there are at the beginning, if lanes come and go; None: they are fixed
    ring       called when there is news of lanes, in the graph's thread

    lanes      that there are; never changed in place, as `aside` is not: hellos are made in a thread of their own
    aside      fixed lane that is gone -> number of an item behind which it has no fragment
    given      fixed lane -> number of its fragments that came to the sink
    takes_state    whether the rollout may be given a state to go on from, for which its trainer is waited for first
    version    policy version that the rollout acts with
    problem    why there is no trainer; "": there is one
    """

    def __init__(self, buffer: ResendBuffer, name: str, lanes: Iterable[int] | None, ring: Callable[[], None]) -> None:
        super().__init__()
        self.version, self.problem, self.takes_state = 0, "", False
        self.lanes = None if lanes is None else frozenset(lanes)
        self.aside: dict[int, int] = {}
        self.given: Counter[int] = Counter()
        self._told, self._ring = self.lanes, ring
        self._gone: dict[int, int] = {}  # fixed lane -> number of its fragments in all
        self._buffer, self._name = buffer, name

    @property
    def holder(self) -> str | None:
        """Name of the trainer, if the rollout waits for it; None: it does not."""
        order, buffer = self._buffer.order, self._buffer
        is_awaited = order is None or self.version < order["version"] or buffer.given > buffer.done
        return self._name if is_awaited else None

    def waits_for(self) -> Wait | None:
        """The trainer, if the rollout waits for it: one that is there holds it back, and does not stall it."""
        order = self._buffer.order
        if order is not None and not self.problem:
            return Wait(self._name, "holds back", "has what it wants for now", mark=self._buffer.done)
        doing = "has not come" if order is None else "is gone"
        text = f"{doing}: {self.problem}" if self.problem else doing
        return Wait(self._name, "away", text, remedy="start the trainer, or look at its address and its log")

    @property
    def wants_newest(self) -> bool:
        """True if fragments are to begin with the newest weights, since the trainer takes nothing that is too old."""
        order = self._buffer.order
        return order is not None and order["ahead"] is not None

    @property
    def is_ready(self) -> bool:
        """True if its environments may begin."""
        return not self.takes_state or self._buffer.order is not None

    def _lets_begin(self, lane: Any) -> bool:
        if self.lanes is not None and lane.index not in self.lanes:
            self.lanes |= {lane.index}
            self._ring()
        order = self._buffer.order
        if order is None or self.version < order["version"]:
            return False
        if order["ahead"] is None:
            return True
        under_way: int = lane.sequence - self.given[lane.index]  # on their way to the sink
        later = self._buffer.later_than(self._buffer.done)
        ahead: int = order["ahead"]
        kept = sum(1 for message, *_ in later if message.lane == lane.index)
        return under_way + kept < ahead

    def gone(self, lane: int, fragments: int) -> None:
        """Note that a lane has ended, with `fragments` in all, of which some may be on their way."""
        self._begun_by.pop(lane, None)
        if self.lanes is None:
            self._gone[lane] = fragments
        else:
            self.lanes -= {lane}
        self._ring()

    def give(self, lane: int, sequence: int) -> None:
        """Note that a lane's fragment has come to the sink."""
        if self.lanes is None:
            self.given[lane] = sequence + 1

    def take_news(self, number: int) -> list[dict[str, Any]]:
        """Take the news: number of lanes, or fixed ones that are gone, with all fragments in items up to `number`."""
        if self.lanes is not self._told:
            self._told = self.lanes
            return [{"lanes": len(self.lanes or ())}]
        over = [lane for lane, fragments in self._gone.items() if self.given[lane] >= fragments]
        for lane in over:
            del self._gone[lane]
            self.aside = self.aside | {lane: number}
        return [{"left": [lane, number]} for lane in over]

    def look_again(self) -> None:
        """Have refused lanes try again. Called in the graph's thread."""
        self._changed()
