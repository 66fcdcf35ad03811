"""Environments with several agents on other hosts: with ids, spaces and infos of every kind, and vectorized."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from fragment_equality import assert_alike, in_time
from remote_hosts import hosting, listening

from rollflow import MultiAgentRollout
from rollflow.nodes import ArrayStep, EnvHost, MultiAgentEnv, MultiAgentVectorEnv, RandomModule
from rollflow.stream import EnvError


class Rich(MultiAgentEnv):
    """Agents with ids of every kind, spaces of every kind, and infos."""

    possible_agents = ("first", 7, np.int64(-3))
    nested = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (4, 3, 2), np.uint8),
            "where": gym.spaces.Tuple((gym.spaces.Discrete(5, start=-2), gym.spaces.MultiBinary((2, 3)))),
        }
    )
    # A space that is sampled from has a generator: every agent has its own.
    observation_spaces: ClassVar[Any] = {
        "first": nested,
        7: gym.spaces.Box(-1, 1, (2,)),
        -3: gym.spaces.Box(-1, 1, (2,)),
    }
    action_spaces: ClassVar[Any] = {
        "first": gym.spaces.MultiDiscrete([3, 4]),
        7: gym.spaces.Box(-1, 1, (2,)),
        -3: gym.spaces.Box(-1, 1, (2,)),
    }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        for place, space in enumerate(self.observation_spaces.values()):
            space.seed(int(self.np_random.integers(2**31)) + place)
        return self._seen(), {7: {"begins": (1, "a")}}

    def step(self, actions: Any) -> Any:
        assert all(self.action_spaces[agent].contains(action) for agent, action in actions.items()), actions
        rewards = {agent: float(np.sum(action)) for agent, action in actions.items()}
        ends = {"__all__": bool(self.np_random.random() < 0.2)}
        return self._seen(), rewards, ends, {}, {"first": {"did": actions["first"].copy(), "at": {"x": [1, None]}}}

    def _seen(self) -> Any:
        return {agent: space.sample() for agent, space in self.observation_spaces.items()}


def test_ids_spaces_and_infos_of_every_kind_cross_the_wire() -> None:
    options: Any = {
        "fragment_length": 8,
        "num_fragments": 2,
        "seed": 1,
        "module": {"first": None, "others": None},
        "agent_to_module_mapping_fn": {"first": "first", 7: "others", -3: "others"},
    }
    envs = listening()
    with hosting(envs.addresses[0], Rich, num_envs=1), MultiAgentRollout(envs, **options) as rollout:
        ours = list(rollout.fragments())
    with MultiAgentRollout(Rich, **options) as inline:
        others = list(inline.fragments())
    for mine, other in zip(ours, others, strict=True):
        for module_id in ("first", "others"):
            chunks = zip(mine.agent_episodes(module_id), other.agent_episodes(module_id), strict=True)
            for chunk, like in chunks:
                np.testing.assert_equal(chunk.get_observations(), like.get_observations())
                np.testing.assert_equal(chunk.get_infos(), like.get_infos())
                np.testing.assert_array_equal(chunk.get_rewards(), like.get_rewards())


class Vectorized(MultiAgentVectorEnv):
    """Two environments that count; the second one's episodes are shorter."""

    num_envs, possible_agents = 2, ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, gym.spaces.Box(0, 100, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, gym.spaces.Discrete(3))

    def reset_arrays(self, seeds: Any) -> Any:
        self.at = np.array([len(str(seed)) for seed in seeds])
        self.at[:] = 0
        return self._seen(self.at), ()

    def step_arrays(self, actions: Any) -> ArrayStep:
        self.at += 1
        seen, ended = self._seen(self.at), self.at == [7, 4]
        self.at[ended] = 0
        first = self._seen(self.at[ended]) if ended.any() else ()
        return ArrayStep(seen, [actions[0].astype(np.float32)], ended & [True, False], ended & [False, True], first)

    def _seen(self, at: Any) -> Any:
        return [np.repeat(at.astype(np.float32), 2).reshape(-1, 2, 1)]


def test_vector_environments_of_several_agents_are_hosted() -> None:
    options: Any = {"fragment_length": 10, "num_fragments": 2, "seed": 1, "module": RandomModule}
    with MultiAgentRollout([Vectorized] * 2, **options) as inline:
        expected = in_time(list(inline.fragments()))
    envs = listening()
    with hosting(envs.addresses[0], [Vectorized] * 2), MultiAgentRollout(envs, **options) as rollout:
        assert_alike(in_time(list(rollout.fragments())), expected)
    envs = listening()
    with hosting(envs.addresses[0], Vectorized()), MultiAgentRollout(envs, **options) as rollout:
        assert_alike(in_time(list(rollout.fragments())), expected[:2])
    with pytest.raises(EnvError, match="num_envs is 3 and lanes is None, but 2 environments in 1 lanes were made"):
        EnvHost(Vectorized(), num_envs=3)
    with pytest.raises(EnvError, match=r"^num_envs is -1, expected at least 1$"):
        EnvHost(Vectorized, num_envs=-1)


def test_what_is_hosted_has_several_agents_where_the_environment_says_so() -> None:
    made_envs = []

    def counted() -> Any:
        made_envs.append(Rich())
        return made_envs[-1]

    with EnvHost(counted, num_envs=3, lanes=2) as host:
        assert (host.role, len(made_envs)) == ("agents", 3)
    with EnvHost("CartPole-v1") as host:
        assert host.role == "env"
    with EnvHost(lambda: gym.make("CartPole-v1"), num_envs=2) as host:
        assert host.role == "env"
