"""Reports of a lane's rollout by its host, checked: with every fragment, and in between."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.env.observation_check import KINDS
from rollflow.nodes.offloaded.fragment_checks import MOST, check_whole
from rollflow.stream.data.errors import WireError, shown

_MOST_TEXT = 1 << 16  # characters
_MOST_LINE = 1 << 10  # characters of a text that is logged


class RolloutReport(NamedTuple):
    """Report that comes with a fragment.

    start         how often the environments were made anew
    steps         transitions made since then
    seed          of the environments since then
    lost_steps    transitions that were under way when the environments raised
    failure       what they raised; None: nothing
    nodes         what every stage has counted, as `LaneRollout.report` has it
    deviations    of observations from their space: (kind, text)
    """

    start: int
    steps: int
    seed: int
    lost_steps: int
    failure: str | None
    nodes: list[list[Any]]
    deviations: tuple[tuple[str, str], ...] = ()


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


@dataclass(slots=True)
class LaneCount:
    """Progress of a lane, as its host has told.

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
    stages: list[list[Any]] = field(default_factory=list)
    turns: int = 0
    since: int = 0
    is_in_vain: bool = False
    lost: str | None = None

    @property
    def unreported(self) -> int:
        """Transitions that were made and are in no fragment that has come."""
        return max(0, self.made - self.reported)

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
    account = RolloutReport(*(_entry(rest, name) for name in RolloutReport._fields if name != "deviations"))
    for name in ("start", "steps", "seed"):
        check_whole(name, getattr(account, name), 0, MOST)
    check_whole("lost_steps", account.lost_steps, 0, slots)
    if not isinstance(account.failure, str | None):
        raise WireError(f"failure is {shown(account.failure)}, expected a string, or nil", "fragment")
    if account.failure is not None and len(account.failure) > _MOST_TEXT:
        raise WireError(f"failure has {len(account.failure)} characters, expected at most {_MOST_TEXT}", "fragment")
    nodes = account.nodes
    if not isinstance(nodes, list) or not all(_is_stage(stage) for stage in nodes):
        raise WireError(f"nodes is {shown(nodes)}, expected lists of name, items, busy seconds and times", "fragment")
    return account._replace(deviations=_deviations_of(rest.get("deviations", [])))


def metrics_of(progress: Mapping[int, LaneProgress]) -> dict[str, Any]:
    """Progress of lanes, as it goes over the wire."""
    return {"lanes": [[lane, each.start, each.steps, each.pulse, each.is_in_vain] for lane, each in progress.items()]}


def progress_of(metrics: Mapping[str, Any], lanes: Collection[int]) -> dict[int, LaneProgress]:
    """Progress of some of a host's lanes, as it says. Raises WireError where it makes no sense."""
    entries = _entry(metrics, "lanes")
    if not isinstance(entries, list) or len(entries) > len(lanes):
        raise WireError(f"metrics.lanes is {shown(entries)}, expected a list of at most {len(lanes)}", "metrics")
    numbers, found = set(lanes), {}
    for each in entries:
        if not isinstance(each, list) or len(each) != 5:
            expected = ", ".join(("lane", *LaneProgress._fields))
            raise WireError(f"metrics.lanes: {shown(each)}, expected a list of {expected}", "metrics")
        for name, value in zip(("lane", "start", "steps", "pulse"), each, strict=False):
            check_whole(f"metrics.lanes: {name}", value, 0, MOST)
        if each[0] not in numbers:
            raise WireError(f"metrics.lanes: lane {each[0]}, expected one of {shown(list(lanes))}", "metrics")
        if not isinstance(each[4], bool):
            raise WireError(f"metrics.lanes: is_in_vain is {shown(each[4])}, expected a bool", "metrics")
        found[each[0]] = LaneProgress(*each[1:])
    return found


def _entry(fields: Mapping[str, Any], name: str) -> Any:
    try:
        return fields[name]
    except KeyError:
        raise WireError(f"no {name}, expected it among {sorted(map(str, fields))}", "fragment") from None


def _deviations_of(pairs: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of kind and text. Raises WireError for anything else."""
    expected = f"a list of pairs: {' or '.join(KINDS)}, and a text of at most {_MOST_LINE} characters"
    if not isinstance(pairs, list) or len(pairs) > len(KINDS):
        raise WireError(f"deviations is {shown(pairs)}, expected {expected}", "fragment")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in KINDS:
            raise WireError(f"deviations has {shown(pair)}, expected {expected}", "fragment")
        if not isinstance(pair[1], str) or len(pair[1]) > _MOST_LINE:
            raise WireError(f"deviations has {shown(pair)}, expected {expected}", "fragment")
    return tuple((kind, text) for kind, text in pairs)


def _is_stage(stage: Any) -> bool:
    if not isinstance(stage, list) or len(stage) not in (3, 7):
        return False
    name, items, *seconds = stage
    piece = seconds.pop() if len(stage) == 7 else ""
    is_named = isinstance(name, str) and isinstance(piece, str) and len(piece) <= _MOST_LINE
    is_timed = all(isinstance(each, float | int) and each >= 0 for each in seconds)
    return is_named and is_timed and is_whole(items) and items >= 0
