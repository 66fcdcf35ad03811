"""Policies that act without the rollout that trained them: save, load, act, evaluate."""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.policies.evaluation import Evaluation as Evaluation, evaluate_agents as evaluate_agents
    from rollflow.nodes.policies.onnx_policy import OnnxPolicy as OnnxPolicy
    from rollflow.nodes.policies.part_records import (
        register_connector as register_connector,
        register_function as register_function,
        register_module as register_module,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
