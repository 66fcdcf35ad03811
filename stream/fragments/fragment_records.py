"""Records of a fragment: layout, index of its chunks, last observations beside the columns, losses, episode ids."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree, map_tree


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """Properties that all fragments of a lane share."""

    num_slots: int
    num_rows: int  # T
    lookback: int  # H
    action_space: gym.Space[Any]
    resets_next_step: bool  # a dead row follows each episode's end
    episode_id: Callable[[int, int], str]  # (slot, how many episodes the slot had before) -> id


@dataclass(frozen=True, slots=True, eq=False)
class ChunkIndex:
    """Positions of a fragment's C chunks, none of them empty: slot by slot, within a slot by time."""

    slot: NDArray[np.int64]  # i64[C]
    number: NDArray[np.int64]  # i64[C]  how many episodes the slot had before this one
    start: NDArray[np.int64]  # i64[C]  row of the first transition
    stop: NDArray[np.int64]  # i64[C]  row after the last transition
    t_started: NDArray[np.int64]  # i64[C]  episode steps before `start`
    lookback: NDArray[np.int64]  # i64[C]  rows before `start` that belong to the same episode, at most H
    terminated: NDArray[np.bool_]  # bool[C]
    truncated: NDArray[np.bool_]  # bool[C]


@dataclass(frozen=True, slots=True, eq=False)
class Final:
    """Last observations and infos of the K episodes that ended in one row, where obs[row + 1] lacks them."""

    row: int
    slots: NDArray[np.int64]  # i64[K]
    observations: Tree  # any[K, ...]
    infos: Mapping[str, Any]  # gymnasium's vector form, over all slots


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """States that a stateful module had before the first steps of K episodes."""

    rows: NDArray[np.int64]  # i64[K]  of the first steps
    slots: NDArray[np.int64]  # i64[K]
    states: Tree  # any[K, ...]

    def at(self, chosen: NDArray[np.bool_]) -> "Start":
        """Some of the K records, bool[K]."""
        return Start(self.rows[chosen], self.slots[chosen], map_tree(lambda leaf: leaf[chosen], self.states))


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """Loss of environments while they made the step of a row. New episodes begin in that row.

    An episode whose last step came before the fragment has no chunk here to mark as truncated. It ends with the chunk
    in the fragment before.
    """

    row: int
    slots: NDArray[np.int64]  # i64[K]
    cut: NDArray[np.int64]  # i64[C]  slots that made a step in the fragment before: that step is marked as truncated
    reason: str


@dataclass(frozen=True, slots=True)
class EpisodeIds:
    """Ids of a lane's episodes: unique to the run, and the same in every run with one seed.

    prefix    of this lane and no other
    """

    prefix: str
    _begun: Any = field(init=False, repr=False, compare=False)  # hash of what they all begin with

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begun", hashlib.blake2b(f"{self.prefix}/".encode(), digest_size=16))

    def __call__(self, slot: int, number: int) -> str:
        """The id of an episode of a slot that had `number` episodes before."""
        whole = self._begun.copy()
        whole.update(b"%d/%d" % (slot, number))
        return str(whole.hexdigest())

    def __reduce__(self) -> Any:
        return EpisodeIds, (self.prefix,)


@dataclass(frozen=True, slots=True)
class NoFragment:
    """Word in place of a fragment that a lane, gone for good or absent, does not give, or not now."""

    index: int
    is_set_aside: bool = True  # it does not go on round the ring
