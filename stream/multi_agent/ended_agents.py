"""Episodes of agents that have ended: with the last step, or because their environments were lost."""

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree
from rollflow.stream.fragments.fragment import Final, Loss
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, AgentInfos

Slots = NDArray[np.int64]


class EndedAgents:
    """The E episodes that have ended with the last step, until pieces have seen them.

    slots           i64[E]
    observations    any[E, ...]  last observation of each
    rows            i64[E]  rows of their last steps
    starts          i64[S]  `episode_start` before the end
    numbers         i64[S]  `episode_number` before the end
    infos           infos of the last observations
    shown           slots that pieces see as ended; all at first
    """

    def __init__(self, slots: Slots, observations: Tree, rows: Slots, starts: Slots, numbers: Slots) -> None:
        self.slots, self.observations, self.rows, self.starts, self.numbers = slots, observations, rows, starts, numbers
        self.infos = AgentInfos()
        self.shown = self._all = frozenset(slots.tolist())
        self._put: list[tuple[Slots, Tree]] = []

    def has(self, slot: int) -> bool:
        """True if the slot is shown as ended."""
        return slot in self.shown

    def show(self, slots: Slots | None) -> None:
        """Set the slots, i64[K], that are shown as ended; None: all."""
        self.shown = self._all if slots is None else frozenset(slots.tolist())

    def of(self, slots: Slots) -> Tree:
        """The last observations of some of the slots, a tree of arrays `any[K, ...]`."""
        places = np.searchsorted(self.slots, slots)
        return map_tree(lambda leaf: leaf[places], self.observations)

    def put(self, slots: Slots, observations: Tree) -> None:
        """Take last observations, `any[K, ...]`, as pieces have left them; they replace the old once all are there."""
        if len(slots):
            self._put.append((slots, observations))
        if sum(len(each) for each, _ in self._put) == len(self.slots):
            order = np.argsort(np.concatenate([each for each, _ in self._put]))
            joined = concatenate_trees([observations for _, observations in self._put])
            self.observations, self._put = map_tree(lambda leaf: leaf[order], joined), []


def mark_lost(
    fragment: AgentFragment, slots: Slots, rows: NDArray[np.int64], starts: NDArray[np.int64], reason: str
) -> Slots:
    """End episodes of lost environments in the current fragment, each with the newest observation of its agent.

        slots     i64[K]  slots of the episodes
        rows      i64[K]  rows of their newest observations
        starts    i64[K]  rows of their first observations

    Episodes with a step in the fragment are marked as truncated. Returns their slots, i64[C].
    """
    columns = fragment.columns
    has_step = np.maximum(starts, fragment.first_row) < rows
    cut, ends = slots[has_step], rows[has_step] - 1
    columns[Columns.TRUNCATEDS].tree[ends, cut] = True
    seen = fragment.clock[ends + 1, cut].tolist()
    fragment.ends.update(zip(zip(ends.tolist(), cut.tolist(), strict=True), seen, strict=True))
    # The first observations and infos of the next episodes will overwrite these.
    infos = _remove_infos(fragment, slots, rows)
    for row in np.unique(ends).tolist():
        of_row = cut[ends == row]
        last = columns[Columns.OBS].items(row + 1, of_row)
        fragment.finals.append(Final(row, of_row, last, infos))
    for row in np.unique(rows).tolist():
        fragment.losses.append(Loss(row, slots[rows == row], cut[ends == row - 1], reason))
    return cut


def _remove_infos(fragment: AgentFragment, slots: Slots, rows: NDArray[np.int64]) -> AgentInfos:
    """Remove the infos of the newest observations from the fragment, and return them."""
    taken = AgentInfos()
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        there = fragment.infos[row]
        if isinstance(there, AgentInfos) and slot in there.of_slots:
            taken.of_slots[slot] = there.of_slots.pop(slot)
    return taken
