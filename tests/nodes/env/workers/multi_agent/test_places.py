"""One meaning: environments with several agents give the same fragments inline, in threads and in worker processes."""

import threading
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from drawn_agents import WAYS, Drawn, assert_alike, drawn_settings, fragments_of, made, makers_of
from hypothesis import given, settings, strategies as st
from leftovers import processes_of
from lost_agents import emitted_steps
from numbered_agents import NumberedAgents
from property_examples import examples
from serial_module import SerialModule
from stalled_rollouts import stalling

from rollflow import ConnectorV2, MultiAgentRollout
from rollflow.nodes import ArrayStep, MultiAgentEnv, MultiAgentVectorEnv, RandomModule
from rollflow.stream import EnvError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

PLACES: list[Any] = ["threads", *(pytest.param(each, marks=pytest.mark.slow) for each in ("processes", "rollouts"))]


@given(drawn=drawn_settings, prefetch=st.integers(0, 2))
@settings(max_examples=examples(20))
def test_threads_give_the_same_fragments(drawn: Drawn, prefetch: int) -> None:
    def key(fragment: MultiAgentFragment) -> tuple[int, int]:
        return fragment.lane, fragment.sequence

    there = fragments_of(drawn, where="threads", prefetch=prefetch)
    assert_alike(sorted(there, key=key), sorted(fragments_of(drawn), key=key))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
@given(drawn=drawn_settings, workers=st.integers(1, 2), prefetch=st.integers(0, 2))
@settings(max_examples=examples(8))
def test_worker_processes_give_the_same_fragments(where: str, drawn: Drawn, workers: int, prefetch: int) -> None:
    there = fragments_of(drawn, where=where, workers=workers, prefetch=prefetch)
    assert_alike(there, fragments_of(drawn))


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_several_lanes_in_one_worker_give_the_same_fragments(where: str) -> None:
    drawn = Drawn(3, 2, 4, 2, 6, False, 7, 2, True, 5)
    assert_alike(fragments_of(drawn, where=where, workers=1), fragments_of(drawn))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("way", list(WAYS))
def test_a_drained_rollout_gives_every_step_that_was_made(way: str, where: str) -> None:
    before = processes_of()
    drawn = Drawn(3, 2, 3, 1, 9, False, 8, 1, False, 1)
    _, rollout = made(drawn, env=makers_of(drawn), where=where)
    fragments = WAYS[way](rollout, 3)
    assert len(emitted_steps(fragments)) == rollout.num_steps
    assert rollout.lost == {}
    assert processes_of() == before


@pytest.mark.slow
@pytest.mark.parametrize("where", ["threads", "processes", "rollouts"])
def test_a_reader_that_stalls_stops_the_environments(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can_not_go_on = stalling(monkeypatch)
    drawn = Drawn(2, 2, 2, 0, 9, True, 5, 1, False, 1)
    _, rollout = made(drawn, env=makers_of(drawn), where=where, prefetch=2)
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


@pytest.mark.slow
def test_environments_get_the_actions_that_are_for_them() -> None:
    options: Any = {"num_envs": 2, "lanes": 1, "seed": 1, "num_fragments": 2, "fragment_length": 10}
    fragments = []
    for place in ("inline", "threads", "processes", "rollouts"):
        with MultiAgentRollout(Wide, where=place, **options) as rollout:  # type: ignore[arg-type]
            fragments.append(list(rollout.fragments()))
    assert_alike(fragments[1], fragments[0])
    assert_alike(fragments[2], fragments[0])
    assert_alike(fragments[3], fragments[0])
    assert np.abs(fragments[0][0].of_module("default_policy").gather("actions")).max() > 1


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"where": "threads"}, "a thread each"),
        ({"where": "processes", "workers": 1}, "in 1 worker process"),
        ({"where": "rollouts", "workers": 1}, "in 1 worker process"),
    ],
)
def test_explain_says_what_is_where(options: Any, place: str) -> None:
    drawn = Drawn(3, 2, 4, 0, 6, False, 7, 2, True, 5)
    _, rollout = made(drawn, env=makers_of(drawn), **options)
    with rollout:
        assert f"2 lanes × 1 or 2 environments × 4 agents, {place}," in rollout.explain()


def test_threads_have_a_lane_for_every_environment_unless_it_is_said() -> None:
    drawn = Drawn(3, 1, 2, 0, 6, False, 7, 2, True, 5)
    for lanes, made_lanes in ((None, 3), (2, 2)):
        rollout = made(drawn, env=makers_of(drawn), where="threads", lanes=lanes)[1]
        assert rollout.environments.num_lanes == made_lanes
        rollout.close()
    rollout = MultiAgentRollout(Vectorized(), where="threads", module=RandomModule)
    assert rollout.environments.num_lanes == 1
    rollout.close()


def test_environments_step_in_the_threads_of_their_lanes_alone() -> None:
    drawn = Drawn(3, 3, 2, 0, 6, False, 7, 2, True, 5)
    seen: list[set[str]] = [set(), set(), set()]

    class Watched(NumberedAgents):
        def step(self, actions: Any) -> Any:
            seen[self.slot].add(threading.current_thread().name)
            return super().step(actions)

    fragments_of(drawn, env=makers_of(drawn, Watched), where="threads")
    assert seen == [{"rollflow lane 0"}, {"rollflow lane 1"}, {"rollflow lane 2"}]


