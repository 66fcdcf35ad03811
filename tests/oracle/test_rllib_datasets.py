"""Episodes that RLlib's own runner has written to Parquet are read as it has sampled them."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from rollflow import DatasetSource

# Its buffer of episodes is written whole each time, so that the later files have the earlier chunks again.
PROGRAM = """
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2, rollout_fragment_length=20)
config.offline_data(output="written", output_write_episodes=True)
runner = OfflineSingleAgentEnvRunner(config=config, worker_index=1)
arrays = {}
for number in range(3):
    for place, chunk in enumerate(runner.sample(num_timesteps=40, random_actions=True)):
        arrays[f"{number:02} {place:02} {chunk.id_} {chunk.is_terminated}"] = np.column_stack(
            [chunk.get_observations(slice(None, -1)), chunk.get_actions(), chunk.get_rewards()]
        )
np.savez("sampled.npz", **arrays)
"""


def test_chunks_that_rllib_has_written_are_the_episodes_that_it_has_sampled(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    sampled = np.load(tmp_path / "sampled.npz")
    steps, terminated = defaultdict(list), {}
    for name in sorted(sampled):
        _, _, episode, ended = name.split()
        steps[episode].append(sampled[name])
        terminated[episode] = ended == "True"
    read = list(DatasetSource(tmp_path / "written").episodes())
    assert {each.id_ for each in read} == steps.keys()
    assert len(read) == len(steps)
    assert any(len(chunks) > 1 for chunks in steps.values())
    for episode in read:
        ours = np.column_stack(
            [episode.get_observations(slice(None, -1)), episode.get_actions(), episode.get_rewards()]
        )
        np.testing.assert_array_equal(ours, np.concatenate(steps[episode.id_]))
        assert (episode.t_started, episode.is_terminated) == (0, terminated[episode.id_])
