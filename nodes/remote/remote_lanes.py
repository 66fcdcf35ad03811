"""Lanes on other hosts, whatever it is that the hosts do for them: hosts come and go, and so do their lanes."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

from rollflow.nodes.backoff import pause_s
from rollflow.nodes.lane_source import LaneSource
from rollflow.nodes.remote.gateway import Gateway
from rollflow.nodes.remote.lane_record import Record, State
from rollflow.nodes.remote.remote_envs import RemoteHosts
from rollflow.nodes.remote.remote_host import Answered, Back, Joined, Left, News, RemoteHost, Told
from rollflow.nodes.workers.patience import Patience
from rollflow.stream.errors import EnvError
from rollflow.stream.wire import Answer, Failed, Request

logger = logging.getLogger(__name__)

_LONGEST_DELAY_S = 30.0
_LOOK_S = 0.5
_SILENT_S = 5.0  # how long hosts are waited for without a word
_MOST_LANES = 1 << 16
_MOST_FAREWELLS = 16


class RemoteLanes(LaneSource):
    """Lanes on hosts that a gateway takes in; what those are asked for is said by the classes made of this, which have
    a node of a kind of environments as their other base.

        step_timeout, reset_timeout    seconds after which a lane is late; None: never
        max_failures                   how often in a row a lane may be lost; then it leaves

        role          of the hosts
        lost_steps    transitions that were under way when they were lost
        joined        called with every lane that comes after the beginning, and with whether it is the first after the
                      last has left
        left          called with every lane that has left, before it goes round for the last time, and with whether
                      it was the last

    A host whose connection breaks goes on where it was when it comes back in time; nothing is lost. One that does not,
    or breaks the protocol, leaves, its lanes with it. Hosts that come later get lanes of their own. While there is none
    at all, the rollout waits, for as long as it did for the first; then it ends with an EnvError that says why each has
    left.
    """

    role: str
    envs_on: Callable[[RemoteHost], list[Any]]
    num_envs: int

    has_fixed_lanes = False

    def __init__(
        self,
        env: RemoteHosts,
        *,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
        max_failures: int = 5,
        **options: Any,
    ) -> None:
        self.in_flight = 0
        self.joined: Callable[[Any, bool], None] = _ignore
        self.left: Callable[[Any, bool], None] = _ignore
        self._patience = Patience(step_timeout, reset_timeout)
        self._max_failures = max_failures
        self._join_timeout = env.join_timeout
        self._records: list[Record] = []
        self._lost: set[int] = set()  # lanes that begin anew some time
        self._farewells: deque[tuple[str, str]] = deque(maxlen=_MOST_FAREWELLS)  # who left last, and why
        self._vacant_since: float | None = None
        self.is_draining = False
        self._gateway = Gateway(env, self.role)
        try:
            super().__init__(env, **options)  # type: ignore[arg-type]
        except BaseException:
            self._gateway.close("the rollout could not be made")
            raise

    def start(self) -> Iterator[Any]:
        """Have every lane set out, all at a time."""
        self._begin()
        for index, (env, first_slot) in enumerate(zip(self.envs, self.first_slots(), strict=True)):
            self._record_of(index, env, first_slot, self._gateway.host_of(index))
        for record in self._records:
            if record.host.session.token not in self._gateway.hosts:
                record.state, record.reason = State.GONE, f"host {record.host.name} left before the first step"
            yield from self._set_out(record)

    def fileno(self) -> int:
        """Can be read once a host has something to say."""
        return self._gateway.fileno()

    @property
    def most_lanes(self) -> int:
        """How many there may come to be."""
        return _MOST_LANES

    @property
    def patience(self) -> float | None:
        """Seconds until a lane is late or to be reset again, or the rollout has waited long enough for hosts."""
        now = monotonic()
        due = [self._records[index].due - now for index in self._lost]
        if self._vacant_since is not None and self._join_timeout is not None:
            due.append(self._vacant_since + self._join_timeout - now)
        if self._patience.left is not None:
            due.append(self._patience.left)
        if self.is_draining:
            due.append(_LOOK_S)  # whether a host has been lost
        return max(0.0, min(due)) if due else None

    def completed(self) -> Iterator[Any]:
        """The lanes that have come back, or begin anew. Raises EnvError when no host is left and none comes."""
        self._gateway.service()
        for news in self._gateway.news():
            yield from self._heard(news)
        for index, told in self._patience.overdue().items():
            record = self._records[index]
            if record.host.lost_at is not None:  # it has time to come back, and its answer from then on
                self._patience.end(index)
            elif self._is_late(record):
                yield from self._late(record, f"host {record.host.name}, lane {index}, {record.slots}: {told}")
            else:
                self._patience.begin(index, resets=False)
        now = monotonic()
        for record in [self._records[index] for index in self._lost]:
            if record.due <= now:
                self._lost.discard(record.lane.index)
                yield from self._set_out(record)
        self._check_vacancy(now)
        if self.is_draining:
            yield from self._given_up()

    def hasten(self) -> None:
        """Have lanes come back that make no step: no more will be asked for."""
        self.is_draining = True

    def describe(self) -> str:
        """Lanes, slots and hosts, for `explain()`."""
        return f"{super().describe()}, on {self._gateway.describe()}"  # type: ignore[misc]

    def close(self) -> None:
        """Say goodbye to the hosts."""
        self.is_closed = True
        self._gateway.close()

    # What environments here do otherwise

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        if num_envs is not None or lanes is not None:
            raise EnvError(
                f"num_envs is {num_envs} and lanes is {lanes}, expected neither: hosts say how many environments and "
                "lanes they have"
            )
        made: list[Any] = []
        for host in self._first_hosts(env.hosts):
            made += self.envs_on(host)
        return made

    def _first_hosts(self, count: int) -> list[RemoteHost]:
        """Wait for so many hosts. Raises EnvError when they don't come in time."""
        hosts: list[RemoteHost] = []
        until = None if self._join_timeout is None else monotonic() + self._join_timeout
        told_at = monotonic() + _SILENT_S
        while len(hosts) < count:
            if until is not None and monotonic() >= until:
                raise EnvError(
                    f"{len(hosts)} of {count} hosts came within {self._join_timeout:g} s, {self._gateway.waited_for()}"
                )
            if monotonic() >= told_at:
                told_at = math.inf
                logger.warning("%d of %d hosts are here, waiting: %s", len(hosts), count, self._gateway.waited_for())
            self._gateway.wait(None if until is None else until - monotonic())
            self._gateway.service()
            for news in self._gateway.news():
                if isinstance(news, Joined):
                    hosts.append(news.host)
                elif isinstance(news, Told):  # it has made nothing yet, and is to say so when it has
                    self._gateway.give_credit(news.host)
                elif isinstance(news, Left):
                    self._farewells.append((f"host {news.host.name}", news.reason))
                    count += 1  # others are waited for in its place
        return hosts

    # What those do otherwise who are made of this

    def _lane_for(self, index: int, env: Any, first_slot: int) -> Any:
        """What goes round for a new lane."""
        raise NotImplementedError

    def _set_out(self, record: Record) -> Iterator[Any]:
        """Have a lane begin, or begin anew after it was lost."""
        raise NotImplementedError

    def _take(self, record: Record, answer: Any) -> Iterator[Any]:
        """Take what a host has answered for a lane, where nothing failed."""
        raise NotImplementedError

    def _lost_with(self, record: Record, reason: str) -> int:
        """End what is open in a lane that is lost: how many transitions are lost with it."""
        raise NotImplementedError

    def _be_late(self, record: Record, reason: str) -> None:
        """A lane has not come back in time."""
        self._lose(record, reason)

    def _take_late(self, record: Record, answer: Answer) -> Iterator[Any]:
        """A lane that was late has been answered after all."""
        self._patience.end(answer.lane)
        yield from self._fail_or_leave(record)

    def _is_late(self, record: Record) -> bool:
        """Whether a lane whose time is up has indeed made nothing."""
        return True

    def _is_given_up(self, record: Record) -> bool:
        """Whether a lane is not waited for any more, where the rollout is ending."""
        return record.state is not State.STEPPING or record.host.lost_at is not None

    # Hosts

    def _heard(self, news: News) -> Iterator[Any]:
        match news:
            case Answered():
                yield from self._answered(news.answer)
            case Joined():
                yield from self._join(news.host)
            case Back():
                self._host_back(news.host)
            case Left():
                yield from self._host_left(news.host, news.reason)

    def _answered(self, answer: Answer) -> Iterator[Any]:
        record = self._records[answer.lane]
        if record.state is State.GONE:
            return
        if record.state is State.LATE:
            yield from self._take_late(record, answer)
        elif isinstance(answer, Failed):
            yield from self._failed(record, answer)
        else:
            yield from self._take(record, answer)

    def _failed(self, record: Record, answer: Failed) -> Iterator[Any]:
        where = f" ({'; '.join(answer.notes)})" if answer.notes else ""
        self._lose(record, f"host {record.host.name}: {answer.type}: {answer.text}{where}", answer.traceback)
        yield from self._fail_or_leave(record)

    def _join(self, host: RemoteHost) -> Iterator[Any]:
        """Give a host that came later its lanes."""
        if self.is_draining:
            return
        is_first = self._vacant_since is not None
        if is_first:
            self._vacant_since = None
            self.in_flight -= 1
        for index, env in zip(host.session.lanes, self.envs_on(host), strict=True):
            record = self._record_of(index, env, self.num_envs, host)
            self.envs = [*self.envs, env]
            self.num_envs += env.num_envs
            self.joined(record.lane, is_first)
            yield from self._set_out(record)
            is_first = False

    def _record_of(self, index: int, env: Any, first_slot: int, host: RemoteHost) -> Record:
        """Take down a new lane."""
        assert index == len(self._records)
        record = Record(self._lane_for(index, env, first_slot), host, env.num_envs, first_slot)
        self._records.append(record)
        return record

    def _host_back(self, host: RemoteHost) -> None:
        """Give a host its time again for what it is at."""
        for record in self._records_of(host):
            if record.state in (State.RESETTING, State.STEPPING, State.LATE):
                self._patience.begin(record.lane.index, resets=record.state is not State.STEPPING)

    def _host_left(self, host: RemoteHost, reason: str) -> Iterator[Any]:
        self._farewells.append((f"host {host.name}", reason))
        for record in self._records_of(host):
            if record.state is State.GONE:
                continue
            self._lose(record, f"host {host.name}: {reason}")
            self._lost.discard(record.lane.index)
            record.state = State.GONE
            if record.is_waited:
                yield self._leave(record)

    # Losses

    def _late(self, record: Record, reason: str) -> Iterator[Any]:
        """Give up what a lane is at; the lane itself, when it is late with that for the second time."""
        index = record.lane.index
        if record.state is State.LATE:
            self._lose(record, f"{record.reason}, nor since")
            record.state = State.GONE
            self._farewells.append((f"lane {index}", record.reason))
            yield self._leave(record)
            return
        self._be_late(record, reason)
        record.state = State.LATE
        self._patience.begin(index, resets=True)

    def _lose(self, record: Record, reason: str, traceback: str = "") -> None:
        """End the lane's open episodes."""
        self._patience.end(record.lane.index)
        record.reason = reason
        self.lost_steps += self._lost_with(record, reason)
        logger.warning("lane %d is lost: %s", record.lane.index, reason)
        if traceback:  # for people, and the host has logged its own
            logger.debug("lane %d, on its host:\n%s", record.lane.index, traceback)

    def _fail(self, record: Record) -> None:
        """Have the lane reset after a while, longer each time."""
        record.failures += 1
        record.steps = 0
        record.state = State.LOST
        self._lost.add(record.lane.index)
        record.due = monotonic() + pause_s(record.failures, _LONGEST_DELAY_S)

    def _fail_or_leave(self, record: Record) -> Iterator[Any]:
        self._fail(record)
        if record.failures > self._max_failures:
            logger.error(
                "lane %d leaves, lost %d times in a row: %s", record.lane.index, record.failures, record.reason
            )
            self._farewells.append((f"lane {record.lane.index}", record.reason))
            record.state = State.GONE
            yield self._leave(record)

    def _leave(self, record: Record) -> Any:
        """Let the lane go round for the last time."""
        if record.is_waited:
            self._come_back(record)
        record.has_left = record.lane.is_set_aside = True
        self._lost.discard(record.lane.index)
        is_last = all(each.has_left for each in self._records)
        if is_last:
            if not self.is_draining:
                logger.warning("no lane is left: hosts are waited for, %s", self._gateway.waited_for())
            self._vacant_since = monotonic()
            self.in_flight += 1  # hosts that may come
        self.left(record.lane, is_last)
        return record.lane

    def _check_vacancy(self, now: float) -> None:
        if self._vacant_since is None or self._join_timeout is None:
            return
        if now - self._vacant_since >= self._join_timeout:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._farewells)
            who = "every lane has left, though hosts are here," if self._gateway.hosts else "every host has left"
            raise EnvError(f"{who} and none came within {self._join_timeout:g} s: {reasons}")

    def _given_up(self) -> Iterator[Any]:
        """The lanes that make no step, or whose hosts are not there."""
        if self._vacant_since is not None:
            self._vacant_since = None
            self.in_flight -= 1
        for record in self._records:
            if record.is_waited and self._is_given_up(record):
                self._lose(record, f"the rollout ended: {record.reason or 'no host'}")
                self._lost.discard(record.lane.index)
                record.state = State.GONE
                yield self._come_back(record)

    # Inside

    def _ask(self, record: Record, request: Request, *, resets: bool = False) -> None:
        record.state = State.RESETTING if resets else State.STEPPING
        self._patience.begin(record.lane.index, resets=resets)
        self._gateway.ask(request)

    def _wait_for(self, record: Record) -> None:
        self.in_flight += 1
        record.is_waited = True

    def _come_back(self, record: Record) -> Any:
        self.in_flight -= 1
        record.is_waited = False
        self._patience.end(record.lane.index)
        return record.lane

    def _records_of(self, host: RemoteHost) -> list[Record]:
        """A host's lanes; one that came when the rollout was ending has been given none."""
        return [self._records[index] for index in host.session.lanes if index < len(self._records)]


def _ignore(*_: Any) -> None:
    """Nobody wants to know."""
