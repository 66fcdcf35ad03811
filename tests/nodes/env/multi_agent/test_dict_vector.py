"""Dict environments side by side: what they told is what the vector steps say, no more and no less."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numbered_agents import NUM_ACTIONS, AgentsTold, NumberedAgents, numbered_agents, rows_of
from numpy.typing import NDArray
from property_examples import examples, strategies
from serial_module import at_of

from rollflow.nodes.env.lane_envs import MultiAgentEnvs
from rollflow.stream.multi_agent.agent_part import VectorStep


def chosen_for(envs: MultiAgentEnvs, acting: list[NDArray[np.int64]], rng: np.random.Generator) -> list[Any]:
    """An action for each slot that acts; all of a part's slots at times as None."""
    actions: list[Any] = []
    for part, slots in zip(envs.parts, acting, strict=True):
        is_all = len(slots) == len(part.agents) * envs.num_envs
        actions.append((None if is_all and rng.integers(2) else slots, rng.integers(NUM_ACTIONS, size=len(slots))))
    return actions


def by_env(observed: Any, parts: Any) -> dict[int, dict[str, tuple[int, ...]]]:
    """Environment -> agent -> the five numbers of its observation."""
    told: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for part, of_part in zip(parts, observed, strict=True):
        rows = rows_of(of_part)
        assert [slot for slot, _ in rows] == sorted({slot for slot, _ in rows})
        for slot, row in rows:
            env, place = divmod(slot, len(part.agents))
            assert at_of(row).dtype == np.int64
            told[env][part.agents[place]] = tuple(at_of(row).tolist())
            assert not isinstance(row, dict) or row["agent"] == row["at"][1]
    return told


def flags_of(step: VectorStep, envs: MultiAgentEnvs, env: int) -> dict[str, tuple[bool, bool, float]]:
    """Agent -> terminated, truncated, reward."""
    told = {}
    for part, of_part in zip(envs.parts, step.parts, strict=True):
        for place, agent in enumerate(part.agents):
            slot = env * len(part.agents) + place
            of_all = of_part.terminateds, of_part.truncateds, of_part.rewards
            told[agent] = tuple(each[slot].item() for each in of_all)
    return told


def acting_in(own: list[NumberedAgents], envs: MultiAgentEnvs) -> list[NDArray[np.int64]]:
    return [
        np.array(
            [
                env * len(part.agents) + place
                for env, each in enumerate(own)
                for place, agent in enumerate(part.agents)
                if each.states[agent] == 1
            ],
            np.int64,
        )
        for part in envs.parts
    ]


class Reader:
    """Reads an environment's own log, and works out what a vector step is to say of it."""

    def __init__(self, env: NumberedAgents) -> None:
        self.env = env
        self.read = 0

    def begin(self) -> dict[str, tuple[int, ...]]:
        """The observations that the next reset gave."""
        told = self._next()
        assert told.env_step == 0
        self.come, self.ended = set(told.observations), set[str]()
        return told.observations

    def step(self) -> tuple[AgentsTold, dict[str, tuple[bool, bool, float]], bool]:
        """The next step, agent -> terminated, truncated, reward, and whether the episode is over."""
        told = self._next()
        self.come |= set(told.observations)
        live = self.come - self.ended
        flags = {}
        for agent in self.env.possible_agents:
            own = told.terminateds.get(agent, False), told.truncateds.get(agent, False)
            ends = [
                agent in live and (flag or told_of["__all__"])
                for flag, told_of in zip(own, (told.terminateds, told.truncateds), strict=True)
            ]
            if any((*own, *ends)):
                self.ended.add(agent)
            flags[agent] = (*ends, told.rewards.get(agent, 0.0))
        is_over = told.terminateds["__all__"] or told.truncateds["__all__"] or not self.come - self.ended
        return told, flags, is_over

    def _next(self) -> AgentsTold:
        self.read += 1
        return self.env.log[self.read - 1]


def given_to(env: int, actions: list[Any], envs: MultiAgentEnvs) -> dict[str, int]:
    """Agent -> action, for one environment."""
    told = {}
    for part, (slots, values) in zip(envs.parts, actions, strict=True):
        chosen = range(len(values)) if slots is None else slots.tolist()
        for slot, action in zip(chosen, values.tolist(), strict=True):
            if slot // len(part.agents) == env:
                told[part.agents[slot % len(part.agents)]] = action
    return told


@settings(max_examples=examples(60), deadline=None)
@given(**strategies(seed=(0, 2**16), num_envs=(1, 3), agents=(1, 5), nested=(0, 5), at_once=bool))
def test_vector_steps_say_what_the_environments_said(
    seed: int, num_envs: int, agents: int, nested: int, at_once: bool
) -> None:
    own, makers = numbered_agents(num_envs, agents=agents, nested=nested, at_once=at_once)
    envs, rng, readers = MultiAgentEnvs(makers), np.random.default_rng(seed), [Reader(env) for env in own]
    first, _ = envs.reset([seed + env for env in range(num_envs)])
    assert by_env(first, envs.parts) == {env: reader.begin() for env, reader in enumerate(readers)}
    for _ in range(30):
        actions = chosen_for(envs, acting_in(own, envs), rng)
        step = envs.step(actions)
        seen = by_env([part.observed for part in step.parts], envs.parts)
        seen_first = by_env(step.first, envs.parts) if len(step.ended) else {}
        over = []
        for env, reader in enumerate(readers):
            told, flags, is_over = reader.step()
            assert given_to(env, actions, envs) == told.actions
            assert seen[env] == told.observations
            assert flags_of(step, envs, env) == flags
            assert (step.infos[env] if step.infos else {}) == told.infos
            if is_over:
                over.append(env)
                assert seen_first[env] == reader.begin()
            assert reader.read == len(reader.env.log)
        assert step.ended.tolist() == over == sorted(seen_first)
    envs.close()
    assert all(each.closed for each in own)


def test_an_error_in_an_environment_says_which() -> None:
    own, makers = numbered_agents(3)
    own[1].step = lambda actions: 1 / 0  # type: ignore[method-assign,assignment]
    envs = MultiAgentEnvs(makers, first_env=10)
    envs.reset([1, 2, 3])
    with pytest.raises(ZeroDivisionError) as caught:
        envs.step(chosen_for(envs, acting_in(own, envs), np.random.default_rng(0)))
    assert caught.value.__notes__ == ["environment 11, env step 0"]


def test_resets_within_a_step_are_told_of() -> None:
    own, makers = numbered_agents(2, nested=0)
    envs = MultiAgentEnvs(makers)
    told: list[list[int]] = []
    assert envs.tell_resets(lambda: told.append([each.episode for each in own]))
    envs.reset([0, 1])
    assert told == []
    while not told:
        before = [each.episode for each in own]
        envs.step(chosen_for(envs, acting_in(own, envs), np.random.default_rng(0)))
    begun, ended = told
    assert begun == before
    assert ended == [each.episode for each in own] != before
