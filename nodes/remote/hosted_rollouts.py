"""Whole rollouts on other hosts, as a node: environments, connectors and a copy of the module on each."""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.nodes.remote.account import Account, account_of, progress_of
from rollflow.nodes.remote.fragment_checks import check_form, form_of
from rollflow.nodes.remote.fragment_message import fragment_of
from rollflow.nodes.remote.lane_record import Record, State
from rollflow.nodes.remote.lines import quoted
from rollflow.nodes.remote.remote_host import Back, Left, News, RemoteHost, Told, vectors_on
from rollflow.nodes.remote.remote_lanes import RemoteLanes
from rollflow.nodes.remote.rollout_settings import RolloutSettings
from rollflow.nodes.rollouts_elsewhere import RolloutsElsewhere, Turns
from rollflow.nodes.weights_codec import to_arrays
from rollflow.stream.errors import WireError
from rollflow.stream.wire import Answer, Cut, Failed, Fragment, GatewayConnection, Settings, States, Turn, Weights

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Count:
    """How far a lane is, by what its host has said.

    start       how often its environments were made anew
    steps       transitions in the fragments that have come
    reported    those of them since the last start
    made        all that were made since then
    pulse       how often it has got on with something
    seen        the same, when it was asked last
    stages      [name, items, busy seconds]
    is_in_vain  whether its turn, which is to end now, will have no step
    lost        why the environments were lost before the next fragment; None: they were not
    """

    start: int = 0
    steps: int = 0
    reported: int = 0
    made: int = 0
    pulse: int = 0
    seen: int = -1
    stages: list[list[Any]] = field(default_factory=list)
    is_in_vain: bool = False
    lost: str | None = None

    @property
    def unreported(self) -> int:
        """Transitions that were made and are in no fragment that has come."""
        return max(0, self.made - self.reported)

    def tell(self, start: int, steps: int, most: int) -> None:
        """Take down so many steps since a start, of which `most` fit into a fragment. Raises WireError if not."""
        if start < self.start:
            raise WireError(f"start {start}, expected {self.start} or more", "fragment")
        if start != self.start:
            self.start, self.reported, self.made = start, 0, 0
        if steps > self.reported + most:
            raise WireError(f"{steps} steps, expected at most {self.reported + most}", "fragment")
        self.made = steps  # a word may be older than the last fragment


@dataclass(slots=True)
class _Equipment:
    """What a host has been told through a connection."""

    connection: GatewayConnection
    has_settings: bool = False
    states: States | None = None
    version: int = -1


