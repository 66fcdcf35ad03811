"""Fragments whose columns are tensors on one device, and what they give of them on the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batches import array_of
from rollflow.nodes.connectors.module_to_env.action_pieces import weights_blamed
from rollflow.nodes.modules.distribution import without_choice
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError, shown
from rollflow.stream.data.space import leaves_within
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import ChunkIndex, Final, Fragment, FragmentLayout

FAULTS = "faults"
"""Column of an outline, u8[H+T, N]: bits of what is wrong with a transition; 0: nothing."""

_TERMINATED, _TRUNCATED = 1, 2  # bits of a transition's flags; and of faults:
_LOGP, _OBSERVATION, _LOGITS = 4, 8, 16  # not finite; not finite; NaN, +inf, or all ruled out
_ACTION = {Columns.ACTIONS: 32, Columns.ACTIONS_FOR_ENV: 64}  # NaN, or not in its space


class DeviceFragment(Fragment):
    """T vector steps of one lane in tensors on one device: every row is a transition.

    Columns are those of a `Fragment`, and one more:

        bootstrap_from    u8[H+T, N]    1 where the step truncated its episode, and the environment gave no last
                                        observation: the one before stands in for it; else 0

    device      of the columns
    last_rows   row of a step -> observations, a tree of tensors any[N, ...], the last ones where it ended an episode
    versions    of the weights that each row's actions were computed with
    chosen_by   type of the distributions that actions are chosen by; None: the module gives them itself
    spaces      of the columns of actions

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
        self.chosen_by: Any = None
        self.spaces: Mapping[str, gym.Space[Any]] = {}

    @cached_property
    def outline(self) -> Fragment:
        """A fragment of arrays with `rewards`, flags and chunks alone, and `faults`: see there."""
        columns, rows = self.columns, self.layout.lookback + self.layout.num_rows
        flags = columns[Columns.TERMINATEDS].tree.to(torch.uint8) * _TERMINATED
        flags += columns[Columns.TRUNCATEDS].tree.to(torch.uint8) * _TRUNCATED
        self._mark_faults(flags)
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
            FAULTS: marks & ~np.uint8(_TERMINATED | _TRUNCATED),
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

    def _mark_faults(self, flags: torch.Tensor) -> None:
        """Set the bits of faults in the transitions' flags, u8[H+T, N]: no number is read."""
        columns, rows = self.columns, len(flags)

        def mark(bit: int, bad: torch.Tensor, row: slice = slice(rows)) -> None:
            flags[row].bitwise_or_(bad[:rows].unsqueeze(-1).flatten(2).any(2).to(torch.uint8) * bit)

        for leaf in filter(torch.is_floating_point, leaves_of(columns[Columns.OBS].tree)):
            mark(_OBSERVATION, ~leaf.isfinite())
        for row, last in self.last_rows.items():
            for leaf in filter(torch.is_floating_point, leaves_of(last)):
                done = (flags[row] & (_TERMINATED | _TRUNCATED) != 0).view(-1, *[1] * (leaf.ndim - 1))
                mark(_OBSERVATION, (done & ~leaf.isfinite())[None], slice(row, row + 1))
        if Columns.ACTION_LOGP in columns:
            mark(_LOGP, ~columns[Columns.ACTION_LOGP].tree.isfinite())
        if self.chosen_by is not None and Columns.ACTION_DIST_INPUTS in columns:
            logits, space = columns[Columns.ACTION_DIST_INPUTS].tree, getattr(self.chosen_by, "space", None)
            mark(_LOGITS, logits.isnan() | logits.isposinf())
            mark(_LOGITS, without_choice(logits, space))
        for name, space in self.spaces.items():
            for part in leaves_within(space, name) if name in columns else ():
                values, (low, high) = part.found(columns[name].tree), part.bounds()
                if isinstance(part.space, gym.spaces.Box):
                    mark(_ACTION[name], values.isnan())
                    continue
                for place, ends in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
                    of_place = values.flatten(2)[..., place] if part.shape else values
                    mark(_ACTION[name], (of_place < int(ends[0])) | (of_place > int(ends[1])))

    def check_choices(self, named: Callable[[int], str], module: Any, filters: str | None) -> None:
        """Raise an error for the first transition whose action can't be meant: see below.

        named      (vector step · N + slot) -> its name
        module     that chose, whose weights may be to blame
        filters    name of a piece that observations have to be finite for; None: there is none

        Raises ConnectorError for an observation, ModuleError for logits, log-probabilities and actions that are no
        numbers, and ColumnError for an action outside its space.
        """
        all_marks = self.outline.columns[FAULTS].tree[self.first_row : self.last_row]
        marks = all_marks if filters else all_marks & ~np.uint8(_OBSERVATION)
        if not marks.any():
            return
        place = int((marks != 0).argmax())
        row, slot = divmod(place, self.layout.num_slots)
        fault, where = int(marks[row, slot]), named(place)
        if fault & _OBSERVATION:
            raise ConnectorError(f"{filters}: an observation of {where} is not finite, expected numbers")
        blamed = weights_blamed(module)
        if all_marks[row, slot] & _OBSERVATION:
            blamed = ": the observation itself is not finite, expected numbers"

        def given(name: str) -> str:
            tree = self.columns[name].tree
            return f"'{name}' is {shown(map_tree(lambda leaf: leaf[self.first_row + row, slot].tolist(), tree))}"

        if fault & _LOGITS:
            raise ModuleError(
                f"{given(Columns.ACTION_DIST_INPUTS)} in {where}, expected numbers below inf, with one above -1e9 for "
                f"each choice{blamed}"
            ).see("not a number")
        for name in [name for name, bit in _ACTION.items() if fault & bit]:
            space = self.spaces[name]
            error = ModuleError if isinstance(space, gym.spaces.Box) else ColumnError
            raise error(f"{given(name)} in {where}, expected one in {space}{blamed}").see("module")
        raise ModuleError(
            f"'{Columns.ACTION_LOGP}' is not finite in {where}, expected a number: of logits that are finite, and "
            f"deviations whose logarithms are from -88 to 88{blamed}"
        ).see("not a number")

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
