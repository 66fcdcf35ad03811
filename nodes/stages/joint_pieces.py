"""Connector pieces that look at all agents of an environment together, before those of the modules."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.nodes.stages.module_set import ModuleSet
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.env_episodes import live_episode
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane


class JointPieces:
    """Runs pieces over the `MultiAgentEpisode`s of a lane.

    parts     the agents by their spaces
    pieces    may rewrite the newest observations of agents, and must leave the batch empty
    """

    def __init__(self, parts: Sequence[AgentPart], pieces: Sequence[ConnectorV2]) -> None:
        agents = [(agent, part) for part in parts for agent in part.agents]
        seen = gym.spaces.Dict({agent: part.observation_space for agent, part in agents})
        done = gym.spaces.Dict({agent: part.action_space for agent, part in agents})
        self.pipeline = EnvToModulePipeline(seen, done, connectors=list(pieces))
        self._parts = parts

    def parts_left(self) -> tuple[AgentPart, ...]:
        """The parts, with the spaces that the pieces leave their observations in.

        Raises ConnectorError where they are others for one agent of a part than for another.
        """
        left: Any = self.pipeline.observation_space
        parts = []
        for part in self._parts:
            spaces = [left[agent] if self._is_by_agents(left) else left for agent in part.agents]
            for agent, space in zip(part.agents, spaces, strict=True):
                if space != spaces[0]:
                    raise ConnectorError(
                        f"{self.pipeline.name} leaves observations of agent '{agent}' in {space} and those of "
                        f"'{part.agents[0]}' in {spaces[0]}, expected the same for agents with the same spaces"
                    )
            # The very space where nothing has changed it: a lane tells spaces apart by that.
            same = spaces[0] == part.observation_space
            parts.append(part if same else part._replace(observation_space=spaces[0]))
        return tuple(parts)

    def _is_by_agents(self, space: Any) -> bool:
        agents = {agent for part in self._parts for agent in part.agents}
        return isinstance(space, gym.spaces.Dict) and set(space.spaces) == agents

    def __call__(self, lane: MultiAgentLane, modules: ModuleSet, explore: bool, metrics: Any) -> None:
        """Have the pieces see what the last step gave: first the episodes that it has ended, then those that go on."""
        if len(lane.just_ended):
            self._see(lane, lane.just_ended.tolist(), modules, explore, metrics, has_ended=True)
        self._see(lane, range(lane.num_envs), modules, explore, metrics, has_ended=False)
        for part in lane.parts:
            part.reveal_ended(None)

    def _see(
        self,
        lane: MultiAgentLane,
        envs: Sequence[int],
        modules: ModuleSet,
        explore: bool,
        metrics: Any,
        *,
        has_ended: bool,
    ) -> None:
        for part in lane.parts:
            part.reveal_ended(lane.just_ended, of_these=has_ended)
        shown = [part.show_jointly(with_those_that_act=not has_ended) for part in lane.parts]
        episodes: Any = [live_episode(lane, env, has_ended=has_ended) for env in envs]
        batch = self.pipeline.run(modules.modules, {}, episodes, explore, {"step": lane.step}, metrics)
        if batch:
            raise ConnectorError(
                f"{self.pipeline.name} put {sorted(map(str, batch))} into the batch, expected it to be left empty: "
                "pieces that see all agents together rewrite observations, and batches are made for each module"
            )
        for part, each in zip(lane.parts, shown, strict=True):
            part.take_jointly(each)
