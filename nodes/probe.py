"""Where a rollout goes fastest, by what its environment and its forward pass take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rollflow.nodes.env_source import EnvSource, count_of, is_ready, lane_makers
from rollflow.nodes.given import module_for
from rollflow.nodes.stepping import step_of
from rollflow.nodes.workers.worker_process import core_count
from rollflow.stream.space import row_of
from rollflow.stream.tree import map_tree

_PROBE_S = 0.2
_FEWEST_STEPS, _MOST_STEPS = 3, 400
# What rollflow takes itself on a machine of today: a vector step, one that comes from a thread or process, and the part
# of whole rollouts elsewhere that is not lost to handing over fragments.
_STEP_S, _HAND_OVER_S, _KEPT = 60e-6, 150e-6, 0.92
_WORTH = 1.25  # how much faster another place must be than inline
_AS_GOOD = 0.95  # of the fastest: the simpler place is taken


@dataclass(frozen=True, slots=True)
class Measured:
    """What the parts of a vector step take, in seconds.

    slots      in all
    env        a step of one slot's environment; of all of them at once where `is_vectorized`
    waits      the share of that in which the processor is free
    forward    a pass over so many rows: rows -> seconds
    on_cpu     whether the module is on the processor
    """

    slots: int
    env: float
    waits: float
    forward: Callable[[int], float]
    is_vectorized: bool = False
    on_cpu: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """Where to go, with how many lanes and workers, how many steps a second are to be expected, and why."""

    where: Any
    lanes: int | None
    workers: int | None
    steps_per_s: float
    why: str = ""


def choose(measured: Measured, cores: int) -> Choice:
    """The place where a rollout is to be fastest; inline unless another is well worth it."""
    all_ = [_inline(measured), *_threads(measured), *_processes(measured, cores), *_rollouts(measured, cores)]
    choices = _best_of_each(all_)  # the simplest first
    most = max(choice.steps_per_s for choice in choices)
    best = next(choice for choice in choices if choice.steps_per_s >= _AS_GOOD * most)
    if best.steps_per_s < _WORTH * choices[0].steps_per_s:
        best = choices[0]
    told = ", ".join(f"{_name(choice)} {choice.steps_per_s:,.0f}" for choice in choices)
    why = (
        f"an environment's step takes {measured.env * 1e6:.0f} µs ({measured.waits:.0%} of it waiting), a forward pass "
        f"over {measured.slots} slots {measured.forward(measured.slots) * 1e6:.0f} µs; expected steps/s: {told}"
    )
    return replace(best, why=f"where='{best.where}': {why}")


def probe(env: EnvSource, num_envs: int | None, module: Any, model_config: Any) -> Measured | None:
    """Step one environment for a moment, and the module with it; None for environments that can't be moved."""
    if is_ready(env):
        return None
    slots = count_of(env, num_envs)
    maker = lane_makers(env, num_envs, 1)[0]
    is_vectorized = maker.spec is not None and maker.spec.vector_entry_point is not None
    if not is_vectorized:
        maker = replace(maker, num_envs=1, makers=maker.makers[:1])
    made = maker.make()
    try:
        seconds, waits = _step_time(made)
        forward, on_cpu = _forward_time(made, module, model_config, slots)
    finally:
        made.close()
    return Measured(slots, seconds, waits, forward, is_vectorized, on_cpu)


def placed(
    env: EnvSource, num_envs: int | None, lanes: int | None, workers: int | None, module: Any, model_config: Any
) -> tuple[Any, int | None, int | None, str]:
    """Where to go, with how many lanes and workers, and why; what was asked for stays."""
    measured = probe(env, num_envs, module, model_config)
    if measured is None:
        return "inline", lanes, None, "where='inline': these vector environments are here already"
    choice = choose(measured, core_count())
    has_workers = choice.where in ("processes", "rollouts")
    return choice.where, lanes or choice.lanes, (workers or choice.workers) if has_workers else None, choice.why


def _inline(measured: Measured) -> Choice:
    step = _envs(measured, measured.slots) + measured.forward(measured.slots) + _STEP_S
    return Choice("inline", None, None, measured.slots / step)


