"""Reports of a lane's rollout by its host, checked: with every fragment, and in between."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.observation_check import KINDS
from rollflow.nodes.env.remote.hosted_node import RemoteLane
from rollflow.nodes.offloaded.fragment_checks import MOST
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.graph.meter import clock
from rollflow.stream.wire.codec import field as checks

_LINE = checks.text(1 << 10)  # a text that is logged
_COUNT = checks.whole(0, MOST)
_Count = Annotated[int, _COUNT]


def _is_stage(stage: Any) -> bool:
    if not isinstance(stage, list) or len(stage) not in (3, 7):
        return False
    name, items, *seconds = stage
    piece = seconds.pop() if len(stage) == 7 else ""
    is_named = isinstance(name, str) and isinstance(piece, str) and len(piece) <= 1 << 10
    is_timed = all(isinstance(each, float | int) and each >= 0 for each in seconds)
    return is_named and is_timed and is_whole(items) and items >= 0


_STAGE = checks.check_that(_is_stage, "a list of name, items, busy seconds and times")


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Report that comes with a fragment.

    start         how often the environments were made anew
    steps         transitions made since then
    seed          of the environments since then
    lost_steps    transitions that were under way when the environments raised
    failure       what they raised; None: nothing
    nodes         what every stage has counted, as `LaneRollout.report` has it
    deviations    of observations from their space: (kind, text)
    """

    start: _Count
    steps: _Count
    seed: _Count
    lost_steps: _Count
    failure: Annotated[str | None, checks.nullable(checks.text(1 << 16))]
    nodes: Annotated[Sequence[list[Any]], checks.list_of(_STAGE, 64)]
    deviations: Annotated[
        Sequence[Sequence[str]],
        checks.list_of(checks.items(checks.one_of(*KINDS), _LINE), len(KINDS)),
    ] = ()


class LaneProgress(NamedTuple):
    """Progress of a lane.

    start       how often its environments were made anew
    steps       transitions made since then
    pulse       how often it has got on with something
    is_in_vain  whether its turn will end without a step: it is to end, and environments are still made or reset
    """

    start: int = 0
    steps: int = 0
    pulse: int = 0
    is_in_vain: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class HostedLane(RemoteLane):
    """One lane on a host that does its whole rollout, with its progress, as its host has told.

    start       how often its environments were made anew
    steps       transitions in the fragments that have come
    reported    those of them since the last start
    made        all that were made since then
    pulse       how often it has got on with something
    first_pulse the same, when the turn began that its environments are made or reset in; -1: they were before it
    stages      [name, items, busy seconds]
    turns       that were asked for
    since       when the newest turn began, in ns
    is_in_vain  whether its turn, which is to end now, will have no step
    lost        why the environments were lost before the next fragment; None: they were not
    """

    start: int = 0
    steps: int = 0
    reported: int = 0
    made: int = 0
    pulse: int = 0
    first_pulse: int = -1
    stages: Sequence[list[Any]] = ()
    turns: int = 0
    since: int = 0
    is_in_vain: bool = False
    lost: str | None = None

    @property
    def unreported(self) -> int:
        """Transitions that were made and are in no fragment that has come."""
        return max(0, self.made - self.reported)

    def counted(self) -> list[list[Any]]:
        """Counts of its stages, and the seconds that a turn is under way, of which nothing is known yet."""
        seconds = (clock() - self.since) / 1e9 if self.is_waited else 0.0
        return [*self.stages, ["rollouts", self.turns, seconds]]

    def begin_turn(self) -> None:
        """Count another turn; environments that are lost, or new, are made or reset in it."""
        self.first_pulse = self.pulse if self.failures > 0 or not self.reported else -1
        self.turns, self.since, self.is_in_vain = self.turns + 1, clock(), False

    def take(self, start: int, steps: int, most: int) -> None:
        """Take down so many steps since a start, of which `most` fit into a fragment. Raises WireError if not."""
        if start < self.start:
            raise WireError(f"start {start}, expected {self.start} or more", "fragment")
        if start != self.start:
            self.start, self.reported, self.made = start, 0, 0
        if steps > self.reported + most:
            raise WireError(f"{steps} steps, expected at most {self.reported + most}", "fragment")
        self.made = steps  # a word may be older than the last fragment


def account_of(rest: Mapping[str, Any], slots: int) -> RolloutReport:
    """Report that a lane of so many slots has given with a fragment. Raises WireError where it makes no sense."""
    account = RolloutReport(**checks.checked_fields(RolloutReport, rest, "rest"))
    if account.lost_steps > slots:
        raise WireError(f"rest.lost_steps is {account.lost_steps}, expected a whole number from 0 to {slots}")
    return account


def metrics_of(progress: Mapping[int, LaneProgress]) -> dict[str, Any]:
    """Progress of lanes, as it goes over the wire."""
    return {"lanes": [[lane, each.start, each.steps, each.pulse, each.is_in_vain] for lane, each in progress.items()]}


_PROGRESS = checks.items(lane=_COUNT, start=_COUNT, steps=_COUNT, pulse=_COUNT, is_in_vain=checks.flag)


def progress_of(metrics: Mapping[str, Any], lanes: Collection[int]) -> dict[int, LaneProgress]:
    """Progress of some of a host's lanes, as it says. Raises WireError where it makes no sense."""
    entries = checks.list_of(_PROGRESS, len(lanes))(metrics.get("lanes"), "metrics.lanes")
    if others := {lane for lane, *_ in entries}.difference(lanes):
        raise WireError(f"metrics.lanes: lanes {sorted(others)}, expected some of {shown(list(lanes))}")
    return {lane: LaneProgress(*progress) for lane, *progress in entries}
