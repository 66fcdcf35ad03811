"""Environments of several agents that come to an end before their time, or wait; what they did is in files."""

import os
import pickle
import signal
from pathlib import Path
from typing import Any

from held_envs import await_file
from numbered_agents import AgentsTold, NumberedAgents

_LIVES = 1000  # episodes of one life are numbered from a thousand times its number on


class DoomedAgents(NumberedAgents):
    """Writes down what it tells, and its process id; comes to its fate in a step of its life, in each of so many lives.

    fate    "kill", "stop", "raise"; "stop at reset"; "wrong": to break the conventions; "hold": to wait for a file
            "go {slot}", when there is one "held {slot}" that has its process id
    step    counted over the life, from 0 on
    lives   how many lives are fated
    """

    def __init__(self, slot: int, folder: Path, *, fate: str = "", step: int = 0, lives: int = 0, **kwargs: Any):
        super().__init__(slot, **kwargs)
        self.folder, self.fate, self.fated = folder, fate, step
        life = len(list(folder.glob(f"log {slot} *")))
        self.path = folder / f"log {slot} {life}"
        self.path.touch()
        (folder / f"pid {slot}").write_text(str(os.getpid()))
        self.is_fated = life < lives
        self.episode, self.made = life * _LIVES - 1, 0

    def reset(self, **kwargs: Any) -> Any:
        if self.is_fated and self.fate == "stop at reset":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().reset(**kwargs)

    def step(self, actions: Any) -> Any:
        if self.is_fated and self.made == self.fated and self.fate != "stop at reset":
            if self.fate == "raise":
                raise RuntimeError("it broke")
            if self.fate == "hold":
                held = self.folder / f"holding {self.slot}"
                held.write_text(str(os.getpid()))
                held.rename(self.folder / f"held {self.slot}")
                await_file(self.folder / f"go {self.slot}")
            elif self.fate == "wrong":
                return {"nobody": 0}, {}, {}, {}, {}
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.fate])
        self.made += 1
        return super().step(actions)

    def _told(self, *told: Any) -> Any:
        answer = super()._told(*told)
        with self.path.open("ab") as file:
            pickle.dump(tuple(self.log[-1]), file)
        return answer


def logs_of(folder: Path, slot: int) -> list[list[AgentsTold]]:
    """Return an environment's logs, one for each life."""
    lives = sorted(folder.glob(f"log {slot} *"), key=lambda path: int(path.name.split()[-1]))
    return [_read(path) for path in lives]


def _read(path: Path) -> list[AgentsTold]:
    told = []
    with path.open("rb") as file:
        while True:
            try:
                told.append(AgentsTold(*pickle.load(file)))
            except EOFError:
                return told
