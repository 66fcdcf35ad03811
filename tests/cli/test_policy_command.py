"""`rollflow policy`: saved policies are shown, checked and exported."""

from pathlib import Path

import numpy as np
import pytest
from command_errors import Says
from drawn_policies import drawn_policy
from extras import needs

from rollflow import Policy
from rollflow.policy import OnnxPolicy


def save(path: Path, pieces: str = "filter") -> Policy:
    """Save a policy of a rollout over random environments."""
    policy = drawn_policy("box", pieces)
    policy.trained_on = {"policy_version": 1}
    policy.save(path)
    return policy


def test_show_says_what_a_policy_is(tmp_path: Path, shown: Says) -> None:
    save(tmp_path / "p")
    text = shown("policy", "show", tmp_path / "p")
    assert "observations  Box(-2.0, 2.0, (3,), float32)\nactions       Discrete(4)\n" in text
    assert "module        rollflow.DefaultModule\n" in text
    assert "env_to_module MeanStdFilter → AddObservationsFromEpisodesToBatch → " in text
    assert "trained_on    policy_version 1\n" in text


def test_check_loads_a_policy_or_says_why_it_can_not(tmp_path: Path, refused: Says, shown: Says) -> None:
    save(tmp_path / "p.zip", "listed")
    assert "'drawn_policies:shifted' is not allowed to be imported" in refused("policy", "check", tmp_path / "p.zip")
    assert "does what it did when it was saved" in shown(
        "policy", "check", tmp_path / "p.zip", "--allow", "drawn_policies"
    )


@pytest.mark.slow
def test_export_writes_an_onnx_program(tmp_path: Path, refused: Says, shown: Says) -> None:
    needs("onnx", "onnxruntime", "onnxscript")
    policy = save(tmp_path / "p", "all")
    assert "takes the likeliest actions" in shown("policy", "export", tmp_path / "p", "--onnx", tmp_path / "p.onnx")
    program = OnnxPolicy.load(tmp_path / "p.onnx")
    for step in range(5):
        observation = np.full(3, step / 4, np.float32)
        assert program.act(observation) == policy.act(observation)
    save(tmp_path / "q", "listed")
    command = ["policy", "export", str(tmp_path / "q"), "--onnx", str(tmp_path / "q.onnx"), "--allow", "drawn_policies"]
    assert "has no tensor form" in refused(*command)
    assert not (tmp_path / "q.onnx").exists()
