"""Compatibility of a rollout that comes to a trainer with it and with those that are there; log lines of its coming."""

import logging
import ssl
from collections.abc import Collection, Iterable
from time import monotonic
from typing import Any

from rollflow.sinks.trainer.trainer_side.rollout_peer import RolloutPeer
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.net.descriptor_transport import check_shared
from rollflow.stream.net.transport import check_server_tls
from rollflow.stream.wire import Address, Hello, check_secret, parse_trainer_address

logger = logging.getLogger(__name__)


def checked_address(address: str | Address, secret: bytes | None, tls: ssl.SSLContext | None) -> Address:
    """An address that a trainer can listen on with this secret and this TLS. Raises ValueError for any other."""
    parsed = parse_trainer_address(address)
    check_secret(parsed, secret)
    check_shared(parsed, tls)
    check_server_tls(tls)
    return parsed


def check_shares(hello: Hello, *, shares: bool) -> None:
    """Raise WireError where one end shares memory and the other one does not."""
    is_shared = hello.metadata.get("shares_memory") is True
    if is_shared != shares:
        listens, dials = ("shm:", "another address") if shares else ("another address", "shm:")
        raise WireError(
            f"the trainer listens on {listens} and the rollout dials {dials}, expected 'shm:/path' at both or neither",
            "memory",
        )


def check_together(source: RolloutPeer, others: Collection[RolloutPeer]) -> None:
    """Raise WireError for a rollout whose items don't go into one batch with others'; warn of two with one seed.

    Others count while they are connected. They go together: what fits one of them fits all.
    """
    one = next((other for other in others if other is not source and other.is_connected), source)
    if reason := difference(source, one):
        raise WireError(f"{reason}, as rollout {one.name} has, which is here as well", "spaces")
    if source.seed is None or source.connection is not None:
        return
    for other in others:
        if other.seed == source.seed and other.is_connected:
            logger.warning(
                "rollouts %s and %s both have seed=%d: their environments are seeded alike, and their episodes have "
                "the same ids; expected another seed for each, or none",
                other.name,
                source.name,
                source.seed,
            )


def announce(source: RolloutPeer, others: Iterable[RolloutPeer]) -> None:
    """Log that a rollout is connected: again, or newly, when it may take the place of a lost one."""
    if source.connection is None:
        logger.info("rollout %s has come", source.name)
        _replace_lost(source, others)
    else:
        gone = "" if source.lost_at is None else f" after {monotonic() - source.lost_at:.1f} s"
        logger.warning("rollout %s is connected again%s", source.name, gone)


def leaves_overdue(source: RolloutPeer, now: float, grace_s: float) -> bool:
    """Stop waiting for a lost rollout that did not come back within `grace_s` seconds; True if that happens now.

    Until then, log at growing intervals that it is awaited.
    """
    since = None if source.has_ended else source.lost_at
    if since is None:
        return False
    if now - since >= grace_s:
        source.has_ended = source.is_lost = True
        logger.warning("rollout %s is not back within %g s", source.name, grace_s)
        return True
    if source.reminder.is_due(now):
        logger.warning("waiting: rollout %s: %s", source.whereabouts(grace_s), source.reason)
    return False


def difference(source: RolloutPeer, other: RolloutPeer) -> str:
    """The trait that keeps two rollouts from being learnt from together, of the first and the other; "": none does."""
    mine, theirs = _traits(source), _traits(other)
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return f"{name} is {shown(mine.get(name))}, expected {shown(theirs.get(name))}"
    return ""


def _traits(source: RolloutPeer) -> dict[str, Any]:
    """Traits that rollouts must share to be learnt from together, by their names for people."""
    traits: dict[str, Any] = {name: getattr(source, name) for name in ("is_by_module", "is_stateful", "action_space")}
    traits |= {f"spaces[{index}]": space for index, space in enumerate(source.spaces)}
    if source.agents is not None:
        traits |= {f"part {index} of the agents": part for index, part in enumerate(source.agents.parts)}
    return traits | {f"the shape of weight {name!r}": shape for name, shape in source.weights.items()}


def _replace_lost(source: RolloutPeer, others: Iterable[RolloutPeer]) -> None:
    """Stop waiting for a lost rollout of the same name, in whose place a new one has come.

    If the lost one comes back all the same, it is taken in.
    """
    for other in others:
        if other.lost_at is not None and not other.has_ended and other.called == source.called:
            other.has_ended = other.is_lost = True
            logger.warning("rollout %s has come in place of %s, which is not waited for", source.name, other.name)
            return
