"""Environments that come to a place and wait there, until they are let go."""

import time
from pathlib import Path
from typing import Any

from numbered_env import NumberedEnv

LONGEST_S = 60.0


class Held(NumberedEnv):
    """Waits in step number `step` of its life, or in its reset number `reset`, both from 0 on; says when it is closed.

    Each slot is held once, be it made again or not.
    """

    def __init__(
        self, slot: int, folder: Path, *, step: int | None = None, reset: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(slot, **kwargs)
        self.folder, self.held_step, self.held_reset = folder, step, reset

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.episode + 1 == self.held_reset:
            self._wait()
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.life == self.held_step:
            self._wait()
        return super().step(action)

    def close(self) -> None:
        super().close()
        (self.folder / f"closed {self.slot}").touch()

    def _wait(self) -> None:
        held = self.folder / f"held {self.slot}"
        if not held.exists():
            held.touch()
            await_file(self.folder / f"go {self.slot}")


def await_held(folder: Path, slot: int) -> None:
    """Wait until this slot has come to where it waits."""
    await_file(folder / f"held {slot}")


def let_go(folder: Path, slot: int) -> None:
    """Have it go on."""
    (folder / f"go {slot}").touch()


def is_closed(folder: Path, slot: int) -> bool:
    """Whether it has been closed."""
    return (folder / f"closed {slot}").exists()


def await_file(path: Path) -> None:
    """Wait until somebody has made a file. Raises TimeoutError when nobody does."""
    until = time.monotonic() + LONGEST_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} is not there")
        time.sleep(0.002)
