"""Dict environments that break the conventions are refused with the environment, its step and the agent."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from mpe2 import simple_spread_v3

from rollflow import MultiAgentRollout
from rollflow.nodes import RandomModule
from rollflow.nodes.env.lane_envs import AgentLaneMaker, MultiAgentEnvs
from rollflow.nodes.env.multi_agent_env import MultiAgentEnv
from rollflow.nodes.env.observation_check import Deviations
from rollflow.stream.data.errors import EnvError

SPACE = gym.spaces.Box(-1, 1, (2,), np.float32)
ACTIONS = gym.spaces.Discrete(3)
SEEN = np.zeros(2, np.float32)
NEVER: dict[Any, bool] = {"__all__": False}


class Scripted(MultiAgentEnv):
    """Agents "a" and "b"; the reset gives `first`, and each step the next of `steps`: five dicts."""

    def __init__(self, *steps: Any, first: Any = ({"a": SEEN}, {}), **attributes: Any) -> None:
        self.possible_agents = ["a", "b"]
        self.observation_spaces = dict.fromkeys(self.possible_agents, SPACE)
        self.action_spaces = dict.fromkeys(self.possible_agents, ACTIONS)
        self.first, self.steps = first, list(steps)
        self.seeds: list[int | None] = []
        self.is_closed = False
        vars(self).update(attributes)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return self.first

    def step(self, actions: Any) -> Any:
        return self.steps.pop(0)

    def close(self) -> None:
        self.is_closed = True


GOOD = ({"a": SEEN}, {"a": 0.5}, NEVER, NEVER, {})


def step_all(*steps: Any) -> Any:
    """Environment 7 goes on well; what environment 8 tells is given. Returns the last vector step."""
    envs = MultiAgentEnvs([lambda: Scripted(*[GOOD] * len(steps)), lambda: Scripted(*steps)], first_env=7)
    envs.reset()
    acting: Any = np.array([0, 2])
    for _ in steps:
        step = envs.step([(acting, np.zeros(len(acting), np.int64))])
        [part] = step.parts
        seen = part.observed.slots
        acting = seen[~(part.terminateds | part.truncateds)[seen]]
    return step


def told(observations: Any = None, **others: Any) -> Any:
    """A step in which "a" goes on, but for what is given."""
    given = {"rewards": {}, "terminateds": NEVER, "truncateds": NEVER, "infos": {}} | others
    return {"a": SEEN} if observations is None else observations, *given.values()


STEPS = {
    "an observation of one that has ended": (
        [told({"a": SEEN, "b": SEEN}, terminateds={"b": True}), told({"a": SEEN, "b": SEEN})],
        r"environment 8, env step 1, agent 'b': it has an observation, but has ended before",
    ),
    "a reward of one that has ended": (
        [told(truncateds={"b": True}), told(), told(rewards={"b": 1.0})],
        r"environment 8, env step 2, agent 'b': it has a reward, but has ended before",
    ),
    "an observation of a stranger": (
        [told({"a": SEEN, "c": SEEN})],
        r"environment 8, env step 0, agent 'c': observations has it, but it is not in 'possible_agents', \['a', 'b'\]",
    ),
    "a reward of a stranger": ([told(rewards={"c": 1.0})], "agent 'c': rewards has it"),
    "a stranger that ends": ([told(terminateds={"c": True})], "agent 'c': terminateds has it"),
    "infos of a stranger": ([told(infos={"c": {"x": 1}})], "agent 'c': infos has it"),
    "an info that is no dict": (
        [told(infos={"__common__": 1, "b": 3})],
        "environment 8, env step 0, agent 'b': its info is 3, expected a dict",
    ),
    "a wrong shape": (
        [told({"a": np.zeros(3, np.float32)})],
        r"environment 8, env step 0, agent 'a': an observation that is not in its space: .* got float32\[3\], "
        r"expected float32\[2\]",
    ),
    "a wrong dtype": ([told({"a": np.zeros(2, complex)})], r"agent 'a': .*got complex128\[2\], expected float32\[2\]"),
    "a reward that is text": ([told(rewards={"a": "1"})], "agent 'a': its reward is '1', expected one number"),
    "a reward that is NaN": ([told(rewards={"b": np.nan})], "agent 'b': its reward is nan, expected a finite float32"),
    "a reward beyond float32": ([told(rewards={"a": 1e39})], "agent 'a': its reward is 1e.39, expected a finite"),
    "nobody to act": (
        [told(), told({})],
        "environment 8, env step 1: its episode goes on, but no agent has an observation to act on",
    ),
    "a truncated one without a last observation": (
        [told({"b": SEEN}, truncateds={"a": True})],
        "environment 8, env step 0, agent 'a': it is truncated after an action without an observation, expected its",
    ),
    "four dicts": ([GOOD[:4]], "environment 8, env step 0: it gave .*, expected a tuple of observations, rewards, "),
    "a list of observations": ([told([SEEN, SEEN])], r"its observations are \[.*\], expected a dict by agents"),
    "no infos": ([(*GOOD[:4], None)], "its infos are None, expected a dict by agents"),
    "several flags for one": (
        [told(truncateds={"a": np.array([True, False])})],
        "environment 8, env step 0, agent 'a': truncateds says .*, expected a bool",
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_refused(name: str) -> None:
    steps, match = STEPS[name]
    with pytest.raises(EnvError, match=match):
        step_all(*steps)


FIRST = {
    "nobody to act": (({}, {}), "environment 8, reset: its episode goes on, but no agent has an observation to act on"),
    "a stranger": (({"c": SEEN}, {}), "environment 8, reset, agent 'c': observations has it, but it is not in"),
    "infos of a stranger": (({"a": SEEN}, {"c": {"x": 1}}), "environment 8, reset, agent 'c': infos has it"),
    "observations alone": (({"a": SEEN}), "environment 8, reset: it gave .*, expected a tuple of observations, infos"),
    "a wrong shape": (({"a": np.zeros(1)}, {}), r"environment 8, reset, agent 'a': .*got float64\[1\]"),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_reset_that_is_refused(name: str) -> None:
    first, match = FIRST[name]
    envs = MultiAgentEnvs([Scripted, lambda: Scripted(first=first)], first_env=7)
    with pytest.raises(EnvError, match=match):
        envs.reset()


def test_a_reset_after_an_end_has_no_seed_and_is_checked_as_well() -> None:
    ending = Scripted(told(terminateds={"__all__": True}))
    envs = MultiAgentEnvs([lambda: ending])
    envs.reset([11])
    ending.first = ({}, {})
    with pytest.raises(EnvError, match="environment 0, reset: its episode goes on"):
        envs.step([(np.array([0]), np.zeros(1, np.int64))])
    assert ending.seeds == [11, None]


@pytest.mark.parametrize(
    ("slots", "who"),
    [
        (None, "environment 0, env step 0, agent 'b'"),
        ([], "environment 0, env step 0, agent 'a'"),
        ([1], "environment 0, env step 0, agent 'a'"),
        ([0, 5], r"agents \['a', 'b'\]"),
        ([0, 0], r"agents \['a', 'b'\]"),
    ],
)
def test_actions_of_others_than_those_that_must_act_are_refused(slots: list[int] | None, who: str) -> None:
    envs = MultiAgentEnvs([lambda: Scripted(GOOD)])
    envs.reset()
    given = None if slots is None else np.array(slots, np.int64)
    with pytest.raises(EnvError, match=rf"{who}: actions of slots .*, expected those that .*, \[0\]"):
        envs.step([(given, np.zeros(2 if given is None else len(given), np.int64))])


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(EnvError, match="step before the first reset"):
        MultiAgentEnvs([Scripted]).step([(np.zeros(0, np.int64), np.zeros(0))])


# Environments that can't be stepped


MADE = {
    "no agents": (lambda: Scripted(possible_agents=[]), "'possible_agents' is missing .* of one agent is for Rollout"),
    "an agent named all": (lambda: Scripted(possible_agents=["a", "__all__"]), "none named '__all__'"),
    "a space missing": (
        lambda: Scripted(observation_spaces={"a": SPACE}),
        "environment 4: agent 'b': its observation space is None, expected a gymnasium.Space in 'observation_spaces'",
    ),
    "a space without columns": (
        lambda: Scripted(action_spaces={"a": ACTIONS, "b": gym.spaces.Text(3)}),
        "environment 4: agent 'b': the action space Text.* has no columns; expected Box, Discrete",
    ),
    "no dict of spaces": (
        lambda: Scripted(observation_spaces=None),
        r"environment 4: agent 'a': 'observation_spaces' is None, expected a dict: agent -> gymnasium.Space, or "
        r"'get_observation_space' to give the agent's, which raises KeyError\('a'\)",
    ),
    "nothing": (lambda: None, "the callable for environment 4 gave None, expected a MultiAgentEnv"),
    "no environment": (lambda: 5, "environment 4: 5 has no method 'reset', expected a MultiAgentEnv"),
}


@pytest.mark.parametrize("name", MADE)
def test_an_environment_that_is_refused(name: str) -> None:
    make, match = MADE[name]
    with pytest.raises(EnvError, match=match):
        MultiAgentEnvs([make], first_env=4)


def test_environments_that_differ_are_refused_and_closed() -> None:
    first = Scripted()
    for other, match in (
        (Scripted(possible_agents=["b", "a"]), r"environment 1: its agents are \['b', 'a'\], expected those of env"),
        (
            Scripted(action_spaces=dict.fromkeys("ab", gym.spaces.Discrete(4))),
            r"environment 1: agent 'a': its action space is Discrete\(4\), expected that of environment 0, Discrete\(3",
        ),
        (first, "the callable for environment 1 gave one that another has already given"),
    ):
        first.is_closed = False
        with pytest.raises(EnvError, match=match):
            MultiAgentEnvs([lambda: first, lambda other=other: other])  # type: ignore[misc]
        assert first.is_closed
    with pytest.raises(EnvError, match="there are no makers"):
        MultiAgentEnvs([])


@pytest.mark.parametrize("lanes", [1, 2])
def test_one_environment_that_is_given_twice_is_refused(lanes: int) -> None:
    zoo = simple_spread_v3.parallel_env()
    for env in (Scripted(), zoo):
        match = "the callable for environment 1 gave one" if lanes == 1 else "callables 0 and 1 were given the same env"
        with pytest.raises(EnvError, match=match):
            MultiAgentRollout(lambda env=env: env, module=RandomModule, num_envs=2, lanes=lanes)
    zoo.close()


def test_a_callable_that_raises_is_named() -> None:
    told = "the callable for environment 3, expected to make a MultiAgentEnv, raised ZeroDivisionError: division by"
    for first, makers in ((2, [Scripted, lambda: 1 / 0]), (3, [lambda: 1 / 0])):
        with pytest.raises(EnvError, match=told) as caught:
            AgentLaneMaker(makers, first).lane_env(Deviations())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


# What is not refused


def test_an_end_flag_may_be_said_again_and_of_agents_that_never_came() -> None:
    again = told({"a": SEEN}, terminateds={"b": True, "__all__": False})
    [part] = step_all(told({"a": SEEN, "b": SEEN}), again, again).parts
    assert not part.terminateds.any()
    [part] = step_all(told({"a": SEEN}, terminateds={"b": True})).parts
    assert not part.terminateds.any()
    [part] = step_all(told({"a": SEEN, "b": SEEN}, terminateds={"b": True})).parts
    assert part.terminateds.tolist() == [False, False, False, True]


def test_infos_of_nobody_are_left_out() -> None:
    assert step_all(told(infos={"__common__": {"x": 1}, "a": {"y": 2}})).infos == [{}, {"a": {"y": 2}}]


def test_one_that_terminates_needs_no_last_observation_and_the_last_one_ends_the_episode() -> None:
    step = step_all(told({"b": SEEN}, terminateds={"a": True}))
    assert step.parts[0].terminateds.tolist() == [False, False, True, False]
    assert step.parts[0].observed.slots.tolist() == [0, 3]
    assert step.ended.tolist() == []
    step = step_all(told({"b": SEEN}, terminateds={"a": True}), told({}, terminateds={"b": True}))
    assert (step.ended.tolist(), step.first[0].slots.tolist()) == ([1], [2])


def test_numbers_of_other_kinds_are_rewards_and_lists_are_observations() -> None:
    step = step_all(told({"a": [0, 1]}, rewards={"a": np.int8(3), "b": True}))
    assert step.parts[0].rewards.tolist() == [0.5, 0, 3, 1]
    assert step.parts[0].observed.observations.tolist() == [[0, 0], [0, 1]]


def test_an_environment_that_looks_like_one_will_do() -> None:
    class Own:
        agents = ("a", "b")

        def get_observation_space(self, agent: str) -> Any:
            return SPACE

        def get_action_space(self, agent: str) -> Any:
            return ACTIONS

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return {"b": SEEN}, {}

        def step(self, actions: Any) -> Any:
            assert actions == {"b": 2}
            return told({"a": SEEN})

    envs = MultiAgentEnvs([Own])
    assert envs.possible_agents == ("a", "b")
    [observed], _ = envs.reset([3])
    assert observed.slots is not None
    assert observed.slots.tolist() == [1]
    step = envs.step([(np.array([1]), np.array([2]))])
    assert step.parts[0].observed.slots.tolist() == [0]  # type: ignore[union-attr]
    envs.close()


def test_a_reset_may_write_over_the_infos_of_the_last_step() -> None:
    info = {"left": 1}

    class Reusing(Scripted):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            info["left"] = 2
            return {"a": SEEN}, {"a": info}

    envs = MultiAgentEnvs([lambda: Reusing(told(terminateds={"__all__": True}, infos={"a": info}))])
    envs.reset()
    info["left"] = 1
    step = envs.step([(np.array([0]), np.zeros(1, np.int64))])
    assert ([*step.infos], [*step.first_infos]) == ([{"a": {"left": 1}}], [{"a": {"left": 2}}])
