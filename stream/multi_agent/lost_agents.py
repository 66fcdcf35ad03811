"""Episodes of agents whose environments were lost."""

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.columns import Columns
from rollflow.stream.fragment import Final, Loss
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, AgentInfos
from rollflow.stream.multi_agent.ended_agents import Slots


def mark_lost(
    fragment: AgentFragment, slots: Slots, rows: NDArray[np.int64], starts: NDArray[np.int64], reason: str
) -> Slots:
    """End episodes in a fragment in the making, each with the newest observation of its agent.

        slots     i64[K] whose episodes are lost
        rows      i64[K] of their newest observations
        starts    i64[K] rows of their first ones

    Those that have made a step in the fragment are marked as truncated, and returned: the others have no chunk here.
    """
    columns = fragment.columns
    has_step = np.maximum(starts, fragment.first_row) < rows
    cut, ends = slots[has_step], rows[has_step] - 1
    columns[Columns.TRUNCATEDS].tree[ends, cut] = True
    seen = fragment.clock[ends + 1, cut].tolist()
    fragment.ends.update(zip(zip(ends.tolist(), cut.tolist(), strict=True), seen, strict=True))
    # The first observations and infos of the episodes that come next take the place of what was there.
    infos = _taken_out(fragment, slots, rows)
    for row in np.unique(ends).tolist():
        of_row = cut[ends == row]
        last = columns[Columns.OBS].items(row + 1, of_row)
        fragment.finals.append(Final(row, of_row, last, infos))
    for row in np.unique(rows).tolist():
        fragment.losses.append(Loss(row, slots[rows == row], cut[ends == row - 1], reason))
    return cut


def _taken_out(fragment: AgentFragment, slots: Slots, rows: NDArray[np.int64]) -> AgentInfos:
    """The infos that go with the newest observations."""
    taken = AgentInfos()
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        there = fragment.infos[row]
        if isinstance(there, AgentInfos) and slot in there.of_slots:
            taken.of_slots[slot] = there.of_slots.pop(slot)
    return taken
