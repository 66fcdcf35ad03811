"""Environments on other hosts, as a node: the same lanes as everywhere, whose hosts come and go."""

from typing import Any

from rollflow.nodes.environments import Environments, actions_of
from rollflow.nodes.remote.remote_host import vectors_on
from rollflow.nodes.remote.stepped_lanes import SteppedLanes
from rollflow.stream.lane import Lane
from rollflow.stream.tree import map_tree
from rollflow.stream.wire import Rows, Step


class RemoteEnvironments(SteppedLanes, Environments):
    """`Environments` on hosts that a gateway takes in: see `SteppedLanes`."""

    role = "env"
    envs_on = staticmethod(vectors_on)

    # What SteppedLanes leaves open

    def _lane_for(self, index: int, env: Any, first_slot: int) -> Lane:
        if index == len(self.lanes):
            self.lanes.append(self._lane(index, env))
        return self.lanes[index]

    def _step_of(self, lane: Lane, number: int) -> Step:
        return Step(lane.index, number, actions_of(lane))

    def _record_reset(self, lane: Lane, answer: Rows) -> None:
        lane.reset(answer.obs, answer.infos)

    def _record_step(self, lane: Lane, answer: Rows) -> None:
        assert answer.rewards is not None
        assert answer.terminateds is not None
        assert answer.truncateds is not None
        final = None
        if answer.final_slots:
            last = [map_tree(lambda leaf, i=i: leaf[i], answer.final_obs) for i in range(len(answer.final_slots))]
            final = last, answer.final_infos
        lane.record_step(answer.obs, answer.rewards, answer.terminateds, answer.truncateds, answer.infos, final)
