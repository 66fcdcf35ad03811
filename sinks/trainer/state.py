"""How far a trainer has come with its rollouts, as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollflow.nodes.weights_digest import DIGEST_BYTES
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.wire import SESSION_BYTES, TrainerSession
from rollflow.stream.wire.handshake import MOST_NUMBER


class Known(NamedTuple):
    """What a trainer goes on from.

    sources    by their tokens; none of them has come yet
    version    the policy version
    digest     of the weights that were published under it; None: there are none, or nobody knows
    lost       transitions that were left out, by cause
    """

    sources: dict[bytes, Source]
    version: int
    digest: bytes | None
    lost: dict[str, int]


def state_of(
    sources: Mapping[bytes, Source],
    current: Sequence[Arrived],
    version: int,
    digest: bytes | None,
    lost: Mapping[str, int],
) -> dict[str, Any]:
    """What has been handed over, with `current` as well, the newest weights, and what was left out: for JSON."""
    told = {}
    for token, source in sources.items():
        numbers = source.beyond | {arrived.number for arrived in current if arrived.source is source}
        done = source.session.done
        while done + 1 in numbers:
            done += 1
        beyond = sorted(number for number in numbers if number > done)
        told[token.hex()] = {"done": done, "beyond": beyond, "missed": source.session.missed}
    newest = {"version": version, "digest": None if digest is None else digest.hex()}
    return {**newest, "lost": dict(lost), "sources": told}


def known_of(state: Mapping[str, Any]) -> Known:
    """What a state says, which may be one without `digest`, `lost` and `missed`. Raises ValueError for none."""
    if not (isinstance(state, Mapping) and "sources" in state):
        raise ValueError(f"state is {state!r:.100}, expected what state_dict() of a TrainerStream gave, with 'sources'")
    try:
        known = {}
        for token, told in state["sources"].items():
            done, beyond = _number(told["done"]), {_number(number) for number in told["beyond"]}
            if len(bytes.fromhex(token)) != SESSION_BYTES or any(number <= done for number in beyond):
                raise ValueError(f"{token}: {told}")
            source = Source(TrainerSession(bytes.fromhex(token), done))
            source.beyond, source.session.missed = beyond, _number(told.get("missed", 0))
            known[source.session.token] = source
        lost = {str(cause): _number(count) for cause, count in state.get("lost", {}).items()}
        return Known(known, _number(state["version"]), _digest(state.get("digest")), lost)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"state is {state!r:.100}, expected what state_dict() gave: {error!r}") from error


def _digest(told: Any) -> bytes | None:
    digest = None if told is None else bytes.fromhex(told)
    if digest is not None and len(digest) != DIGEST_BYTES:
        raise ValueError(f"digest {told}")
    return digest


def _number(value: Any) -> int:
    number = int(value)
    if not 0 <= number < MOST_NUMBER:
        raise ValueError(f"{number} is out of range")
    return number
