"""The chunks of fragments as a sequence of episodes."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.tree import Tree, concatenate_trees, kind_of

if TYPE_CHECKING:
    from rollflow.stream.fragment import Fragment


class FragmentEpisodes(Sequence[SingleAgentEpisode]):
    """The chunks of some fragments, fragment by fragment, as episodes that are made only when asked for.

    A learner piece that loops over it gets episodes; one that asks for columns gets all rows at once.
    """

    def __init__(self, fragments: Sequence["Fragment"]) -> None:
        self.fragments = list(fragments)
        self._bounds = np.cumsum([len(fragment.chunks.slot) for fragment in self.fragments])
        self._made: dict[int, SingleAgentEpisode] = {}

    def __len__(self) -> int:
        return int(self._bounds[-1]) if self.fragments else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]  # an IndexError for what lies outside, as a list gives
        episode = self._made.get(position)
        if episode is None:
            which = int(np.searchsorted(self._bounds, position, side="right"))
            before = int(self._bounds[which - 1]) if which else 0
            episode = self._made[position] = self.fragments[which].chunk(position - before)
        return episode

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the extra model outputs that every fragment has, and all alike."""
        if len(self.fragments) < 2:
            return self.fragments[0].extra_columns if self.fragments else ()
        first, *others = (_kinds(fragment) for fragment in self.fragments)
        return tuple(name for name in first if all(kinds.get(name) == first[name] for kinds in others))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """i64[C]: steps of each chunk."""
        return np.concatenate([fragment.chunks.stop - fragment.chunks.start for fragment in self.fragments])

    def gather(self, name: str) -> Tree:
        """A column's rows of all chunks, end to end: a tree of new arrays `any[sum(lengths), ...]`."""
        return concatenate_trees([fragment.gather(name) for fragment in self.fragments])

    def last_observations(self) -> Tree:
        """The observation after each chunk's last step: a tree of new arrays `any[C, ...]`."""
        return concatenate_trees([fragment.last_observations() for fragment in self.fragments])

    def last(self, name: str) -> Tree:
        """What each chunk's last step recorded in a column: a tree of new arrays `any[C, ...]`."""
        return concatenate_trees([fragment.last(name) for fragment in self.fragments])

    def preceding(self, name: str) -> Tree:
        """What the step before each chunk recorded in a column: as `Fragment.preceding`."""
        return concatenate_trees([fragment.preceding(name) for fragment in self.fragments])

    def recent_observations(self, count: int) -> Tree:
        """The last `count` observations at every step of all chunks: as `Fragment.recent_observations`."""
        return concatenate_trees([fragment.recent_observations(count) for fragment in self.fragments])

    def chunk_index(self, field: str) -> NDArray[Any]:
        """One field of every fragment's `ChunkIndex`, end to end: `any[C]`."""
        return np.concatenate([getattr(fragment.chunks, field) for fragment in self.fragments])


def _kinds(fragment: "Fragment") -> dict[str, Tree]:
    return {name: kind_of(fragment.columns[name].row(0)) for name in fragment.extra_columns}