def _threads(measured: Measured) -> list[Choice]:
    """A thread for each lane: as long as environments wait, others go on."""
    choices = []
    for lanes in _divisors(measured.slots):
        each = measured.slots // lanes
        central = measured.forward(each) + _HAND_OVER_S
        alone = each / (_envs(measured, each) + central)
        at_most = each / (_envs(measured, each) * (1 - measured.waits) + central)
        choices.append(Choice("threads", lanes, None, min(lanes * alone, at_most)))
    return choices


def _processes(measured: Measured, cores: int) -> list[Choice]:
    """Environments on the other cores, forward passes on this one."""
    choices = []
    for lanes in _divisors(measured.slots):
        each, workers = measured.slots // lanes, min(lanes, max(1, cores - 1))
        central = lanes * (measured.forward(each) + _HAND_OVER_S)
        stepping = _envs(measured, each) * (lanes * (1 - measured.waits) / workers + measured.waits)
        alone = _envs(measured, each) + central / lanes  # one lane's way round
        choices.append(Choice("processes", lanes, workers, measured.slots / max(central, stepping, alone)))
    return choices


def _rollouts(measured: Measured, cores: int) -> list[Choice]:
    """A part of the slots on every core, with a copy of the module."""
    workers = min(cores, measured.slots)
    if workers < 2 or not measured.on_cpu:
        return []
    each = measured.slots // workers
    step = _envs(measured, each) + measured.forward(each) + _STEP_S
    return [Choice("rollouts", workers, workers, _KEPT * workers * each / step)]


def _envs(measured: Measured, slots: int) -> float:
    """Seconds that a step of so many slots takes in one thread: all at once costs nearly as much for fewer."""
    return measured.env if measured.is_vectorized else slots * measured.env


def _divisors(slots: int) -> list[int]:
    return [lanes for lanes in range(2, slots + 1) if slots % lanes == 0]


def _name(choice: Choice) -> str:
    return choice.where if choice.lanes is None else f"{choice.where} ({choice.lanes} lanes)"


def _best_of_each(choices: Sequence[Choice]) -> list[Choice]:
    best: dict[str, Choice] = {}
    for choice in choices:
        if choice.where not in best or choice.steps_per_s > best[choice.where].steps_per_s:
            best[choice.where] = choice
    return list(best.values())


def _step_time(env: Any) -> tuple[float, float]:
    """Mean seconds of a vector step with random actions, and the share in which the processor was free."""
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(16)]
    step = step_of(env, is_ours=True)
    step(actions[0])  # the first one may set things up
    wall, cpu, steps = time.perf_counter(), time.thread_time(), 0
    while steps < _FEWEST_STEPS or (time.perf_counter() - wall < _PROBE_S and steps < _MOST_STEPS):
        step(actions[steps % len(actions)])
        steps += 1
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    return wall / steps, max(0.0, 1.0 - cpu / wall)


def _forward_time(env: Any, module: Any, model_config: Any, slots: int) -> tuple[Callable[[int], float], bool]:
    """Seconds of a pass by its number of rows, and whether it is on the processor: a line through two measurements."""
    spaces = env.single_observation_space, env.single_action_space
    try:
        made = module_for(module, model_config, *spaces)
        times = [_pass_time(made, rows, spaces[0]) for rows in (1, slots)]
        on_cpu = all(parameter.is_cpu for parameter in made.parameters())
    except Exception:  # made for other observations, which connector pieces make out of these
        times, on_cpu = [100e-6, 100e-6], True
    per_row = max(0.0, times[1] - times[0]) / max(1, slots - 1)
    return lambda rows: times[0] + per_row * (rows - 1), on_cpu


def _pass_time(module: Any, rows: int, space: Any) -> float:
    device = next((parameter.device for parameter in module.parameters()), "cpu")
    batch = {"obs": map_tree(lambda leaf: torch.from_numpy(np.array(leaf)).to(device), row_of(space, rows))}
    times = []
    with torch.inference_mode():
        for _ in range(7):
            began = time.perf_counter()
            module.forward_exploration(dict(batch))
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
