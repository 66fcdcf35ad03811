"""One seed for each slot's environment, wherever the environments step."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from small_env import SmallEnv
from together import Together

from rollflow import MultiAgentRollout, RemoteEnvs, Rollout
from rollflow.nodes import RandomModule
from rollflow.nodes.env.stepping import seeds_for
from rollflow.stream.graph.seeding import seed_for

SEEDS = [7, 0, 2**40, 7]
PLACES = ["inline", "threads", "processes", "rollouts"]


class Seeded(SmallEnv):
    """Observes the seed of its first reset, split in two so that a float could not round it."""

    observation_space = gym.spaces.Box(0, 2**31, (2,), np.int64)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seen = np.array(divmod(seed, 2**31), np.int64)
        return super().reset(seed=seed)

    def look(self) -> Any:
        return self.seen


def seeded_agents() -> Together:
    """An agent whose environment is `Seeded`."""
    return Together({"a": Seeded()})


def seeds_seen(observations: Any) -> list[int]:
    return [int(high) * 2**31 + int(low) for high, low in np.asarray(observations)]


def seeds_by_slot(kind: Any, **options: Any) -> list[int]:
    """The seeds that four environments in two lanes were reset with."""
    seen: dict[int, list[int]] = {}
    given: dict[str, Any] = {"num_envs": 4, "lanes": 2, "module": RandomModule, "fragment_length": 2}
    env = Seeded if kind is Rollout else seeded_agents
    with kind(env, num_fragments=1, **given, **options) as rollout:
        for fragment in rollout.fragments():
            part = None if kind is Rollout else fragment.parts[0]
            rows = fragment.column("obs")[0] if part is None else part.columns["obs"].tree[part.first_row]
            seen[fragment.lane] = seeds_seen(rows)
    return seen[0] + seen[1]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_every_slot_is_reset_with_the_seed_of_its_own(kind: Any, where: Any) -> None:
    assert seeds_by_slot(kind, where=where, seed=SEEDS) == SEEDS


@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_seeds_that_follow_from_the_rollouts_fit_31_bits(kind: Any) -> None:
    raw = [seed_for(3, "env", slot) for slot in range(4)]
    assert min(raw) < 2**31 < max(raw)
    assert seeds_by_slot(kind, seed=3) == [each % 2**31 for each in raw]


def test_a_list_names_the_seeds_that_one_number_would_have_given() -> None:
    def observed(seed: Any) -> list[int]:
        with Rollout(Seeded, num_envs=3, fragment_length=1, num_fragments=1, seed=seed) as rollout:
            [fragment] = rollout.fragments()
            return seeds_seen(fragment.column("obs")[0])

    assert observed(5) == observed(seeds_for(5, 0, 3)) == observed(np.array(seeds_for(5, 0, 3)))


def test_what_else_is_drawn_follows_from_the_whole_list() -> None:
    def actions(seed: Any) -> Any:
        with Rollout("CartPole-v1", lanes=2, num_envs=2, fragment_length=32, num_fragments=1, seed=seed) as rollout:
            assert type(rollout.seed) is int
            return [fragment.column("actions").tolist() for fragment in rollout.fragments()]

    assert actions([1, 2]) == actions((1, 2))
    assert actions([1, 2])[0] != actions([1, 3])[0]  # lane 0's environment has the same seed; sampling has another


@pytest.mark.parametrize("kind", [Rollout, MultiAgentRollout])
def test_a_list_of_another_length_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"seed is a list of 3, expected one whole number, or a list of 4"):
        seeds_by_slot(kind, seed=[1, 2, 3])


@pytest.mark.parametrize("where", ["inline", "threads", "processes"])
def test_a_vector_environment_with_one_generator_takes_no_list(where: Any) -> None:
    with pytest.raises(ValueError, match=r"vector environment of lane 0 takes one seed for its 2 slots; expected one"):
        Rollout("CartPole-v1", num_envs=4, lanes=2, where=where, seed=[1, 2, 3, 4])


@pytest.mark.parametrize(("seed", "told"), [([], "empty"), ([1, -1], r"seed\[1\] is -1"), ([1.5], r"seed\[0\] is 1.5")])
def test_what_is_no_list_of_seeds_is_refused(seed: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Rollout(Seeded, num_envs=2, seed=seed)


def test_hosts_take_no_list() -> None:
    for made in (Rollout, MultiAgentRollout):
        envs = RemoteEnvs.listen("tcp://127.0.0.1:0")
        with pytest.raises(ValueError, match="seed is a list of 2, but hosts say how many environments they have"):
            made(envs, seed=[1, 2])
