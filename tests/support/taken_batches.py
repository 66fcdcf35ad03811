"""Items taken from a trainer's batch assembly."""

from collections.abc import Sequence

from rollflow.sinks.trainer.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.sinks.trainer.stream import ArrivalOrder, LaneRounds


def taken_of(supply: ArrivalOrder | LaneRounds, present: Sequence[RolloutPeer]) -> list[list[ArrivedItem]]:
    """Have what is handed over together taken from what waits."""
    sets, supply.waiting = supply.take(lambda: present)  # type: ignore[assignment]
    return sets
