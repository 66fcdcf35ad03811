"""A quarter of an hour of each kind of the benchmarks' environments, inline, in which the doctor says nothing.

Steps and updates take drawn times, on a clock of their own; the doctor looks at each half second of it, within a step
as well. Nobody sleeps, so that it takes seconds, and is none the less true.
"""

import random
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from doctor_clock import Looking

from benchmarks import envs
from benchmarks.policies import Mlp, Noop, Zeros
from rollflow import Rollout, Watch

LONG_S, STEP_S, UPDATE_S, SIGMA = 900.0, 0.3, 8.0, 1.0


class DrawnTime:
    """Lognormal times, with the doctor's looks while they go by.

    looking    None: nobody looks yet, and no time goes by
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.looking: Looking | None = None
        self._random, self._left = random.Random(0), 0.0

    def spend(self, mean_s: float) -> None:
        """Let a time go by that has this mean."""
        if self.looking is None:
            return
        self._left += self._random.lognormvariate(np.log(mean_s) - SIGMA**2 / 2, SIGMA)
        while self._left >= self.looking.rules.look_s:
            self._left -= self.looking.rules.look_s
            self.texts += self.looking.once_inside()


def timed(env: Any, time: DrawnTime) -> Any:
    """The environment, whose steps take time."""
    step = env.step

    def timed_step(actions: Any) -> Any:
        time.spend(STEP_S)
        return step(actions)

    env.step = timed_step
    return env


def train(rollout: Rollout) -> None:
    """Change the weights a little, and publish them."""
    with torch.no_grad():
        for parameter in rollout.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    rollout.publish(rollout.module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "module", "update"),
    [
        (lambda: envs.NoopEnv(64), Noop(64), str),
        (lambda: gym.make("CartPole-v1"), Mlp(), train),
        (envs.SleepEnv, Mlp(), train),
        (lambda: envs.PixelEnv(0.0), Zeros(), str),
    ],
    ids=["nothing done", "CartPole", "steps of lognormal time", "pixels"],
)
def test_nothing_is_said_in_a_long_run(
    make: Callable[[], Any], module: Any, update: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "time", SimpleNamespace(sleep=str, perf_counter=perf_counter))
    time = DrawnTime()
    options: Any = {"fragment_length": 16, "seed": 0, "watch": Watch(stall_after=None)}
    env = timed(make(), time) if make().__class__ is envs.NoopEnv else lambda: timed(make(), time)
    with Rollout(env, module=module, **options) as rollout:
        time.looking = Looking(rollout._doctor)
        for _ in rollout.batches():
            update(rollout)
            time.spend(UPDATE_S)
            if time.looking.spent >= LONG_S:
                break
        notes = time.looking.watch.diagnose().notes
    assert (time.texts, notes) == ([], ())
    assert rollout.num_steps > 250
