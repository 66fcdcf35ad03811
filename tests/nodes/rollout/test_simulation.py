"""The simulation of a ring: rates worked by hand, and laws."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollflow.nodes.rollout.simulation import Pool, Setting, Simulated, VirtualClock, simulate
from rollflow.nodes.rollout.step_costs import Machine, StepCosts

MANY = Machine(cores=64, hand_over=0.0, wake=0.0, fragment=0.0)  # and nothing that only machines take


def costs(env: float, rest: float, **others: Any) -> StepCosts:
    """Of lanes of one slot: seconds of a step, and of all else, however many rows a pass has."""
    return StepCosts(1, lambda slots: env * slots, others.pop("waits", 0.0), lambda slots: rest, **others)


def simulated(of: StepCosts, machine: Machine = MANY, **setting: Any) -> Simulated:
    return simulate(
        of, Setting(**{"slots": setting.get("lanes", 1), "fragment_length": 32, "prefetch": 1, **setting}), machine
    )


# A ring of two stages: 3 ms in the environments, 1 ms in the ring's thread


@pytest.mark.parametrize(("lanes", "rate"), [(1, 250), (2, 500), (3, 750), (4, 1000), (8, 1000)])
def test_lanes_in_processes_of_their_own_overlap_until_the_ring_is_full(lanes: int, rate: int) -> None:
    found = simulated(costs(3e-3, 1e-3), where="processes", lanes=lanes, workers=lanes)
    assert found.steps_per_s == pytest.approx(rate, rel=0.02)
    if lanes != 3:  # of three, each stage has three quarters of the time
        assert found.bottleneck == ("env" if lanes < 3 else "module")


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_inline_everything_comes_one_after_the_other(lanes: int) -> None:
    found = simulated(costs(3e-3, 1e-3), where="inline", lanes=lanes)
    assert found.steps_per_s == pytest.approx(250)
    assert found.busy["env"] == pytest.approx(0.75)
    assert found.busy["module"] == pytest.approx(0.25)


@pytest.mark.parametrize(("workers", "rate"), [(1, 1000 / 3), (2, 2000 / 3), (3, 1000)])
def test_lanes_of_one_worker_share_its_interpreter(workers: int, rate: float) -> None:
    found = simulated(costs(3e-3, 1e-3), where="processes", lanes=12, workers=workers)
    assert found.steps_per_s == pytest.approx(rate, rel=0.03)


def test_threads_share_the_interpreter_with_the_ring() -> None:
    found = simulated(costs(3e-3, 1e-3), where="threads", lanes=8)
    assert found.steps_per_s == pytest.approx(250, rel=0.02)  # 4 ms of the lock for each step


def test_threads_whose_environments_wait_overlap() -> None:
    found = simulated(costs(3e-3, 1e-3, waits=1.0), where="threads", lanes=8)
    assert found.steps_per_s == pytest.approx(1000, rel=0.02)


def test_threads_whose_environments_let_the_interpreter_go_overlap_as_far_as_there_are_cores() -> None:
    releases = costs(3e-3, 1e-3, env_releases=1.0)
    assert simulated(releases, where="threads", lanes=8).steps_per_s == pytest.approx(1000, rel=0.02)
    two = Machine(2, 0.0, 0.0, 0.0)
    assert simulated(releases, two, where="threads", lanes=8).steps_per_s == pytest.approx(500, rel=0.03)


@pytest.mark.parametrize(("cores", "rate"), [(1, 250), (2, 500), (4, 1000), (8, 2000), (16, 2000)])
def test_whole_rollouts_go_as_fast_as_there_are_cores_and_workers(cores: int, rate: int) -> None:
    found = simulated(costs(3e-3, 1e-3), Machine(cores, 0.0, 0.0, 0.0), where="rollouts", lanes=8, workers=8)
    assert found.steps_per_s == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(("lanes", "rate"), [(1, 250), (2, 500 / 1.25), (3, 750 / 1.5)])
def test_work_takes_longer_the_more_cores_are_at_work(lanes: int, rate: float) -> None:
    machine = Machine(3, 0.0, 0.0, 0.0, beside=1.5)  # half of that beside one of two others
    found = simulated(costs(3e-3, 1e-3), machine, where="rollouts", lanes=lanes, workers=lanes)
    assert found.steps_per_s == pytest.approx(rate, rel=0.02)


def test_what_a_pass_takes_beyond_that_of_one_row_does_not_hold_the_interpreter() -> None:
    held = StepCosts(2, lambda slots: 1e-3 * slots, 0.0, lambda rows: 4e-3)
    free = StepCosts(2, lambda slots: 1e-3 * slots, 0.0, lambda rows: 1e-3 if rows == 1 else 4e-3)
    setting = {"where": "threads", "lanes": 2, "slots": 4}
    assert simulated(held, **setting).steps_per_s == pytest.approx(4 / 12e-3, rel=0.02)  # 2 and 4 ms of the lock each
    assert simulated(free, **setting).steps_per_s == pytest.approx(4 / 8e-3, rel=0.02)  # but for 3 ms of a pass


def test_hosts_have_cores_of_their_own_and_share_a_link() -> None:
    two = Machine(2, 0.0, 0.0, 0.0)
    setting = {"where": "rollouts", "lanes": 8, "workers": 2, "hosts": 4}
    assert simulated(costs(3e-3, 1e-3), two, **setting).steps_per_s == pytest.approx(2000, rel=0.03)
    slow = simulated(costs(3e-3, 1e-3, step_bytes=1000), two, link_bytes_s=1e6, **setting)
    assert slow.steps_per_s == pytest.approx(1000, rel=0.05)  # a thousand steps of a thousand bytes


# Passes, fragments and the reader


def test_a_pass_over_all_lanes_that_are_there_takes_as_long_as_one() -> None:
    stages = {"env_to_module": lambda rows: 1e-4, "module": lambda rows: 4e-3, "module_to_env": lambda rows: 0.0}
    of = StepCosts(8, lambda slots: 0.0, 0.0, lambda slots: 4.1e-3, stages=stages)
    alone = simulated(of, where="inline", lanes=8)
    joint = simulated(of, where="inline", lanes=8, max_batch=8)
    assert alone.steps_per_s == pytest.approx(1 / 4.1e-3)
    assert joint.steps_per_s == pytest.approx(8 / 4.8e-3)
    assert simulated(of, where="inline", lanes=8, max_batch=4).steps_per_s == pytest.approx(8 / 8.8e-3)


def test_the_ring_stands_still_while_its_reader_works_unless_it_may_run_ahead() -> None:
    of = costs(3e-3, 1e-3, update_s=0.128, update_rows=32)  # as long as a fragment
    still = simulated(of, where="processes", lanes=1, workers=1, prefetch=0)
    ahead = simulated(of, where="processes", lanes=1, workers=1, prefetch=1)
    assert still.steps_per_s == pytest.approx(125, rel=0.02)
    assert ahead.steps_per_s == pytest.approx(250, rel=0.02)
    assert still.lag == 0.0
    assert 1.0 <= ahead.lag <= 2.0


def test_a_reader_that_takes_longest_is_the_bottleneck() -> None:
    of = costs(1e-4, 1e-4, update_s=1.0, update_rows=32)
    assert simulated(of, where="inline", lanes=1, prefetch=0).bottleneck == "caller"


def test_lanes_that_take_uneven_times_wait_for_each_other_at_the_end_of_a_round() -> None:
    even, uneven = costs(1e-2, 0.0, waits=1.0), costs(1e-2, 0.0, waits=1.0, spread=(0.1, 0.1, 0.1, 3.7))
    setting = {"where": "threads", "lanes": 16, "prefetch": 0}
    assert simulated(even, **setting).steps_per_s == pytest.approx(1600, rel=0.02)
    assert simulated(uneven, **setting).steps_per_s < 1400  # the slowest of 16 sums of 32 steps is waited for
    assert simulated(uneven, **setting | {"prefetch": 4}).steps_per_s > 1.1 * simulated(uneven, **setting).steps_per_s


def test_a_reader_that_has_a_thread_of_its_own_takes_the_lock_for_every_fragment() -> None:
    machine = Machine(cores=64, hand_over=0.0, wake=0.0, fragment=8e-3)
    of = costs(3e-3, 1e-3)
    for prefetch, seconds in (0, 32 * 4e-3), (1, 32 * 4e-3 + 8e-3):
        found = simulated(of, machine, where="inline", prefetch=prefetch)
        assert found.steps_per_s == pytest.approx(32 / seconds, rel=0.01)


def test_a_fragment_from_another_process_takes_its_time_here() -> None:
    found = simulated(costs(3e-3, 1e-3), Machine(64, 0.0, 0.0, 0.064), where="rollouts", lanes=8, workers=8)
    assert found.steps_per_s == pytest.approx(500, rel=0.15)  # 32 steps in 64 ms of this process


# Laws


@settings(max_examples=40)
@given(
    env=st.floats(1e-6, 1e-2),
    rest=st.floats(1e-6, 1e-2),
    waits=st.sampled_from([0.0, 0.5, 1.0]),
    where=st.sampled_from(["inline", "threads", "processes", "rollouts"]),
    lanes=st.integers(1, 9),
    workers=st.integers(1, 9),
    prefetch=st.integers(0, 2),
    cores=st.integers(1, 8),
)
@example(env=3 * 2**-9, rest=3e-5, waits=0.0, where="rollouts", lanes=7, workers=3, prefetch=1, cores=4)
def test_no_setting_is_faster_than_its_parts_allow(
    env: float, rest: float, waits: float, where: str, lanes: int, workers: int, prefetch: int, cores: int
) -> None:
    of, machine = costs(env, rest, waits=waits), Machine(cores)
    setting = Setting(
        where=where, slots=lanes, lanes=lanes, workers=min(workers, lanes), prefetch=prefetch, fragment_length=16
    )
    found = simulate(of, setting, machine)
    assert 0 < found.steps_per_s <= 1.05 * lanes / (env + rest)  # a lane has one step at a time
    assert found.steps_per_s <= 1.05 * cores / (env * (1 - waits) + rest)
    assert all(0 <= share <= 1 + 1e-6 for share in found.busy.values())
    assert found.bottleneck in {"env", "module", "caller"}
    assert found == simulate(of, setting, machine)  # nothing is left to chance


# Virtual time


def test_who_waits_longest_for_a_pool_gets_it_first() -> None:
    clock = VirtualClock()
    pool, got = Pool(clock, 1), list[tuple[str, float]]()

    def takes(name: str, seconds: float) -> Any:
        yield pool
        got.append((name, clock.now))
        yield seconds
        pool.give()

    for name in "abc":
        clock.go_on(takes(name, 2.0))
    clock.run(lambda: False)
    assert got == [("a", 0.0), ("b", 2.0), ("c", 4.0)]
    assert pool.free == 1


def test_time_ends_where_everybody_waits() -> None:
    clock = VirtualClock()
    pool = Pool(clock, 0)
    clock.go_on(iter_of(pool))
    clock.run(lambda: False)
    assert clock.now == 0.0


def iter_of(pool: Pool) -> Any:
    yield pool
