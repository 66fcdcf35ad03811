"""Meters of nodes and edges: plain integer counters, which are always on."""

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Final, NamedTuple

from rollflow.stream.observe.trace import Record, Trace

clock: Final = perf_counter_ns
_RECENT = 1024  # calls


class CallStats(NamedTuple):
    """How long calls took, in seconds: the median and the 99th percentile of recent ones, and the longest of all."""

    p50_s: float
    p99_s: float
    longest_s: float


class CallTimes:
    """Durations of calls in ns: of the last 1,024, and of the longest.

    Adding to `recent` costs 20 ns, a bucket of a histogram 40 to 110. From any thread.
    """

    __slots__ = ("longest", "recent")

    def __init__(self) -> None:
        self.recent: deque[int] = deque(maxlen=_RECENT)
        self.longest = 0

    def add(self, took: int) -> None:
        """Count a call."""
        self.recent.append(took)
        if took > self.longest:
            self.longest = took

    def read(self) -> CallStats | None:
        """What there is by now; None: there was no call."""
        ordered = sorted(self.recent)
        if not ordered:
            return None
        last = len(ordered) - 1
        return CallStats(ordered[last // 2] / 1e9, ordered[last * 99 // 100] / 1e9, self.longest / 1e9)


NodeTrace = Mapping[str, Record]
"""Records the spans of a node in a trace, by what it is at then: "busy", "waits" or "blocked"."""


def node_trace(trace: Trace, name: str) -> NodeTrace:
    """Records on a track of the node's name."""
    spans = {"busy": name, "waits": "waits for an item", "blocked": "waits for room"}
    return {kind: trace.recorder(name, text, kind) for kind, text in spans.items()}


@dataclass(slots=True, eq=False)
class NodeMeter:
    """One node's counters.

        items         items taken, or for a source sent
        busy_ns       time in the node's own work, but for what is under way
        blocked_ns    time in which an outlet of the node waited for room, or the node for somebody outside of the graph
        calls         how long each call took, or each span of an asynchronous node's own work
        trace         records the same times as spans; None: nothing is traced
        counts_itself whether the node counts all of its work itself
        works_since   time at which background work began that the thread waits for, in ns; None: there is none
        tasks         that have to wait for the node to be idle, of the caller those that read outputs

    The rest of the elapsed time is idle: waiting for items, or for other nodes of the same task. A synchronous node
    adds up its calls. An asynchronous one lives from `begin_life` to `end_life`, and is busy whenever it neither waits
    nor is blocked. Waits of several tasks at once count as one, if so many wait. Background work that a
    thread waits for counts from `begin_work` to `end_work`.
    """

    name: str
    items: int = 0
    busy_ns: int = 0
    blocked_ns: int = 0
    calls: CallTimes = field(default_factory=CallTimes)
    trace: NodeTrace | None = None
    counts_itself: bool = False
    works_since: int | None = None
    tasks: int = 1
    _is_alive: bool = False
    _waiting: int = 0
    _blocked: int = 0
    _span: tuple[str, int] = ("", 0)  # "busy", "waits", "blocked" or "", and since when

    def take_trace(self, trace: NodeTrace | None) -> None:
        """Have the times that begin from now on be recorded; None: no more, and work under way as far as it has come.

        From any thread.
        """
        before, self.trace = self.trace, trace
        at, since = self._span
        for began in self.works_since, since if at == "busy" else None:
            if before is not None and began is not None:
                before["busy"](began, clock())

    @property
    def is_waiting(self) -> bool:
        """True while a task of the node waits for an item."""
        return self._waiting > 0

    @property
    def is_blocked(self) -> bool:
        """True while a task of the node waits for room, or for somebody outside of the graph."""
        return self._blocked > 0

    def begin_work(self, now: int) -> None:
        """Begin to count background work that the thread now waits for."""
        self.works_since = now

    def end_work(self, now: int) -> None:
        """End the count of background work."""
        since, self.works_since = self.works_since, None
        if since is not None:
            self.count_work(since, now)

    def count_work(self, began: int, now: int) -> None:
        """Count a span of the node's work that is over."""
        self.busy_ns += now - began
        trace = self.trace
        if trace is not None:
            trace["busy"](began, now)

    def begin_life(self) -> None:
        """Begin to count the time between waits as busy; a second call changes nothing."""
        self._is_alive = True
        self._turn()

    def end_life(self) -> None:
        """End the node's life: it is no longer busy."""
        self._is_alive = False
        self._turn()

    def waits(self) -> "TaskWait":
        """Block in which a task of the node waits for an item."""
        return TaskWait(self, 1, 0)

    def blocks(self) -> "TaskWait":
        """Block in which a task of the node waits for room."""
        return TaskWait(self, 0, 1)

    def _turn(self, waiting: int = 0, blocked: int = 0) -> None:
        """Begin the span of what the node is at now, and count the one that ends, unless that goes on.

        waiting, blocked    tasks that begin to wait; negative: that no longer do
        """
        self._waiting += waiting
        self._blocked += blocked
        at = (
            "blocked" if self._blocked else "waits" if self._waiting >= self.tasks else "busy" if self._is_alive else ""
        )
        was, since = self._span
        if at == was:
            return
        now = clock()
        self._span = at, now
        if was == "busy":
            self.busy_ns += now - since
            self.calls.add(now - since)
        elif was == "blocked":
            self.blocked_ns += now - since
        trace = self.trace
        if was and trace is not None:
            trace[was](since, now)

    def read(self) -> tuple[int, int]:
        """busy_ns and blocked_ns as of now, with what is under way. From any thread."""
        now = clock()  # first: a span that ends after it is counted as far as it has come
        # In one statement without a call, within which no other thread has its turn.
        busy, blocked, works, (at, since) = self.busy_ns, self.blocked_ns, self.works_since, self._span
        passed = max(now - since, 0)
        busy += passed * (at == "busy") + (0 if works is None else max(now - works, 0))
        return busy, blocked + passed * (at == "blocked")


class TaskWait:
    """Block in which a task of a node waits for an item, or for room: a generator's would cost 1 µs more."""

    __slots__ = ("_blocked", "_meter", "_waiting")

    def __init__(self, meter: NodeMeter, waiting: int, blocked: int) -> None:
        self._meter, self._waiting, self._blocked = meter, waiting, blocked

    def __enter__(self) -> None:
        self._meter._turn(self._waiting, self._blocked)

    def __exit__(self, *error: object) -> None:
        self._meter._turn(-self._waiting, -self._blocked)


def waiting_for(holders: dict[str, NodeMeter], name: str | None) -> AbstractContextManager[None]:
    """Block in which a node or a chain waits for somebody outside of the graph, such as a trainer.

    holders    name -> meter of each; an item is a wait, and simultaneous waits of several nodes count as one
    name       None: unknown, and nothing is counted
    """
    if name is None:
        return nullcontext()
    meter = holders.setdefault(name, NodeMeter(name, _is_alive=True, _waiting=1))
    meter.items += 1
    return TaskWait(meter, -1, 0)  # a holder itself waits while no node waits for it


@dataclass(slots=True, eq=False)
class EdgeMeter:
    """One channel's counters.

    items            items taken
    dropped          items dropped
    peak             most items held at a time
    blocked_count    number of sends that had to wait
    full_ns          time in which the channel was full
    item_ns          integral of the items held over time
    held             items held now
    """

    name: str
    capacity: int
    items: int = 0
    dropped: int = 0
    peak: int = 0
    blocked_count: int = 0
    full_ns: int = 0
    item_ns: int = 0
    held: int = 0
    _since: int = field(default_factory=clock)

    def holds(self, count: int) -> None:
        """Record that the channel now holds `count` items."""
        now = clock()
        held, self.held = self.held, count
        elapsed = now - self._since
        self._since = now
        self.item_ns += held * elapsed
        if held >= self.capacity:
            self.full_ns += elapsed
        if count > self.peak:
            self.peak = count

    def read(self) -> tuple[int, int]:
        """item_ns and full_ns as of now."""
        held, elapsed = self.held, clock() - self._since
        return self.item_ns + held * elapsed, self.full_ns + (elapsed if held >= self.capacity else 0)
