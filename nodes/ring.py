"""The four stages of a rollout, joined to a ring."""

import torch

from rollflow.nodes.connectors.module_to_env.get_actions import RACES
from rollflow.nodes.distribution import Races
from rollflow.nodes.env_to_module import EnvToModule
from rollflow.nodes.environments import Environments
from rollflow.nodes.module_forward import GatheringForward, ModuleForward, ReadyForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.lane import Lane
from rollflow.stream.seeding import generator_for, seed_for


def ring_of(
    environments: Environments,
    prepare: EnvToModule,
    forward: ModuleForward | ReadyForward | GatheringForward,
    act: ModuleToEnv,
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
    lane.shared_data["lane"] = lane.index
    lane.shared_data["generator"] = torch.Generator().manual_seed(seed_for(seed, "module", lane.index))
    lane.shared_data[RACES] = Races(generator_for(seed, "module", lane.index))


def _passed_on(batches: Lane) -> Lane:
    return batches
