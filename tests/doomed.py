"""Environments that come to an end before their time."""

import os
import signal
from pathlib import Path
from typing import Any

from numbered_env import NumberedEnv


class Doomed(NumberedEnv):
    """Writes down every step that it makes; in its `fate` step of the life it dies, each of so many lives."""

    def __init__(self, slot: int, log: Path, fate: str, step: int, lives: int, **kwargs: Any) -> None:
        super().__init__(slot, **kwargs)
        self.log_path, self.fate, self.fated = log / f"{slot}", fate, step
        with self.log_path.open("a") as file:
            file.write("life\n")
        self.is_fated = self.log_path.read_text().count("life") <= lives

    def step(self, action: Any) -> Any:
        if self.is_fated and self.life == self.fated:
            if self.fate == "raise":
                raise RuntimeError("it broke")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.fate])
        answer = super().step(action)
        with self.log_path.open("a") as file:
            file.write(f"{self.life}\n")
        return answer

    @staticmethod
    def lives(log: Path, slot: int) -> list[int]:
        """Steps made in every life."""
        return [len(life.split()) for life in (log / f"{slot}").read_text().split("life\n")[1:]]


class Reports(NumberedEnv):
    """Has an info that can't be handed to another process."""

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"simulator": object()}
