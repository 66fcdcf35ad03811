"""One lane of a host: environments that are stepped, in a thread, as requests come."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rollflow.nodes.env_source import LaneMaker
from rollflow.nodes.remote.lane_threads import described
from rollflow.nodes.remote.served_environments import ServedEnvironments
from rollflow.nodes.stepping import Stepped, reset_with, step_of
from rollflow.stream.tree import Tree, stack_trees
from rollflow.stream.wire import Reset, Rows, Step


class HostLane(ServedEnvironments[Rows]):
    """A vector environment with one agent in each of its environments."""

    def __init__(self, maker: LaneMaker) -> None:
        self._maker = maker
        super().__init__(can_be_remade=maker.can_travel)

    def describe(self) -> dict[str, Any]:
        """What a Hello says of them."""
        return described(self.env)

    def _make(self) -> None:
        self.env: VectorEnv[Any, Any, Any] = self._maker.make()
        self._do = step_of(self.env, is_ours=self._maker.can_travel)

    def _reset(self, request: Reset) -> Rows:
        options = None if request.options is None else dict(request.options)
        observations, infos = reset_with(self.env, request.seeds, options)
        return Rows(request.lane, request.number, observations, None, None, None, (), None, infos, {})

    def _step(self, request: Step) -> Rows:
        observations, rewards, terminateds, truncateds, infos, final = Stepped(*self._do(request.actions))
        slots: tuple[int, ...] = ()
        last: Tree = None
        last_infos: Mapping[str, Any] = {}
        if final is not None:
            slots = tuple(np.flatnonzero(np.logical_or(terminateds, truncateds)).tolist())
            last, last_infos = stack_trees(list(final[0])), final[1]
        return Rows(
            request.lane,
            request.number,
            observations,
            np.asarray(rewards, np.float64),
            np.asarray(terminateds, np.bool_),
            np.asarray(truncateds, np.bool_),
            slots,
            last,
            infos,
            last_infos,
        )
