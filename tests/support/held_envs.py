"""Environments that come to a place and wait there, until they are let go."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numbered_env import NumberedEnv

LONGEST_S = 60.0


class Held(NumberedEnv):
    """Waits in these steps of its life and in these resets, both numbered from 0 on; says when it is closed.

    lives    only so many lives of a slot are held
    makes    numbers of the lives, from 0 on, in whose making it waits
    """

    def __init__(
        self,
        slot: int,
        folder: Path,
        *,
        steps: Sequence[int] = (),
        resets: Sequence[int] = (),
        lives: int = 1,
        makes: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(slot, **kwargs)
        self.folder = folder
        with (folder / f"lives {slot}").open("a") as file:
            file.write("life\n")
        life = times_made(folder, slot) - 1
        self.held_steps, self.held_resets = (steps, resets) if life < lives else ((), ())
        if life in makes:
            self._wait()

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.episode + 1 in self.held_resets:
            self._wait()
        return super().reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.life in self.held_steps:
            self._wait()
        return super().step(action)

    def close(self) -> None:
        super().close()
        (self.folder / f"closed {self.slot}").touch()

    def _wait(self) -> None:
        times = len(list(self.folder.glob(f"held {self.slot} *")))
        (self.folder / f"held {self.slot} {times}").touch()
        await_file(self.folder / f"go {self.slot} {times}")


def await_held(folder: Path, slot: int, times: int = 0) -> None:
    """Wait until this slot waits, after it has done so already so many times."""
    await_file(folder / f"held {slot} {times}")


def let_go(folder: Path, slot: int, times: int = 0) -> None:
    """Have it go on."""
    (folder / f"go {slot} {times}").touch()


def times_made(folder: Path, slot: int) -> int:
    """Return how often this slot has been made."""
    return len((folder / f"lives {slot}").read_text().split())


def is_closed(folder: Path, slot: int) -> bool:
    """Return True once it has been closed."""
    return (folder / f"closed {slot}").exists()


def await_file(path: Path) -> None:
    """Wait until somebody has made a file. Raises TimeoutError when nobody does."""
    await_that(path.exists, lambda: f"{path} is not there")


def await_that(is_so: Callable[[], Any], seen: Callable[[], object] = str) -> None:
    """Wait until something holds. Raises TimeoutError where it never does, with what is `seen` then."""
    until = time.monotonic() + LONGEST_S
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"it has not come to that: {seen()}")
        time.sleep(0.002)
