"""Recording of whole episodes: so many of each slot, so that short ones do not come more often than long ones."""

import copy
from collections.abc import Callable
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.rollout.rollout import Rollout
from rollflow.sinks.datasets.dataset_sink import DatasetSink
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import ChunkIndex, Final, Fragment


def record_episodes(
    rollout: Rollout, sink: DatasetSink, episodes: int, progress: Callable[[int], None] | None = None
) -> int:
    """Run a rollout of one lane, and write the first episodes of its slots to a sink, in equal shares; their number.

    episodes    number, which is reached unless the rollout ends before
    progress    called with the number of whole episodes, after each fragment
    """
    shares = shares_of(episodes, rollout.environments.num_envs)
    count = 0
    for fragment in rollout.fragments():
        chunks = fragment.chunks
        kept = chunks.number < shares[chunks.slot]
        if kept.any():
            sink(_with_chunks(fragment, kept))
        count += int(np.count_nonzero((chunks.terminated | chunks.truncated) & kept))
        if progress is not None:
            progress(count)
        if count == episodes:
            break
    return count


def shares_of(episodes: int, slots: int) -> NDArray[np.int64]:
    """How many of some episodes each slot plays, i64[slots]: as equal as can be, the first ones one more."""
    shares = np.full(slots, episodes // slots)
    shares[: episodes % slots] += 1
    return shares


def _with_chunks(fragment: Fragment, kept: NDArray[np.bool_]) -> Fragment:
    """A fragment with some of another's chunks, and with its columns.

    kept    bool[C]
    """
    if kept.all():
        return fragment
    chosen = copy.copy(fragment)
    vars(chosen).pop("row_order", None)
    chosen.chunks = ChunkIndex(**{each.name: getattr(fragment.chunks, each.name)[kept] for each in fields(ChunkIndex)})
    ends = set(zip(chosen.chunks.stop.tolist(), chosen.chunks.slot.tolist(), strict=True))
    chosen.finals = []
    for final in fragment.finals:
        at = np.array([(final.row + 1, slot) in ends for slot in final.slots.tolist()], np.bool_)
        if at.any():
            observations = map_tree(lambda leaf, at=at: leaf[at], final.observations)
            chosen.finals.append(Final(final.row, final.slots[at], observations, final.infos))
    return chosen
