"""One pass of a policy: from the observations of its sessions to their actions."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.policies.sessions import SessionGroup
from rollflow.nodes.stages.module_forward import ModuleForward, note_batch
from rollflow.nodes.stages.module_to_env import ModuleToEnv, convert_actions
from rollflow.stream.data.tree import Tree


class PolicyPass:
    """The stages of a policy, one after the other.

        module, env_to_module, module_to_env    of the policy
        weights                                 of the module's copy
        sampling                                shared data of its sessions, with the random numbers that it samples by
        explore                                 True: sample actions; False: take the likeliest
        action_space                            of the environments
        remembers                               False: an action depends on the observation alone

    Where nothing is remembered and the default pieces alone are around the module, observations don't go through a
    lane, which takes two thirds of the time for one environment.
    """

    def __init__(
        self,
        module: Any,
        env_to_module: EnvToModulePipeline,
        module_to_env: ModuleToEnvPipeline,
        weights: PolicyWeights,
        sampling: dict[str, Any],
        *,
        explore: bool,
        action_space: gym.Space[Any],
        remembers: bool,
    ) -> None:
        self._module, self._explore, self._sampling = module, explore, [sampling]
        self._before, self._after = env_to_module, module_to_env
        flat = type(module) is DefaultModule
        self._forward = ModuleForward(module, weights, explore=explore, flat=flat, threads=1)
        context = {"module": module, "explore": explore}
        self._act = ModuleToEnv(module_to_env, env_space=action_space, threads=1, **context)
        self._action_space = action_space
        self._needs_lane = remembers

    def __call__(
        self,
        group: SessionGroup,
        observations: Tree,
        rewards: NDArray[np.float32] | None,
        infos: Sequence[Mapping[str, Any]] | None,
    ) -> Batch:
        """All columns, any[N, ...], of a pass over the next observation of each of the group's sessions.

        observations, rewards, infos    as `SessionLane.take_observations` takes them; observations in new memory
        """
        lane = group.lane
        is_tried = not (self._needs_lane or lane.is_fresh)  # a lane's first pass is its own, which checks types
        output = self._output(observations) if is_tried else None
        if output is not None:
            sizes = [len(lane.sessions)]
            made = self._after.run_jointly(self._module, output, sizes, self._explore, self._sampling)
            if made is not None:
                convert_actions(made, lane.layout.action_space, self._action_space)
                return made
        lane.take_observations(observations, rewards, infos)
        group.prepare(lane)
        if output is None:
            self._forward(lane)
        else:
            lane.batch = output
        columns: Batch = self._act(lane).batch
        if is_tried:
            self._needs_lane = True
        return columns

    def _output(self, observations: Tree) -> Batch | None:
        """The module's output for observations that no lane has; None where the pieces before it need a lane."""
        batch = self._before.run_on(self._module, observations)
        if batch is None:
            return None
        try:
            return self._forward.forward(batch)
        except Exception as error:
            note_batch(error, "sessions without a memory", batch)
            raise
