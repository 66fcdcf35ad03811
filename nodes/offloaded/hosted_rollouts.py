"""Whole rollouts on other hosts, as a node: environments, connectors and a copy of the module on each."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rollflow.nodes.env.remote.gateway import HostEvent, RemoteHost
from rollflow.nodes.env.remote.hosted_node import NOT_SAID, HostedNode, RemoteLane
from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.nodes.env.workers.lane_status import LanePhase, RaisedError
from rollflow.nodes.env.workers.watch import Activity, ProgressMark
from rollflow.nodes.modules.policy_weights import to_arrays
from rollflow.nodes.offloaded.offloaded import OffloadedRollouts
from rollflow.nodes.offloaded.rollout_settings import LaneProgress, RolloutSettings, check_report
from rollflow.stream.data.errors import StateError, WireError
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.net.socket_loop import quoted
from rollflow.stream.wire import Cut, Failed, Settings, States, Turn, Weights

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class HostedLane(RemoteLane):
    """One lane on a host that does its whole rollout, with its progress, as its host has told.

    progress    as its host has told last
    steps       transitions in the fragments that have come
    reported    those of them since the last start of its environments
    first_pulse pulse when the turn began that its environments are made or reset in; -1: they were before it
    stages      [name, items, busy seconds]
    turns       that were asked for
    since       when the newest turn began, in ns
    seed        of its environments since the last start
    lost        why the environments were lost before the next fragment; None: they were not
    before      fragments that it gave in an earlier run
    """

    progress: LaneProgress = LaneProgress()  # noqa: RUF009  # it can't be changed
    steps: int = 0
    reported: int = 0
    first_pulse: int = -1
    stages: Sequence[list[Any]] = ()
    turns: int = 0
    since: int = 0
    seed: int = 0
    lost: str | None = None
    before: int = 0

    def get_state(self) -> dict[str, Any]:
        """What is known of it here, for a lane that begins anew."""
        return {"starts": self.progress.start + 1, "steps": self.steps, "lost": f"the run was resumed: {NOT_SAID}"}

    @property
    def unreported(self) -> int:
        """Transitions that were made and are in no fragment that has come."""
        return max(0, self.progress.steps - self.reported)

    def counted(self) -> list[list[Any]]:
        """Counts of its stages, and the seconds that a turn is under way, of which nothing is known yet."""
        seconds = (clock() - self.since) / 1e9 if self.is_waited else 0.0
        return [*self.stages, ["rollouts", self.turns, seconds]]

    def begin_turn(self) -> None:
        """Count another turn; environments that are lost, or new, are made or reset in it."""
        self.first_pulse = self.progress.pulse if self.failures > 0 or not self.reported else -1
        self.turns, self.since = self.turns + 1, clock()
        self.progress = self.progress._replace(is_in_vain=False)

    def take(self, progress: LaneProgress) -> None:
        """Take down how far it is."""
        if progress.start != self.progress.start:
            self.reported = 0
        self.progress = progress

    @property
    def has_no_step(self) -> bool:
        """True if it makes no step: its host may come back with what was made, as long as it has not left."""
        return self.phase is not LanePhase.STEPPING or self.progress.is_in_vain

    def lose(self, reason: str) -> int:
        """Transitions that the host has told of and not given, and those of a step that was under way."""
        lost = self.unreported
        # A step was under way, unless the environments have not begun, or the host has begun none.
        is_asked = self.phase in (LanePhase.STEPPING, LanePhase.LATE)
        if is_asked and self.progress.steps and not (self.progress.is_in_vain or self.host.has_drained):
            lost += self.lane.steps_under_way
        self.progress = self.progress._replace(steps=self.reported)
        return lost


class HostedRollouts(HostedNode, OffloadedRollouts):
    """A node that has each lane's rollout done on another host: takes turns, gives fragments. See `HostedNode`.

    Hosts are told settings, weights and connectors' states: nothing is pickled, so each must have the same connectors
    and module. A lane that is late is waited for until `reset_timeout` is over as well. A host that leaves takes the
    fragments with it that it was making: their transitions, as far as it has said that it made them, are in
    `lost_steps`.
    """

    roles = ("rollout", "agent_rollout")
    takes_late = True
    steps_while_draining = False
    remote_of = HostedLane
    remotes: list[HostedLane]  # type: ignore[assignment]  # as `remote_of` makes them

    def __init__(self, env: RemoteHosts, **options: Any) -> None:
        self._settings: Settings | None = None  # None: the rollout has not begun
        super().__init__(env, **options)

    def get_state(self) -> list[Any]:
        self.note_states()
        return super().get_state()

    def go_on(self, remote: Any) -> None:
        super().go_on(remote)
        remote.lost, remote.before = remote.get_state()["lost"], remote.lane.sequence
        remote.steps = remote.lane.elsewhere["steps"]

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have every host's connectors take over states before its next turn."""
        names = [name for name, _ in self.acting.named_pipelines]
        self.states = States(dict(zip(names, states, strict=True)))

    def completed(self) -> Iterator[Any]:
        """The lanes that have come back, or begin anew. Raises EnvError when no host is left and none comes."""
        yield from super().completed()
        for host in list(self.gateway.hosts.values()):
            if host.told and any(self.lacking(host.told)):
                self._equip(host)

    def hasten(self) -> None:
        """Have every host give what there is of the fragments that it is making."""
        super().hasten()
        self._cut(self.remotes)

    # Dialogue with the hosts

    def _set_out(self, remote: Any) -> Iterator[Any]:
        """Have a lane that is waited for take its turn; another one is to be handed over first."""
        if remote.is_waited:
            self.ask(remote)
        elif remote.phase is LanePhase.LOST:
            self.begin(remote, LanePhase.READY)
        else:
            yield remote.lane

    def ask(self, remote: Any) -> None:
        self._equip(remote.host, is_urgent=self._relay.wants_newest)
        remote.begin_turn()
        turn = Turn(remote.index, remote.next_number, remote.lane.step)
        self.request(remote, turn, LanePhase.STEPPING)

    def progress(self, lane: int) -> ProgressMark:
        """Count by which a lane shows that it gets on, and its activity: a lane that is late has a reset's time."""
        remote = self.remotes[lane]
        pulse = remote.progress.pulse
        resets = pulse == remote.first_pulse or remote.phase is LanePhase.LATE
        return pulse, Activity.RESET if resets else Activity.STEP

    def note(self, event: HostEvent) -> None:
        """Take down how far a host is, and equip one that has another connection."""
        match event.kind:
            case "progressed":
                self._take_progress(event)
            case "reconnected":
                self._equip(event.host)
                if self.is_draining:
                    self._cut(self.lanes_of(event.host))

    def take(self, remote: Any, answer: Any) -> Iterator[Any]:
        where, report = f"fragment {answer.number} of lane {remote.index}", answer.rest
        remote.phase = LanePhase.STEPPING  # also where it was late
        try:
            check_report(report)
            raised = RaisedError(**report["failure"]) if "failure" in report else None
            remote.take(remote.progress._replace(start=report["start"], steps=report["steps"]))
            remote.seed = report["seed"]
            if remote.before:  # the host counts from 0
                report["sequence"] += remote.before
            is_there = self.take_turn(remote, answer, report, is_checked=True)
        except Exception as error:
            self._expel(remote.host, error, where)
            return
        self.lost_steps += report.get("lost_steps", 0)
        self._hear(remote, report, where)
        if raised is None:
            remote.phase, remote.failures = LanePhase.READY, 0
            yield self.come_back(remote)
            return
        remote.note(f"host {remote.host.name}: {quoted('; '.join((raised.line, *raised.notes)))}")
        yield from self.begin_anew_or_leave(remote)
        if remote.is_waited and is_there:
            yield self.come_back(remote)

    def failed(self, remote: Any, answer: Failed) -> None:
        """Take note that environments could not be made or reset, or gave what is refused: no step was under way."""
        remote.phase = LanePhase.RESETTING
        remote.lost = f"{answer.type}: {answer.text}"

    def late(self, remote: Any, reason: str) -> None:
        """Say that a lane is late: it goes on with its fragment, and may come back."""
        remote.note(reason)
        logger.warning("lane %d is late: %s", remote.index, reason)

    # Inside

    def _hear(self, remote: HostedLane, report: Mapping[str, Any], where: str) -> None:
        """Hand on what a host says beside a fragment."""
        try:
            for kind, text in report.get("deviations", ()):
                self.deviations.add(kind, f"host {remote.host.name}: {quoted(text)}")
            self.take_message(remote.index, report)
        except StateError:  # of a connector piece here, whichever host has sent its state
            raise
        except Exception as error:  # of connectors and metrics, which may be given anything
            self._expel(remote.host, error, where)

    def _equip(self, host: RemoteHost, *, is_urgent: bool = False) -> None:
        """Tell a host whatever of settings, states and weights it does not have yet.

        is_urgent    also while much is still on its way to it
        """
        tell = partial(self.gateway.tell, host, through=host.connection)
        settings, states, told = self._begun_settings(), self.states, host.told
        if Settings not in told:
            if tell(settings):
                told[Settings] = settings
        elif self.gateway.is_behind(host) and not is_urgent:
            return  # it has some to go on with, and gets the newest once those have arrived
        if states is not None and states is not told.get(States) and tell(states):
            told[States] = states
        for module_id, version, weights in self.lacking(told):
            if tell(weights):
                told[module_id] = version

    def _begun_settings(self) -> Settings:
        """The rollout's settings; when it begins, the first weights are published if none were."""
        if self._settings is None:
            settings = RolloutSettings.of(
                self.acting,
                self.how,
                fragment_length=self.fragment_length,
                lookback=self.lookback,
                # Hosts play other episodes than the first ones of the run that this one goes on with.
                seed=seed_for(self.seed, "resumed", self._first_step) if self.states_before else self.seed,
            )
            self._keep({each: weights.newest(module) for each, (module, weights) in self.acting.by_id.items()})
            self._settings = Settings(asdict(settings))
        return self._settings

    def _announce(self) -> None:
        self.gateway.wake()

    def _packed(self, module_id: Any, version: int, weights: Mapping[str, Any]) -> Weights:
        module = str(module_id) if self.kind.has_several else None  # one agent's rollout has one module
        return Weights(version, *to_arrays(weights), module=module)

    def _cut(self, lanes: Iterable[Any]) -> None:
        """Have fragments that are being made end now."""
        for remote in lanes:
            if remote.is_waited and remote.phase in (LanePhase.STEPPING, LanePhase.LATE):
                cut = Cut(remote.index, remote.next_number - 1)
                self.gateway.tell(remote.host, cut, remote.host.connection)

    def _take_progress(self, event: HostEvent) -> None:
        """Take down how far a host's lanes are; not of those that are lost, or came when the rollout was ending."""
        try:
            lanes: dict[int, Any] = {remote.index: remote for remote in self.lanes_of(event.host)}
            for index, *progress in event.what["lanes"]:
                told, remote = LaneProgress(*progress).checked(), lanes.get(index)
                if remote is not None and remote.phase not in (LanePhase.ASIDE, LanePhase.LOST):
                    is_alive = told.pulse != remote.progress.pulse
                    remote.take(told)
                    if is_alive and remote.phase is LanePhase.LATE:
                        self.begin(remote, LanePhase.STEPPING)
        except Exception as error:
            self._expel(event.host, error, "metrics")

    def _expel(self, host: RemoteHost, error: Exception, where: str) -> None:
        """Have a host leave that has said what makes no sense."""
        text = str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"
        self.gateway.expel(host, WireError(f"host {host.name}: {where}: {text}", "fragment"))
