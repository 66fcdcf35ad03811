"""Rollouts of several agents over remote environments for tests."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ending_agent_envs import DoomedAgents
from lost_agents import agent_chunks, numbers
from serial_module import SerialModule, at_of

from rollflow import MultiAgentRollout, RemoteEnvs
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.wire import Limits

HASTY = Limits(heartbeat_s=0.3, grace_s=0.5, handshake_s=2.0)
Fragments = list[MultiAgentFragment]


def rollout_over(envs: RemoteEnvs, **options: Any) -> MultiAgentRollout:
    return MultiAgentRollout(envs, **{"module": SerialModule(), "fragment_length": 8, "seed": 0, **options})


def makers(folder: Path, *slots: int, **options: Any) -> list[Any]:
    """Environments that write down what they tell."""
    return [partial(DoomedAgents, slot, folder, **{"nested": 0, **options}) for slot in slots]


def told(folder: Path, *slots: int, **options: Any) -> list[Any]:
    """Return environments' arguments in plain form, for a host in another process."""
    return [((slot, folder), {"nested": 0, **options}) for slot in slots]


def slots_of(fragments: Fragments) -> set[int]:
    """The numbers of the environments that agents' chunks are of."""
    return {numbers(at_of(chunk.get_observations(0)))[0] for _, chunk in agent_chunks(fragments)}


def taken_until(fragments: Iterator[MultiAgentFragment], enough: Callable[[Fragments], bool]) -> Fragments:
    taken: Fragments = []
    while not enough(taken):
        taken.append(next(fragments))
    return taken
