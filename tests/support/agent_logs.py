"""Logs of numbered environments: the actions of agents, which fragments are held against."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numbered_agents import NESTED, NUMBERS, AgentsTold, NumberedAgents

from rollflow import MultiAgentEpisode

At = tuple[int, ...]  # (slot, agent, episode, env step, agent step)


class AgentStep(NamedTuple):
    """One step of an agent; by its place `at` in the environment's life."""

    at: At
    action: int
    reward: float
    next_at: At
    terminated: bool
    truncated: bool


class Hanging(NamedTuple):
    """An action that waits for an observation, and what the agent received since."""

    at: At
    action: int
    received: float


def episodes_of(log: Sequence[AgentsTold]) -> Iterator[list[AgentsTold]]:
    """The log, episode by episode: each begins with its reset; none where its process was killed before the first."""
    begins = [place for place, told in enumerate(log) if told.env_step == 0]
    for begin, end in itertools.pairwise([*begins, len(log)]):
        yield list(log[begin:end])


def steps_of(log: Sequence[AgentsTold]) -> tuple[list[AgentStep], list[Hanging]]:
    """Return the steps of an environment's agents, and those that are still open."""
    done, open_ = [], []
    for episode in episodes_of(log):
        newest: dict[str, At] = {}
        hanging: dict[str, Hanging] = {}
        for told in episode:
            over = told.terminateds.get("__all__", False), told.truncateds.get("__all__", False)
            for agent, action in told.actions.items():
                hanging[agent] = Hanging(newest[agent], action, 0.0)
            for agent, reward in told.rewards.items():
                if agent in hanging:
                    hanging[agent] = hanging[agent]._replace(received=hanging[agent].received + reward)
            for agent in list(hanging):
                flags = over[0] or told.terminateds.get(agent, False), over[1] or told.truncateds.get(agent, False)
                if agent in told.observations or any(flags):
                    at, action, received = hanging.pop(agent)
                    next_at = told.observations.get(agent, at)
                    done.append(AgentStep(at, action, received, next_at, *flags))
            newest |= told.observations
        open_ += hanging.values()
    return done, open_


def episodes_by_hand(
    env: NumberedAgents, cuts: Sequence[int], lookback: int, outputs: Callable[[str, At], dict[str, Any]], last: int
) -> list[MultiAgentEpisode]:
    """The chunks of an environment's episodes, built step by step, cut after so many vector steps, up to the `last`.

    outputs    what the agent's module gave for the observation with these numbers
    """
    chunks, vector_step = [], 0
    for told_of_episode in episodes_of(env.log):
        first = told_of_episode[0]
        episode = MultiAgentEpisode(
            f"{env.slot} {first.episode}", observation_space=env.observation_spaces, action_space=env.action_spaces
        )
        episode.add_env_reset(observations=_observations(env, first), infos=first.infos)
        newest = dict(first.observations)
        for told in told_of_episode[1 : 1 + last - vector_step]:
            ends: Any = {"terminateds": told.terminateds, "truncateds": told.truncateds}
            ends["extra_model_outputs"] = {agent: outputs(agent, newest[agent]) for agent in told.actions}
            episode.add_env_step(_observations(env, told), told.actions, told.rewards, told.infos, **ends)
            newest |= told.observations
            vector_step += 1
            if vector_step in cuts:
                chunks.append(episode)
                if not episode.is_done:
                    episode = episode.cut(lookback)
        if vector_step not in cuts:
            chunks.append(episode)
    return [chunk for chunk in chunks if len(chunk)]


def _observations(env: NumberedAgents, told: AgentsTold) -> dict[str, Any]:
    return {agent: observation_of(at, env.observation_spaces[agent]) for agent, at in told.observations.items()}


def observation_of(at: At, space: gym.Space[Any]) -> Any:
    """The observation with these numbers, in one of the two spaces."""
    assert space in (NESTED, NUMBERS)
    numbers = np.array(at, np.int64)
    return {"at": numbers, "agent": at[1]} if space == NESTED else numbers