class HostedRollouts(RemoteLanes, RolloutsElsewhere):
    """A node that has each lane's rollout done on another host: takes turns, gives fragments.

    Hosts are told settings, weights and connectors' states: nothing is pickled, so each must have the same connectors
    and module. A lane that is late is waited for until `reset_timeout` is over as well. A host that leaves takes the
    fragments with it that it was making: their transitions, as far as it has said that it made them, are in
    `lost_steps`.
    """

    role = "rollout"
    envs_on = staticmethod(vectors_on)

    def __init__(self, env: Any, **options: Any) -> None:
        self._counts: list[_Count] = []
        self._equipped: dict[bytes, _Equipment] = {}
        self._settings: Settings | None = None
        self._weights: Weights | None = None
        self._states: States | None = None
        self._spaces: list[Any] = []  # that connectors may leave observations in
        self._form: dict[str, Any] | None = None  # of a row of the columns
        self._publishing = threading.Lock()
        super().__init__(env, **options)

    def __call__(self, turns: Turns) -> Turns | None:  # type: ignore[override]
        """Have the lane's host make its next fragment."""
        record = self._records[turns.index]
        turns.fragment = None
        if record.state is State.GONE:
            self._leave(record)
        elif self.is_draining:
            turns.is_set_aside = True
        else:
            self._wait_for(record)
            if record.state is not State.LOST:  # then it has its turn when it is due
                self._turn(record)
            return None
        return turns

    def broadcast(self, version: int, weights: Mapping[str, Any]) -> None:
        """Have every host use these weights from its next forward pass on."""
        message = Weights(version, *to_arrays(weights))
        with self._publishing:
            if not self.is_closed and (self._weights is None or version > self._weights.version):
                self._weights = message
                self._gateway.wake()

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have every host's connectors take over states before its next turn."""
        env_to_module, module_to_env = states
        self._states = States({"env_to_module": env_to_module, "module_to_env": module_to_env})

    def completed(self) -> Iterator[Any]:
        """The lanes that have come back, or begin anew. Raises EnvError when no host is left and none comes."""
        yield from super().completed()
        for token, known in list(self._equipped.items()):
            host, newest = self._gateway.hosts.get(token), self._weights
            if host is not None and newest is not None and known.version < newest.version:
                self._equip(host)

    def hasten(self) -> None:
        """Have every host give what there is of the fragments that it is making."""
        super().hasten()
        self._cut(self._records)

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made, but for those that were lost."""
        return sum(count.steps + count.unreported for count in self._counts)

    @property
    def uncut_steps(self) -> int:
        """Those of them that are in no fragment yet."""
        return sum(count.unreported for count in self._counts)

    def counted(self) -> Iterable[list[list[Any]]]:
        """What each lane's stages have counted."""
        return [count.stages for count in self._counts]

    def describe(self) -> str:
        """Lanes, slots and hosts, for `explain()`."""
        return f"{super().describe()}, each with connectors and a copy of the module"

    def close(self) -> None:
        """Say goodbye to the hosts."""
        with self._publishing:
            self.is_closed = True
        super().close()

    # What RemoteLanes leaves open

    def _lane_for(self, index: int, env: Any, first_slot: int) -> Turns:
        self._counts.append(_Count())
        return Turns(index, env.num_envs)

    def _set_out(self, record: Record) -> Iterator[Turns]:
        """Have a lane take its first turn, or, where it was lost, its next."""
        if record.is_waited:
            self._turn(record)
        elif record.state is State.LOST:
            record.state = State.READY
        else:
            yield record.lane

    def _heard(self, news: News) -> Iterator[Any]:
        match news:
            case Told():
                self._take_told(news)
            case Back():
                self._equip(news.host)
                if self.is_draining:
                    self._cut(self._records_of(news.host))
            case Left():
                self._equipped.pop(news.host.session.token, None)
        yield from super()._heard(news)

    def _take(self, record: Record, answer: Any) -> Iterator[Any]:
        assert isinstance(answer, Fragment)
        index, where = record.lane.index, f"fragment {answer.number} of lane {record.lane.index}"
        count = self._counts[index]
        try:
            account = account_of(answer.rest, record.num_slots)
            count.tell(account.start, account.steps, record.num_slots * self.fragment_length)
            fragment = self._fragment_of(answer, account)
        except WireError as error:
            self._expel(record.host, error, where)
            return
        count.steps += account.steps - count.reported
        count.reported, count.stages = account.steps, account.nodes
        self.lost_steps += account.lost_steps
        try:
            self.heard(index, answer.rest)
        except Exception as error:  # of connectors and metrics, which may be given anything
            self._expel(record.host, error, where)
        if account.failure is not None:
            logger.warning("lane %d is lost: host %s: %s", index, record.host.name, quoted(account.failure))
            record.reason = account.failure
        if account.failure is not None and not fragment.num_rows:  # there is none: the next one says what was lost
            count.lost = account.failure
            self._patience.end(index)
            yield from self._fail_or_leave(record)
            return
        count.lost = None
        record.lane.fragment, record.lane.sequence = fragment, fragment.sequence + 1
        if account.failure is not None:
            yield from list(self._fail_or_leave(record)) or [self._come_back(record)]
            return
        record.state, record.failures = State.READY, 0
        yield self._come_back(record)

    def _fragment_of(self, answer: Fragment, account: Account) -> Any:
        """The fragment in an answer. Raises WireError where it is none, or not the next one."""
        lane, count = self._records[answer.lane].lane, self._counts[answer.lane]
        layout = self._layout(lane.index, self.envs[lane.index], account.seed)
        fragment = fragment_of(answer, layout, self._spaces, count.lost)
        for name, given, expected in (
            ("sequence", fragment.sequence, lane.sequence),
            ("steps", account.steps, count.reported + fragment.num_steps),
        ):
            if given != expected:
                raise WireError(f"{name} is {given}, expected {expected}", "fragment")
        if fragment.num_rows:
            form = form_of(fragment.columns)
            self._form = self._form or form
            check_form(form, self._form)
        return fragment

    def _failed(self, record: Record, answer: Failed) -> Iterator[Any]:
        """Environments could not be made, or not be reset: no step was under way."""
        record.state = State.RESETTING
        self._counts[record.lane.index].lost = f"{answer.type}: {answer.text}"
        yield from super()._failed(record, answer)

    def _take_late(self, record: Record, answer: Answer) -> Iterator[Any]:
        record.state = State.STEPPING
        yield from self._answered(answer)

    def _be_late(self, record: Record, reason: str) -> None:
        record.reason = reason
        logger.warning("lane %d is late: %s", record.lane.index, reason)

    def _is_late(self, record: Record) -> bool:
        count = self._counts[record.lane.index]
        seen, count.seen = count.seen, count.pulse
        if seen == count.seen:
            return True
        record.state = State.STEPPING
        return False

    def _lost_with(self, record: Record, reason: str) -> int:
        count = self._counts[record.lane.index]
        lost: int = count.unreported
        # A step was under way, unless the environments have not begun.
        if record.state in (State.STEPPING, State.LATE) and count.made and not count.is_in_vain:
            lost += record.num_slots
        count.made = count.reported
        return lost

    def _is_given_up(self, record: Record) -> bool:
        # A host that has no connection may come back with what was made, as long as it has not left.
        return record.state is not State.STEPPING or self._counts[record.lane.index].is_in_vain

    def _given_up(self) -> Iterator[Any]:
        for lane in super()._given_up():
            lane.is_set_aside = True
            yield lane

    # Inside

    def _turn(self, record: Record) -> None:
        index = record.lane.index
        self._equip(record.host, is_urgent=self.wants_newest())
        count = self._counts[index]
        count.seen, count.is_in_vain = count.pulse, False
        self._ask(record, Turn(index, self._gateway.next_number(index)))
        if record.failures or not count.reported:  # environments are to be made, or reset
            self._patience.begin(index, resets=True)

    def _equip(self, host: RemoteHost, *, is_urgent: bool = False) -> None:
        """Tell a host whatever of settings, states and weights it does not have yet.

        is_urgent    also while much is still on its way to it
        """
        token, connection = host.session.token, host.connection
        known = self._equipped.get(token)
        if known is None or known.connection is not connection:
            known = self._equipped[token] = _Equipment(connection)
        if self._settings is None:
            self._settings = self._make_settings()
        if not known.has_settings:
            known.has_settings = self._gateway.tell(host, self._settings, connection)
        elif self._gateway.is_behind(host) and not is_urgent:
            return  # it has some to go on with, and gets the newest once those have arrived
        states, weights = self._states, self._weights
        if states is not known.states and states is not None and self._gateway.tell(host, states, connection):
            known.states = states
        assert weights is not None
        if weights.version > known.version and self._gateway.tell(host, weights, connection):
            known.version = weights.version

    def _make_settings(self) -> Settings:
        replica = self.replica()
        with self._publishing:
            if self._weights is None:
                self._weights = Weights(replica["version"], *to_arrays(replica["module"].state_dict()))
        self._spaces = [self.observation_space, *replica["env_to_module"].observation_spaces]
        sizes = {"fragment_length": self.fragment_length, "lookback": self.lookback, "seed": self.seed}
        return RolloutSettings.of(replica, self.acting, digests=self.digests, **sizes).message()

    def _cut(self, records: Iterable[Record]) -> None:
        """Have fragments that are being made end now."""
        for record in records:
            if record.is_waited and record.state in (State.STEPPING, State.LATE):
                index = record.lane.index
                number = self._gateway.next_number(index) - 1
                self._gateway.tell(record.host, Cut(index, number), record.host.connection)

    def _take_told(self, told: Told) -> None:
        """Take down how far a host's lanes are; not of those that have left, or came when the rollout was ending."""
        try:
            for index, progress in progress_of(told.metrics, told.host.session.lanes).items():
                if index < len(self._records) and self._records[index].state is not State.GONE:
                    count = self._counts[index]
                    most = self.fragment_length * self._records[index].num_slots
                    count.tell(progress.start, progress.steps, most)
                    count.pulse, count.is_in_vain = progress.pulse, progress.is_in_vain
        except WireError as error:
            self._expel(told.host, error, "metrics")
        self._gateway.give_credit(told.host)

    def _expel(self, host: RemoteHost, error: Exception, where: str) -> None:
        """Have a host leave that has said what makes no sense."""
        told = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
        self._gateway.expel(host, WireError(f"host {host.name}: {where}: {told}", "fragment"))
