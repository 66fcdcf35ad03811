"""Fragments whose columns are tensors on one device, and what they give of them on the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batches import array_of
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import ChunkIndex, Final, Fragment, FragmentLayout

INFINITE_LOGP = "infinite_logp"
"""Column of an outline, bool[H+T, N]: log-probabilities that are not finite."""

_TERMINATED, _TRUNCATED, _INFINITE = 1, 2, 4  # bits of a transition's flags


class DeviceFragment(Fragment):
    """T vector steps of one lane in tensors on one device: every row is a transition.

    Columns are those of a `Fragment`, and one more:

        bootstrap_from    u8[H+T, N]    1 where the step truncated its episode, and the environment gave no last
                                        observation: the one before stands in for it; else 0

    device      of the columns
    last_rows   row of a step -> observations, a tree of tensors any[N, ...], the last ones where it ended an episode
    versions    of the weights that each row's actions were computed with

    Positions of chunks are worked out on the host, of `outline`, which takes one copy of 5 bytes a transition. What is
    given as episodes is made of `host`, which takes one copy of all columns.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        lane: int,
        sequence: int,
        columns: dict[str, Column],
        episode_start: torch.Tensor,
        episode_number: torch.Tensor,
        device: torch.device,
    ) -> None:
        super().__init__(layout, lane, sequence, columns)
        del self.finals, self.episode_start, self.episode_number  # which are worked out
        self._begun = episode_start, episode_number
        self.device = device
        self.last_rows: dict[int, Tree] = {}
        self.versions: list[int] = []

    @cached_property
    def outline(self) -> Fragment:
        """A fragment of arrays with `rewards`, flags and chunks alone, and `infinite_logp`: see there."""
        columns, rows = self.columns, self.layout.lookback + self.layout.num_rows
        flags = columns[Columns.TERMINATEDS].tree.to(torch.uint8) * _TERMINATED
        flags += columns[Columns.TRUNCATEDS].tree.to(torch.uint8) * _TRUNCATED
        if Columns.ACTION_LOGP in columns:
            flags += columns[Columns.ACTION_LOGP].tree.isfinite().logical_not_().to(torch.uint8) * _INFINITE
        parts = *self._begun, columns[Columns.REWARDS].tree, flags
        packed = array_of(torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]))
        slots = self.layout.num_slots
        begun = packed[: 16 * slots].view(np.int64).reshape(2, slots)
        rewards = packed[16 * slots : 16 * slots + 4 * rows * slots].view(np.float32).reshape(rows, slots)
        marks = packed[16 * slots + 4 * rows * slots :].reshape(rows, slots)
        arrays = {
            Columns.REWARDS: rewards,
            Columns.TERMINATEDS: marks & _TERMINATED != 0,
            Columns.TRUNCATEDS: marks & _TRUNCATED != 0,
            INFINITE_LOGP: marks & _INFINITE != 0,
        }
        made = self._on_host({name: Column(name, array) for name, array in arrays.items()}, *begun)
        made.num_rows = self.num_rows
        return made

    @cached_property
    def host(self) -> Fragment:
        """The fragment with columns of arrays: one copy of all of them."""
        columns = {name: Column(name, map_tree(array_of, column.tree)) for name, column in self.columns.items()}
        made = self._on_host(columns, self.outline.episode_start, self.outline.episode_number)
        made.finals = [
            Final(each.rows, each.slots, map_tree(array_of, each.observations), each.infos) for each in self.finals
        ]
        made.observation_space, made.origin = self.observation_space, self.origin
        made.seal(self.num_rows)
        return made

    @property
    def chunks(self) -> ChunkIndex:
        """The positions of the chunks, on the host."""
        return self.outline.chunks

    @property
    def row_order(self) -> None:
        """None: no row is dead."""

    @property
    def num_steps(self) -> int:
        return self.num_rows * self.layout.num_slots

    @property
    def is_empty(self) -> bool:
        return not self.num_rows

    @property
    def policy_version(self) -> int:
        return min(self.versions[: self.num_rows], default=0)

    @cached_property
    def finals(self) -> list[Final]:
        """Last observations of all episodes that have ended here, in tensors; the one before for one that is missing.

        They are in the order of the steps.
        """
        chunks = self.chunks
        ended = np.flatnonzero(chunks.terminated | chunks.truncated)
        if not len(ended):
            return []
        ended = ended[np.argsort(chunks.stop[ended], kind="stable")]
        rows, slots = chunks.stop[ended] - 1, chunks.slot[ended]
        observations = map_tree(lambda leaf: leaf[rows, slots], self.columns[Columns.OBS].tree)
        given = np.isin(rows, list(self.last_rows))
        if given.any():
            places, on_device = np.flatnonzero(given), torch.as_tensor(slots[given], device=self.device)
            stops = np.flatnonzero(np.diff(rows[given], append=-1)) + 1
            begin = 0
            for stop in stops.tolist():
                last = self.last_rows[int(rows[places[begin]])]
                # Ends of one row stand together.
                at, of = slice(int(places[begin]), int(places[stop - 1]) + 1), on_device[begin:stop]
                map_tree(lambda leaf, whole, at=at, of=of: leaf[at].copy_(whole[of]), observations, last)
                begin = stop
        return [Final(rows, slots, observations, {})]

    def drop_finals(self) -> None:
        """Release last observations: the fragment is not given to anybody."""
        self.last_rows.clear()
        self.finals = []

    def check_logp(self, named: Callable[[int], str]) -> None:
        """Raise ModuleError for a log-probability that is not finite.

        named    (vector step · N + slot) -> its name
        """
        infinite = self.outline.columns[INFINITE_LOGP].tree[self.first_row : self.last_row]
        if infinite.any():
            place = int(infinite.argmax())
            row, slot = divmod(place, self.layout.num_slots)
            observed = [leaf[self.first_row + row, slot] for leaf in leaves_of(self.columns[Columns.OBS].tree)]
            if all(bool(leaf.isfinite().all()) for leaf in observed):
                why = (
                    ", expected a number: of logits that are finite, and deviations whose logarithms are from -88 to 88"
                )
            else:
                why = f": the observation itself is not finite in slot {slot}, expected numbers"
            raise ModuleError(f"'{Columns.ACTION_LOGP}' is not finite in {named(place)}{why}").see("not a number")

    def in_chunk_order(self, rows: Any) -> Any:
        """The transitions of `rows`, any[T, N, ...], chunk by chunk: a new tensor any[num_steps, ...]."""
        return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def initial_states(self, like: Tree) -> tuple[Tree, NDArray[np.bool_]]:
        count = len(self.chunks.slot)
        zeros = map_tree(lambda leaf: torch.zeros((count, *leaf.shape), dtype=_dtype(leaf), device=self.device), like)
        return zeros, np.zeros(count, np.bool_)

    # What is given of arrays

    def chunk(self, index: int) -> SingleAgentEpisode:
        return self.host.chunk(index)

    def stored_columns(self, extra: Sequence[str] | None, purpose: str) -> dict[str, Tree]:
        return self.host.stored_columns(extra, purpose)

    def last_of(self, stop: int, slot: int) -> tuple[Tree, Mapping[str, Any]]:
        return self.host.last_of(stop, slot)

    def _repr_html_(self) -> str:
        return self.host._repr_html_()

    def _on_host(self, columns: dict[str, Column], start: NDArray[np.int64], number: NDArray[np.int64]) -> Fragment:
        """A fragment of arrays in the place of this one."""
        return Fragment(self.layout, self.lane, self.sequence, columns, start, number)


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if torch.is_tensor(leaf) else torch.from_numpy(np.empty(0, leaf.dtype)).dtype
