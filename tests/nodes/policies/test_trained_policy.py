"""A policy trained on CartPole plays as well in other programs: by its class, by its program, and in onnxruntime."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "cartpole.py"

BY_POLICY = """
from rollflow.policy import Policy

policy = Policy.load("cartpole-policy", allow=ALLOW)
print(type(policy.module).__name__, policy.evaluate("CartPole-v1", episodes=100).mean)
"""
BY_ONNX = """
import sys

import gymnasium as gym
import numpy as np

from rollflow.policy import OnnxPolicy

policy = OnnxPolicy.load("cartpole-policy")
env, returns = gym.make("CartPole-v1"), []
for episode in range(100):
    observation, _ = env.reset(seed=episode)
    policy.reset()
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        total, ended = total + reward, terminated or truncated
    returns.append(total)
assert "torch" not in sys.modules
print("OnnxPolicy", np.mean(returns))
"""


def ran(script: str, folder: Path, most_seconds: float = 280.0) -> str:
    """The last line of what a program prints, in a process of its own."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=most_seconds)
    assert not done.returncode, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cartpole.py` and the policy that it has trained and saved."""
    folder = tmp_path_factory.mktemp("training")
    shutil.copy(EXAMPLE, folder)
    line = ran('import cartpole; cartpole.main(0, "cartpole-policy")', folder, 800.0)
    assert line.startswith("mean return ")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["Policy", "ProgramModule", "OnnxPolicy"])
def test_a_trained_policy_plays_as_well_in_a_fresh_process(way: str, trained: Path, tmp_path: Path) -> None:
    """In an empty folder, where the module's class is only for who plays by it."""
    shutil.copytree(trained / "cartpole-policy", tmp_path / "cartpole-policy")
    if way == "Policy":
        shutil.copy(EXAMPLE, tmp_path)
    script = BY_ONNX if way == "OnnxPolicy" else BY_POLICY.replace("ALLOW", repr(["cartpole"]))
    acted_by, mean = ran(script, tmp_path).split()
    assert acted_by == way
    assert float(mean) >= 475
