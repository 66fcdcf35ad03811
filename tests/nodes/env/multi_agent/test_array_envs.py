"""Environments that are vectorized already: their arrays are the vector step's, and nothing is done agent by agent."""

import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rollflow.nodes.env.lane_envs import ArrayEnvs
from rollflow.nodes.env.multi_agent_env import ArrayStep, MultiAgentVectorEnv
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.tree import map_tree

SEEKERS = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
HIDERS = gym.spaces.Dict({"at": gym.spaces.Box(0, 1000, (2,), np.int64), "seen": gym.spaces.Discrete(2)})


class HideAndSeek(MultiAgentVectorEnv):
    """Seekers see (env, place, step), hiders the like in a Dict; environment i ends after each `3 + i`-th step."""

    def __init__(self, num_envs: int, hiders: int = 2, seekers: int = 3) -> None:
        self.num_envs = num_envs
        self.sizes = hiders, seekers
        names = [f"hider {i}" for i in range(hiders)] + [f"seeker {i}" for i in range(seekers)]
        self.possible_agents = names
        self.observation_spaces = {name: HIDERS if name.startswith("hider") else SEEKERS for name in names}
        self.action_spaces = dict.fromkeys(names, gym.spaces.Discrete(5))
        self.steps = np.zeros(num_envs, np.int64)
        self.actions: list[Any] = []
        self.changed: dict[str, Any] = {}
        self.is_closed = False

    def reset_arrays(self, seeds: Any) -> Any:
        self.seeds = seeds
        self.steps[:] = 0
        return self._observations(np.arange(self.num_envs)), ()

    def step_arrays(self, actions: Any) -> ArrayStep:
        self.actions = actions
        self.steps += 1
        envs = np.arange(self.num_envs)
        observations = self._observations(envs)
        rewards = [envs[:, None] * 10.0 + np.arange(size) for size in self.sizes]
        done = self.steps == envs + 3
        self.steps[done] = 0
        first = self._observations(np.flatnonzero(done)) if done.any() else ()
        flags = done & (envs % 2 == 0), done & (envs % 2 == 1)
        return ArrayStep(observations, rewards, *flags, first)._replace(**self.changed)

    def close(self) -> None:
        self.is_closed = True

    def _observations(self, envs: Any) -> list[Any]:
        hiders, seekers = self.sizes
        shape = len(envs), hiders
        at = np.stack([np.broadcast_to(envs[:, None], shape), np.broadcast_to(np.arange(hiders), shape)], -1)
        seen = np.broadcast_to(self.steps[envs, None] % 2, shape)
        seekers_see = np.empty((len(envs), seekers, 3), np.float32)
        seekers_see[..., 0], seekers_see[..., 1] = envs[:, None], np.arange(seekers)
        seekers_see[..., 2] = self.steps[envs, None]
        return [{"at": at, "seen": seen}, seekers_see]


def everybody(num_envs: int) -> list[Any]:
    return [(None, np.arange(num_envs * 2)), (np.arange(num_envs * 3), np.arange(num_envs * 3))]


