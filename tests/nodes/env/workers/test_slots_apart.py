"""Slots that step each on its own: where their threads run, and what is refused."""

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Forward, Rollout, Timeouts
from rollflow.nodes.env.workers import ready_slots
from rollflow.stream import ColumnError, EnvError
from rollflow.stream.graph.meter import clock

APART: Any = {"where": "threads", "forward": Forward(max_batch=64), "module": NumberedModule()}


class Idle(NumberedEnv):
    """Waits for a millisecond in each step."""

    def step(self, action: Any) -> Any:
        time.sleep(1e-3)
        return super().step(action)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of threads")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize(("load", "prefetch", "shares"), [(0.1, 1, True), (0.3, 1, False), (0.1, 0, False)])
def test_threads_that_wait_share_a_core_where_the_ring_has_a_thread(
    load: float, prefetch: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)

    def used(thread: int) -> int:  # ns of the processor, of each of four threads
        return int(load / 4 * clock())

    monkeypatch.setattr(ready_slots, "time", SimpleNamespace(pthread_getcpuclockid=int, clock_gettime_ns=used))
    with Rollout(lambda: Idle(0), num_envs=4, fragment_length=20, prefetch=prefetch, **APART) as rollout:
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


def test_slots_that_were_given_up_are_not_waited_for() -> None:
    is_gone, is_over = threading.Event(), threading.Event()

    class Gone(NumberedEnv):
        def step(self, action: Any) -> Any:
            if self.slot == 1 and self.life == 3:
                rollout.environments.lanes[0].give_up(np.array([1]))
                is_gone.set()
                is_over.wait()
            elif self.life == 3:
                is_gone.wait()
            return super().step(action)

    options = {**APART, "forward": Forward(max_batch=64, max_wait=30.0), "fragment_length": 8}
    began = time.perf_counter()
    with Rollout([lambda slot=slot: Gone(slot) for slot in range(2)], **options) as rollout:
        next(rollout.fragments())
        is_over.set()
    assert time.perf_counter() - began < 60
