"""Callables that make a `MultiAgentVectorEnv` each: a lane by itself, here and in worker processes."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fragment_equality import in_time

from rollflow import MultiAgentRollout
from rollflow.nodes import ArrayStep, MultiAgentVectorEnv, RandomModule
from rollflow.stream import EnvError

AGENTS = ("a", "b", "c")


class Counted(MultiAgentVectorEnv):
    """Agents see (number, env, place, step); environment i ends after each `3 + i`-th step, and infos tell the step."""

    def __init__(self, number: int, num_envs: int = 2) -> None:
        self.number, self.num_envs, self.possible_agents = number, num_envs, AGENTS
        self.observation_spaces = dict.fromkeys(AGENTS, gym.spaces.Box(0, 1000, (4,), np.int64))
        self.action_spaces = dict.fromkeys(AGENTS, gym.spaces.Discrete(4))
        self.is_closed = False

    def reset_arrays(self, seeds: Any) -> Any:
        self.steps = np.zeros(self.num_envs, np.int64)
        return [self._seen()], [{"a": {"seed": seeds[env]}} for env in range(self.num_envs)]

    def step_arrays(self, actions: Any) -> ArrayStep:
        self.steps += 1
        seen, envs = self._seen(), np.arange(self.num_envs)
        done = self.steps == envs + 3
        infos = [{"b": {"step": int(step)}} for step in self.steps]
        self.steps[done] = 0
        first = [self._seen()[done]] if done.any() else ()
        first_infos = [{"c": {"begins": True}} for _ in envs[done]]
        rewards = [actions[0] * np.array([1.0, 10.0, 100.0])]
        return ArrayStep([seen], rewards, done, np.zeros_like(done), first, infos, first_infos)

    def close(self) -> None:
        self.is_closed = True

    def _seen(self) -> Any:
        seen = np.zeros((self.num_envs, len(AGENTS), 4), np.int64)
        seen[..., 0] = self.number
        seen[..., 1], seen[..., 2], seen[..., 3] = np.arange(self.num_envs)[:, None], np.arange(3), self.steps[:, None]
        return seen


def told(makers: Any, **options: Any) -> list[Any]:
    """All that four fragments of each lane tell of the agents' episodes, lane by lane."""
    given: dict[str, Any] = {"module": RandomModule, "fragment_length": 4, "num_fragments": 4, "seed": 3}
    with MultiAgentRollout(makers, **given, **options) as rollout:
        fragments = in_time(list(rollout.fragments()))
    return [
        (
            *(fragment.lane, fragment.sequence, episode.id_, own.agent_id, own.get_observations().tolist()),
            *(own.get_actions().tolist(), own.get_rewards().tolist(), own.get_infos(), own.is_terminated),
        )
        for fragment in in_time(fragments)
        for episode in fragment.episodes()
        for own in episode.agent_episodes.values()
    ]


@pytest.mark.slow
def test_each_is_a_lane_by_itself_and_the_same_everywhere() -> None:
    makers = [partial(Counted, number) for number in range(2)]
    here = told(makers)
    assert {(row[0], row[4][0][0]) for row in here} == {(0, 0), (1, 1)}  # of lane 0 the first
    infos = {tuple(info) for row in here for info in row[7] if info}
    assert infos == {("seed",), ("step",), ("begins",)}
    assert told(makers, lanes=2) == here
    assert told(makers, lanes=2, where="processes", workers=1) == here


@pytest.mark.slow
def test_one_callable_is_one_lane() -> None:
    assert told(partial(Counted, 0), where="processes") == told(partial(Counted, 0)) == told(Counted(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"num_envs": 4, "lanes": 2}, {"num_envs": 2, "lanes": 1, "where": "processes"}],
)
def test_they_do_not_share_a_lane(options: Any) -> None:
    with pytest.raises(EnvError, match="a MultiAgentVectorEnv of 2 environments, which is a lane by itself; expected"):
        MultiAgentRollout(partial(Counted, 0), module=RandomModule, **options)


def test_there_are_as_many_environments_as_are_asked_for() -> None:
    assert told(partial(Counted, 0, 1), num_envs=2)[-1][0] == 1
    with pytest.raises(EnvError, match="num_envs is 2 and lanes is None, but 4 environments in 2 lanes were made; exp"):
        MultiAgentRollout(partial(Counted, 0), module=RandomModule, num_envs=2)


def test_those_that_are_made_here_are_closed_and_one_that_is_given_is_not() -> None:
    envs = [Counted(number) for number in range(3)]
    told([lambda env=env: env for env in envs[:2]])  # type: ignore[misc]
    told(envs[2])
    assert [env.is_closed for env in envs] == [True, True, False]
