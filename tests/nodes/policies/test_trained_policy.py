"""A policy trained on CartPole plays as well in other programs: by its class, its program, onnxruntime, and served."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import httpx
import numpy as np
import pytest
from extras import needs
from serving_process import serving

from rollflow import PolicyClient

EXAMPLES = Path(__file__).parents[3] / "examples"

BY_POLICY = """
from rollflow import Policy

policy = Policy.load("cartpole-policy", allow=ALLOW)
print(type(policy.module).__name__, policy.evaluate("CartPole-v1", episodes=100).mean)
"""
OF_FRAMES = """
from functools import partial

import stack_observations as example

from rollflow import FrameStacking

# The piece off the shelf, which is there wherever rollflow is, with fewer frames.
example.NUM_FRAMES = 4
example.StackLast10Observations = partial(FrameStacking, num_frames=example.NUM_FRAMES)
example.main(0, "frames-policy")
"""
BY_FRAMES = """
import gymnasium as gym

from rollflow import Policy


def positions():
    env = gym.make("CartPole-v1")
    space = env.observation_space
    seen = gym.spaces.Box(space.low[::2], space.high[::2])
    return gym.wrappers.TransformObservation(env, lambda observation: observation[::2], seen)


print(Policy.load("frames-policy").evaluate(positions, episodes=100).mean)
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


def ran(script: str, folder: Path, most_seconds: float = 280.0, *, alone: bool = False) -> str:
    """The last line of what a program prints, in a process of its own.

    alone    without what the folder or the environment's variables have to import: installed packages are there
    """
    command = [sys.executable, *(["-I"] if alone else []), "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=most_seconds)
    assert not done.returncode, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `cartpole.py` and the policy that it has trained and saved."""
    needs("onnx", "onnxruntime", "onnxscript")
    folder = tmp_path_factory.mktemp("training")
    shutil.copy(EXAMPLES / "cartpole.py", folder)
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
        shutil.copy(EXAMPLES / "cartpole.py", tmp_path)
    script = BY_ONNX if way == "OnnxPolicy" else BY_POLICY.replace("ALLOW", repr(["cartpole"]))
    acted_by, mean = ran(script, tmp_path, alone=way != "Policy").split()
    assert acted_by == way
    assert float(mean) >= 475


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_policy_that_stacks_frames_plays_as_well_where_rollflow_alone_is(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "empty").mkdir()
    shutil.copy(EXAMPLES / "stack_observations.py", tmp_path / "training")
    assert ran(OF_FRAMES, tmp_path / "training", 800.0).startswith("mean return ")
    shutil.move(tmp_path / "training" / "frames-policy", tmp_path / "empty")
    assert float(ran(BY_FRAMES, tmp_path / "empty", alone=True)) >= 475


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_policy_with_an_lstm_plays_as_well_in_a_fresh_process(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "lstm_cartpole.py", tmp_path)
    told = ran('import lstm_cartpole; lstm_cartpole.main(0, "cartpole-policy")', tmp_path, 800.0)
    assert float(told.removeprefix("mean return ").split(",")[0]) >= 475
    acted_by, mean = ran(BY_POLICY.replace("ALLOW", repr(["lstm_cartpole"])), tmp_path).split()
    assert acted_by == "DefaultModule"
    assert float(mean) >= 475


def over_http(url: str) -> list[float]:
    """The returns of 30 episodes, a request for each action."""
    with ThreadPoolExecutor(10) as threads:
        return list(threads.map(lambda seed: played(url, seed), range(30)))


def played(url: str, seed: int) -> float:
    """The return of an episode with a client's actions over HTTP."""
    env, total, ended = gym.make("CartPole-v1"), 0.0, False
    observation, _ = env.reset(seed=seed)
    with httpx.Client(base_url=url, timeout=60.0) as client:
        while not ended:
            answer = client.post("/v1/policies/cartpole-policy/act", json={"observation": observation.tolist()})
            observation, reward, terminated, truncated, _ = env.step(answer.json()["action"])
            total, ended = total + float(reward), terminated or truncated
    return total


def over_websocket(url: str) -> list[float]:
    """The returns of 100 episodes, played side by side by one `PolicyClient`."""
    envs = {number: gym.make("CartPole-v1") for number in range(100)}
    seen = {number: env.reset(seed=number)[0] for number, env in envs.items()}
    returns = [0.0] * len(envs)
    with PolicyClient(url) as client:
        while seen:
            actions = client.act_batch(np.stack(list(seen.values())), sessions=list(seen))
            for number, action in zip(list(seen), actions, strict=True):
                seen[number], reward, terminated, truncated, _ = envs[number].step(action)
                returns[number] += float(reward)
                if terminated or truncated:
                    del seen[number]
    return returns


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("play", [over_http, over_websocket])
def test_a_trained_policy_plays_as_well_for_clients(play: Callable[[str], list[float]], trained: Path) -> None:
    with serving(str(trained / "cartpole-policy")) as (_, url):
        assert np.mean(play(url)) >= 475
