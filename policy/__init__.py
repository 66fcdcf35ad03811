"""Policies that act without the rollout that trained them: save, load, act, evaluate."""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.connectors.adapting.matching import Choices, UnsettledFields
    from rollflow.nodes.policies.evaluation import Evaluation
    from rollflow.nodes.policies.of_agent import evaluate_agents
    from rollflow.nodes.policies.onnx_policy import OnnxPolicy
    from rollflow.nodes.policies.policy import Policy
    from rollflow.nodes.policies.registry import register_connector, register_function, register_module
    from rollflow.policy.client import PolicyClient

__all__ = [
    "Choices",
    "Evaluation",
    "OnnxPolicy",
    "Policy",
    "PolicyClient",
    "UnsettledFields",
    "evaluate_agents",
    "register_connector",
    "register_function",
    "register_module",
]

_HOMES = {
    "Choices": "nodes.connectors.adapting.matching",
    "Evaluation": "nodes.policies.evaluation",
    "OnnxPolicy": "nodes.policies.onnx_policy",
    "Policy": "nodes.policies.policy",
    "PolicyClient": "policy.client",
    "UnsettledFields": "nodes.connectors.adapting.matching",
    "evaluate_agents": "nodes.policies.of_agent",
    "register_connector": "nodes.policies.registry",
    "register_function": "nodes.policies.registry",
    "register_module": "nodes.policies.registry",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES, "rollflow")
