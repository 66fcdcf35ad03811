"""One meaning: environments with several agents inline and in worker processes give the same fragments."""

import threading
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from drawn_agents import WAYS, Drawn, assert_alike, drawn_settings, fragments_of, made, makers_of
from hypothesis import given, settings
from hypothesis import strategies as st
from lost_agents import emitted_steps
from numbered_agents import NumberedAgents
from stalling import stalling

from rollflow.nodes import ArrayStep, ConnectorV2, MultiAgentEnv, MultiAgentRollout, MultiAgentVectorEnv
from rollflow.stream import EnvError


@pytest.mark.slow
@given(drawn=drawn_settings, workers=st.integers(1, 2), prefetch=st.integers(0, 2))
@settings(max_examples=8)
def test_worker_processes_give_the_same_fragments(drawn: Drawn, workers: int, prefetch: int) -> None:
    there = fragments_of(drawn, where="processes", workers=workers, prefetch=prefetch)
    assert_alike(there, fragments_of(drawn))


def test_several_lanes_in_one_worker_give_the_same_fragments() -> None:
    drawn = Drawn(3, 2, 4, 2, 6, False, 7, 2, True, 5)
    assert_alike(fragments_of(drawn, where="processes", workers=1), fragments_of(drawn))


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_a_drained_rollout_gives_every_step_that_was_made(way: str) -> None:
    before = psutil.Process().children()
    drawn = Drawn(3, 2, 3, 1, 9, False, 8, 1, False, 1)
    _, rollout = made(drawn, env=makers_of(drawn), where="processes", workers=2)
    fragments = WAYS[way](rollout, 3)
    assert len(emitted_steps(fragments)) == rollout.num_steps
    assert rollout.lost == {}
    assert psutil.Process().children() == before


def test_a_reader_that_stalls_stops_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    can_not_go_on = stalling(monkeypatch)
    drawn = Drawn(2, 2, 2, 0, 9, True, 5, 1, False, 1)
    _, rollout = made(drawn, env=makers_of(drawn), where="processes", workers=2, prefetch=2)
    with rollout:
        next(iter(rollout.fragments()))
        assert can_not_go_on.wait(60)
        assert rollout.num_steps == 3 * 2 * 5 * 2


class Wide(MultiAgentEnv):
    """Takes actions that are not what the module's are: they are clipped on the way."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, gym.spaces.Box(-100, 100, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, gym.spaces.Box(-1, 1, (2,), np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in self.possible_agents}, {}

    def step(self, actions: Any) -> Any:
        assert all(self.action_spaces[agent].contains(action) for agent, action in actions.items()), actions
        rewards = {agent: float(action[1]) for agent, action in actions.items()}
        return {agent: action[:1] * 2 for agent, action in actions.items()}, rewards, {}, {}, {}


def test_environments_get_the_actions_that_are_for_them() -> None:
    options: Any = {"num_envs": 2, "lanes": 1, "seed": 1, "num_fragments": 2, "fragment_length": 10}
    fragments = []
    for place in ("inline", "processes"):
        with MultiAgentRollout(Wide, where=place, **options) as rollout:  # type: ignore[arg-type]
            fragments.append(list(rollout.fragments()))
    assert_alike(*fragments)
    assert np.abs(fragments[0][0].of_module("default_policy").gather("actions")).max() > 1


def test_explain_says_what_is_where() -> None:
    drawn = Drawn(3, 2, 4, 0, 6, False, 7, 2, True, 5)
    _, rollout = made(drawn, env=makers_of(drawn), where="processes", workers=1)
    with rollout:
        assert "2 lanes × 1 or 2 environments × 4 agents, in 1 worker process," in rollout.explain()


class Vectorized(MultiAgentVectorEnv):
    """Is here already."""

    num_envs, possible_agents = 1, ("a",)

    def reset_arrays(self, seeds: Any) -> Any:
        raise NotImplementedError

    def step_arrays(self, actions: Any) -> ArrayStep:
        raise NotImplementedError


def test_what_can_not_be_worked_with_is_refused() -> None:
    make = partial(NumberedAgents, 0)
    with pytest.raises(ValueError, match="where is 'threads', expected 'inline' or 'processes'"):
        MultiAgentRollout(make, where="threads")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers is 2, but where='inline' has none; expected 'processes'"):
        MultiAgentRollout(make, workers=2)
    with pytest.raises(ValueError, match="workers is 0, expected at least 1"):
        MultiAgentRollout(make, where="processes", workers=0)
    with pytest.raises(ValueError, match="step_timeout is '1', expected seconds"):
        MultiAgentRollout(make, where="processes", step_timeout="1")  # type: ignore[arg-type]
    with pytest.raises(EnvError, match="worker processes make the environments themselves"):
        MultiAgentRollout(Vectorized(), where="processes")
    with pytest.raises(EnvError, match="expected a callable that makes an environment"):
        MultiAgentRollout(NumberedAgents(0), where="processes")
    lock = threading.Lock()
    with pytest.raises(EnvError, match="the environments of lane 0 can't be handed to a worker process: cannot pickle"):
        MultiAgentRollout(lambda: (lock, NumberedAgents(0))[1], where="processes")


@pytest.mark.parametrize("where", ["inline", "processes"])
def test_environments_of_different_lanes_have_the_same_agents(where: Any) -> None:
    before = psutil.Process().children()
    makers = [partial(NumberedAgents, slot, agents=2 + slot) for slot in range(2)]
    with pytest.raises(EnvError, match=r"environment 1: its agents are .*, expected those of environment 0"):
        MultiAgentRollout(makers, where=where, lanes=2)
    assert psutil.Process().children() == before


def test_environments_are_closed_where_those_of_another_lane_can_not_be_worked_with() -> None:
    def broken() -> NumberedAgents:
        raise FileNotFoundError("no simulator here")

    for other in (broken, lambda: NumberedAgents(1, agents=2)):
        env = NumberedAgents(0)
        with pytest.raises((EnvError, FileNotFoundError)):
            MultiAgentRollout([lambda env=env: env, other], lanes=2)
        assert env.closed


def test_what_is_not_known_of_environments_elsewhere_is_refused_with_the_reason() -> None:
    def joint(env: Any) -> list[ConnectorV2]:
        assert env.num_envs == 1
        assert env.possible_agents == tuple(f"agent {number}" for number in range(4))
        assert not hasattr(env, "render_mode")
        return env.envs  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="are elsewhere, where 'envs' can't be asked for; known here: num_envs"):
        MultiAgentRollout(partial(NumberedAgents, 0), where="processes", joint_connector=joint)
