"""`rollflow policy`: saved policies are shown, checked and exported."""

from pathlib import Path

import numpy as np
import pytest
from drawn_policies import drawn_policy
from extras import needs

from rollflow import Policy
from rollflow.cli.main import main
from rollflow.policy import OnnxPolicy


def save(path: Path, pieces: str = "filter") -> Policy:
    """Save a policy of a rollout over random environments."""
    policy = drawn_policy("box", pieces)
    policy.trained_on = {"policy_version": 1}
    policy.save(path)
    return policy


def test_show_says_what_a_policy_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "p")
    assert main(["policy", "show", str(tmp_path / "p")]) == 0
    shown = capsys.readouterr().out
    assert "observations  Box(-2.0, 2.0, (3,), float32)\nactions       Discrete(4)\n" in shown
    assert "module        rollflow.DefaultModule\n" in shown
    assert "env_to_module MeanStdFilter → AddObservationsFromEpisodesToBatch → " in shown
    assert "trained_on    policy_version 1\n" in shown


def test_check_loads_a_policy_or_says_why_it_can_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "p.zip", "listed")
    assert main(["policy", "check", str(tmp_path / "p.zip")]) == 1
    assert "'drawn_policies:shifted' is not allowed to be imported" in capsys.readouterr().err
    assert main(["policy", "check", str(tmp_path / "p.zip"), "--allow", "drawn_policies"]) == 0
    assert "does what it did when it was saved" in capsys.readouterr().out


@pytest.mark.slow
def test_export_writes_an_onnx_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("onnx", "onnxruntime", "onnxscript")
    policy = save(tmp_path / "p", "all")
    assert main(["policy", "export", str(tmp_path / "p"), "--onnx", str(tmp_path / "p.onnx")]) == 0
    assert "takes the likeliest actions" in capsys.readouterr().out
    program = OnnxPolicy.load(tmp_path / "p.onnx")
    for step in range(5):
        observation = np.full(3, step / 4, np.float32)
        assert program.act(observation) == policy.act(observation)
    save(tmp_path / "q", "listed")
    command = ["policy", "export", str(tmp_path / "q"), "--onnx", str(tmp_path / "q.onnx"), "--allow", "drawn_policies"]
    assert main(command) == 1
    assert "has no tensor form" in capsys.readouterr().err
    assert not (tmp_path / "q.onnx").exists()
