"""Answer of environments with several agents, as a message.

A part is all agents that have the same two spaces. In a lane of N environments a part of A agents has S = N * A agent
slots: agent slot = environment * A + place of the agent in the part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec.field import agent_infos, list_of, nullable, numbers, tree
from rollflow.stream.wire.codec.handshake import MOST_AGENTS, MOST_SLOTS, LaneId, Number

AgentSlots = tuple[NDArray[np.int64] | None, ...]
Floats = tuple[NDArray[np.float32], ...]
Flags = tuple[NDArray[np.bool_], ...]
Infos = Sequence[list[list[Any]]]

_SLOTS = list_of(nullable(numbers("<i8")), MOST_AGENTS)
_TREES = list_of(tree, MOST_AGENTS)
_FLAGS = nullable(list_of(numbers("|b1"), MOST_AGENTS))


@dataclass(frozen=True, slots=True, eq=False)
class AgentRows:
    """Host to gateway: what a Reset or Step with this number gave to the agents, part by part.

    agent_slots         i64[K] ascending: who has an observation; None: all
    obs                 trees of arrays `any[K, ...]`, in the parts' spaces: after the step, the last ones of those that
                        ended with it among them
    rewards             f4[S], 0 where none came; None after a Reset, as all below
    terminateds,        bool[S]: who ended with the step, where it had come; of an environment that ended, all that were
    truncateds          still there
    ended               i64[E] ascending: environments whose episodes ended; they have been reset
    ended_truncated     bool[E]: whether that was by truncation
    first_agent_slots,  as the first two, of the episodes that began then; None where none ended
    first_obs
    infos               of each environment: [number of the agent among all, its info]; none at all where all are empty
    first_infos         of each of `ended`, likewise
    """

    kind: ClassVar[str] = "agent_rows"
    lane: LaneId
    number: Number
    agent_slots: Annotated[AgentSlots, _SLOTS]
    obs: Annotated[tuple[Tree, ...], _TREES]
    rewards: Annotated[Floats | None, nullable(list_of(numbers("<f4"), MOST_AGENTS))]
    terminateds: Annotated[Flags | None, _FLAGS]
    truncateds: Annotated[Flags | None, _FLAGS]
    ended: Annotated[NDArray[np.int64] | None, nullable(numbers("<i8"))]
    ended_truncated: Annotated[NDArray[np.bool_] | None, nullable(numbers("|b1"))]
    first_agent_slots: Annotated[AgentSlots | None, nullable(_SLOTS)]
    first_obs: Annotated[tuple[Tree, ...] | None, nullable(_TREES)]
    infos: Annotated[Infos, list_of(agent_infos, MOST_SLOTS)]
    first_infos: Annotated[Infos, list_of(agent_infos, MOST_SLOTS)]
