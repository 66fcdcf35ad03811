"""One environment in every form in which a user can give it, and the episodes that direct stepping makes of it.

Without torch, so that a worker process that steps it is there soon.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import NDArray

NUM_ACTIONS = 5


class SeededEnv(gym.Env[Any, Any]):
    """Observations are i64[3]: (seed of the first reset, episode, step); a reward says step and action."""

    def __init__(self, longest: int = 6) -> None:
        self.observation_space = gym.spaces.Box(0, 2**62, (3,), np.int64)
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self._longest, self._seed, self._episode = longest, 0, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._seed = self._seed if seed is None else seed
        self._episode += 1
        self._step = 0
        self._length = int(self.np_random.integers(1, self._longest + 1))
        self._truncates = bool(self.np_random.integers(2))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        done = self._step == self._length
        reward = float(self._step + 100 * int(action))
        return self._observation(), reward, done and not self._truncates, done and self._truncates, {}

    def _observation(self) -> NDArray[np.int64]:
        return np.array([self._seed, self._episode, self._step], np.int64)


class TenfoldRewards(gym.RewardWrapper[Any, Any]):
    """Rewards times ten."""

    def reward(self, reward: Any) -> Any:
        return 10 * reward


class TenfoldSyncVectorEnv(SyncVectorEnv):
    """Rewards times ten, by a `step` of its own."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *others = super().step(actions)
        return observations, 10 * rewards, *others


class TenfoldVectorRewards(VectorWrapper):
    """Rewards times ten."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *others = super().step(actions)
        return observations, 10 * rewards, *others


def vector_env(kind: str, mode: AutoresetMode, longest: int, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """A vector environment: gymnasium's own ("sync"), a "subclass" of it, or it "wrapped" in another."""
    makers = [partial(SeededEnv, longest)] * num_envs
    if kind == "subclass":
        return TenfoldSyncVectorEnv(makers, autoreset_mode=mode)
    env = SyncVectorEnv(makers, autoreset_mode=mode)
    return TenfoldVectorRewards(env) if kind == "wrapped" else env


class EnvForm(NamedTuple):
    """Form in which an environment is given.

    name    "id", "callable", "wrapped callable" or "list": of environments. "id of sync", "id of subclass", "id of
            wrapped": an id that has such a vector form. "sync", "subclass", "wrapped": vector environments made already
    """

    name: str
    mode: AutoresetMode
    longest: int

    @property
    def is_ready(self) -> bool:
        """Return True if the vector environments have been made already."""
        return self.name in ("sync", "subclass", "wrapped")

    def env(self, sizes: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Return `env` and the other arguments of a rollout or a host, for lanes of these sizes."""
        if self.is_ready:
            return [vector_env(self.name, self.mode, self.longest, size) for size in sizes], {}
        numbers: dict[str, Any] = {"num_envs": sum(sizes), "lanes": len(sizes)}
        if self.name.startswith("id of "):
            return self._registered(self.name.removeprefix("id of ")), numbers
        numbers["autoreset_mode"] = self.mode
        if self.name == "id":
            return self._registered(None), numbers
        make: Callable[[], Any] = partial(SeededEnv, self.longest)
        if self.name == "wrapped callable":
            make = partial(_wrapped, make)
        return [make] * sum(sizes) if self.name == "list" else make, numbers

    def episodes(self, seeds: Sequence[int], vector_steps: int) -> "list[list[Episode]]":
        """The episodes of every slot that come of stepping a vector environment without rollflow."""
        kind = self.name.removeprefix("id of ").replace("wrapped callable", "wrapped")
        kind = kind if kind in ("subclass", "wrapped") else "sync"
        return stepped_directly(vector_env(kind, self.mode, self.longest, len(seeds)), seeds, vector_steps)

    def _registered(self, kind: str | None) -> str:
        form = None if kind is None else partial(_vector_form, kind, self.mode)
        spec = EnvSpec("Seeded-v0", partial(SeededEnv), vector_entry_point=form, kwargs={"longest": self.longest})
        gym.registry["Seeded-v0"] = spec
        return spec.id


def _wrapped(make: Callable[[], Any]) -> Any:
    return TenfoldRewards(make())


def _vector_form(kind: str, mode: AutoresetMode, num_envs: int, longest: int) -> Any:
    return vector_env(kind, mode, longest, num_envs)


class Episode(NamedTuple):
    """One episode of one slot, as far as it came."""

    observations: list[list[int]]  # one more than there are actions
    actions: list[int]
    rewards: list[float]
    ends: list[tuple[bool, bool]]  # (terminated, truncated) after every action


def actions_for(observations: NDArray[np.int64]) -> NDArray[np.int64]:
    """The actions i64[N] that the policy takes, from observations i64[N, 3]."""
    return observations.sum(-1) % NUM_ACTIONS


def stepped_directly(env: VectorEnv[Any, Any, Any], seeds: Sequence[int], vector_steps: int) -> list[list[Episode]]:
    """The episodes of every slot, in order, from so many calls of the vector environment's own `step`."""
    mode = env.metadata["autoreset_mode"]
    observations, _ = env.reset(seed=list(seeds))
    slots = range(env.num_envs)
    episodes = [[Episode([observations[slot].tolist()], [], [], [])] for slot in slots]
    ended = np.zeros(env.num_envs, bool)
    for _ in range(vector_steps):
        actions = actions_for(observations)
        observations, rewards, terminateds, truncateds, infos = env.step(actions)
        only_reset = ended if mode is AutoresetMode.NEXT_STEP else np.zeros_like(ended)
        ended = terminateds | truncateds
        for slot in np.flatnonzero(~only_reset):
            is_replaced = ended[slot] and mode is AutoresetMode.SAME_STEP
            last = infos["final_obs"][slot] if is_replaced else observations[slot]
            seen, acted, rewarded, ends = episodes[slot][-1]
            seen.append(last.tolist())
            acted.append(int(actions[slot]))
            rewarded.append(float(rewards[slot]))
            ends.append((bool(terminateds[slot]), bool(truncateds[slot])))
        if mode is AutoresetMode.DISABLED and ended.any():
            observations, _ = env.reset(options={"reset_mask": ended})
        for slot in np.flatnonzero(only_reset if mode is AutoresetMode.NEXT_STEP else ended):
            episodes[slot].append(Episode([observations[slot].tolist()], [], [], []))
    env.close()
    return [[episode for episode in of_slot if episode.actions] for of_slot in episodes]