class Expires(NumberedAgents):
    def step(self, actions: Any) -> Any:
        raise SystemExit("the licence has expired")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_environment_that_ends_the_program_does_so(prefetch: int) -> None:
    maker, options = partial(Expires, 0, nested=0), {"where": "threads", "prefetch": prefetch}
    rollout = MultiAgentRollout(maker, module=SerialModule(), step_timeout=20.0, **options)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="the licence has expired"), rollout:
        next(iter(rollout.fragments()))


class Breaks(NumberedAgents):
    """Breaks in its third step, or in its second reset."""

    def __init__(self, slot: int, at: str, **options: Any) -> None:
        super().__init__(slot, **options)
        self.at, self.steps = at, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.at == "step" and self.slot == 1 and self.steps == 3:
            raise ZeroDivisionError("it broke")
        return super().step(actions)

    def reset(self, **options: Any) -> Any:
        if (self.at == "reset" and self.slot == 1 and self.episode == 0) or (
            self.at == "first reset" and self.slot == 0
        ):
            raise ZeroDivisionError("it broke")
        return super().reset(**options)


@pytest.mark.parametrize(
    ("at", "notes"),
    [
        ("step", ["environment 1, env step 2", "lane 1, vector step 2"]),
        ("reset", ["environment 1, reset", "lane 1, vector step 2"]),
        ("first reset", ["environment 0, reset", "lane 0, the first reset"]),
    ],
)
@pytest.mark.parametrize("where", ["inline", "threads"])
def test_an_environment_that_raises_says_where(where: Any, at: str, notes: list[str]) -> None:
    before = set(threading.enumerate())
    makers = [partial(Breaks, slot, at, nested=0, length=3, at_once=True) for slot in range(2)]
    rollout = MultiAgentRollout(makers, lanes=2, where=where, module=SerialModule(), fragment_length=8, seed=0)
    with pytest.raises(ZeroDivisionError, match="it broke") as caught, rollout:
        list(rollout.fragments())
    assert caught.value.__notes__[:2] == notes
    assert rollout.lost.get("failed", 0) == rollout.num_steps + rollout.environments.unrecorded_steps
    assert set(threading.enumerate()) <= before


class Vectorized(MultiAgentVectorEnv):
    """Is here already."""

    num_envs, possible_agents = 1, ("a",)
    observation_spaces = action_spaces = dict.fromkeys(possible_agents, gym.spaces.Discrete(2))

    def reset_arrays(self, seeds: Any) -> Any:
        raise NotImplementedError

    def step_arrays(self, actions: Any) -> ArrayStep:
        raise NotImplementedError


def test_what_can_not_be_worked_with_is_refused() -> None:
    make = partial(NumberedAgents, 0)
    with pytest.raises(ValueError, match="where is 'elsewhere', expected 'inline', 'threads', 'processes', 'rollouts'"):
        MultiAgentRollout(make, where="elsewhere")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers is 2, but where='threads' has none; expected 'processes'"):
        MultiAgentRollout(make, where="threads", workers=2)
    with pytest.raises(ValueError, match="workers is 2, but where='inline' has none; expected 'processes'"):
        MultiAgentRollout(make, workers=2)
    with pytest.raises(ValueError, match="workers is 0, expected a whole number from 1 on"):
        MultiAgentRollout(make, where="processes", workers=0)
    with pytest.raises(ValueError, match="step_timeout is '1', expected seconds"):
        MultiAgentRollout(make, where="processes", step_timeout="1")  # type: ignore[arg-type]
    lock, told = threading.Lock(), "the environments of lane 0 can't be handed to a worker process: cannot pickle"
    for where in ("processes", "rollouts"):
        options: dict[str, Any] = {"where": where}
        with pytest.raises(EnvError, match="worker processes make the environments themselves"):
            MultiAgentRollout(Vectorized(), **options)
        with pytest.raises(EnvError, match="expected a callable that makes an environment"):
            MultiAgentRollout(NumberedAgents(0), **options)
        with pytest.raises(EnvError, match=told):
            MultiAgentRollout(lambda: (lock, NumberedAgents(0))[1], **options)


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_environments_of_different_lanes_have_the_same_agents(where: Any) -> None:
    before = processes_of()
    makers = [partial(NumberedAgents, slot, agents=2 + slot) for slot in range(2)]
    with pytest.raises(EnvError, match=r"environment 1: its agents are .*, expected those of environment 0"):
        MultiAgentRollout(makers, where=where, lanes=2)
    assert processes_of() == before


def test_environments_are_closed_where_those_of_another_lane_can_not_be_worked_with() -> None:
    def broken() -> NumberedAgents:
        raise FileNotFoundError("no simulator here")

    for other in (broken, lambda: NumberedAgents(1, agents=2)):
        env = NumberedAgents(0)
        with pytest.raises((EnvError, FileNotFoundError)):
            MultiAgentRollout([lambda env=env: env, other], lanes=2)
        assert env.closed


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_what_is_not_known_of_environments_elsewhere_is_refused_with_the_reason(where: Any) -> None:
    def joint(env: Any) -> list[ConnectorV2]:
        assert env.num_envs == 1
        assert env.possible_agents == tuple(f"agent {number}" for number in range(4))
        assert not hasattr(env, "render_mode")
        return env.envs  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match="are elsewhere, where 'envs' can't be asked for; known here: num_envs"):
        MultiAgentRollout(partial(NumberedAgents, 0), where=where, joint_connector=joint)
