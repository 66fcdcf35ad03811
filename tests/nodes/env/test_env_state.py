"""The state of an environment: another one that is given it goes on to the bit."""

import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from extras import needs
from gymnasium import wrappers
from gymnasium.vector import SyncVectorEnv
from mpe2 import simple_adversary_v3, simple_speaker_listener_v4
from pettingzoo.butterfly.cooperative_pong import cooperative_pong
from pettingzoo.butterfly.knights_archers_zombies import knights_archers_zombies
from pettingzoo.classic.connect_four import connect_four
from pettingzoo.classic.go import go
from pettingzoo.classic.rps import rps
from pettingzoo.classic.tictactoe import tictactoe

from rollflow.nodes.env import env_state
from rollflow.nodes.env.env_state import RecordedEnv, restored, set_state, state_of, states_of
from rollflow.nodes.env.multi_agent_env import adapted
from rollflow.nodes.policies.part_records import from_plain, to_plain
from rollflow.stream import EnvError
from rollflow.stream.data.packing import pack, unpack
from rollflow.stream.data.tree import leaves_of

Make = Callable[[], Any]
CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"]
TOY_TEXT = ["Blackjack-v1", "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", "FrozenLake-v1", "CliffWalking-v1"]
MUJOCO = ["HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "InvertedDoublePendulum-v5", "Pusher-v5", "Walker2d-v5"]


def pendulum() -> Any:
    return gym.make("Pendulum-v1", max_episode_steps=30)


SINGLE: dict[str, Make] = {id_: partial(gym.make, id_) for id_ in (*CLASSIC, *TOY_TEXT)} | {
    mode: partial(gym.make_vec, "CartPole-v1", num_envs=3, vectorization_mode=mode)
    for mode in ("vector_entry_point", "sync")
}
SINGLE |= {
    "stacked": lambda: wrappers.FrameStackObservation(pendulum(), 3),
    "normalized": lambda: wrappers.NormalizeObservation(wrappers.NormalizeReward(pendulum())),
    "delayed": lambda: wrappers.DelayObservation(pendulum(), 2),
    "time": lambda: wrappers.TimeAwareObservation(pendulum()),
    "sticky": lambda: wrappers.StickyAction(pendulum(), 0.4),
    "counted": lambda: wrappers.RecordEpisodeStatistics(pendulum()),
    "autoreset": lambda: wrappers.Autoreset(pendulum()),
    "function": lambda: wrappers.TransformReward(pendulum(), lambda reward: 2 * reward),
    "below a wrapper": lambda: wrappers.TimeLimit(SaysIts(), 40),
}


class Place(NamedTuple):
    x: int
    y: int


class SaysIts(gym.Env[Any, Any]):
    """An environment that says its own state, in a generator that no attribute shows."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.set_state({"count": 0})
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._next = next(self._numbers)
        return np.full(1, self._next % 100, np.float32), 1.0, False, self._next > 70, {}

    def get_state(self) -> dict[str, int]:
        return {"count": self._next}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._next = state["count"]
        self._numbers = iter(range(self._next + 1, 10**6))


class Silent(SaysIts):
    """The same, but it says nothing; it draws from its generator."""

    get_state = None  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return observation + self.np_random.random(1).astype(np.float32), *rest


class Clocked(Silent):
    """It depends on what no reset begins anew."""

    lives = 0

    def step(self, action: Any) -> Any:
        type(self).lives += 1
        observation, *rest = super().step(action)
        return observation + type(self).lives % 7, *rest


def play(env: Any, actions: Any) -> list[Any]:
    """What an environment gives, with a reset after each end."""
    given: list[Any] = []
    for action in actions:
        given.append(env.step(action))
        if np.any(given[-1][2]) or np.any(given[-1][3]):
            given.append(env.reset())
    for _, info in (each for each in given if len(each) == 2):
        info.pop("episode", None)
    for *_, info in given:
        info.pop("episode", None)  # which has a time
    return given


def sent(state: Any) -> Any:
    """A state on its way through a file, and from a worker before."""
    arrays: dict[str, Any] = {}
    text = json.dumps(to_plain(unpack(pack(state)), "env", arrays))
    return from_plain(json.loads(text), "env", arrays)


def check(make: Make, steps: int = 80) -> None:
    first, other = make(), make()
    first.action_space.seed(3)
    actions = [first.action_space.sample() for _ in range(2 * steps)]
    first.reset(seed=5)
    other.reset(seed=9)
    play(first, actions[:steps])
    set_state(other, sent(state_of(first)))
    expected, found = play(first, actions[steps:]), play(other, actions[steps:])
    assert len(expected) == len(found)
    for one, two in zip(expected, found, strict=True):
        for leaf, same in zip(leaves_of(list(one)), leaves_of(list(two)), strict=True):
            np.testing.assert_array_equal(leaf, same)
    first.close()
    other.close()


@pytest.mark.parametrize("name", SINGLE)
def test_environments_and_wrappers_go_on_to_the_bit(name: str) -> None:
    check(SINGLE[name])


@pytest.mark.parametrize("id_", ["Ant-v5", *(pytest.param(each, marks=pytest.mark.slow) for each in MUJOCO)])
def test_mujoco_goes_on_to_the_bit(id_: str) -> None:
    needs("mujoco")
    check(lambda: gym.make(id_))


@pytest.mark.parametrize("id_", ["ALE/Pong-v5", "ALE/Breakout-v5"])
def test_atari_goes_on_to_the_bit(id_: str) -> None:
    gym.register_envs(needs("ale_py"))
    check(lambda: gym.make(id_, repeat_action_probability=0.0), 60)
    with pytest.raises(EnvError, match="an emulator that may repeat the action before does not say which it was"):
        state_of(gym.make(id_))
    expected, found = replayed(lambda: gym.make(id_), 60)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one[0], two[0])


def test_minatar_goes_on_to_the_bit() -> None:
    made = needs("minatar.gym").BaseEnv  # not `register_envs`, which may be called once in a process
    check(lambda: made("breakout"))


AGENTS: Mapping[str, Make] = {
    "adversary": simple_adversary_v3.parallel_env,  # whose agents' goal is one of the landmarks
    "adversary in turns": simple_adversary_v3.env,
    "speaker": simple_speaker_listener_v4.parallel_env,
    "tictactoe": tictactoe.env,
    "connect four": connect_four.env,
    "rps": rps.env,
    "pong": partial(cooperative_pong.parallel_env, render_mode="rgb_array"),
}


def play_agents(env: Any, seen: Any, random: np.random.Generator, steps: int) -> tuple[list[Any], Any]:
    """What an environment of several agents gives for drawn actions, and what is to be acted on next."""
    given: list[Any] = []
    for _ in range(steps):
        actions = {}
        for agent, observation in seen.items():
            has_mask = isinstance(observation, Mapping)
            allowed = np.flatnonzero(observation["action_mask"]) if has_mask else range(env.action_spaces[agent].n)
            actions[agent] = int(random.choice(allowed))
        observations, rewards, *ends, _ = env.step(actions)
        given.append((observations, rewards, *ends))
        seen = {agent: each for agent, each in observations.items() if not (ends[0][agent] or ends[1][agent])}
        if ends[0]["__all__"] or ends[1]["__all__"]:
            seen, _ = env.reset()
            given.append(seen)
    return given, seen


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", AGENTS)
def test_environments_of_petting_zoo_go_on_to_the_bit(name: str, is_recorded: bool) -> None:
    def made() -> Any:
        env = adapted(AGENTS[name]())
        return RecordedEnv(env) if is_recorded else env

    first, other, random = made(), made(), np.random.default_rng(0)
    spaces = first.env.action_spaces if is_recorded else first.action_spaces
    first.action_spaces = other.action_spaces = spaces
    seen, _ = first.reset(seed=5)
    other.reset(seed=9)
    _, seen = play_agents(first, seen, random, 37)
    (state,) = states_of([first])
    assert list(state) == ["replay" if is_recorded else "state"]
    restored(other, sent(state), 0)
    again = np.random.default_rng()
    again.bit_generator.state = random.bit_generator.state
    expected, found = (play_agents(env, seen, draws, 40)[0] for env, draws in ((first, random), (other, again)))
    assert len(leaves_of(expected)) == len(leaves_of(found))
    for one, two in zip(leaves_of(expected), leaves_of(found), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("make", [go.env, knights_archers_zombies.env])
def test_what_no_attribute_shows_of_an_environment_of_petting_zoo_is_named(make: Make) -> None:
    env = adapted(make())
    seen, _ = env.reset(seed=0)
    play_agents(env, seen, np.random.default_rng(0), 9)
    with pytest.raises(EnvError, match=r"the state of a Group .*can't be read"):
        state_of(env)


@pytest.mark.parametrize("value", [{1}, b"text", Place(1, 2), np.array([None])], ids=repr)
def test_what_no_file_can_have_of_what_an_environment_says_is_named(value: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(SaysIts, "get_state", lambda self: {"at": [value]})
    with pytest.raises(
        EnvError, match=r"SaysIts\.get_state\(\)\['at'\]\[0\] is .*, which can't be saved; expected numbers"
    ):
        state_of(SaysIts())


def test_a_generator_that_no_seed_made_goes_on() -> None:
    first, other = pendulum(), pendulum()
    first.reset()
    other.reset()
    set_state(other, sent(state_of(first)))
    assert other.unwrapped.np_random_seed == first.unwrapped.np_random_seed >= 2**63
    np.testing.assert_array_equal(first.reset()[0], other.reset()[0])


def test_what_is_held_twice_is_one_thing_again() -> None:
    def make() -> Any:
        env = wrappers.TimeLimit(pendulum(), 30)
        env.both = env.one = [deque([1, 2], maxlen=2)]  # type: ignore[attr-defined]
        return env

    first, other = make(), make()
    first.reset(seed=0)
    other.reset(seed=0)
    first.one[0].append(3)
    set_state(other, sent(state_of(first)))
    assert other.one is other.both
    assert (other.one, other.one[0].maxlen) == ([deque([2, 3])], 2)


def test_a_state_that_cannot_be_read_names_the_part() -> None:
    with pytest.raises(EnvError, match=r"TimeLimit\.env: the state of a Silent can't be read; expected it to have get"):
        state_of(gym.wrappers.TimeLimit(Silent(), 9))
    env = pendulum()
    env.held = iter(())
    with pytest.raises(EnvError, match=r"TimeLimit\.held: the state of a tuple_iterator .* can't be read"):
        state_of(env)


def test_the_state_of_another_kind_is_refused() -> None:
    one, other = gym.make("CartPole-v1"), gym.make("Acrobot-v1")
    one.reset(seed=0)
    other.reset(seed=0)
    with pytest.raises(EnvError, match=r"is a gymnasium.*AcrobotEnv, expected a gymnasium.*CartPoleEnv"):
        set_state(other, state_of(one))
    with pytest.raises(EnvError, match=r"NoneType, expected a gymnasium.*TimeLimit"):
        set_state(SyncVectorEnv([pendulum] * 3), state_of(SyncVectorEnv([pendulum] * 2)))


def replayed(make: Make, steps: int = 100) -> tuple[list[Any], list[Any]]:
    first, other = RecordedEnv(make()), RecordedEnv(make())
    first.reset(seed=5)
    other.reset(seed=9)
    play(first, [0] * steps)
    other.set_state(sent(first.get_state()))
    return play(first, [1] * steps), play(other, [1] * steps)


def test_one_that_draws_from_its_generator_alone_is_stepped_to_where_it_stood() -> None:
    expected, found = replayed(Silent)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one[0], two[0])


def test_an_episode_that_is_too_long_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_state, "MOST_ACTIONS", 5)
    recorded = RecordedEnv(pendulum())
    recorded.reset(seed=0)
    play(recorded, [np.zeros(1, np.float32)] * 5)
    assert len(recorded.get_state()["actions"]) == 5
    play(recorded, [np.zeros(1, np.float32)] * 2)
    with pytest.raises(EnvError, match="the episode has more than 5 steps: too many"):
        recorded.get_state()
    recorded.reset(seed=0)
    assert recorded.get_state()["actions"] == []


def test_one_that_comes_to_something_else_is_found() -> None:
    text = r"the same actions from the same seed give another observation or reward after \d+ steps"
    with pytest.raises(EnvError, match=text):
        replayed(Clocked)
    with pytest.raises(EnvError, match=text):  # no reset begins the mean anew
        replayed(lambda: wrappers.NormalizeReward(Silent()))
