"""An environment in JAX that numbers its episodes and steps, in the forms of gymnax, Brax and PGX, and as a loop."""

from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from extras import needs

jax = needs("jax")
jnp = jax.numpy


class Numbers(NamedTuple):
    """A state: the episode's number, drawn, its steps and its length, and a number that each step draws."""

    episode: Any
    t: Any
    length: Any
    drawn: Any

    def look(self) -> Any:
        return jnp.stack([self.episode, self.t, self.drawn]).astype(jnp.float32)

    def ends(self) -> tuple[Any, Any]:
        """Whether the episode terminated, and whether it was truncated, as those of odd numbers are."""
        done, is_cut = self.t == self.length, self.episode % 2 == 1
        return done & ~is_cut, done & is_cut


def begun(key: Any, longest: Any = 6) -> Numbers:
    episode, length = key >> 12  # as random as what is drawn from it, without a generator to compile
    return Numbers(episode, 0, length % longest + 1, 0)


def moved(key: Any, state: Numbers, action: Any) -> tuple[Numbers, Any]:
    """The next state, and a reward that tells the action."""
    drawn = 0 if key is None else key[0] >> 12
    return state._replace(t=state.t + 1, drawn=drawn), state.t + action[0] / 8


class Box(NamedTuple):
    """A space of gymnax: a Box whose dtype is another than that of the values."""

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: Any = jnp.int32


class Gymnax:
    """The form of gymnax before version 1.0; `params` is the greatest length."""

    default_params = 6

    def action_space(self, params: Any) -> Any:
        return Box(-1.0, jnp.ones(2), (2,), jnp.float32)

    def observation_space(self, params: Any) -> Any:
        return Box(-1, 1 << 20, (3,))

    def reset(self, key: Any, params: Any) -> Any:
        state = begun(key, params)
        return state.look(), state

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        state, reward = moved(key, state, action)
        terminated, truncated = state.ends()
        return state.look(), state, reward, terminated | truncated, {}

    def step(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        return self._step(key, state, action, params)[:5]

    def _step(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        of_step, of_reset = jax.random.split(key)
        last, state, reward, done, _ = self.step_env(of_step, state, action, params)
        now = jax.tree.map(lambda *each: jnp.where(done, *each), self.reset(of_reset, params), (last, state))
        return *now, reward, done, {"discount": ~done}, (last, *state.ends())


class Gymnax1(Gymnax):
    """The form of gymnax 1.0."""

    def step(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        now, state, reward, _, _, (last, *ends) = self._step(key, state, action, params)
        return now, state, reward, *ends, {"final_observation": last}


class Wrapped:
    """What wrappers of gymnax are: they hand on what they have not."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class State(NamedTuple):
    """What states of Brax and of PGX have."""

    numbers: Numbers
    obs: Any
    reward: Any
    done: Any
    info: Any
    terminated: Any
    truncated: Any
    legal_action_mask: Any

    @property
    def observation(self) -> Any:
        return self.obs

    @property
    def rewards(self) -> Any:
        return self.reward[None]


def told(numbers: Numbers, reward: Any, info: Any = None) -> State:
    ends, mask = numbers.ends(), jnp.stack([True, numbers.t % 2 == 0])
    return State(numbers, numbers.look(), jnp.float32(reward), (ends[0] | ends[1]).astype(float), info, *ends, mask)


class Brax:
    """The form of Brax under an `EpisodeWrapper`; without `is_cut` of itself alone."""

    action_size = 2

    def __init__(self, *, is_cut: bool = True, **info: Any) -> None:
        self.is_cut, self.info = is_cut, info

    def reset(self, key: Any) -> Any:
        return self._told(begun(key), 0.0)

    def step(self, state: Any, action: Any) -> Any:
        return self._told(*moved(None, state.numbers, action))

    def _told(self, numbers: Numbers, reward: Any) -> State:
        cut = {"truncation": numbers.ends()[1].astype(float)} if self.is_cut else {}
        return told(numbers, reward, self.info | cut)


class Pgx:
    """The form of PGX: two actions, of which the second is legal in every other step alone."""

    num_actions, num_players = 2, 1

    def __init__(self, id: str = "numbers", **more: Any) -> None:
        self.id = id
        self.__dict__ |= more

    def init(self, key: Any) -> Any:
        return told(begun(key), 0.0)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        return told(*moved(key, state.numbers, action[None]))


class LoopSlot(gym.Env[Any, Any]):
    """A slot of a `JaxEnvs` over numbers, stepped by itself in Python, from the keys that `JaxSlots` documents.

    has_keys     whether steps are given keys
    has_limit    whether truncations are told from terminations
    """

    def __init__(self, slot: int, env: Any, seed: int, has_keys: bool, has_limit: bool) -> None:
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.has_keys, self.has_limit = has_keys, has_limit
        key = jax.random.split(jax.random.PRNGKey(seed), env.num_envs)[slot]
        self.key, self.fresh = jax.random.split(key)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.state = _begun(self.fresh)
        return np.asarray(_looked(self.state)), {}

    def step(self, action: Any) -> Any:
        held = _stepped(self.key, self.state, np.atleast_1d(action), self.has_keys)
        self.key, self.fresh, self.state, (observation, reward, ends) = held
        ends = map(bool, ends if self.has_limit else (ends[0] | ends[1], False))
        return np.asarray(observation), float(reward), *ends, {}


_begun, _looked = jax.jit(begun), jax.jit(Numbers.look)


@partial(jax.jit, static_argnums=3)
def _stepped(key: Any, state: Numbers, action: Any, has_keys: bool) -> Any:
    key, given = jax.random.split(key)
    of_step, fresh = jax.random.split(given)
    state, reward = moved(of_step if has_keys else None, state, action)
    return key, fresh, state, (state.look(), reward, state.ends())
