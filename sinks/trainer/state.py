"""How far a trainer has come with its rollouts, as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.wire import SESSION_BYTES, TrainerSession
from rollflow.stream.wire.handshake import MOST_NUMBER


def state_of(sources: Mapping[bytes, Source], version: int, current: Sequence[Arrived]) -> dict[str, Any]:
    """What has been handed over, with `current` as well, and the policy version: for JSON."""
    told = {}
    for token, source in sources.items():
        numbers = source.beyond | {arrived.number for arrived in current if arrived.source is source}
        done = source.session.done
        while done + 1 in numbers:
            done += 1
        told[token.hex()] = {"done": done, "beyond": sorted(number for number in numbers if number > done)}
    return {"version": version, "sources": told}


def sources_of(state: Mapping[str, Any]) -> tuple[dict[bytes, Source], int]:
    """The sources of a state, none of which has come yet, and its policy version. Raises ValueError for none."""
    try:
        known = {}
        for token, told in state["sources"].items():
            done, beyond = _number(told["done"]), {_number(number) for number in told["beyond"]}
            if len(bytes.fromhex(token)) != SESSION_BYTES or any(number <= done for number in beyond):
                raise ValueError(f"{token}: {told}")
            source = Source(TrainerSession(bytes.fromhex(token), done))
            source.beyond = beyond
            known[source.session.token] = source
        return known, _number(state["version"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"state is {state!r:.100}, expected what state_dict() gave: {error!r}") from error


def _number(value: Any) -> int:
    number = int(value)
    if not 0 <= number < MOST_NUMBER:
        raise ValueError(f"{number} is out of range")
    return number
