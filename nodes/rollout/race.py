"""The race for `where="auto"`: each place that can be used runs on copies for about a second, and the fastest wins."""

import logging
import random
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rollflow.nodes.connectors.learner.train_columns import device_of
from rollflow.nodes.env.env_source import count_of
from rollflow.nodes.env.workers.worker_process import core_count
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.nodes.rollout.options import JOINT_PASSES, Forward, RolloutOptions, Watch
from rollflow.nodes.stages.acting import copied_pieces

logger = logging.getLogger(__name__)

Trial = Callable[..., Any]  # (environments, where=…, num_envs=…, …) -> a rollout with copies of module and connectors

PLACES = ("inline", "threads", "processes", "rollouts")  # the simplest first
WORTH = 1.05  # how much faster than a simpler place another one must be
_RUN_S = 0.8  # of each place, once it has started
_FRAGMENT_S = 0.05  # of a fragment, about
_KEPT = {  # arguments that each place has as they were given
    "agent_to_module_mapping_fn",
    "autoreset_mode",
    "device",
    "explore",
    "lookback",
    "model_config",
    "seed",
    "timeouts",
}
_STARTS_S = 2.0  # that the environments of one place may take to be made: of slower ones fewer are made


class Result(NamedTuple):
    """Results of a race.

    rates      place -> steps per second
    lanes      place -> number of its lanes
    ruled_out  place -> why it is not used
    """

    rates: dict[str, float]
    lanes: dict[str, int]
    ruled_out: dict[str, str]

    @property
    def fastest(self) -> str:
        """The fastest place, or a simpler one that is about as fast."""
        most = max(self.rates.values())
        return next(where for where in PLACES if WORTH * self.rates.get(where, 0.0) >= most)

    def __str__(self) -> str:
        made = [f"{where} ({self.lanes[where]} lanes) {rate:,.0f}" for where, rate in self.rates.items()]
        refused = [f"not where='{where}': {why}" for where, why in self.ruled_out.items()]
        return "; ".join([f"steps/s in a short run each: {', '.join(made)}", *refused])


def race(env: Any, options: RolloutOptions, trial: Trial) -> Result:
    """Run each place for a moment, one after the other. Raises what an inline rollout of one environment raises.

    A place that raises is ruled out.
    """
    result = Result({}, {}, {})
    slots = count_of(env, options.num_envs)
    with generators_kept():
        began = time.perf_counter()
        with _open(trial(_first(env, 1), num_envs=1, fragment_length=1)) as alone:
            fragments = alone.fragments()
            next(fragments)
            start_s = time.perf_counter() - began
            step_s = min(timeit.repeat(partial(next, fragments), number=1, repeat=3))
            result.ruled_out.update(_refusals(options, alone))
        if slots * start_s > _STARTS_S:
            slots = min(slots, max(options.lanes or 1, options.workers or 1, 4 * core_count()))
        length = max(1, min(options.fragment_length, int(_FRAGMENT_S / (slots * step_s))))
        for where in PLACES:
            if where in result.ruled_out:
                continue
            try:
                with _open(
                    trial(
                        _first(env, slots),
                        num_envs=slots,
                        where=where,
                        lanes=options.lanes,
                        workers=workers_in(where, options),
                        fragment_length=length,
                        prefetch=options.prefetch,
                        forward=replace(options.forward, compile=False),
                    )
                ) as rollout:
                    result.rates[where] = _rate(rollout)
                    result.lanes[where] = rollout.environments.num_lanes
            except Exception as error:  # whatever an environment, a piece or a module may raise there
                result.ruled_out[where] = f"it raised {type(error).__name__}: {error}"
    return result


def workers_in(where: str, options: RolloutOptions) -> int | None:
    """The number of workers asked for, in a place that has workers."""
    return options.workers if where in ("processes", "rollouts") else None


def trial_of(rollout: type, options: RolloutOptions) -> Trial:
    """Maker of rollouts with these options, with copies of the pieces; of modules copies act anyway."""
    given = {each.name: value for each in fields(options) if (value := getattr(options, each.name)) is not None}
    kept = {name: given[name] for name in _KEPT & given.keys()}
    pieces = {name: copied_pieces(made) for name, made in given.items() if name.endswith("_connector")}
    alone = Forward(flat=options.forward.flat, threads=options.forward.threads)
    return partial(rollout, module=options.module, forward=alone, watch=Watch(stall_after=None), **kept, **pieces)


def _first(env: Any, slots: int) -> Any:
    return env[:slots] if isinstance(env, list | tuple) else env


def _rate(rollout: Any) -> float:
    """Steps per second once each lane has given a fragment."""
    fragments = rollout.fragments()
    for _ in range(rollout.environments.num_lanes):
        next(fragments)
    steps, began, taken = 0, time.perf_counter(), 0.0
    while taken < _RUN_S:
        steps += next(fragments).num_steps
        taken = time.perf_counter() - began
    return steps / taken


def _refusals(options: RolloutOptions, alone: Any) -> dict[str, str]:
    """Place -> why it does not keep to what is asked for."""
    if options.forward.max_batch is not None:
        return {"rollouts": JOINT_PASSES}
    metrics = options.watch.metrics
    if not isinstance(metrics, MetricsLogger | None):
        return {"rollouts": f"metrics of type {type(metrics).__name__} can't be merged"}
    for module, _ in alone._acting.by_id.values():
        on = device_of(module) if options.device is None else torch.device(options.device)
        if on.type != "cpu":
            return {"rollouts": f"the module acts on {on}, where a copy for each worker is not faster"}
    return {}


@contextmanager
def _open(rollout: Any) -> Iterator[Any]:
    """Enter a rollout and leave it. An error in closing is logged, since it says nothing of the speed."""
    rollout.__enter__()
    try:
        yield rollout
    finally:
        try:
            rollout.__exit__(None, None, None)
        except Exception as error:
            logger.warning("where='auto': closing a trial raised %s: %s", type(error).__name__, error)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the shared generators of random numbers, of Python, numpy and torch, as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
