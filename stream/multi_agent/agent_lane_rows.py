"""AgentLaneRows: the rows of one part's agent slots in the current fragment, and how they are written."""

import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError
from rollflow.stream.data.tree import Tree, kind_of, leaves_of, map_tree
from rollflow.stream.fragments.fragment import FragmentLayout
from rollflow.stream.fragments.lane_columns import LaneColumns
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, AgentInfos, named_columns
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.ended_agents import Slots


class AgentLaneRows:
    """The rows of a part's S agent slots in one fragment after the other.

    lane      number of the lane
    layout    layout of its fragments, slots being agent slots
    part      the agents and their spaces

    everyone          i64[S] all slots
    at                i64[S] row of each slot's newest observation
    module            i16[S] place of the module that serves each slot, or served it last
    module_ids        ids of the lane's modules, by place
    first_env         number of the lane's first environment
    episode_start     i64[S] row of the first observation of the slot's episode
    episode_number    i64[S] number of episodes with a step that the slot had before
    custom_data       (slot, number of its episode) -> data that pieces keep with the episode
    parents           (slot, number of its episode) -> id of the multi-agent episode
    fragment          the fragment that is being filled
    """

    def __init__(self, lane: int, layout: FragmentLayout, part: AgentPart) -> None:
        self.lane, self.layout, self.part = lane, layout, part
        slots = layout.num_slots
        self.everyone: Slots = np.arange(slots)
        self.at: Slots = np.full(slots, layout.lookback)
        self.module = np.zeros(slots, np.int16)
        self.module_ids: Sequence[Any] = ()
        self.first_env = 0
        self.episode_start = self.at.copy()
        self.episode_number = np.zeros(slots, np.int64)
        self.custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        self.parents: dict[tuple[int, int], str] = {}
        self._row: int | None = layout.lookback  # row of all slots; None: slots stand in different rows
        self._columns = LaneColumns(layout, None)
        self._space = part.observation_space
        self._outputs: dict[int, dict[str, str]] = {}  # module's place -> name of an output -> column
        self._renamed: set[str] = set()  # columns with another name than their output
        self._has_infos = False
        self.fragment = self._fragment(0, self._columns.first(self._space))

    @property
    def observation_space(self) -> Any:
        """The space of the `obs` column."""
        return self._space

    def share(self) -> None:
        """Let other processes see the columns of all fragments but the first. Before the first step only."""
        self._columns = LaneColumns(self.layout, None, is_shared=True)

    def release(self) -> None:
        """Release all memory: no more steps are made. Drops the unfinished fragment."""
        self.fragment.columns.clear()
        self._columns = LaneColumns(self.layout, None)

    # Writing

    def _write_outputs(self, slots: Slots, outputs: Mapping[str, Tree], module: int, version: int) -> None:
        names = self._outputs.get(module)
        if names is None:
            names = self._outputs[module] = {
                name: self._column_for(name, values) for name, values in outputs.items() if name != Columns.ACTIONS
            }
        columns = self.fragment.columns
        try:
            self._write(columns[Columns.ACTIONS], slots, outputs[Columns.ACTIONS])
            for name, column in names.items():
                self._write(columns[column], slots, outputs[name])
        except KeyError:
            self._refuse_outputs(module, names, outputs)
        if len(outputs) != len(names) + 1:
            self._refuse_outputs(module, names, outputs)
        versions, rows = columns[Columns.POLICY_VERSION].tree, self._rows_of(slots)
        versions[rows, slots] = version

    def _write(self, column: Column, slots: Slots, values: Tree) -> None:
        if self._row is not None and len(slots) == self.layout.num_slots:
            column.write(self._row, values)
        else:
            column.write_items(self._rows_of(slots), slots, values)

    def _rows_of(self, slots: Slots) -> Slots | int:
        """The rows i64[K] of slots, or the one row where all slots stand."""
        return self.at[slots] if self._row is None else self._row

    def _column_for(self, name: str, values: Tree) -> str:
        """The name of an output's column; modules share one if their outputs have one type. A new column is zeros."""
        row = map_tree(
            lambda leaf: np.zeros((self.layout.num_slots, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), values
        )
        columns = self.fragment.columns
        names = chain([name], (f"{name}#{number}" for number in count(2)))
        column = next(each for each in names if each not in columns or kind_of(columns[each].row(0)) == kind_of(row))
        if column not in columns:
            columns[column] = self._columns.extra(column, row)
            for leaf in leaves_of(columns[column].tree):
                leaf[:] = 0
        if column != name:
            self._renamed.add(column)
        return column

    def forget(self, module: int) -> None:
        """Forget a module that serves no slot any more, with the columns that only it wrote."""
        dropped = set(self._outputs.pop(module, {}).values())
        dropped.difference_update(*(names.values() for names in self._outputs.values()))
        self._renamed -= dropped
        for column in dropped:
            del self.fragment.columns[column]

    def fragment_for(self, module: int) -> AgentFragment:
        """The current fragment, with columns by the names that the module at this place uses."""
        if not self._renamed:
            return self.fragment
        fragment = copy.copy(self.fragment)
        fragment.columns = named_columns(fragment.columns, self._outputs.get(module, {}), self._renamed)
        return fragment

    def _outputs_by_id(self) -> dict[Any, dict[str, str]]:
        """Module id -> name -> column, of the extra outputs that all modules with this id have alike."""
        by_id: dict[Any, dict[str, str]] = {}
        for module, names in self._outputs.items():
            before = by_id.get(self.module_ids[module], names)
            by_id[self.module_ids[module]] = {
                name: column for name, column in before.items() if names.get(name) == column
            }
        return by_id

    def _refuse_outputs(self, module: int, names: Collection[str], outputs: Mapping[str, Tree]) -> NoReturn:
        expected = {Columns.ACTIONS, *names}
        missing, new = sorted(expected - set(outputs)), sorted(set(outputs) - expected)
        raise ColumnError(
            f"lane {self.lane}: the outputs of module '{self.module_ids[module]}' changed between steps: missing "
            f"{missing}, new {new}; every step must give {sorted(expected)}"
        )

    # From fragment to fragment

    def _turn_over(self, *, are_written: bool) -> AgentFragment:
        """Begin the next fragment, with the last H steps of every slot; return the old one, not sealed yet.

        are_written    whether observations are in their column as the environments give them
        """
        old, lookback = self.fragment, self.layout.lookback
        new = self._fragment(old.sequence + 1, self._columns.like(old.columns, are_written=are_written))
        # One row more than the lookback: a slot that waits has its action in the row of its newest observation.
        rows = self.at + np.arange(-lookback, 1)[:, None]
        for name, column in new.columns.items():
            _copy(column.tree, old.columns[name].tree, rows, self.everyone)
        _copy(new.clock, old.clock, rows, self.everyone)
        new.module_of[:] = self.module
        self.episode_start -= self.at - lookback
        new.episode_start[:] = self.episode_start
        if self._has_infos:
            self._copy_infos(old, new)
        old.observation_space = new.observation_space = self._space
        old.custom_data, old.parents = copy.deepcopy(self.custom_data), self.parents
        old.serves = self.module.copy()
        old.module_ids, old.outputs = tuple(self.module_ids), self._outputs_by_id()
        number = self.episode_number.tolist()
        self.custom_data = {key: data for key, data in self.custom_data.items() if key[1] == number[key[0]]}
        self.parents = {key: parent for key, parent in self.parents.items() if key[1] == number[key[0]]}
        old.hand_on_starts(new, self.at, self.at - lookback)
        self.fragment = new
        return old

    def _fragment(self, sequence: int, columns: dict[str, Column]) -> AgentFragment:
        rows, slots = self.layout.lookback + self.layout.num_rows, self.layout.num_slots
        return AgentFragment(
            self.layout,
            self.lane,
            sequence,
            columns,
            part=self.part,
            clock=np.zeros((rows + 1, slots), np.int64),
            module_of=np.zeros((rows, slots), np.int16),
            episode_start=self.episode_start.copy(),
            episode_number=self.episode_number.copy(),
        )

    def _infos_in(self, fragment: AgentFragment, row: int) -> AgentInfos:
        there = fragment.infos[row]
        if not isinstance(there, AgentInfos):
            there = fragment.infos[row] = AgentInfos()
        return there

    def _copy_infos(self, old: AgentFragment, new: AgentFragment) -> None:
        moved = self.at - self.layout.lookback
        for row, infos in enumerate(old.infos):
            if isinstance(infos, AgentInfos):
                for slot, info in infos.of_slots.items():
                    to = row - int(moved[slot])
                    if 0 <= to <= self.layout.lookback:
                        self._infos_in(new, to).of_slots[slot] = info


def _copy(new: Tree, old: Tree, rows: NDArray[np.int64], slots: Slots) -> None:
    """Copy `rows`, i64[R, S], of the slots of `old`, a tree of arrays `any[n, S, ...]`, to the first rows of `new`."""
    for leaf, source in zip(leaves_of(new), leaves_of(old), strict=True):
        leaf[: len(rows)] = source[np.minimum(rows, len(source) - 1), slots]
