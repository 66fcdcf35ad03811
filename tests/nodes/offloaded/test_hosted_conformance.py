"""Environments and whole rollouts on other hosts: spaces and infos, what episodes carry, and states of modules."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fragment_equality import assert_alike
from places import rollout_at

from rollflow import ConnectorV2, Rollout
from rollflow.stream.testing import check

pytestmark = pytest.mark.wait_times(first_pause_s=0.001)


class Notes(ConnectorV2):
    """Writes into what episodes carry, and counts how often it has been called for each."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            kept = episode.custom_data
            kept["calls"] = kept.get("calls", 0) + 1
            kept.setdefault("seen", []).append((len(episode), {"at": np.float32(len(episode))}))
        return batch


space = gym.spaces.Dict(
    {
        "image": gym.spaces.Box(0, 255, (4, 3, 2), np.uint8),
        "where": gym.spaces.Tuple((gym.spaces.Discrete(5, start=-2), gym.spaces.MultiBinary((2, 3)))),
        "numbers": gym.spaces.MultiDiscrete([3, 4]),
    }
)


class Sampled(gym.Env[Any, Any]):
    """Has spaces of every kind, and infos that come and go."""

    observation_space = space
    action_space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": space["numbers"]})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        space.seed(int(self.np_random.integers(2**31)))
        return space.sample(), {"began": "so"}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        infos = {"seen": action["a"].sum()} if self.np_random.random() < 0.5 else {"nested": {"a": [1, None]}}
        return space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, infos


HOSTS = pytest.mark.parametrize("there", [pytest.param("hosts", id="environments"), "hosted rollouts"])


def both(there: str, read: Any, env: Any, envs: Any, acts: Any = None, **options: Any) -> list[list[Any]]:
    """What is read of a rollout on a host, and of one here."""
    found = []
    for place in (there, "inline"):
        with rollout_at(place, env, acts=acts, envs=envs, **options) as made, made as rollout:
            found.append(list(read(rollout)))
    return found


@HOSTS
def test_nested_spaces_infos_and_what_episodes_carry_come_through(there: str) -> None:
    options: Any = {"fragment_length": 8, "num_fragments": 3, "seed": 1}
    notes: Any = {"env_to_module_connector": lambda env: Notes()}
    ours, inline = both(there, Rollout.fragments, Sampled, {"num_envs": 1}, notes, **options)
    assert_alike(ours, inline)
    chunks = [chunk for fragment in ours for chunk in fragment.episodes()]
    assert all(chunk.custom_data["calls"] >= len(chunk) for chunk in chunks)
    assert {key for chunk in chunks for infos in chunk.get_infos() for key in infos} == {"began", "seen", "nested"}


@HOSTS
def test_a_stateful_module_goes_on_from_where_its_episodes_are(there: str) -> None:
    options: Any = {"fragment_length": 7, "num_fragments": 4, "seed": 1, "model_config": {"use_lstm": True}}
    ours, inline = both(there, Rollout.batches, "CartPole-v1", {"num_envs": 3, "lanes": 2}, **options)
    assert "state_in" in ours[0]
    for mine, other in zip(ours, inline, strict=True):
        check(mine, other)
