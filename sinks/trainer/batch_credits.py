"""How many fragments may be under way so that the train batches they go into come to a trainer soon enough."""

from collections.abc import Sequence
from typing import Any

from rollflow.sinks.learner_pipeline import Gathering


class BatchCredits:
    """Counts the fragments of a rollout on their way into train batches.

    What is begun when `done` batches are done with is to go into one of the next `ahead`. It does if no more are begun,
    until it has come, than there is room for in these: batches are made of fragments in the order in which they come.

    gathering    makes the batches
    """

    def __init__(self, gathering: Gathering[Any]) -> None:
        self._gathering = gathering
        self._begun = 0
        self._under_way: dict[tuple[int, int], int] = {}  # lane, sequence -> batches that were done with at its begin

    def admits(self, done: int, ahead: int) -> bool:
        """Whether another fragment may be begun."""
        room = self._gathering.fragments_per_batch * (min(self._under_way.values(), default=done) + ahead)
        return self._begun - self._gathering.left_out < room

    def begin(self, lane: int, sequence: int, done: int) -> None:
        """A lane begins a fragment."""
        self._begun += 1
        self._under_way[lane, sequence] = done

    def come(self, lane: int, sequence: int) -> None:
        """A fragment has left the rollout. Those before it in its lane never come."""
        self._forget([key for key in self._under_way if key[0] == lane and key[1] <= sequence])
        self._begun += 1

    def leave(self, lane: int) -> None:
        """Nothing comes of a lane any more."""
        self._forget([key for key in self._under_way if key[0] == lane])

    def _forget(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            del self._under_way[key]
        self._begun -= len(keys)
