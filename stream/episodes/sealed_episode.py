"""SealedEpisode: a read-only chunk of a fragment, and its buffers over data that are not in one column."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from rollflow.stream.data.errors import EpisodeError
from rollflow.stream.data.infos import info_of
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.episodes.buffer import LookbackBuffer
from rollflow.stream.episodes.single_agent import SingleAgentEpisode


class SealedEpisode(SingleAgentEpisode):
    """A chunk of a fragment, read-only, since the fragment's columns are shared.

    To change or continue it, copy it: `SingleAgentEpisode.from_state(chunk.get_state())`.
    """

    def add_env_step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise EpisodeError: the fragment's columns would not have the step."""
        self._refuse()

    def concat_episode(self, other: SingleAgentEpisode) -> NoReturn:
        """Raise EpisodeError, as `add_env_step` does."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EpisodeError(
            f"episode '{self.id_}': a fragment's chunk is read-only; write to a copy: "
            "SingleAgentEpisode.from_state(episode.get_state())"
        )


class EndedWindow(LookbackBuffer):
    """Buffer of a chunk's observations whose last one is not in the column: arrays are joined when they are read.

    data    tree of arrays `any[L + n, ...]`, without the last observation
    last    the last observation, a tree of arrays `any[...]`
    """

    def __init__(self, data: Tree, last: Tree, lookback: int, space: gym.Space[Any] | None) -> None:
        super().__init__(data, lookback, space, name="observations")
        self._last = last

    def total(self) -> int:
        return super().total() + 1

    def item(self, position: int) -> Any:
        return self._last if position == self.total() - 1 else super().item(position)

    def items(self, where: Any) -> Any:
        before = super().total()
        if isinstance(where, slice) and where.stop <= before:
            return super().items(where)
        joined = concatenate_trees([self.data, map_tree(lambda leaf: np.asarray(leaf)[None], self._last)])
        return map_tree(lambda leaf: leaf[where], joined)

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError("observations of a fragment are read-only")


class InfosWindow(LookbackBuffer):
    """Buffer of one slot's info dicts, taken from gymnasium's vector infos of some rows.

    rows     vector infos of L + n rows
    last     vector infos of the last item; None: the last row's
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], slot: int, lookback: int, last: Mapping[str, Any] | None
    ) -> None:
        super().__init__([], lookback, name="infos")
        self._rows = [*rows[:-1], last] if last is not None else rows
        self._slot = slot

    def total(self) -> int:
        return len(self._rows)

    def item(self, position: int) -> Any:
        return info_of(self._rows[position], self._slot)

    def items(self, where: Any) -> Any:
        positions = range(*where.indices(self.total())) if isinstance(where, slice) else where
        return [self.item(position) for position in positions]

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError("infos of a fragment are read-only")
