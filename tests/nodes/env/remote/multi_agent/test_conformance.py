"""Environments with several agents on other hosts: with ids, spaces and infos of every kind."""

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from remote_hosts import hosting, listening

from rollflow import MultiAgentRollout
from rollflow.nodes import EnvHost, MultiAgentEnv


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
    pair = gym.spaces.Box(-1, 1, (2,))
    observation_spaces: ClassVar[Any] = {"first": nested, 7: pair, -3: pair}
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
    options: Any = {"fragment_length": 8, "num_fragments": 2, "seed": 1, "module": {"first": None, "others": None}}
    options["agent_to_module_mapping_fn"] = {"first": "first", 7: "others", -3: "others"}
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
