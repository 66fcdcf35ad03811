"""PettingZoo's environments: agents get what they get where the game is stepped by hand, step by step."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from mpe2 import simple_spread_v3, simple_tag_v3
from numbered_agents import rows_of
from pettingzoo import AECEnv
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.classic.connect_four import connect_four
from pettingzoo.classic.rps import rps
from pettingzoo.classic.tictactoe import tictactoe

from rollflow import Forward, MultiAgentRollout
from rollflow.nodes.env.lane_envs import MultiAgentEnvs
from rollflow.nodes.env.multi_agent_env import adapted
from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.tree import leaves_of, map_tree

Life = list[tuple[Any, float, bool, bool]]  # an agent's observations, its rewards before each, its end flags


class Player:
    """Chooses actions by a generator of its own: of the legal ones where a mask tells them."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, observation: Any, space: spaces.Discrete) -> int:
        if isinstance(observation, dict):
            return int(self.rng.choice(np.flatnonzero(observation["action_mask"])))
        return int(self.rng.integers(int(space.n)))


def aec_by_hand(env: Any, seed: int, player: Player) -> dict[str, Life]:
    lives: dict[str, Life] = defaultdict(list)
    env.reset(seed=seed)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        lives[agent].append((map_tree(np.array, observation), reward, terminated, truncated))
        env.step(None if terminated or truncated else player(observation, env.action_space(agent)))
    return lives


def parallel_by_hand(env: Any, seed: int, player: Player) -> dict[str, Life]:
    lives: dict[str, Life] = defaultdict(list)
    observations, _ = env.reset(seed=seed)
    for agent, observation in observations.items():
        lives[agent].append((map_tree(np.array, observation), 0.0, False, False))
    while env.agents:
        actions = {agent: player(observations[agent], env.action_space(agent)) for agent in env.agents}
        observations, rewards, terminateds, truncateds, _ = env.step(actions)
        for agent, observation in observations.items():
            ends = terminateds[agent], truncateds[agent]
            lives[agent].append((map_tree(np.array, observation), rewards[agent], *ends))
    return lives


def in_vector_steps(make: Callable[[], Any], seed: int, player: Player) -> dict[str, Life]:
    """The first episode, as vector steps have it."""
    envs = MultiAgentEnvs([make])
    lives: dict[str, Life] = defaultdict(list)
    first, _ = envs.reset([seed])
    for part, observed in zip(envs.parts, first, strict=True):
        for place, row in rows_of(observed):
            lives[part.agents[place]].append((row, 0.0, False, False))
    acting = first
    earned: dict[str, float] = defaultdict(float)
    while True:
        step = envs.step(chosen(envs, acting, player))
        for part, told in zip(envs.parts, step.parts, strict=True):
            for place, agent in enumerate(part.agents):
                earned[agent] += float(told.rewards[place])
            for place, row in rows_of(told.observed):
                agent = part.agents[place]
                flags = bool(told.terminateds[place]), bool(told.truncateds[place])
                lives[agent].append((row, earned.pop(agent), *flags))
        if len(step.ended):
            envs.close()
            assert not any(earned.values())
            return lives
        acting = [still_acting(told) for told in step.parts]


def still_acting(told: Any) -> Any:
    slots = np.array([slot for slot, _ in rows_of(told.observed)], np.int64)
    live = ~(told.terminateds | told.truncateds)[slots]
    rows = map_tree(lambda leaf: leaf[live], told.observed.observations)
    return told.observed._replace(slots=slots[live], observations=rows)


def chosen(envs: MultiAgentEnvs, acting: Any, player: Player) -> list[Any]:
    """Actions in the order of `possible_agents`, as by hand."""
    parts = zip(envs.parts, acting, strict=True)
    rows = {part.agents[slot]: row for part, observed in parts for slot, row in rows_of(observed)}
    actions = {agent: player(rows[agent], envs.action_spaces[agent]) for agent in envs.possible_agents if agent in rows}
    told = []
    for part in envs.parts:
        places = [place for place, agent in enumerate(part.agents) if agent in actions]
        told.append((np.array(places, np.int64), np.array([actions[part.agents[place]] for place in places])))
    return told


def assert_same_lives(lives: dict[str, Life], expected: dict[str, Life]) -> None:
    assert set(lives) == set(expected)
    for agent, life in lives.items():
        assert len(life) == len(expected[agent])
        for (observation, *rest), (as_expected, reward, *flags) in zip(life, expected[agent], strict=True):
            assert rest == [pytest.approx(reward, rel=1e-6), *flags]
            for leaf, other in zip(leaves_of(observation), leaves_of(as_expected), strict=True):
                np.testing.assert_array_equal(leaf, np.asarray(other, leaf.dtype))


