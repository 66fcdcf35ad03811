"""Policies to be served, whose actions show which session acted, for how long, and with which version."""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rollflow import Policy, RLModule
from rollflow.policy.serving import BatchOptions, HttpServer, Shelf
from rollflow.policy.serving.request import Acted, ActRequest, Outcome

OBSERVATIONS = spaces.Box(-1e6, 1e6, (2,), np.float32)
SECRET = "correct horse battery stäple"
ACTIONS = spaces.Box(-1e9, 1e9, (2,), np.float32)


class Sums(RLModule):
    """Chooses [sum of the session's first observation numbers so far, `offset`]: a recurrent module."""

    def setup(self) -> None:
        self.offset = torch.nn.Parameter(torch.zeros(1))

    def get_initial_state(self) -> Any:
        return {"sum": torch.zeros(1)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        sums = batch["state_in"]["sum"] + batch["obs"][:, :, :1].sum(1)
        actions = torch.cat([sums, self.offset.expand(len(sums), 1)], 1)[:, None]
        return {"actions": actions, "state_out": {"sum": sums}}


class Echo(RLModule):
    """Chooses [the observation's first number, `offset`]: a module without memory. Hundreds in it raise ValueError."""

    def setup(self) -> None:
        self.offset = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if bool((batch["obs"] == 13.0).any()):
            raise ValueError("thirteen")
        return {"actions": torch.cat([batch["obs"][:, :1], self.offset.expand(len(batch["obs"]), 1)], 1)}


def policy_of(module: Any, offset: float = 0.0) -> Policy:
    """A policy of one of these modules."""
    made = module(OBSERVATIONS, ACTIONS)
    with torch.no_grad():
        made.offset.fill_(offset)
    return Policy(made, observation_space=OBSERVATIONS, action_space=ACTIONS)


@contextmanager
def served(
    *policies: Any, names: Sequence[str] = "abc", options: BatchOptions | None = None, **others: Any
) -> Iterator[tuple[Shelf, HttpServer]]:
    """A server with policies under names."""
    shelf = Shelf(options)
    for name, policy in zip(names, policies, strict=False):
        shelf.put(name, policy, "1")
    with HttpServer(shelf, "127.0.0.1:0", **{"secret": SECRET, **others}) as server:
        yield shelf, server
    shelf.close()


def value_of(meters: Any, meter: str) -> float:
    """The value of a meter of version "1" of policy "a", among `Meters`."""
    value = meters.registry.get_sample_value(f"rollflow_serve_{meter}", {"policy": "a", "version": "1"})
    assert value is not None
    return float(value)


class Held:
    """A policy whose batches wait until they are let go; `sizes` has those that have begun."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.sizes: list[int] = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def act_batch(self, observations: Any, rewards: Any, sessions: Sequence[Any]) -> Any:
        """Act as the policy does, once `go` is released."""
        self.sizes.append(len(sessions))
        self.begun.release()
        assert self.go.acquire(timeout=30)
        return self._policy.act_batch(observations, rewards, sessions)


class Taking:
    """Front that keeps the answers, in the order in which they came."""

    def __init__(self) -> None:
        self.answers: queue.Queue[tuple[Any, Outcome]] = queue.Queue()

    def deliver(self, outcomes: Sequence[tuple[Any, Outcome]]) -> None:
        """Keep some answers."""
        for answer in outcomes:
            self.answers.put(answer)

    def take(self, count: int = 1) -> dict[Any, Outcome]:
        """The next answers, by ticket."""
        return dict(self.answers.get(timeout=30) for _ in range(count))

    def request(self, number: float, session: Any = None, *, begins: bool = False, ticket: Any = None) -> ActRequest:
        """A request with one observation, whose ticket is its session by default."""
        observation = np.array([number, 0.0], np.float32)
        return ActRequest(
            session, observation, float("nan"), begins, self.deliver, session if ticket is None else ticket
        )


def first_of(outcome: Outcome) -> float:
    """The first number of an answer's action."""
    assert isinstance(outcome, Acted), outcome
    return float(outcome.action[0])
