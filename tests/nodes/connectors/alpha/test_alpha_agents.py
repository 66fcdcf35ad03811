"""Alpha pipelines with several agents: those of one environment that are mapped to one policy come as one list."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rollflow import MultiAgentRollout
from rollflow.nodes import DefaultModule, MultiAgentEnv
from rollflow.nodes.connectors.alpha import (
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorDataType,
    AgentConnectorPipeline,
    ConnectorContext,
    ConnectorPolicy,
    connected_inference,
    default_action_connectors,
    default_agent_connectors,
    register_lambda_action_connector,
)

SPACE, CHOICES = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32), gym.spaces.Discrete(2)


class Three(MultiAgentEnv):
    """Agents 1, 2 and 3, each of which sees its number plus ten times the step's; 4 steps an episode."""

    def __init__(self) -> None:
        self.agents = self.possible_agents = ["1", "2", "3"]
        self.observation_spaces = dict.fromkeys(self.agents, SPACE)
        self.action_spaces = dict.fromkeys(self.agents, CHOICES)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.t = 0
        return self._seen(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        self.t += 1
        rewards = {agent: 5.0 * actions[agent] for agent in self.agents}
        return self._seen(), rewards, {"__all__": self.t == 4}, {"__all__": False}, {}

    def _seen(self) -> Any:
        return {agent: np.array([float(agent) + 10 * self.t], np.float32) for agent in self.agents}


class SumOfAgents(AgentConnector):
    """Gives every agent the sum of what all agents of its policy see."""

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        total = np.sum([each.data["new_obs"] for each in acd_list], axis=0, dtype=np.float32)
        for each in acd_list:
            each.data["new_obs"] = total
        return acd_list


Ones = register_lambda_action_connector(
    "OnesOfAgents", lambda actions, states, fetches: (0 * actions + 1, states, fetches)
)


def test_agents_of_one_module_in_one_environment_are_one_list() -> None:
    with MultiAgentRollout(
        Three,
        num_envs=2,
        fragment_length=6,
        seed=0,
        module={"odd": None, "even": None},
        agent_to_module_mapping_fn=lambda agent_id, episode: "even" if agent_id == "2" else "odd",
        env_to_module_connector=lambda env: AgentConnectorPipeline(None, [SumOfAgents()]),
        module_to_env_connector=lambda env: ActionConnectorPipeline(None, [Ones()]),
    ) as rollout:
        fragment = next(iter(rollout.fragments()))
    episodes = list(fragment.episodes())
    assert len(episodes) == 4
    for episode in episodes:
        for agent_id, chunk in episode.agent_episodes.items():
            steps = np.arange(chunk.t_started, chunk.t + 1)
            expected = 2 + 10 * steps if agent_id == "2" else 4 + 20 * steps
            np.testing.assert_array_equal(chunk.get_observations()[:, 0], expected)
            np.testing.assert_array_equal(chunk.get_rewards(), np.full(len(chunk), 5.0))
    assert {int(a) for e in episodes for c in e.agent_episodes.values() for a in c.get_actions()} == {0, 1}


def test_a_policy_acts_for_several_agents_as_one_list() -> None:
    torch.manual_seed(0)
    module = DefaultModule(SPACE, CHOICES)
    ctx = ConnectorContext.from_policy(module)
    agents = default_agent_connectors(ctx)
    agents.prepend(SumOfAgents(ctx))
    policy = ConnectorPolicy(module, agents, default_action_connectors(ctx))
    data = [AgentConnectorDataType("e", f"{i}", {"new_obs": np.array([float(i)], np.float32)}) for i in (1, 2, 3)]
    outputs = connected_inference(policy, data, explore=False)
    with torch.inference_mode():
        logits = module.forward_inference({"obs": torch.tensor([[6.0]])})["action_dist_inputs"][0].numpy()
    assert len(outputs) == 3
    for action, states, fetches in outputs:
        assert (action, states) == (int(logits.argmax()), [])
        np.testing.assert_array_equal(fetches["action_dist_inputs"], logits)
