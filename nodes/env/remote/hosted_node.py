"""Hosts of lanes: taken in by a gateway, asked, heard, given up and awaited, as they come and go."""

import abc
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from rollflow.nodes.env.environments import EnvKind
from rollflow.nodes.env.remote.gateway import Gateway, HostEvent, RemoteHost
from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.nodes.env.workers.lane_status import LanePhase, LaneStatus, RaisedError
from rollflow.nodes.env.workers.lanes_elsewhere import LanesElsewhere
from rollflow.nodes.env.workers.stand_ins import stand_in_for
from rollflow.nodes.env.workers.watch import Activity, ProgressMark, call_under_way
from rollflow.stream.data.errors import EnvError
from rollflow.stream.fragments.fragment import NoFragment
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.observe.waits import Wait
from rollflow.stream.wire import Answer, Failed, Request, Reset

_LOOK_S = 0.5
_MOST_FAREWELLS = 16
NOT_SAID = "environments on hosts do not say their state"
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class RemoteLane(LaneStatus):
    """One lane on a host.

    has_left    whether it has set out on its last round
    is_absent   whether the reader's rounds go on without it, since its host is away
    """

    host: RemoteHost
    num_slots: int
    first_slot: int
    has_left: bool = False
    is_absent: bool = False

    @property
    def has_no_step(self) -> bool:
        return self.phase is not LanePhase.STEPPING or self.host.lost_at is not None

    def lose(self, reason: str) -> int:
        is_stepping = self.phase is LanePhase.STEPPING
        return int(self.lane.lose(reason, is_under_way=not self.host.has_drained)) if is_stepping else 0

    @property
    def next_number(self) -> int:
        """Number of its next request."""
        return self.host.session.next_number(self.index)

    @property
    def slots(self) -> str:
        """Its slots, in words."""
        last = self.first_slot + self.num_slots - 1
        return f"slot {last}" if self.num_slots == 1 else f"slots {self.first_slot} to {last}"


def environments_on(host: RemoteHost) -> list[Any]:
    """Stand-ins for a host's environments, lane by lane."""
    hello = host.session.hello  # which has been found to be right
    names = ("observation_space", "action_space", "autoreset", "agents", "parts")
    description = {name: getattr(hello, name) for name in names}
    return [stand_in_for({**description, "num_envs": slots}) for slots in hello.slots]


class HostWait(WaitReminder):
    """A wait for hosts, which begins now.

    has_warned    whether a line has said that hosts are awaited
    """

    has_warned = False

    def warn(self, state: str, where: str) -> None:
        """Log that hosts are awaited: how things stand, and where hosts are expected."""
        self.has_warned = True
        more = "for ever" if self.limit is None else f"for {self.left_s:.0f} s more"
        since = f" since {self.waited_s:.0f} s," if self.waited_s >= 1.0 else ""
        logger.warning("%s: hosts are awaited%s %s (join_timeout), %s", state, since, more, where)

    def remind(self, state: str, where: str) -> None:
        """Log that hosts are awaited, if a line is due."""
        if self.is_long:
            self.warn(state, where)


