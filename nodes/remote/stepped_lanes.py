"""Lanes on other hosts that reset and step environments, one request after the other."""

from collections.abc import Iterator
from typing import Any

from rollflow.nodes.remote.lane_record import Record, State
from rollflow.nodes.remote.remote_lanes import RemoteLanes
from rollflow.nodes.stepping import seeds_for
from rollflow.stream.seeding import seed_for
from rollflow.stream.wire import Reset, Step


class SteppedLanes(RemoteLanes):
    """`RemoteLanes` whose hosts reset and step environments; of what kind is said by the classes made of this.

    A lane that is late has its episodes given up, and begins anew once its host has answered after all. Where a host
    leaves, open episodes end as truncated; its lanes give the fragment that they have begun, and no more.
    """

    def __call__(self, actions: Any) -> Any:
        """Have the lane's host step its environments with the actions that it brings."""
        record = self._records[actions.index]
        if record.state is State.GONE:  # while the lane was somewhere else: no step is under way
            self.lost_steps += self._lose_lane(actions, record.reason, is_under_way=False)
            return self._leave(record)
        self._wait_for(record)
        self._ask(record, self._step_of(actions, self._gateway.next_number(actions.index)))
        return None

    # What RemoteLanes leaves open

    def _set_out(self, record: Record) -> Iterator[Any]:
        """Have a lane's environments reset."""
        index = record.lane.index
        if record.state is State.GONE:
            yield self._leave(record)
            return
        # Another start goes on with other episodes than the first: the same might fail in the same way.
        seed = self.seed if not record.starts else seed_for(self.seed, "restart", record.starts)
        seeds = tuple(seeds_for(seed, record.first_slot, record.num_slots))
        record.starts += 1
        if not record.is_waited:
            self._wait_for(record)
        self._ask(record, Reset(index, self._gateway.next_number(index), seeds, None), resets=True)

    def _take(self, record: Record, answer: Any) -> Iterator[Any]:
        if record.state is State.RESETTING:
            self._record_reset(record.lane, answer)
        else:
            self._record_step(record.lane, answer)
            record.steps += 1
            if record.steps >= self.fragment_length:
                record.failures = 0
        record.state = State.READY
        yield self._come_back(record)

    def _lost_with(self, record: Record, reason: str) -> int:
        return self._lose_lane(record.lane, reason, is_under_way=True) if record.state is State.STEPPING else 0

    # What those do otherwise who are made of this

    def _step_of(self, lane: Any, number: int) -> Step:
        """The request, of this number, to step a lane with its actions."""
        raise NotImplementedError

    def _record_reset(self, lane: Any, answer: Any) -> None:
        """Have a lane take what a reset gave."""
        raise NotImplementedError

    def _record_step(self, lane: Any, answer: Any) -> None:
        """Have a lane take what a step gave."""
        raise NotImplementedError

    def _lose_lane(self, lane: Any, reason: str, *, is_under_way: bool) -> int:
        """End what is open in a lane: how many transitions are lost, those of a step that is under way among them."""
        lost: int = lane.lose(reason)
        return lost if is_under_way else 0
