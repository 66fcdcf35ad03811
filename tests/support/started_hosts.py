"""Numbered environments of hosts that a rollout starts, and the law that holds when one is killed.

Every environment has a slot of its own, in whichever process it is; it writes down each step that it makes.
"""

import os
from itertools import count
from pathlib import Path

from ending_agent_envs import DoomedAgents
from ending_envs import Doomed, Tells, rewards_by_slot

from rollflow import Fragment

LOG_VARIABLE = "NUMBERED_LOG"  # the folder that environments write to
_MOST = 64  # environments in a process
_numbers = count()


def telling_env() -> Tells:
    """Make an environment that no other has the slot of."""
    return Tells(_slot(), Path(os.environ[LOG_VARIABLE]), lengths=(5, 40))


def telling_agents() -> DoomedAgents:
    """Make an environment of two agents that no other has the slot of."""
    return DoomedAgents(_slot(), Path(os.environ[LOG_VARIABLE]), agents=2, nested=1, at_once=True)


def _slot() -> int:
    return os.getpid() * _MOST + next(_numbers) % _MOST


def pids_of(fragments: list[Fragment]) -> set[int]:
    """Return the processes whose environments made these fragments."""
    return {slot // _MOST for slot in rewards_by_slot(fragments)}


def missing_steps(fragments: list[Fragment], folder: Path) -> dict[int, int]:
    """Steps that a slot's environment has made and that did not come, slot -> number, where that is not 0.

    Fails where one came twice, or was left out between others.
    """
    came, missing = rewards_by_slot(fragments), {}
    for slot in [int(path.name) for path in folder.iterdir() if path.name.isdigit()]:
        [made] = Doomed.lives(folder, slot)
        rewards = came.pop(slot, [])
        assert rewards == list(range(1, len(rewards) + 1))
        if made != len(rewards):
            missing[slot] = made - len(rewards)
    assert came == {}
    return missing


def check_only_unfinished(missing: dict[int, int], pids: set[int], fragment_length: int) -> None:
    """What is missing was of the fragments that the hosts of these processes had begun when they were killed."""
    assert {slot // _MOST for slot in missing} <= pids
    assert all(0 < steps <= fragment_length for steps in missing.values())
