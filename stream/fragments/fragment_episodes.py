"""FragmentEpisodes: the chunks of fragments as a sequence of episodes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.tree import Tree, concatenate_trees, kind_of
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

if TYPE_CHECKING:
    from rollflow.stream.fragments.fragment import Fragment


class FragmentEpisodes(Sequence[SingleAgentEpisode]):
    """The C chunks of some fragments, fragment by fragment, as episodes that are made on demand.

    A learner piece that loops over the sequence gets episodes. One that asks for columns gets all rows at once.
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
        position = range(len(self))[index]  # raises IndexError as a list does
        episode = self._made.get(position)
        if episode is None:
            which = int(np.searchsorted(self._bounds, position, side="right"))
            before = int(self._bounds[which - 1]) if which else 0
            episode = self._made[position] = self.fragments[which].chunk(position - before)
        return episode

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the extra model outputs that every fragment has, with the same structure, dtype and shape."""
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
        """A column's value at the last step of each chunk: a tree of new arrays `any[C, ...]`."""
        return concatenate_trees([fragment.last(name) for fragment in self.fragments])

    def preceding(self, name: str) -> Tree:
        """A column's value at the step before each chunk, `any[C, ...]`: see `Fragment.preceding`."""
        return concatenate_trees([fragment.preceding(name) for fragment in self.fragments])

    def initial_states(self, like: Tree) -> tuple[Tree, NDArray[np.bool_]]:
        """States before episodes' first steps, `any[C, ...]`, and which are known: see `Fragment.initial_states`."""
        parts = [fragment.initial_states(like) for fragment in self.fragments]
        return concatenate_trees([states for states, _ in parts]), np.concatenate([known for _, known in parts])

    def recent_observations(self, count: int) -> Tree:
        """The last `count` observations at every step, `any[steps, count, ...]`: see `Fragment.recent_observations`."""
        return concatenate_trees([fragment.recent_observations(count) for fragment in self.fragments])

    @property
    def lanes(self) -> NDArray[np.int64]:
        """i64[C]: the lane of each chunk."""
        return np.repeat([each.lane for each in self.fragments], [len(each.chunks.slot) for each in self.fragments])

    def env_slots(self) -> NDArray[np.int64]:
        """i64[C]: the lane's slot that each chunk is from."""
        slots = [each.env_slots(each.chunks.slot, each.chunks.number) for each in self.fragments]
        return np.concatenate(slots)

    def chunk_index(self, field: str) -> NDArray[Any]:
        """One field of every fragment's `ChunkIndex`, end to end: `any[C]`."""
        return np.concatenate([getattr(fragment.chunks, field) for fragment in self.fragments])


def _kinds(fragment: "Fragment") -> dict[str, Tree]:
    return {name: kind_of(fragment.columns[name].row(0)) for name in fragment.extra_columns}
