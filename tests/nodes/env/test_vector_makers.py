"""Callables that make vector environments, and keywords for ids, wherever environments step."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numbered_env import NumberedEnv
from numbered_module import NumberedModule
from places import rollout_at
from small_env import SmallEnv

from rollflow import Rollout
from rollflow.nodes import RandomModule
from rollflow.stream import EnvError

PLACES = ["inline", "threads", "processes", "rollouts"]


def vector_of(slots: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return SyncVectorEnv([partial(NumberedEnv, slot) for slot in range(slots)], autoreset_mode=mode)


def workers_in(where: str) -> dict[str, int]:
    """One worker for all lanes, in places that have workers."""
    return {"workers": 1} if where in ("processes", "rollouts") else {}


def lanes_of(env: Any, **options: Any) -> list[tuple[int, int, list[Any]]]:
    """Lane, slots, and rewards of a fragment of each lane."""
    given: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 1, "seed": 5}
    with Rollout(env, **given, **options) as rollout:
        fragments = list(rollout.fragments())
        return sorted((each.lane, each.layout.num_slots, each.column("rewards").tolist()) for each in fragments)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_callable_that_makes_a_vector_environment_is_a_lane_in_every_place(where: Any, mode: AutoresetMode) -> None:
    ready = lanes_of([vector_of(3, mode), vector_of(3, mode)])
    assert lanes_of(partial(vector_of, 3, mode), where=where, lanes=2, **workers_in(where)) == ready


@pytest.mark.parametrize("where", PLACES)
def test_each_of_a_list_is_a_lane(where: Any) -> None:
    makers = [partial(vector_of, 2), partial(vector_of, 3)]
    made = lanes_of(makers, where=where, lanes=2, **workers_in(where))
    assert made == lanes_of([make() for make in makers])


def test_its_slots_are_those_that_the_lane_is_to_have() -> None:
    assert [slots for _, slots, _ in lanes_of(partial(vector_of, 3), num_envs=6, lanes=2)] == [3, 3]
    told = "the callable for slot 0 makes has 3 slots and is a lane by itself, but this lane is to have 4"
    with pytest.raises(EnvError, match=told):
        lanes_of(partial(vector_of, 3), num_envs=4, lanes=1)


@pytest.mark.parametrize("place", [pytest.param("hosts", id="environments"), "hosted rollouts"])
def test_hosts_take_such_callables_and_keywords(place: str) -> None:
    for env, envs in (
        (partial(vector_of, 3), {"lanes": 2}),
        ("Sized-v0", {"lanes": 2, "num_envs": 6, "env_kwargs": {"size": 5, "offset": 1}}),
    ):
        options: Any = {"acts": {"module": RandomModule}, "fragment_length": 2, "num_fragments": 1, "seed": 0}
        with rollout_at(place, env, envs=envs, **options) as made, made as rollout:
            fragments = list(rollout.fragments())
        assert [fragment.layout.num_slots for fragment in fragments] == [3, 3]
        if env == "Sized-v0":
            np.testing.assert_array_equal(fragments[0].column("obs"), np.ones((2, 3, 5), np.float32))


def test_a_vector_environment_has_no_place_beside_others() -> None:
    for makers, told in (
        ([partial(vector_of, 2), partial(vector_of, 2)], r"lane by itself.* expected .* a lane for each \(lanes=…\)"),
        (
            [partial(NumberedEnv, 0), partial(vector_of, 2)],
            "slot 1 gave a vector environment, which is a lane by itself",
        ),
    ):
        with pytest.raises(EnvError, match=told):
            lanes_of(makers)
    with pytest.raises(EnvError, match="lanes is 2, expected at most num_envs, which is 1"):
        lanes_of(partial(NumberedEnv, 0), lanes=2)
    with pytest.raises(EnvError, match=r"autoreset_mode is .*, which is that of the vector environment"):
        lanes_of(partial(vector_of, 2), autoreset_mode="SameStep")


class Sized(SmallEnv):
    """Observes its own argument."""

    def __init__(self, size: int = 1, offset: int = 0) -> None:
        self.observation_space = gym.spaces.Box(-9, 9, (size,), np.float32)
        self.offset = offset

    def look(self) -> Any:
        return np.full(self.observation_space.shape, self.offset, np.float32)

    def pay(self, action: Any) -> float:
        return 1.0


def sized_vector(num_envs: int, **options: Any) -> Any:
    options.pop("max_episode_steps", None)
    return SyncVectorEnv([partial(Sized, **options)] * num_envs)


gym.register("Sized-v0", Sized, kwargs={"offset": 2})
gym.register("SizedVector-v0", Sized, vector_entry_point=sized_vector, kwargs={"offset": 2})


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("env_id", ["Sized-v0", "SizedVector-v0"])
def test_keywords_are_given_to_an_ids_environments(env_id: str, where: Any) -> None:
    options: Any = {"fragment_length": 2, "num_fragments": 1, "seed": 0, "where": where, "num_envs": 2, "lanes": 1}
    with Rollout(env_id, env_kwargs={"size": 3}, **options) as rollout:
        [fragment] = rollout.fragments()
        name = rollout.policy().trained_on["environment"]
    np.testing.assert_array_equal(fragment.column("obs"), np.full((2, 2, 3), 2, np.float32))
    assert name == f"{env_id}(size=3)"


def test_a_limit_of_steps_is_one_of_them() -> None:
    options: Any = {"fragment_length": 4, "num_fragments": 1, "seed": 0}
    with Rollout("Sized-v0", env_kwargs={"max_episode_steps": 2}, **options) as rollout:
        [fragment] = rollout.fragments()
        assert rollout.evaluate(episodes=2).lengths.tolist() == [2, 2]
    assert fragment.column("truncateds")[:, 0].tolist() == [False, True, False, True]


def test_keywords_are_for_ids() -> None:
    with pytest.raises(EnvError, match=r"env_kwargs are for an environment's id, but env is .*functools.partial"):
        Rollout(Sized, env_kwargs={"size": 3})
