"""What a program that only acts imports: loading a policy is not to wait for what trains, steps or serves."""

import subprocess
import sys

import pytest

import rollflow.policy

ENGINE = {"anyio", "rollflow.nodes.rollout", "rollflow.nodes.env", "rollflow.stream.graph.graph", "rollflow.sinks"}
OTHER_WORK = {"rollflow.nodes.connectors.pipelines.adapting", "rollflow.nodes.policies.onnx_export"}
OTHER_WORK |= {"rollflow.stream.observe.watch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("OnnxPolicy", {"torch", "gymnasium", "onnxruntime", "optree", "msgpack", *ENGINE, *OTHER_WORK}),
        ("PolicyClient", {"torch", *OTHER_WORK}),
        ("Policy", {"onnx", "onnxruntime", *ENGINE, *OTHER_WORK}),
    ],
)
def test_a_name_brings_only_what_acting_by_it_needs(name: str, absent: set[str]) -> None:
    program = f"import sys; from rollflow.policy import {name}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert absent.isdisjoint(ran.stdout.split())


def test_every_name_is_found() -> None:
    assert all(hasattr(rollflow.policy, name) for name in rollflow.policy.__all__)
