"""What a host says of a lane's rollout, checked: with every fragment, and in between."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollflow.nodes.env_source import is_whole
from rollflow.stream.errors import WireError

_MOST = 1 << 62


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


class Standing(NamedTuple):
    """How far a lane is: see `Progress`."""

    lane: int
    start: int
    steps: int
    pulse: int
    is_in_vain: bool


def account_of(rest: Mapping[str, Any], slots: int) -> Account:
    """What a lane of so many slots has given with a fragment. Raises WireError where it makes no sense."""
    account = Account(*(_entry(rest, name) for name in Account._fields))
    for name in ("start", "steps", "seed"):
        _check_whole(name, getattr(account, name))
    _check_whole("lost_steps", account.lost_steps, slots)
    if not isinstance(account.failure, str | None):
        raise WireError(f"failure is {_shown(account.failure)}, expected a string, or nil", "fragment")
    nodes = account.nodes
    if not isinstance(nodes, list) or not all(_is_stage(stage) for stage in nodes):
        raise WireError(f"nodes is {_shown(nodes)}, expected lists of name, items and busy seconds", "fragment")
    return account


def standings_of(metrics: Mapping[str, Any], lanes: list[int]) -> list[Standing]:
    """How far a host says that its lanes are. Raises WireError where it makes no sense."""
    told = _entry(metrics, "lanes")
    if not isinstance(told, list) or not all(isinstance(each, list) and len(each) == 5 for each in told):
        raise WireError(f"metrics.lanes is {_shown(told)}, expected lists of {', '.join(Standing._fields)}", "metrics")
    standings = [Standing(*each) for each in told]
    for each in standings:
        for name in ("lane", "start", "steps", "pulse"):
            _check_whole(f"metrics.lanes: {name}", getattr(each, name))
        if each.lane not in lanes:
            raise WireError(f"metrics.lanes: lane {each.lane}, expected one of {lanes}", "metrics")
        if not isinstance(each.is_in_vain, bool):
            raise WireError(f"metrics.lanes: is_in_vain is {_shown(each.is_in_vain)}, expected a bool", "metrics")
    return standings


def _entry(told: Mapping[str, Any], name: str) -> Any:
    try:
        return told[name]
    except KeyError:
        raise WireError(f"no {name}, expected it among {sorted(map(str, told))}", "fragment") from None


def _check_whole(name: str, value: Any, most: int = _MOST) -> None:
    if not is_whole(value) or not 0 <= value <= most:
        raise WireError(f"{name} is {_shown(value)}, expected a whole number from 0 to {most}", "fragment")


def _is_stage(stage: Any) -> bool:
    if not isinstance(stage, list) or len(stage) != 3:
        return False
    name, items, busy = stage
    return isinstance(name, str) and is_whole(items) and items >= 0 and isinstance(busy, float | int) and busy >= 0


def _shown(value: Any) -> str:
    return repr(value)[:100]
