"""A trainer and rollouts that feed it, killed at any moment and started again: nothing is lost, or handed over twice.

Environments number their transitions over their whole life, which goes on where a rollout goes on from a checkpoint. A
rollout that begins anew has other environments. The trainer keeps the number of the last transition that it was handed
of each, beside its policy: the next has to be the one behind it. What a trainer without `ack="manual"` is not handed
again has to be counted in `missed`, and what is too old in `lost`.
"""

import json
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from remote_hosts import forked

from rollflow import Rollout, TrainerStream, feed
from rollflow.nodes import RandomModule
from rollflow.sinks import Sources
from rollflow.stream.wire import Limits

LENGTH, LANES = 4, 2  # vector steps of a fragment; lanes of a rollout, with an environment each
_LIMITS = Limits(grace_s=2.0)


class Born(gym.Env[Any, Any]):
    """Observations are (name of its life, number of the transition); episodes have 1 to 12 steps."""

    observation_space = gym.spaces.Box(0, 2**53, (2,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.state = [int.from_bytes(os.urandom(6), "little"), 0, 0]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.state[2] = int(self.np_random.integers(1, 13))
        return np.array(self.state[:2]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state[1] += 1
        self.state[2] -= 1
        return np.array(self.state[:2]), float(self.state[1]), not self.state[2], False, {}

    def get_state(self) -> list[int]:
        return list(self.state)

    def set_state(self, state: list[int]) -> None:
        self.state = list(state)


class Handed:
    """Number of the last transition that was handed over, of every life; and how many were left out before that."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self.left_out = 0

    def take(self, batch: Any) -> None:
        """Take a train batch. Raises AssertionError for transitions that come twice, or in another order."""
        by_life: dict[str, list[int]] = {}
        for life, number in zip(batch["obs"][:, 0].tolist(), batch["rewards"].tolist(), strict=True):
            by_life.setdefault(str(life), []).append(int(number))
        for life, numbers in by_life.items():
            last = self.last.get(life, 0)
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
            assert numbers[0] > last, f"{life}: {numbers} after {last}"
            self.left_out += numbers[0] - last - 1
            self.last[life] = numbers[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self.last), "left_out": self.left_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last, self.left_out = dict(state["last"]), state["left_out"]


def _rollout(address: str, name: str, log: str) -> None:
    _log_to(log, name)
    rollout = Rollout([Born] * LANES, lanes=LANES, module=RandomModule, fragment_length=LENGTH)
    feed(rollout, address, name=name, limits=_LIMITS, linger=None)


def _train(address: str, folder: Path, options: dict[str, Any], rollouts: int, every: int) -> None:
    _log_to(f"{folder}.log", "trainer")
    handed, version = Handed(), torch.nn.Linear(1, 1)
    sources = Sources(rollouts, join_timeout=None)
    notes = open(f"{folder}.notes", "a")
    with TrainerStream(address, sources=sources, limits=_LIMITS, **options) as stream:
        stream.attach(handed=handed, policy=version)
        if any(folder.glob("checkpoint-*")):
            stream.resume(folder)
        else:
            stream.save(folder)  # against which is counted what rollouts have forgotten
        stream.publish({})
        for count, batch in enumerate(stream):
            handed.take(batch)
            told = stream.missed * LENGTH + stream.lost.get("max_lag", 0)
            assert handed.left_out <= told, (handed.left_out, stream.missed, stream.lost)
            if count % every == every - 1:
                stream.save(folder, keep=2)
            print(json.dumps([stream.log.counted[0], handed.left_out, told, len(handed.last)]), file=notes, flush=True)
            stream.publish({})


def _log_to(path: str, name: str) -> None:
    logging.basicConfig(filename=path, level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", force=True)


def kill_and_go_on(
    kind: str, folder: Path, kills: int, *, rollouts: int = 2, every: int = 5, seed: int = 0, **options: Any
) -> Counter[str]:
    """Kill a trainer, its rollouts or all of them, so many times, and start them again; who was killed, how often.

    kind       of the address: "unix", "shm" or "tcp"
    every      number of batches after which the trainer saves
    options    of the stream

    Raises AssertionError if a trainer has failed, or none is handed anything for a minute.
    """
    draws, killed = random.Random(seed), Counter[str]()
    port = 20_000 + os.getpid() % 20_000
    address = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"{kind}:{folder}/it"
    saved = folder / "saved"
    notes = Path(f"{saved}.notes")

    def begin(number: int) -> Any:
        args: Sequence[Any] = (address, f"rollout {number}", f"{saved}.log")
        target: Any = _rollout
        if number == rollouts:
            target, args = _train, (address, saved, options, rollouts, every)
        process = forked().Process(target=target, args=args)
        process.start()
        return process

    there = [begin(number) for number in range(rollouts + 1)]
    try:
        for _ in range(kills + 1):
            begun, until = notes.stat().st_size if notes.exists() else 0, time.monotonic() + 60.0
            while not notes.exists() or notes.stat().st_size <= begun:
                assert there[rollouts].is_alive(), f"the trainer has failed: {saved}.log"
                assert time.monotonic() < until, f"nothing comes: {saved}.log"
                time.sleep(0.01)
            time.sleep(draws.expovariate(4.0))
            assert there[rollouts].is_alive(), f"the trainer has failed: {saved}.log"
            one = draws.randrange(rollouts)
            of_kinds = {"all": range(rollouts + 1), "trainer": [rollouts], "rollout": [one], "both": [one, rollouts]}
            who = draws.choice(list(of_kinds))
            chosen = of_kinds[who]
            for number in chosen:
                os.kill(there[number].pid, signal.SIGKILL)
                there[number].join()
                if draws.random() < 0.3:
                    time.sleep(draws.random() / 2)
            for number in draws.sample(chosen, len(chosen)):
                there[number] = begin(number)
            killed[who] += 1
    finally:
        for process in there:
            process.kill()
            process.join()
    return killed
