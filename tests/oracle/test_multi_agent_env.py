"""Ray's own multi-agent environments: vector steps say what they say where they are stepped by hand."""

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from ray.rllib.env.multi_agent_env import MultiAgentEnv as RayEnv
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from ray.rllib.examples.envs.classes.multi_agent.rock_paper_scissors import RockPaperScissors
from ray.rllib.examples.envs.classes.multi_agent.tic_tac_toe import TicTacToe

from rollflow.nodes.env.lane_envs import MultiAgentEnvs

MAKERS = {
    "cart pole": lambda: MultiAgentCartPole({"num_agents": 3}),
    "rock, paper, scissors": lambda: RockPaperScissors({}),
    "tic tac toe": TicTacToe,
}


def action_of(agent: Any, turn: int) -> int:
    """Return one action, however the environment is stepped; a field of tic tac toe is free at first."""
    return (turn + len(str(agent))) % 2


def by_hand(env: RayEnv, turns: int) -> tuple[dict[Any, list[Any]], dict[Any, float]]:
    """Agent -> observations, and rewards in all, of the first episode."""
    seen: dict[Any, list[Any]] = defaultdict(list)
    earned: dict[Any, float] = defaultdict(float)
    observations, _ = env.reset(seed=4)
    ended: set[Any] = set()
    for turn in range(turns):
        for agent, observation in observations.items():
            seen[agent].append(np.array(observation))
        actions = {agent: action_of(agent, turn) for agent in observations if agent not in ended}
        if not actions:
            break
        observations, rewards, terminateds, truncateds, _ = env.step(actions)
        for agent, reward in rewards.items():
            earned[agent] += reward
        ended |= {agent for flags in (terminateds, truncateds) for agent, is_set in flags.items() if is_set}
        if "__all__" in ended:
            ended |= set(observations)
    return seen, earned


def in_vector_steps(make: Any, turns: int) -> tuple[dict[Any, list[Any]], dict[Any, float]]:
    """Play the same episode in vector steps."""
    envs = MultiAgentEnvs([make])
    seen: dict[Any, list[Any]] = defaultdict(list)
    earned: dict[Any, float] = defaultdict(float)
    observed, _ = envs.reset([4])
    acting = [_take(part, of_part, seen) for part, of_part in zip(envs.parts, observed, strict=True)]
    for turn in range(turns):
        given = [
            (slots, np.array([action_of(part.agents[slot], turn) for slot in slots], np.int64))
            for part, slots in zip(envs.parts, acting, strict=True)
        ]
        step = envs.step(given)
        acting = []
        for part, told in zip(envs.parts, step.parts, strict=True):
            slots = _take(part, told.observed, seen)
            acting.append(slots[~(told.terminateds | told.truncateds)[slots]])
            for agent, reward in zip(part.agents, told.rewards.tolist(), strict=True):
                earned[agent] += reward
        if len(step.ended):
            break
    return seen, earned


def _take(part: Any, observed: Any, seen: dict[Any, list[Any]]) -> Any:
    slots = np.arange(len(part.agents)) if observed.slots is None else observed.slots
    for slot, row in zip(slots.tolist(), observed.observations, strict=True):
        seen[part.agents[slot]].append(row)
    return slots


@pytest.mark.parametrize("name", MAKERS)
def test_vector_steps_say_what_rays_environment_says(name: str) -> None:
    make = MAKERS[name]
    random.seed(4)  # Ray draws who begins from it
    seen, earned = in_vector_steps(make, 100)
    random.seed(4)
    expected, as_expected = by_hand(make(), 100)
    assert set(seen) == set(expected)
    for agent, observations in expected.items():
        np.testing.assert_allclose(np.array(seen[agent]), np.array(observations), rtol=1e-6)
        assert earned[agent] == pytest.approx(as_expected[agent])
