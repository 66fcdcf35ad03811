"""One lane of a host: environments that are stepped, in a thread, as requests come."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rollflow.nodes.env_source import LaneMaker
from rollflow.nodes.remote.lane_threads import described
from rollflow.nodes.stepping import Stepped, close_failed, reset_with, step_of
from rollflow.stream.tree import Tree, stack_trees
from rollflow.stream.wire import Reset, Rows, Step


class HostLane:
    """The environments of one lane. Raises EnvError where they can't be made.

    env    as they are now: made again when they are reset after they have raised
    """

    def __init__(self, maker: LaneMaker) -> None:
        self._maker = maker
        self._has_failed = False
        self._make()

    def describe(self) -> dict[str, Any]:
        """What a Hello says of them."""
        return described(self.env)

    def answer(self, request: Reset | Step) -> Rows:
        """Do what is asked for. Raises what the environments raise."""
        try:
            return self._reset(request) if isinstance(request, Reset) else self._step(request)
        except BaseException:
            self._has_failed = True
            raise

    def _make(self) -> None:
        self.env: VectorEnv[Any, Any, Any] = self._maker.make()
        self._do = step_of(self.env, is_ours=self._maker.can_travel)

    def _reset(self, request: Reset) -> Rows:
        if self._has_failed and self._maker.can_travel:
            close_failed(self.env)
            self._make()
        options = None if request.options is None else dict(request.options)
        observations, infos = reset_with(self.env, request.seeds, options)
        self._has_failed = False
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
