"""What a trainer's supply hands over, taken from it."""

from collections.abc import Sequence

from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.supply import FirstCome, Rounds


def taken_of(supply: FirstCome | Rounds, present: Sequence[Source]) -> list[list[Arrived]]:
    """Have what is handed over together taken from what waits."""
    sets, supply.waiting = supply.take(present)  # type: ignore[assignment]
    return sets
