"""What somebody would write by hand for environments that wait: a thread for each, and one for the forward passes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch

from benchmarks.policies import sampled


class _Row(NamedTuple):
    """A transition, and the environment's next observation."""

    slot: int
    observation: Any
    action: Any
    log_prob: Any
    value: Any
    reward: float
    terminated: bool
    truncated: bool


class Threads:
    """Environments in a thread each; a thread of its own passes forward whatever observations are there.

    make       makes an environment
    policy     its module
    length     steps of every slot in a batch, on average: rows are taken as they come
    """

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], policy: Any, slots: int, length: int) -> None:
        self._policy, self._rows_of_batch = policy, slots * length
        self._asked: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._answers: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(slots)]
        self._rows: SimpleQueue[_Row | Exception] = SimpleQueue()
        self._is_over = False
        self._envs = [make() for _ in range(slots)]
        works = [partial(self._step, env, slot) for slot, env in enumerate(self._envs)]
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (*works, self._pass_forward)]
        self.batch: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End after the steps that are under way."""
        self._is_over = True
        self._asked.put(None)
        for answers in self._answers:
            answers.put(None)
        for thread in self._threads:
            thread.join()
        for env in self._envs:
            env.close()

    def take(self) -> int:
        """Wait for a batch; how many transitions it has. Raises what an environment or the module raised."""
        rows: list[_Row] = []
        while len(rows) < self._rows_of_batch:
            row = self._rows.get()
            if isinstance(row, Exception):
                raise row
            rows.append(row)
        self.batch = {
            name: torch.from_numpy(np.asarray(column))
            for name, column in zip(_Row._fields, zip(*rows, strict=True), strict=True)
        }
        return len(rows)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._rows.put(error)

    def _step(self, env: gym.Env[Any, Any], slot: int) -> None:
        observation, _ = env.reset(seed=slot)
        while not self._is_over:
            self._asked.put((slot, observation))
            answer = self._answers[slot].get()
            if answer is None:
                break
            following, reward, terminated, truncated, _ = env.step(answer[0])
            self._rows.put(_Row(slot, observation, *answer, float(reward), terminated, truncated))
            observation = env.reset()[0] if terminated or truncated else following

    def _pass_forward(self) -> None:
        with torch.no_grad():
            while not self._is_over:
                ready = [self._asked.get()]
                while not self._asked.empty():
                    ready.append(self._asked.get())
                asked = [each for each in ready if each is not None]
                if not asked:
                    continue
                output = self._policy._forward({"obs": torch.from_numpy(np.stack([each for _, each in asked]))})
                actions, log_probs = (column.numpy() for column in sampled(output["action_dist_inputs"]))
                answers = zip(actions, log_probs, output["vf_preds"].numpy(), strict=True)
                for (slot, _), answer in zip(asked, answers, strict=True):
                    self._answers[slot].put(answer)


@contextmanager
def running(threads: Threads) -> Iterator[Threads]:
    """At work until the block ends."""
    threads.start()
    try:
        yield threads
    finally:
        threads.close()
