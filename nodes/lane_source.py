"""What nodes that step environments have in common, of one agent each or of several."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rollflow.nodes.pace import nobody_waits
from rollflow.stream.errors import RunError


class LaneSource:
    """Steps the environments of some lanes, once.

    seed                     of every environment
    fragment_length          vector steps in a fragment (T)
    envs                     the environments of every lane
    lanes                    as they go round
    is_started, is_closed    how far it is
    lost_steps               transitions that were under way where environments were lost: only workers are
    has_fixed_lanes          whether no others come, and none but those that are set aside goes
    lane_lost                called with the number of a lane that is lost
    is_draining              whether lanes come back without having made a step, since no more are asked for
    """

    has_fixed_lanes = True
    is_draining = False

    envs: Sequence[Any]
    lanes: Sequence[Any]

    def __init__(self, seed: int, fragment_length: int) -> None:
        self.seed, self.fragment_length = seed, fragment_length
        self.is_started = self.is_closed = False
        self.lost_steps = 0
        self.lane_lost: Callable[[int], None] = nobody_waits

    @property
    def num_lanes(self) -> int:
        """How many lanes there are."""
        return len(self.envs)

    @property
    def most_lanes(self) -> int:
        """How many there may come to be."""
        return self.num_lanes

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made."""
        return sum(lane.num_steps for lane in self.lanes)

    @property
    def uncut_steps(self) -> int:
        """Those of them that are in no fragment yet."""
        return sum(lane.uncut_steps for lane in self.lanes)

    def first_slots(self) -> list[int]:
        """The number of every lane's first environment."""
        return [0, *accumulate(envs.num_envs for envs in self.envs[:-1])]

    def _begin(self) -> None:
        if self.is_started:
            raise RunError("these environments have been run before: a rollout runs once, make another one")
        self.is_started = True
