"""What a host says of a lane's rollout, checked: with every fragment, and in between."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rollflow.nodes.env_source import is_whole
from rollflow.nodes.remote.fragment_checks import MOST, check_whole, told_of
from rollflow.nodes.weights_digest import DIGEST_BYTES
from rollflow.stream.errors import WireError

_MOST_TEXT = 1 << 16  # characters


class Account(NamedTuple):
    """What is said with a fragment beside what makes it one.

    start         how often the environments were made anew
    steps         transitions made since then
    seed          of the environments since then
    lost_steps    transitions that were under way when the environments raised
    failure       what they raised; None: nothing
    nodes         what every stage has counted: [name, items, busy seconds]
    """

    start: int
    steps: int
    seed: int
    lost_steps: int
    failure: str | None
    nodes: list[list[Any]]


class Progress(NamedTuple):
    """How far a lane is.

    start       how often its environments were made anew
    steps       transitions made since then
    pulse       how often it has got on with something
    is_in_vain  whether its turn will end without a step: it is to end, and environments are still made or reset
    """

    start: int = 0
    steps: int = 0
    pulse: int = 0
    is_in_vain: bool = False


def account_of(rest: Mapping[str, Any], slots: int) -> Account:
    """What a lane of so many slots has given with a fragment. Raises WireError where it makes no sense."""
    account = Account(*(_entry(rest, name) for name in Account._fields))
    for name in ("start", "steps", "seed"):
        check_whole(name, getattr(account, name), 0, MOST)
    check_whole("lost_steps", account.lost_steps, 0, slots)
    if not isinstance(account.failure, str | None):
        raise WireError(f"failure is {told_of(account.failure)}, expected a string, or nil", "fragment")
    if account.failure is not None and len(account.failure) > _MOST_TEXT:
        raise WireError(f"failure has {len(account.failure)} characters, expected at most {_MOST_TEXT}", "fragment")
    nodes = account.nodes
    if not isinstance(nodes, list) or not all(_is_stage(stage) for stage in nodes):
        raise WireError(f"nodes is {told_of(nodes)}, expected lists of name, items and busy seconds", "fragment")
    if "loaded" in rest:
        _check_loaded(rest["loaded"])
    return account


def metrics_of(progress: Mapping[int, Progress]) -> dict[str, Any]:
    """How far lanes are, as it goes over the wire."""
    return {"lanes": [[lane, each.start, each.steps, each.pulse, each.is_in_vain] for lane, each in progress.items()]}


def progress_of(metrics: Mapping[str, Any], lanes: Collection[int]) -> dict[int, Progress]:
    """How far a host says that some of its lanes are. Raises WireError where it makes no sense."""
    told = _entry(metrics, "lanes")
    if not isinstance(told, list) or len(told) > len(lanes):
        raise WireError(f"metrics.lanes is {told_of(told)}, expected a list of at most {len(lanes)}", "metrics")
    known, found = set(lanes), {}
    for each in told:
        if not isinstance(each, list) or len(each) != 5:
            expected = ", ".join(("lane", *Progress._fields))
            raise WireError(f"metrics.lanes: {told_of(each)}, expected a list of {expected}", "metrics")
        for name, value in zip(("lane", "start", "steps", "pulse"), each, strict=False):
            check_whole(f"metrics.lanes: {name}", value, 0, MOST)
        if each[0] not in known:
            raise WireError(f"metrics.lanes: lane {each[0]}, expected one of {told_of(list(lanes))}", "metrics")
        if not isinstance(each[4], bool):
            raise WireError(f"metrics.lanes: is_in_vain is {told_of(each[4])}, expected a bool", "metrics")
        found[each[0]] = Progress(*each[1:])
    return found


def _entry(told: Mapping[str, Any], name: str) -> Any:
    try:
        return told[name]
    except KeyError:
        raise WireError(f"no {name}, expected it among {sorted(map(str, told))}", "fragment") from None


def _check_loaded(told: Any) -> None:
    """Raise WireError for what is no version of weights and their digest."""
    if not isinstance(told, list) or len(told) != 2 or not is_whole(told[0]) or not isinstance(told[1], bytes):
        raise WireError(f"loaded is {told_of(told)}, expected a version and a digest", "fragment")
    check_whole("loaded: version", told[0], 0, MOST)
    if len(told[1]) != DIGEST_BYTES:
        raise WireError(f"loaded: {len(told[1])} bytes, expected a digest of {DIGEST_BYTES}", "fragment")


def _is_stage(stage: Any) -> bool:
    if not isinstance(stage, list) or len(stage) != 3:
        return False
    name, items, busy = stage
    return isinstance(name, str) and is_whole(items) and items >= 0 and isinstance(busy, float | int) and busy >= 0
