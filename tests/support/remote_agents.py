"""Rollouts of several agents over remote environments for tests, and what they have in common with those of one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import remote_rollouts
from ending_agent_envs import DoomedAgents
from lost_agents import agent_chunks, check_laws, numbers
from serial_module import SerialModule, at_of

from rollflow import MultiAgentRollout, RemoteEnvs
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

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


class Kind(NamedTuple):
    """Rollouts of one agent or of several over hosts.

    makers        environments of a host, of a folder and slots; those of several agents write down what they tell there
    check_laws    checks fragments of a rollout over so many environments
    max_batch     slots that a pass may have, fewer than some lanes have
    """

    makers: Callable[..., list[Any]]
    rollout_over: Callable[..., Any]
    slots_of: Callable[[Any], set[int]]
    check_laws: Callable[[Any, Any, Path, int], None]
    max_batch: int


ONE = Kind(
    lambda folder, *slots: remote_rollouts.makers(*slots),
    remote_rollouts.rollout_over,
    remote_rollouts.slots_of,
    lambda rollout, fragments, folder, envs: remote_rollouts.check_laws(fragments, rollout.lost, slots_lost=envs),
    2,
)
SEVERAL = Kind(makers, rollout_over, slots_of, check_laws, 8)