def test_a_vector_step_has_views_on_the_arrays() -> None:
    env = HideAndSeek(4)
    envs = ArrayEnvs(env)
    assert [part.agents for part in envs.parts] == [("hider 0", "hider 1"), ("seeker 0", "seeker 1", "seeker 2")]
    first, _ = envs.reset([1, 2, 3, 4])
    assert env.seeds == [1, 2, 3, 4]
    assert first[1].observations[:4].tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0], [1, 0, 0]]
    step = envs.step(everybody(4))
    assert env.actions[0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert env.actions[1].shape == (4, 3)
    hiders, seekers = step.parts
    assert hiders.observed.slots is None and seekers.observed.slots is None  # noqa: PT018
    assert hiders.observed.observations["at"][3].tolist() == [1, 1]
    assert seekers.observed.observations.base is not None
    assert seekers.rewards.tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
    assert seekers.rewards.dtype == np.float32
    assert (len(step.ended), [*step.first], [*step.infos], [*step.first_infos]) == (0, [], [], [])


def test_an_episode_that_ends_has_last_observations_and_the_next_ones_first() -> None:
    envs = ArrayEnvs(HideAndSeek(2))
    envs.reset()
    ended = [envs.step(everybody(2)) for _ in range(4)][2:]
    third, fourth = ended
    assert (third.ended.tolist(), fourth.ended.tolist()) == ([0], [1])
    assert (third.truncated.tolist(), fourth.truncated.tolist()) == ([False], [True])
    assert third.parts[1].terminateds.tolist() == [True] * 3 + [False] * 3
    assert fourth.parts[1].truncateds.tolist() == [False] * 3 + [True] * 3
    assert not third.parts[0].truncateds.any()
    assert third.parts[1].observed.observations[:3, 2].tolist() == [3, 3, 3]
    hiders, seekers = fourth.first
    assert (hiders.slots.tolist(), seekers.slots.tolist()) == ([2, 3], [3, 4, 5])  # type: ignore[union-attr]
    assert seekers.observations.tolist() == [[1, 0, 0], [1, 1, 0], [1, 2, 0]]
    assert hiders.observations["at"].tolist() == [[1, 0], [1, 1]]


def calls_in(function: Callable[[], object]) -> int:
    """Count the functions, Python's and C's, that a call calls."""
    count = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_what_a_vector_step_costs_does_not_grow_with_environments_and_agents() -> None:
    calls = []
    for num_envs, seekers in ((5, 3), (200, 30)):
        envs = ArrayEnvs(HideAndSeek(num_envs, seekers=seekers))
        envs.reset()
        actions = [(None, np.zeros(num_envs * size, np.int64)) for size in (2, seekers)]
        # One episode ends in each of the last three.
        calls.append([calls_in(lambda envs=envs, actions=actions: envs.step(actions)) for _ in range(5)])  # type: ignore[misc]
    assert calls[0] == calls[1]


def spoilt(trees: Any, part: int, change: Callable[[Any], Any]) -> list[Any]:
    return [map_tree(change, tree) if at == part else tree for at, tree in enumerate(trees)]


STEPS = {
    "too few parts": (lambda good: {"observations": good.observations[:1]}, "observations of 1 parts, expected 2"),
    "agents before environments": (
        lambda good: {"observations": spoilt(good.observations, 1, lambda leaf: leaf.swapaxes(0, 1))},
        r"environments from 5, agents 'seeker 0', .*: observations are float32\[3, 2, 3\], expected float32\[2, 3, 3\]",
    ),
    "a wrong dtype": (
        lambda good: {"observations": spoilt(good.observations, 0, lambda leaf: leaf + 0.5)},
        r"agents 'hider 0', 'hider 1': observations are float64\[2, 2, 2\], expected int64\[2, 2, 2\]",
    ),
    "a reward that is NaN": (
        lambda good: {"rewards": [good.rewards[0], np.array([[0, 0, 0], [0, np.nan, 0]])]},
        "environment 6, env step 0, agent 'seeker 1': its reward is nan, expected a finite float32",
    ),
    "rewards in a list": (
        lambda good: {"rewards": [good.rewards[0].tolist(), good.rewards[1]]},
        r"agents 'hider 0', 'hider 1': rewards are \[\[.*\]\], expected float32\[2, 2\]",
    ),
    "flags as numbers": (
        lambda good: {"terminateds": np.zeros(2)},
        r"environments from 5: terminateds are an array float64\[2\], expected bool\[2\]",
    ),
    "no first observations": (
        lambda good: {"truncateds": np.array([True, False])},
        "first observations of 0 parts, expected 2",
    ),
    "first observations of all": (
        lambda good: {"truncateds": np.array([True, False]), "first": good.observations},
        r"agents 'hider 0', 'hider 1': first observations are .*\[2, .*\], expected .*\[1, ",
    ),
    "no infos": (
        lambda good: {"infos": None},
        r"infos are None, expected a dict for each of 2 environments, or \(\) where there are none",
    ),
    "infos of one": (lambda good: {"infos": [{}]}, r"infos are \[\{\}\], expected a dict for each of 2 environments"),
    "infos as a number": (
        lambda good: {"infos": [{}, 5]},
        "environment 6, env step 1: its infos are 5, expected a dict by agents",
    ),
    "infos of a stranger": (
        lambda good: {"infos": [{"nobody": {}}, {}]},
        "environment 5, env step 1, agent 'nobody': infos has it, but it is not in 'possible",
    ),
    "an info as a number": (
        lambda good: {"infos": [{}, {"hider 1": 7}]},
        "environment 6, env step 1, agent 'hider 1': its info is 7, expected a dict",
    ),
    "a reward that is NaN in a second episode": (
        lambda good: {"rewards": [good.rewards[0], np.full((2, 3), np.nan)]},
        "environment 5, env step 1, agent 'seeker 0'",
        4,  # its episodes take 3 steps
    ),
    "first infos of one that has not ended": (
        lambda good: {"first_infos": [{}, {}]},
        r"first infos are .*, expected a dict for each of 1 environments",
        2,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_refused(name: str) -> None:
    change, match, *before = STEPS[name]
    env = HideAndSeek(2)
    env.reset_arrays(None)
    changed = change(env.step_arrays(None))
    envs = ArrayEnvs(env, first_env=5)
    envs.reset()
    for _ in range(*before or [0]):
        envs.step(everybody(2))
    env.changed = changed
    with pytest.raises(EnvError, match=match):
        envs.step(everybody(2))


def test_actions_that_are_not_everybodys_are_refused() -> None:
    envs = ArrayEnvs(HideAndSeek(2))
    envs.reset()
    told = "environment {}, env step 0, agent '{}': actions of slots .*, expected those that"
    with pytest.raises(EnvError, match=told.format(1, "hider 0")):
        envs.step([(np.array([0, 1, 3]), np.zeros(3)), (None, np.zeros(6))])
    with pytest.raises(EnvError, match=told.format(0, "seeker 1")):
        envs.step([(None, np.zeros(4)), (np.array([0, 2, 3, 4, 5]), np.zeros(5))])


class Loose(HideAndSeek):
    """Environment that gives its values in other forms."""

    def reset_arrays(self, seeds: Any) -> Any:
        return super().reset_arrays(seeds)[0] if seeds is None else super().reset_arrays(seeds)

    def step_arrays(self, actions: Any) -> Any:
        return tuple(super().step_arrays(actions))


def test_the_forms_of_what_is_given_are_checked() -> None:
    envs = ArrayEnvs(Loose(2), first_env=5)
    told = "environments from 5: reset_arrays gave a list, expected a tuple: observations per"
    with pytest.raises(EnvError, match=told):
        envs.reset()
    envs.reset([1, 2])
    with pytest.raises(EnvError, match="environments from 5: step_arrays gave a tuple, expected an ArrayStep"):
        envs.step(everybody(2))


def test_numbers_and_agents_are_checked() -> None:
    env = HideAndSeek(2)
    envs = ArrayEnvs(env)
    envs.close()
    assert env.is_closed
    env.num_envs = 0
    with pytest.raises(EnvError, match="'num_envs' is 0, expected a whole number, 1 or more"):
        ArrayEnvs(env)
    env.possible_agents = ()
    with pytest.raises(EnvError, match="'possible_agents' is missing or empty"):
        ArrayEnvs(env)
