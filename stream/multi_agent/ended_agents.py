"""Episodes of agents that have ended with the last step."""

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.multi_agent.agent_fragment import AgentInfos
from rollflow.stream.tree import Tree, concatenate_trees, map_tree

Slots = NDArray[np.int64]


class EndedAgents:
    """Episodes that have ended with the last step, E of them: what pieces still have to see.

    slots           i64[E]
    observations    any[E, ...] the last of each
    rows            i64[E] of their last steps
    starts          i64[S] `episode_start` as it was
    numbers         i64[S] likewise
    infos           that came with it
    shown           the slots that pieces are to see as having ended; all at first
    """

    def __init__(self, slots: Slots, observations: Tree, rows: Slots, starts: Slots, numbers: Slots) -> None:
        self.slots, self.observations, self.rows, self.starts, self.numbers = slots, observations, rows, starts, numbers
        self.infos = AgentInfos()
        self.shown = self._known = frozenset(slots.tolist())
        self._put: list[tuple[Slots, Tree]] = []

    def has(self, slot: int) -> bool:
        """Whether it is one of those that are shown."""
        return slot in self.shown

    def show(self, slots: Slots | None) -> None:
        """Have pieces see some of them as having ended; None: all."""
        self.shown = self._known if slots is None else frozenset(slots.tolist())

    def of(self, slots: Slots) -> Tree:
        """The last observations of some of them, `any[K, ...]`."""
        places = np.searchsorted(self.slots, slots)
        return map_tree(lambda leaf: leaf[places], self.observations)

    def put(self, slots: Slots, observations: Tree) -> None:
        """Take the last observations of some of them as pieces have left them; once all have been put they are seen."""
        if len(slots):
            self._put.append((slots, observations))
        if sum(len(each) for each, _ in self._put) == len(self.slots):
            order = np.argsort(np.concatenate([each for each, _ in self._put]))
            joined = concatenate_trees([observations for _, observations in self._put])
            self.observations, self._put = map_tree(lambda leaf: leaf[order], joined), []
