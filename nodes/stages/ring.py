"""The four stages of a rollout, joined to a ring."""

from typing import Any

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.node import Gate

STAGES = ("env", "env_to_module", "module", "module_to_env")


def ring_of(environments: LaneSource, prepare: Any, forward: Any, act: Any, gate: Gate | None) -> Graph:
    """The ring, with the output `fragments`; the gate lets a lane go on to its next step.

    prepare, forward, act    the stages before the forward pass, of it, and behind it, of one agent or of several
    """
    graph = Graph("rollout")
    graph.add(env=environments, env_to_module=prepare)
    graph.add(module=forward, module_to_env=act)
    graph.output("fragments", "env_to_module.fragments", capacity=environments.most_lanes)
    graph.connect("env", "env_to_module")
    graph.connect("env_to_module.batches", "module", gate=gate)
    graph.connect("module", "module_to_env")
    graph.connect("module_to_env", "env", feedback=True)
    return graph
