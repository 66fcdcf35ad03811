"""Fragments whose columns are tensors on one device, and what they give of them on the host."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.connectors.common.batches import array_of
from rollflow.nodes.connectors.module_to_env.action_pieces import weights_blamed
from rollflow.nodes.device.columns import on_device
from rollflow.nodes.modules.distribution import without_choice
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import RULED_OUT, Columns
from rollflow.stream.data.errors import ColumnError, ConnectorError, ModuleError, shown
from rollflow.stream.data.space import Leaf, leaves_within
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import ChunkIndex, Final, Fragment, FragmentLayout, Loss

_WHOLE = {4: torch.int32, 8: torch.int64, 16: torch.complex128}  # by their bytes

_OUTLINE = *[np.int64] * 3, *[np.float32] * 2, *[np.bool_] * 2
# Bits of faults: not finite; not finite; NaN, +inf, or all ruled out.
_LOGP, _OBSERVATION, _LOGITS = 4, 8, 16
_ACTION = {Columns.ACTIONS: 32, Columns.ACTIONS_FOR_ENV: 64}  # NaN, or not in its space


class DeviceFragment(Fragment):
    """T vector steps of one lane in tensors on one device: every row is a transition.

    Columns are those of a `Fragment`, and one more:

        bootstrap_from    u8[H+T, N]    1 if the step truncated its episode, and the environment gave no last
                                        observation: the one before stands in for it; else 0

    device             of the columns
    last_rows          row of a step -> observations, a tree of tensors any[N, ...], the last ones if it ended an
                       episode
    versions           of the weights that each row's actions were computed with
    chosen_by          type of the distributions that actions are chosen by; None: the module gives them itself
    spaces             of the columns of actions
    filters            name of a piece that observations have to be finite for; None: there is none
    initial_state      of episodes that begin here, a tree of tensors any[...]; None: the module has none
    may_have_faults    whether a reward, or what an action follows from, may be no number; known with `outline`

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
        self.filters: str | None = None
        self.initial_state: Tree = None
        self.may_have_faults = False

    @cached_property
    def outline(self) -> Fragment:
        """A fragment of arrays with `rewards`, flags and chunks alone: one copy, which says if there may be faults."""
        names = Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS
        rewards, *flags = (self.columns[name].tree.t() for name in names)  # slot by slot, as chunks are
        floats, wholes, bounds = self._looks(rewards)
        parts = *self._begun, torch.cat(wholes), rewards, torch.stack(floats), *flags
        packed = array_of(torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]))
        each = zip(parts, np.split(packed, np.cumsum([part.nbytes for part in parts[:-1]])), _OUTLINE, strict=True)
        arrays = [array.view(dtype).reshape(part.shape) for part, array, dtype in each]
        start, number, whole, rewards, least, *flags = arrays
        is_within = (bounds[0] <= whole) & (whole <= bounds[1])
        self.may_have_faults = not (is_within.all() and least[0] > RULED_OUT and np.isfinite(least).all())
        columns = {name: Column(name, array.T) for name, array in zip(names, (rewards, *flags), strict=True)}
        made = self._on_host(columns, start, number)
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
        if self.initial_state is not None:
            chunks, state = self.chunks, map_tree(array_of, self.initial_state)
            begun = chunks.t_started == 0
            places = zip(chunks.start[begun].tolist(), chunks.slot[begun].tolist(), strict=True)
            made.starts = dict.fromkeys(places, state)
        made.observation_space, made.origin = self.observation_space, self.origin
        made.seal(self.num_rows)
        return made

    @property
    def chunks(self) -> ChunkIndex:
        """The positions of the chunks, on the host."""
        return self.outline.chunks

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

    def get_state(self, spaces: Sequence[gym.Space[Any]]) -> dict[str, Any]:
        """Its rows and what is known of them, in plain form: none is copied.

        spaces    that its observations may be in
        """
        stop = self.last_row
        return {
            "columns": {name: column.rows(0, stop + (name == Columns.OBS)) for name, column in self.columns.items()},
            "space": [each is self.observation_space for each in spaces].index(True),
            "begun": self._begun,
            "last_rows": [[row, last] for row, last in self.last_rows.items()],
            "initial_state": self.initial_state,
            "losses": [[each.row, each.slots, each.cut, each.reason] for each in self.losses],
            "custom_data": [[*key, data] for key, data in self.custom_data.items()],
            **{name: getattr(self, name) for name in ("sequence", "num_rows", "versions")},
        }

    def complete(self, state: Mapping[str, Any]) -> None:
        """Take what another one gave, but for its rows."""
        self.sequence, self.versions = state["sequence"], list(state["versions"])
        self._begun, self.initial_state = (on_device(state[name], self.device) for name in ("begun", "initial_state"))
        self.last_rows = {row: on_device(last, self.device) for row, last in state["last_rows"]}
        self.losses = [Loss(*each) for each in state["losses"]]
        self.custom_data = {(slot, number): data for slot, number, data in state["custom_data"]}

    def _looks(self, rewards: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], NDArray[np.float64]]:
        """Numbers that say whether a transition may have a fault, in far less time than it takes to mark those.

        Without one the first, f32[] each, are finite, and the first of them is above `RULED_OUT`; the second, i64[D]
        each, are within the bounds that come third, f64[2, sum of D].
        """
        columns, bounds, wholes = self.columns, [np.zeros((2, 0))], [self._begun[0][:0]]
        floats = [rewards.new_zeros(())]
        if self._looks_at_logits:
            floats = list(self.column(Columns.ACTION_DIST_INPUTS).float().aminmax())
        summed = [self.column(name) for name in (Columns.REWARDS, Columns.ACTION_LOGP) if name in columns]
        if self.filters:
            newest = columns[Columns.OBS].rows(self.first_row, self.last_row + 1)
            summed += filter(torch.is_floating_point, leaves_of([newest, *self.last_rows.values()]))
        for name, part in self._parts_of_actions():
            values = part.found(self.column(name))
            if isinstance(part.space, gym.spaces.Box):
                summed.append(values)
            else:
                wholes += [each.long() for each in values.reshape(-1, part.size).aminmax(dim=0)]
                bounds += [part.bounds()] * 2
        floats += [values.sum(dtype=torch.float32) for values in summed]
        return floats, wholes, np.concatenate(bounds, 1)

    def _parts_of_actions(self) -> Iterator[tuple[str, Leaf]]:
        names = (name for name in self.spaces if name in self.columns)
        return ((name, part) for name in names for part in leaves_within(self.spaces[name], name))

    @property
    def _looks_at_logits(self) -> bool:
        return self.chosen_by is not None and Columns.ACTION_DIST_INPUTS in self.columns

    def _faults(self) -> torch.Tensor:
        """u8[H+T+1, N]: bits of what is wrong with a transition, or with the newest observation; 0: nothing."""
        columns, rows = self.columns, self.layout.lookback + self.layout.num_rows
        faults = self._begun[0].new_zeros((rows + 1, self.layout.num_slots), dtype=torch.uint8)

        def mark(bit: int, bad: torch.Tensor, row: int = 0) -> None:
            faults[row : row + len(bad)].bitwise_or_(bad.unsqueeze(-1).flatten(2).any(2).to(torch.uint8) * bit)

        for leaf in filter(torch.is_floating_point, leaves_of(columns[Columns.OBS].tree)):
            mark(_OBSERVATION, ~leaf.isfinite())
        for row, last in self.last_rows.items():
            done = columns[Columns.TERMINATEDS].tree[row] | columns[Columns.TRUNCATEDS].tree[row]
            for leaf in filter(torch.is_floating_point, leaves_of(last)):
                mark(_OBSERVATION, (done.view(-1, *[1] * (leaf.ndim - 1)) & ~leaf.isfinite())[None], row)
        if Columns.ACTION_LOGP in columns:
            mark(_LOGP, ~columns[Columns.ACTION_LOGP].tree.isfinite())
        if self._looks_at_logits:
            logits, space = columns[Columns.ACTION_DIST_INPUTS].tree, getattr(self.chosen_by, "space", None)
            mark(_LOGITS, logits.isnan() | logits.isposinf())
            mark(_LOGITS, without_choice(logits, space))
        for name, part in self._parts_of_actions():
            values, (low, high) = part.found(columns[name].tree), torch.from_numpy(part.bounds()).to(self.device)
            flat, is_box = values.reshape(rows, -1, part.size), isinstance(part.space, gym.spaces.Box)
            mark(_ACTION[name], flat.isnan() if is_box else (flat < low) | (flat > high))
        return faults

    def check_choices(self, named: Callable[[int], str], module: Any, filters: str | None) -> None:
        """Raise an error for the first transition whose action can't be meant: see below.

        named      (vector step · N + slot) -> its name
        module     that chose, whose weights may be to blame
        filters    see above

        Raises ConnectorError for an observation, ModuleError for logits, log-probabilities and actions that are no
        numbers, and ColumnError for an action outside its space.
        """
        self.filters = filters
        _ = self.outline  # which tells
        if not self.may_have_faults:
            return
        # Behind the last transition stands the newest observation.
        all_marks = array_of(self._faults()[self.first_row : self.last_row + 1])
        marks = all_marks if filters else all_marks & ~np.uint8(_OBSERVATION)
        marks[-1] &= np.uint8(_OBSERVATION)
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

    def gather(self, name: str) -> Tree:
        version = self.policy_version
        if name == Columns.POLICY_VERSION and version == max(self.versions[: self.num_rows], default=0):
            return torch.full((self.num_steps,), version, device=self.device)
        if name == Columns.BOOTSTRAP_FROM and not self.outline.columns[Columns.TRUNCATEDS].tree.any():
            return torch.zeros(self.num_steps, dtype=torch.uint8, device=self.device)
        return super().gather(name)

    def in_chunk_order(self, rows: Any) -> Any:
        """The transitions of `rows`, any[T, N, ...], chunk by chunk: a new tensor any[num_steps, ...]."""
        rows, shape, dtype = rows.transpose(0, 1), rows.shape[2:], rows.dtype
        whole = _WHOLE.get(rows.element_size() * math.prod(shape)) if rows.is_cpu and shape else None
        if whole is not None and rows.storage_offset() * rows.element_size() % whole.itemsize == 0:
            rows = rows.flatten(2).view(whole).squeeze(-1)  # moved as one number: that takes a third of the time
        turned = rows.clone(memory_format=torch.contiguous_format)
        return turned.view(dtype).view(rows.shape[0] * rows.shape[1], *shape)

    def initial_states(self, like: Tree) -> tuple[Tree, NDArray[np.bool_]]:
        count, own = len(self.chunks.slot), self.initial_state
        known = (self.chunks.t_started == 0) & (own is not None)
        if own is None:
            own = map_tree(lambda leaf: torch.zeros(leaf.shape, dtype=_dtype(leaf), device=self.device), like)
        return map_tree(lambda leaf: leaf.expand(count, *leaf.shape), own), known

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
        made = Fragment(self.layout, self.lane, self.sequence, columns, start, number)
        made.losses, made.custom_data = self.losses, self.custom_data
        return made


def _dtype(leaf: Any) -> torch.dtype:
    return leaf.dtype if torch.is_tensor(leaf) else torch.from_numpy(np.empty(0, leaf.dtype)).dtype
