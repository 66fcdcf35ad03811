"""The four stages of a rollout, joined to a ring."""

from typing import Any

import torch

from rollflow.nodes.connectors.module_to_env.get_actions import RACES
from rollflow.nodes.distribution import Races
from rollflow.nodes.env_to_module import EnvToModule
from rollflow.nodes.environments import Environments
from rollflow.nodes.module_forward import GatheringForward, ModuleForward, ReadyForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.multi_agent.agent_forward import AgentForward
from rollflow.nodes.multi_agent.agents_to_module import AgentsToModule
from rollflow.nodes.multi_agent.module_to_agents import ModuleToAgents
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.lane import Lane
from rollflow.stream.seeding import generator_for, seed_for


def ring_of(
    environments: Environments | AgentEnvironments,
    prepare: EnvToModule | AgentsToModule,
    forward: ModuleForward | ReadyForward | GatheringForward | AgentForward,
    act: ModuleToEnv | ModuleToAgents,
    gate: Gate | None,
) -> Graph:
    """The ring, with the output `fragments`; the gate lets a lane go on to its next step."""
    lanes = environments.most_lanes
    graph = Graph("rollout")
    graph.add(env=environments, env_to_module=prepare)
    graph.add(module=forward, module_to_env=act)
    graph.output("fragments", "env_to_module.fragments", capacity=lanes)
    graph.connect("env", "env_to_module")
    if not isinstance(forward, GatheringForward):
        graph.connect("env_to_module.batches", "module", gate=gate)
        graph.connect("module", "module_to_env")
    else:
        # The gate stands between synchronous nodes, and the forward pass is none here.
        graph.add(pace=_passed_on)
        graph.connect("env_to_module.batches", "pace", gate=gate)
        graph.connect("pace", "module", capacity=lanes)
        graph.connect("module", "module_to_env", capacity=lanes)
    graph.connect("module_to_env", "env", feedback=True)
    return graph


def seed_lane(lane: Lane, seed: int) -> None:
    """Give a lane what its actions are sampled with."""
    lane.shared_data |= sampling_data(lane.index, seed, "module")


def sampling_data(lane: int, seed: int, name: str) -> dict[str, Any]:
    """What a lane's actions are sampled with, by a module of this name, for `shared_data`."""
    return {
        "lane": lane,
        "generator": torch.Generator().manual_seed(seed_for(seed, name, lane)),
        RACES: Races(generator_for(seed, name, lane)),
    }


def _passed_on(batches: Lane) -> Lane:
    return batches