class HostedNode(LanesElsewhere):
    """A node whose lanes are on hosts that a gateway takes in.

    roles          of hosts whose environments have one agent each, or several
    takes_late     whether a lane that was late goes on with the answer that comes after all; else it begins anew
    remote_of      makes a lane on a host
    gateway        which the hosts are connected to

    A host whose connection breaks goes on where it was when it comes back in time; nothing is lost. One that does not,
    or that breaks the protocol, leaves, its lanes with it. Hosts that come later get lanes of their own. While there is
    none at all, the rollout waits, for as long as it did for the first; then it ends with an EnvError that says why
    each has left.

    Subclasses say by `ask` and `take` what hosts are asked for, and what becomes of their answers. A lane that is late
    has its episodes given up, and begins anew once its host has answered after all. If a host leaves, open episodes
    end as truncated; its lanes give the fragment that they have begun, and no more. Whole rollouts do otherwise all
    that is below "What hosts are asked for".
    """

    has_fixed_lanes = False
    late_suffix = ", the resets after ended episodes included"
    roles = ("env", "agents")
    takes_late = False
    remote_of: type[RemoteLane] = RemoteLane
    remotes: list[RemoteLane]
    num_envs: int

    def __init__(self, env: RemoteHosts, *, kind: EnvKind, **options: Any) -> None:
        self.join_timeout, self._supply = env.join_timeout, env.supply
        self._farewells: deque[tuple[str, str]] = deque(maxlen=_MOST_FAREWELLS)  # who left last, and why
        self._vacancy: HostWait | None = None  # while there is no lane
        self.gateway = Gateway(env, self.roles[kind.has_several])
        super().__init__(env, kind=kind, **options)

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        """Wait for the first hosts: what is known of their environments, lane by lane.

        Raises EnvError when they don't come in time, and if numbers of environments or lanes were given.
        """
        if num_envs is not None or lanes is not None:
            raise EnvError(
                f"num_envs is {num_envs} and lanes is {lanes}, expected neither: hosts say how many environments and "
                "lanes they have"
            )
        envs: list[Any] = []
        for host in self._first_hosts(env.hosts):
            envs += environments_on(host)
        return envs

    def start(self) -> Iterator[Any]:
        """Have every lane set out, all at a time. Raises RunError a second time."""
        self.begin_lanes()
        for index, (env, first_slot) in enumerate(zip(self.envs, self.first_slots(), strict=True)):
            self._new_lane(index, env, first_slot, self.gateway.host_of(index))
        for remote in self.remotes if self.states_before else ():
            self.go_on(remote)
        for remote in self.remotes:
            # One that has left, and has come anew since, has the same token.
            if self.gateway.hosts.get(remote.host.session.token) is remote.host:
                yield from self._set_out(remote)
            else:
                remote.note(f"host {remote.host.name} left before the first step")
                yield from self._leave(remote)

    def fileno(self) -> int:
        """A descriptor that can be read once a host has something to say."""
        return self.gateway.fileno()

    @property
    def patience(self) -> float | None:
        """Seconds until a lane is late or begins anew, or the rollout has waited long enough for hosts."""
        left = [super().patience]
        if self._vacancy is not None:
            left.append(self._vacancy.left)
        if self.is_draining:
            left.append(_LOOK_S)  # whether a host has been lost
        return min((seconds for seconds in left if seconds is not None), default=None)

    @property
    def unsettled(self) -> int:
        """Lanes that are waited for, and whose hosts are there."""
        return sum(remote.is_waited and remote.host.lost_at is None for remote in self.remotes)

    def get_state(self) -> list[Any]:
        """Of every lane, that its environments begin anew."""
        return [[{"restart": NOT_SAID}] for _ in self.remotes]

    def go_on(self, remote: Any) -> None:
        """Have a lane go on from that of an earlier run: its environments begin anew, with other episodes."""
        remote.starts = remote.lane.step
        self.begin_anew(remote.lane, NOT_SAID)

    def describe(self) -> str:
        """Lanes, slots and the names of the hosts, for `explain()`."""
        return f"{super().describe()}, on {self.gateway.describe()}"

    def at_work(self, name: str) -> Iterator[Wait]:
        """What is known here of every lane that is waited for. From any thread."""
        if self._vacancy is not None:
            yield Wait(name, "away", "has no host left, and waits for others", remedy="start a host")
        yield from super().at_work(name)

    @property
    def lanes_at_work(self) -> set[int]:
        """Numbers of the lanes that make steps, or should, whose hosts are there. From any thread."""
        return {index for index in super().lanes_at_work if self.remotes[index].host.lost_at is None}

    # For `LanesElsewhere`

    def _heard(self) -> Iterator[Any]:
        self.gateway.service()
        for event in self.gateway.news():
            self.note(event)
            yield from self._took(event)
        self._check_vacancy()

    def _late(self, remote: RemoteLane, text: str) -> Iterator[Any]:
        """Give up what a lane is at; the lane itself, when it is late with that for the second time."""
        if remote.host.lost_at is not None:  # it has time to come back, and its answer from then on
            self.deadlines.end(remote.index)
        elif remote.phase is LanePhase.LATE:
            self._give_up_loudly(remote, f"{remote.reason}, nor since")
            yield from self._leave(remote)
        else:
            self.late(remote, f"host {remote.host.name}, {remote.slots}: {text}")
            self.begin(remote, LanePhase.LATE)

    def _end(self) -> None:
        self.gateway.close("the rollout has ended" if self.is_closed else "the rollout could not be made")

    # What subclasses ask for

    def request(self, remote: RemoteLane, request: Request, phase: LanePhase) -> None:
        """Ask a lane's host for something, which takes the lane to a phase."""
        self.begin(remote, phase)
        self.gateway.ask(request)

    def lanes_of(self, host: RemoteHost) -> list[RemoteLane]:
        """A host's lanes; one that came when the rollout was ending has been given none."""
        return [self.remotes[index] for index in host.session.lanes if index < len(self.remotes)]

    # What hosts are asked for

    def progress(self, lane: int) -> ProgressMark:
        """Nothing is seen of a step or a reset until it is answered."""
        phase = self.remotes[lane].phase
        return 0, Activity.STEP if phase is LanePhase.STEPPING else Activity.RESET

    def _set_out(self, remote: RemoteLane) -> Iterator[Any]:
        """Have a lane begin, or begin anew after it was lost: the lane, if it comes back at once."""
        seeds = tuple(self.seeds_of_slots(remote.first_slot, remote.num_slots, remote.starts))
        remote.starts += 1
        if not remote.is_waited:
            self.wait_for(remote)
        number = remote.next_number
        self.request(remote, Reset(remote.index, number, seeds, None), LanePhase.RESETTING)
        return iter(())

    def note(self, event: HostEvent) -> None:
        """Take note of an event, before this class does; hosts that step say nothing between their answers."""

    @abc.abstractmethod
    def take(self, remote: Any, answer: Any) -> Iterator[Any]:
        """Take what a host has answered for a lane, if nothing failed: the lane, if it comes back."""

    def failed(self, remote: RemoteLane, answer: Failed) -> None:
        """Take note of an error of a lane's environments. Raises EnvError if every lane's raise from the first."""
        where = f"on host {remote.host.name}"
        remote.raised = RaisedError(answer.type, answer.text, answer.notes, answer.traceback, where)
        self.check_first_errors()

    def late(self, remote: RemoteLane, reason: str) -> None:
        """Deal with a lane that has not come back in time, for the first time."""
        self._give_up_loudly(remote, reason)

    # Hosts

    def _first_hosts(self, count: int) -> list[RemoteHost]:
        hosts: list[RemoteHost] = []
        wait = HostWait(self.join_timeout)
        while len(hosts) < count:
            self._check_supply(is_first=True)
            is_last_look = wait.is_over
            wait.remind(f"{len(hosts)} of {count} hosts are here", self.gateway.waited_for())
            self.gateway.wait(wait.left)
            self.gateway.service()
            for event in self.gateway.news():
                if event.kind == "joined":
                    hosts.append(event.host)
                    if wait.has_warned:
                        logger.warning("host %s has joined: %d of %d are here", event.host.name, len(hosts), count)
                elif event.kind == "left":
                    self._farewells.append((f"host {event.host.name}", event.what))
                    count += 1  # others are waited for in its place
            if is_last_look and len(hosts) < count:
                came = f"{len(hosts)} of {count} hosts came within {self.join_timeout:g} s"
                raise EnvError(f"{came}, {self.gateway.waited_for()}").see("hosts")
        return hosts

    def _took(self, event: HostEvent) -> Iterator[Any]:
        match event.kind:
            case "answered":
                yield from self._answered(event.what)
            case "joined":
                yield from self._join(event.host)
            case "reconnected":  # it has its time again for what it is at
                for remote in self.lanes_of(event.host):
                    self.watch(remote)
                self._part_absent()
            case "away":
                absent = self._part_absent()
                if absent:
                    logger.warning("host %s is away: the others go on, and need not wait for it", event.host.name)
                yield from absent
            case "left":
                self._part_absent()
                yield from self._host_left(event.host, event.what)

    def _answered(self, answer: Answer) -> Iterator[Any]:
        remote = self.remotes[answer.lane]
        if remote.phase is LanePhase.ASIDE:
            return
        if remote.phase is LanePhase.LATE and not self.takes_late:
            yield from self.begin_anew_or_leave(remote)
        elif isinstance(answer, Failed):
            self.failed(remote, answer)
            where = f" ({'; '.join(answer.notes)})" if answer.notes else ""
            self.give_up(remote, f"host {remote.host.name}: {answer.type}: {answer.text}{where}")
            if answer.traceback:  # for people, and the host has logged its own
                logger.debug("lane %d, on its host:\n%s", remote.index, answer.traceback)
            yield from self.begin_anew_or_leave(remote)
        else:
            yield from self.take(remote, answer)

    def _join(self, host: RemoteHost) -> Iterator[Any]:
        """Give a host that came later its lanes."""
        if self.is_draining:
            return
        is_first = self._vacancy is not None
        if is_first:
            logger.warning("host %s has joined: there are lanes again", host.name)
            self._fill_vacancy()
        for index, env in zip(host.session.lanes, environments_on(host), strict=True):
            remote = self._new_lane(index, env, self.num_envs, host)
            self.envs = [*self.envs, env]
            self.num_envs += env.num_envs
            self.listener.lane_joined(remote.lane, is_first)
            yield from self._set_out(remote)
            is_first = False

    def _host_left(self, host: RemoteHost, reason: str) -> Iterator[Any]:
        self._farewells.append((f"host {host.name}", reason))
        for remote in self.lanes_of(host):
            if remote.phase is LanePhase.ASIDE:
                continue
            self._give_up_loudly(remote, f"host {host.name}: {reason}")
            self.set_aside(remote)
            if remote.is_waited:
                yield from self._leave(remote)

    def _give_up_loudly(self, remote: RemoteLane, reason: str) -> None:
        """Give a lane up that does not begin anew now."""
        self.give_up(remote, reason)
        logger.warning("lane %d is lost: %s", remote.index, reason)

    # Lanes

    def _new_lane(self, index: int, env: Any, first_slot: int, host: RemoteHost) -> RemoteLane:
        assert index == len(self.remotes)
        lanes: Any = self.lanes
        if index == len(lanes):
            lanes.append(self._lane(index, env, first_slot))
            lanes[index].first_step = self.vector_steps
        slots = {"num_slots": env.num_envs, "first_slot": first_slot}
        self.remotes.append(self.remote_of(index, LanePhase.READY, lane=lanes[index], host=host, **slots))
        return self.remotes[-1]

    def _leave(self, remote: RemoteLane) -> Iterator[Any]:
        host = remote.host
        self.set_aside(remote)
        if self.gateway.hosts.get(host.session.token) is host:
            self._farewells.append((f"lane {remote.index}", remote.reason))
        remote.has_left = True
        self._part_absent()
        is_last = all(each.has_left for each in self.remotes)
        if is_last:
            self._vacancy = HostWait(self.join_timeout)
            if not self.is_draining:
                self._vacancy.warn("no lane is left", self.gateway.waited_for())
            self.in_flight += 1  # hosts that may come
        self.listener.lane_left(remote.lane, is_last)
        yield from super()._leave(remote)

    def _end_waiting(self, remote: RemoteLane) -> None:
        if remote.phase is LanePhase.RESETTING and remote.host.lost_at is None:  # nothing is lost with it
            super()._end_waiting(remote)
            return
        why = "it made no step" if remote.host.lost_at is None else "no host"
        self._give_up_loudly(remote, f"the rollout ended: {remote.reason or why}")

    def _waits_for(self, remote: RemoteLane, name: str, began: float | None, age_s: float) -> Iterator[Wait]:
        host, index = remote.host, remote.index
        where = f"lane {index}, host {host.name}"
        if host.lost_at is not None:
            age_s = max(0.0, monotonic() - host.lost_at)
            yield Wait(name, "away", "has lost the connection to its host", mark=host.lost_at, age_s=age_s, where=where)
            return
        progress = self.progress(index)
        call = call_under_way(
            remote.lane,
            progress,
            party=name,
            mark=(began, progress[0]),
            age_s=age_s,
            where=where,
            remedy="look at the log of the host, or run rollflow doctor PID there; Timeouts(step=…) gives the lane up",
        )
        yield replace(call, doing=f"has no answer to {call.doing.removeprefix('is in ')}")

    def _part_absent(self) -> list[NoFragment]:
        """Have the reader's rounds go on without the lanes of hosts that are away, as long as others are there.

        Returns a word for a reader that waits for each lane which is absent from now on.
        """
        absent = []
        others = any(each.phase is not LanePhase.ASIDE and not each.host.is_away for each in self.remotes)
        for remote in self.remotes:
            is_absent = remote.host.is_away and not remote.has_left and others
            if is_absent and not remote.is_absent:
                self.listener.lane_absent(remote.lane)
                absent.append(NoFragment(remote.index))
            elif remote.is_absent and not is_absent:
                self.listener.lane_back(remote.lane)
            remote.is_absent = is_absent
        return absent

    def _check_vacancy(self) -> None:
        if self.is_draining:
            self._fill_vacancy()
        if self._vacancy is None:
            return
        self._check_supply(is_first=False)
        self._vacancy.remind("no lane is left", self.gateway.waited_for())
        if self._vacancy.is_over:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._farewells)
            who = "every lane has left, though hosts are here," if self.gateway.hosts else "every host has left"
            raise EnvError(f"{who} and none came within {self.join_timeout:g} s: {reasons}").see("hosts")

    def _check_supply(self, *, is_first: bool) -> None:
        if self._supply is not None:
            self._supply.check(is_first=is_first)

    def _fill_vacancy(self) -> None:
        if self._vacancy is not None:
            self._vacancy = None
            self.in_flight -= 1
