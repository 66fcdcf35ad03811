"""Whether a rollout that comes to a trainer can be learnt from together with those that are there."""

import logging
from collections.abc import Iterable, Sequence

from rollflow.sinks.trainer.source import Source
from rollflow.stream.errors import WireError
from rollflow.stream.wire import Hello

logger = logging.getLogger(__name__)


def check_shares(hello: Hello, *, shares: bool) -> None:
    """Raise WireError where one end shares memory and the other one does not."""
    is_shared = hello.metadata.get("shares_memory") is True
    if is_shared != shares:
        listens, dials = ("shm:", "another address") if shares else ("another address", "shm:")
        raise WireError(
            f"the trainer listens on {listens} and the rollout dials {dials}, expected 'shm:/path' at both or neither",
            "memory",
        )


def check_together(source: Source, others: Sequence[Source]) -> None:
    """Raise WireError where a rollout can't be learnt from with others; say it where one makes the same episodes."""
    for other in others:
        if told := source.unlike(other):
            raise WireError(f"{told}, as rollout {other.name} has, which is here as well", "spaces")
        if source.seed is not None and source.seed == other.seed and source.connection is None:
            logger.warning(
                "rollouts %s and %s both have seed=%d: their environments are seeded alike, and their episodes have "
                "the same ids; expected another seed for each, or none",
                other.name,
                source.name,
                source.seed,
            )


def replace_lost(source: Source, others: Iterable[Source]) -> None:
    """Wait no more for one of the same name that is lost: a rollout that is new has come in its place.

    If it comes back all the same, it is taken in.
    """
    for other in others:
        if other.lost_at is not None and not other.has_ended and other.called == source.called:
            other.has_ended = other.is_lost = True
            logger.warning("rollout %s has come in place of %s, which is not waited for", source.name, other.name)
            return
