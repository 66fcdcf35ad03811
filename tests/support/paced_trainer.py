"""A trainer that takes rounds under pace, and holds what it is handed against the laws."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from feeding_rollouts import SHORT, weights
from serial_module import at_of

from rollflow import Columns, TrainerStream


class Rounds:
    """Rounds that trainers of one rollout were handed, one at a time, after which they publish.

        max_lag    of the trainers
        weights    gives what they publish, of a value that is the version; dicts by module, where there are several

    lanes    of each round
    slots    of the environments in the last one
    steps    of all of them, and `steps_of` each slot
    """

    def __init__(self, max_lag: int, weights: Callable[[float], Any] = weights) -> None:
        self.lanes: list[set[int]] = []
        self.slots: set[int] = set()
        self.steps = 0
        self.steps_of: Counter[int] = Counter()
        self._max_lag, self._weights = max_lag, weights
        self._next: dict[int, int] = {}  # lane -> the number that its next fragment has

    def settings(self) -> dict[str, Any]:
        """Return the settings of a trainer that takes such rounds."""
        return {"max_lag": self._max_lag, "on_excess": "pace", "limits": SHORT, "join_timeout": 60.0}

    def publish(self, stream: TrainerStream) -> None:
        """Publish the next weights."""
        stream.publish(self._weights(stream.version + 1.0))

    def until(self, stream: TrainerStream, is_so: Callable[[], bool]) -> dict[str, Any]:
        """Take rounds until something holds behind one: what is to be saved then."""
        for batch in stream:
            self._take(stream, batch)
            saved = stream.state_dict()
            if is_so():
                return saved
            self.publish(stream)
        raise AssertionError("no more came")

    def rest(self, stream: TrainerStream) -> None:
        """Take rounds until no more come."""
        for batch in stream:
            self._take(stream, batch)
            self.publish(stream)

    def are_of(self, *lanes: int, times: int = 3) -> Callable[[], bool]:
        """Return True if the last few rounds were of these lanes."""
        begun = len(self.lanes)
        return lambda: len(self.lanes) >= begun + times and self.lanes[-times:] == [set(lanes)] * times

    def _take(self, stream: TrainerStream, batch: Any) -> None:
        assert len(self.lanes) < 3000
        assert all(each.lag is not None and each.lag <= self._max_lag for each in stream.handed)
        self.lanes.append({each.lane for each in stream.handed})
        assert len(stream.handed) == len(self.lanes[-1])
        self.slots = set()
        for part in [batch] if Columns.POLICY_VERSION in batch else batch.values():
            versions = np.asarray(part[Columns.POLICY_VERSION])
            assert int(versions.min()) >= stream.version - self._max_lag
            np.testing.assert_array_equal(part["weight"], versions)
            slots = at_of(part["obs"])[:, 0].tolist()
            self.slots |= set(slots)
            self.steps_of.update(slots)
            self.steps += len(versions)
        for each in stream.handed:
            assert each.sequence == self._next.get(each.lane, 0)
            self._next[each.lane] = each.sequence + 1
