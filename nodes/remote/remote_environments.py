"""Environments on other hosts, as a node: the same lanes as everywhere, whose hosts come and go."""

from collections.abc import Iterator
from typing import Any

from rollflow.nodes.environments import actions_of
from rollflow.nodes.remote.lane_record import Record, State
from rollflow.nodes.remote.remote_lanes import RemoteLanes
from rollflow.nodes.stepping import seeds_for
from rollflow.stream.lane import Lane
from rollflow.stream.seeding import seed_for
from rollflow.stream.tree import map_tree
from rollflow.stream.wire import Reset, Rows, Step


class RemoteEnvironments(RemoteLanes):
    """`Environments` on hosts that a gateway takes in: they reset and step, one request after the other.

    A lane that is late has its episodes given up, and begins anew once its host has answered after all. Where a host
    leaves, open episodes end as truncated; its lanes give the fragment that they have begun, and no more.
    """

    def __call__(self, actions: Lane) -> Lane | None:
        """Have the lane's host step its environments with the actions that it brings."""
        record = self._records[actions.index]
        if record.state is State.GONE:  # while the lane was somewhere else: no step is under way
            actions.lose(record.reason)
            return self._leave(record)  # type: ignore[no-any-return]
        self._wait_for(record)
        self._ask(record, Step(actions.index, self._gateway.next_number(actions.index), actions_of(actions)))
        return None

    # What RemoteLanes leaves open

    def _lane_for(self, index: int, env: Any) -> Lane:
        if index == len(self.lanes):
            self.lanes.append(self._lane(index, env))
        return self.lanes[index]

    def _set_out(self, record: Record) -> Iterator[Lane]:
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

    def _take(self, record: Record, answer: Any) -> Iterator[Lane]:
        assert isinstance(answer, Rows)
        lane = record.lane
        if record.state is State.RESETTING:
            lane.reset(answer.obs, answer.infos)
        else:
            _record_step(lane, answer)
            record.steps += 1
            if record.steps >= self.fragment_length:
                record.failures = 0
        record.state = State.READY
        yield self._come_back(record)

    def _lost_with(self, record: Record, reason: str) -> int:
        lost: int = record.lane.lose(reason) if record.state is State.STEPPING else 0
        return lost


def _record_step(lane: Lane, rows: Rows) -> None:
    assert rows.rewards is not None
    assert rows.terminateds is not None
    assert rows.truncateds is not None
    final = None
    if rows.final_slots:
        last = [map_tree(lambda leaf, i=i: leaf[i], rows.final_obs) for i in range(len(rows.final_slots))]
        final = last, rows.final_infos
    lane.record_step(rows.obs, rows.rewards, rows.terminateds, rows.truncateds, rows.infos, final)
