"""The four stages of a rollout, joined to a ring."""

from typing import Any

from rollflow.nodes.env.environments import Environments
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.env.workers.thread_environments import ThreadEnvironments
from rollflow.nodes.stages.agent_stages import AgentForward, AgentsToModule, ModuleToAgents
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.joint_forward import JointForward
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.nodes.stages.module_to_env import ModuleToEnv
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.node import Gate

STAGES = ("env", "env_to_module", "module", "module_to_env")


def ring_of(
    environments: Environments | AgentEnvironments | ThreadEnvironments,
    prepare: EnvToModule | AgentsToModule,
    forward: ModuleForward | AgentForward | JointForward[Any],
    act: ModuleToEnv | ModuleToAgents,
    gate: Gate | None,
) -> Graph:
    """The ring, with the output `fragments`; the gate lets a lane go on to its next step."""
    graph = Graph("rollout")
    graph.add(env=environments, env_to_module=prepare)
    graph.add(module=forward, module_to_env=act)
    graph.output("fragments", "env_to_module.fragments", capacity=environments.most_lanes)
    graph.connect("env", "env_to_module")
    graph.connect("env_to_module.batches", "module", gate=gate)
    graph.connect("module", "module_to_env")
    graph.connect("module_to_env", "env", feedback=True)
    return graph
