"""Slots that step each on its own: where their threads run, and what is refused."""

import os
import threading
import time
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import SyncVectorEnv
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Forward, Rollout, Timeouts
from rollflow.stream import ColumnError, EnvError

APART: Any = {"where": "threads", "forward": Forward(max_batch=64), "module": NumberedModule()}


class Busy(NumberedEnv):
    """Works for a millisecond in each step, or waits for as long."""

    works = True

    def step(self, action: Any) -> Any:
        until = time.thread_time() + 1e-3
        while self.works and time.thread_time() < until:
            pass
        time.sleep(0.0 if self.works else 1e-3)
        return super().step(action)


class Idle(Busy):
    works = False


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of threads")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize(("env", "prefetch", "shares"), [(Idle, 1, True), (Busy, 1, False), (Idle, 0, False)])
def test_threads_that_wait_share_a_core_where_the_ring_has_a_thread(env: Any, prefetch: int, shares: bool) -> None:
    cores = os.sched_getaffinity(0)
    with Rollout(lambda: env(0), num_envs=4, fragment_length=20, prefetch=prefetch, **APART) as rollout:
        fragments = rollout.fragments()
        while rollout.environments.vector_steps < 70:
            next(fragments)
        of_slots = [os.sched_getaffinity(each.native_id) for each in rollout.environments.remotes]
        assert len(set().union(*of_slots)) == (1 if shares else len(cores))
        assert os.sched_getaffinity(0) == cores
    assert not any(thread.name.startswith("rollflow slot") for thread in threading.enumerate())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of threads")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_what_is_started_in_a_reset_is_not_bound_to_the_shared_core() -> None:
    cores, found = os.sched_getaffinity(0), list[Any]()

    class Starts(Idle):
        def reset(self, **options: Any) -> Any:
            found.append(os.sched_getaffinity(0))
            return super().reset(**options)

    with Rollout(lambda: Starts(0), num_envs=4, fragment_length=20, prefetch=1, **APART) as rollout:
        fragments = rollout.fragments()
        while rollout.environments.vector_steps < 100:
            next(fragments)
        of_slots = [os.sched_getaffinity(each.native_id) for each in rollout.environments.remotes]
    assert min(map(len, of_slots)) == 1
    assert all(each == cores for each in found)


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_vector_environments_are_refused(where: str) -> None:
    def make() -> Any:
        return SyncVectorEnv([lambda: NumberedEnv(0)] * 2)

    with pytest.raises(EnvError, match="is a vector environment, whose slots step together; expected a callable that"):
        Rollout(make, num_envs=2, **{**APART, "where": where, **({"workers": 1} if where == "processes" else {})})


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_an_observation_of_another_shape_is_named_with_its_slot(where: str) -> None:
    class Wrong(NumberedEnv):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return (observation[:1], *rest) if self.slot == 1 else (observation, *rest)

    with (
        pytest.raises((EnvError, ColumnError)) as raised,
        Rollout([lambda slot=slot: Wrong(slot) for slot in range(2)], **{**APART, "where": where}) as rollout,
    ):
        next(rollout.fragments())
    assert "slot 1" in f"{raised.value} {raised.value.__notes__}"


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_of_a_slot_that_is_waited_for_names_no_other_slot(raises: bool) -> None:
    is_over = threading.Event()

    class Last(NumberedEnv):
        def step(self, action: Any) -> Any:
            while self.slot == 2 and self.life == 3 and not is_over.wait(0.001):
                if raises and rollout.environments.waits_in_call:
                    raise EnvError("no more")
            return super().step(action)

    options = APART | {"timeouts": Timeouts(step=1.0), "fragment_length": 8}
    rollout = Rollout([lambda slot=slot: Last(slot) for slot in range(4)], **options)
    with (
        pytest.raises(EnvError, match="no more" if raises else "lane 0, slot 2: no answer to a step") as raised,
        rollout,
    ):
        try:
            next(rollout.fragments())
        finally:
            is_over.set()
    assert [note for note in raised.value.__notes__ if "slot" in note] == (["slot 2, step 3"] if raises else [])


def test_an_id_is_stepped_without_its_vectorized_form() -> None:
    with Rollout("CartPole-v1", num_envs=3, **{**APART, "module": None}) as rollout:
        assert "1 lane × 3 slots, a thread each" in rollout.explain()
        assert isinstance(next(rollout.fragments()).observation_space, gym.spaces.Box)


def test_the_end_of_a_fragment_does_not_wait_for_a_full_pass() -> None:
    class Last(NumberedEnv):
        def step(self, action: Any) -> Any:
            while self.slot == 1 and not rollout.environments.waits_in_call:
                time.sleep(0.001)
            rollout.environments._max_wait = 60.0 if self.slot == 1 else 0.01
            return super().step(action)

    options = {**APART, "forward": Forward(max_batch=64, max_wait=0.01), "fragment_length": 1}
    began = time.perf_counter()
    with Rollout([lambda slot=slot: Last(slot) for slot in range(2)], **options) as rollout:
        assert next(rollout.fragments()).num_steps >= 2
    assert time.perf_counter() - began < 30
