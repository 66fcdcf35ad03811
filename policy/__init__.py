"""Policies that act without the rollout that trained them: save, load, act, evaluate."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollflow.nodes.policies.evaluation import Evaluation
    from rollflow.nodes.policies.onnx_policy import OnnxPolicy
    from rollflow.nodes.policies.policy import Policy
    from rollflow.nodes.policies.registry import register_connector, register_function, register_module
    from rollflow.policy.client import PolicyClient

__all__ = [
    "Evaluation",
    "OnnxPolicy",
    "Policy",
    "PolicyClient",
    "register_connector",
    "register_function",
    "register_module",
]

_HOMES = {
    "Evaluation": "nodes.policies.evaluation",
    "OnnxPolicy": "nodes.policies.onnx_policy",
    "Policy": "nodes.policies.policy",
    "PolicyClient": "policy.client",
    "register_connector": "nodes.policies.registry",
    "register_function": "nodes.policies.registry",
    "register_module": "nodes.policies.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"rollflow.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
