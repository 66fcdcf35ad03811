"""Summary of a dataset's episodes: returns, lengths and policy versions, as arrays, to choose episodes by."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import Description, empty_tree
from rollflow.sinks.datasets.episode_block import EpisodeStore
from rollflow.sinks.datasets.stored_steps import Ints
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import leaves_of

_NEEDED = (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.POLICY_VERSION)
_STEPS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeSummary:
    """What a dataset's E episodes are like, in the order of their numbers.

    returns            f64[E]    sum of the rewards that are stored
    lengths            i64[E]    steps that are stored
    runs               i64[E]    number of the run in the description
    is_whole           bool[E]   whether beginning and end are stored
    oldest_version     i64[E]    the oldest policy version that an action was computed with; 0 if it is not stored
    newest_version     i64[E]
    """

    returns: NDArray[np.float64]
    lengths: Ints
    runs: Ints
    is_whole: NDArray[np.bool_]
    oldest_version: Ints
    newest_version: Ints


def summary_of(store: EpisodeStore) -> EpisodeSummary:
    """Read the rewards, flags and policy versions of all episodes. Raises DatasetError for a damaged file."""
    count = len(store.num_steps)
    returns, is_whole = np.zeros(count), store.t_started == 0
    oldest, newest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    columns = {name: store.columns[name] for name in _NEEDED if name in store.columns}
    for episodes in windows_of(store.num_steps, np.arange(count), _STEPS_AT_ONCE):
        lengths = store.num_steps[episodes]
        steps = store.read(episodes, columns, with_last=False)
        read = {name: steps.taken(name) for name in columns}
        begins, ends = np.cumsum(lengths) - lengths, np.cumsum(lengths) - 1
        returns[episodes] = np.add.reduceat(read[Columns.REWARDS].astype(np.float64), begins)
        is_whole[episodes] &= read[Columns.TERMINATEDS][ends] | read[Columns.TRUNCATEDS][ends]
        if Columns.POLICY_VERSION in read:
            oldest[episodes] = np.minimum.reduceat(read[Columns.POLICY_VERSION], begins)
            newest[episodes] = np.maximum.reduceat(read[Columns.POLICY_VERSION], begins)
    return EpisodeSummary(returns, store.num_steps, store.runs, is_whole, oldest, newest)


def windows_of(num_steps: Ints, episodes: Ints, window_steps: int) -> list[Ints]:
    """Episodes, i64[K], in groups of about so many steps that stand one behind the other.

    num_steps    i64[E]    of all episodes
    """
    window = (np.cumsum(num_steps[episodes]) - 1) // window_steps
    return [each for each in np.split(episodes, np.flatnonzero(np.diff(window)) + 1) if len(each)]


def step_bytes(columns: Mapping[str, Description]) -> int:
    """Bytes of one step in memory."""
    return sum(leaf.nbytes for each in columns.values() for leaf in leaves_of(empty_tree(each, 1)))


def histogram(values: NDArray[Any], bins: int = 10, width: int = 40) -> Iterator[str]:
    """Lines of a histogram of values, any[E]: the range of each bin, a bar, and how many values are in it."""
    if not len(values):
        return
    low, high = values.min(), values.max()
    if np.all(values == np.round(values)) and max(abs(low), abs(high)) < 2**53:
        size = int((high - low) // bins + 1)
        edges = np.arange(low, high + size + 1, size)
        names = [f"{first:.0f}" + (f" … {first + size - 1:.0f}" if size > 1 else "") for first in edges[:-1]]
    else:
        edges = np.linspace(low / 2, high / 2, bins + 1) * 2  # between the largest numbers is more than a float holds
        names = [f"{first:.4g} … {second:.4g}" for first, second in pairwise(edges)]
    counts, _ = np.histogram(values, edges)
    wide = max(map(len, names))
    for name, count in zip(names, counts.tolist(), strict=True):
        bar = "█" * -(-count * width // int(counts.max()))
        yield f"  {name:>{wide}}  {bar:<{width}}  {count}".rstrip()
