"""Environments that come to an end before their time, and what shows how far they came."""

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numbered_env import NumberedEnv

from rollflow import Fragment


class Doomed(NumberedEnv):
    """Writes down every step that it makes; in a step of the life its `fate` comes, in each of so many lives."""

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
            if self.fate.startswith("nan"):
                observation, _, *rest = super().step(action)
                return observation, np.nan, *rest
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.fate])
        if self.is_fated and self.life == self.fated + 1 and self.fate == "nan and raise":
            raise RuntimeError("it broke")
        answer = super().step(action)
        with self.log_path.open("a") as file:
            file.write(f"{self.life}\n")
        return answer

    @staticmethod
    def lives(log: Path, slot: int) -> list[int]:
        """Steps made in every life."""
        return [len(life.split()) for life in (log / f"{slot}").read_text().split("life\n")[1:]]


class Tells(Doomed):
    """Says in whose process it is, once it has been stepped; takes a while from a step that is made to its answer."""

    def __init__(self, slot: int, log: Path, **kwargs: Any) -> None:
        super().__init__(slot, log, "", 0, 0, **kwargs)

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        if self.life == 1:
            (self.log_path.parent / f"pid {os.getpid()}").touch()
        time.sleep(1e-3)  # in which it may be struck
        return answer


class NotMadeAgain(NumberedEnv):
    """Raises in its life's step 17, and whenever another one is made."""

    def __init__(self, slot: int, folder: Path) -> None:
        super().__init__(slot)
        self.broken = folder / "broken"
        if self.broken.exists():
            raise RuntimeError("it can't be made again")

    def step(self, action: Any) -> Any:
        if self.life == 17:
            self.broken.touch()
            raise RuntimeError("it broke")
        return super().step(action)


class NeverReset(NumberedEnv):
    """Raises in every reset."""

    def reset(self, **options: Any) -> Any:
        raise RuntimeError("it has no beginning")


def rewards_by_slot(fragments: list[Fragment]) -> dict[int, list[int]]:
    """Return the rewards of each slot's transitions, in the order of time."""
    found: dict[int, list[int]] = {}
    for fragment in sorted(fragments, key=lambda fragment: fragment.sequence):
        for chunk in fragment.episodes():
            slot = int(chunk.get_observations(0)[0])
            found.setdefault(slot, []).extend(int(reward) for reward in chunk.get_rewards())
    return found


def lives_of(rewards: list[int]) -> list[int]:
    """Steps in every life: rewards count them from 1 on. Fails where one is missing or doubled."""
    ends = [at for at in range(len(rewards)) if at + 1 == len(rewards) or rewards[at + 1] == 1]
    begins = [0, *(end + 1 for end in ends[:-1])] if ends else []
    for begin, end in zip(begins, ends, strict=True):
        assert rewards[begin : end + 1] == list(range(1, end - begin + 2))
    return [rewards[end] for end in ends]


def check_chunks(fragments: list[Fragment]) -> None:
    """Continuity and alignment of every slot's chunks, and how those ended that go on nowhere."""
    by_slot: dict[tuple[int, int], list[Any]] = {}
    for fragment in sorted(fragments, key=lambda fragment: fragment.sequence):
        for index, chunk in enumerate(fragment.episodes()):
            by_slot.setdefault((fragment.lane, int(fragment.chunks.slot[index])), []).append((fragment, chunk))
    for (lane, slot), chunks in by_slot.items():
        ids = [chunk.id_ for _, chunk in chunks]
        assert len(dict.fromkeys(ids)) == 1 + sum(a != b for a, b in pairwise(ids))
        for place, (fragment, chunk) in enumerate(chunks):
            observations = chunk.get_observations(slice(0, None))
            assert [int(row[2]) for row in observations] == list(
                range(chunk.t_started, chunk.t_started + len(chunk) + 1)
            )
            assert len({int(row[1]) for row in observations}) == 1
            np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), observations[:-1])
            before = chunks[place - 1][1] if place else None
            if chunk.t_started:
                assert before is not None
                assert before.id_ == chunk.id_
            elif before is not None and not before.is_done:
                # It ended where a fragment begins: there is no chunk left that could say so.
                since, until = chunks[place - 1][0].sequence, fragment.sequence
                between = [each for each in fragments if each.lane == lane and since < each.sequence <= until]
                lost_at = [loss.row for each in between for loss in each.losses if slot in loss.slots]
                assert fragment.first_row in lost_at
            lost = chunk.custom_data.get("lost")
            assert lost is None or (chunk.is_truncated and not chunk.is_terminated)