GAMES: dict[str, tuple[Callable[[], Any], Callable[..., dict[str, Life]]]] = {
    "tictactoe": (tictactoe.env, aec_by_hand),
    "connect four": (connect_four.env, aec_by_hand),
    "rps": (lambda: rps.env(max_cycles=5), aec_by_hand),
    "spread in turns": (lambda: simple_spread_v3.env(max_cycles=4), aec_by_hand),
    "zombies in turns": (lambda: knights_archers_zombies.env(max_cycles=250, max_zombies=60), aec_by_hand),
    "spread": (lambda: simple_spread_v3.parallel_env(max_cycles=6), parallel_by_hand),
    "tag": (lambda: simple_tag_v3.parallel_env(max_cycles=6), parallel_by_hand),
    "zombies": (lambda: knights_archers_zombies.parallel_env(max_cycles=300, max_zombies=60), parallel_by_hand),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GAMES)
def test_games_are_as_stepped_by_hand(name: str, seed: int) -> None:
    make, by_hand = GAMES[name]
    assert_same_lives(in_vector_steps(make, seed, Player()), by_hand(make(), seed, Player()))


class Relay(AECEnv):  # type: ignore[misc]  # comes without types
    """Three runners; each step earns the two others 1. `ends` says after which step whom ends, and how.

    A runner that ends out of its turn takes leave at once, before the next one's turn.
    """

    metadata = {"name": "relay"}  # noqa: RUF012

    def __init__(self, ends: dict[int, dict[str, str]]) -> None:
        self.ends = ends
        self.possible_agents = ["a", "b", "c"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 1000, (2,), np.int64)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def reset(self, seed: Any = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {"at": 0} for agent in self.agents}
        self.agent_selection, self.count = "a", 0
        self._view = np.zeros(2, np.int64)

    def observe(self, agent: str) -> Any:
        self._view[:] = self.possible_agents.index(agent), self.count  # written over
        return self._view

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self.count += 1
        self._cumulative_rewards[agent] = 0
        self.rewards = {other: int(other != agent) for other in self.agents}
        for other, how in self.ends.get(self.count, {}).items():
            (self.terminations if how == "terminated" else self.truncations)[other] = True
        live = [other for other in self.agents if not (self.terminations[other] or self.truncations[other])]
        later = [other for other in live if other > agent] or live
        self.agent_selection = later[0] if later else agent
        self._accumulate_rewards()
        self._deads_step_first()


ENDS = {
    "in turn": {4: {"a": "terminated"}, 6: {"b": "terminated", "c": "terminated"}},
    "out of turn": {4: {"c": "truncated"}, 7: {"b": "terminated"}, 8: {"a": "truncated"}},
    "before its first turn": {1: {"c": "terminated"}, 5: {"a": "truncated", "b": "truncated"}},
    "both ways at once": {5: {"a": "truncated", "b": "terminated", "c": "truncated"}},
}


@pytest.mark.parametrize("name", ENDS)
def test_runners_that_end_while_others_run_get_their_last_observation_and_rewards(name: str) -> None:
    lives = in_vector_steps(lambda: Relay(ENDS[name]), 0, Player())
    assert_same_lives(lives, aec_by_hand(Relay(ENDS[name]), 0, Player()))
    assert {agent: life[-1][2:] for agent, life in lives.items()} == {
        agent: (how == "terminated", how == "truncated") for told in ENDS[name].values() for agent, how in told.items()
    }


def test_the_flags_of_everybody_are_set_with_the_last_agents_alone() -> None:
    env = adapted(Relay({2: {"c": "truncated"}, 4: {"a": "truncated", "b": "truncated"}}))
    env.reset(seed=0)
    for agent, expected in (("a", False), ("b", False), ("a", False), ("b", True)):
        *_, terminateds, truncateds, _ = env.step({agent: 0})
        assert (terminateds["__all__"], truncateds["__all__"]) == (False, expected)


def test_an_action_out_of_turn_is_refused() -> None:
    env = adapted(tictactoe.env())
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"actions of \['player_2'\], expected one of agent 'player_1': it is its turn"):
        env.step({"player_2": 0})


def test_an_agent_that_does_not_take_leave_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = adapted(Relay({1: {"a": "terminated"}}))
    env.reset()
    monkeypatch.setattr(env.env, "_was_dead_step", lambda action: None)
    with pytest.raises(EnvError, match="agent 'a' has ended, but is among the agents after its step with None"):
        env.step({"a": 0})


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("flat_forward", [None, False])
def test_default_modules_play_by_the_rules(explore: bool, flat_forward: bool | None) -> None:
    options: Any = {"num_envs": 4, "fragment_length": 50, "num_fragments": 1, "seed": 0}
    with MultiAgentRollout(tictactoe.env, explore=explore, forward=Forward(flat=flat_forward), **options) as rollout:
        [fragment] = rollout.fragments()
    chunks = list(fragment.agent_episodes("default_policy"))
    assert len(chunks) > 20
    for chunk in chunks:
        masks, actions = chunk.get_observations(slice(0, len(chunk)))["action_mask"], chunk.get_actions()
        assert masks[np.arange(len(chunk)), actions].all()
        assert not explore or np.isfinite(chunk.get_extra_model_outputs("action_logp")).all()
