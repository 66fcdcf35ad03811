"""Environments with several agents as workers and hosts send them: infos and steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.multi_agent_env import AgentInfos
from rollflow.stream.data.blocks import BlockLayout
from rollflow.stream.data.column import Column
from rollflow.stream.data.packing import Drop, can_pack, sendable_info
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.multi_agent.agent_part import Actions, AgentPart, Observed, PartStep, VectorStep

_OF_SOME = ("actions", "observations", "first observations")
_OF_ALL = ("rewards", "terminateds", "truncateds")


class InfoCodec:
    """Infos of a lane's environments as plain lists, with numbers in place of agents.

    first_env    the number of the lane's first environment, in what is told of infos that can't be packed
    """

    def __init__(self, agents: Sequence[Any], first_env: int = 0) -> None:
        self._agents, self._first_env = list(agents), first_env
        self._place = {agent: place for place, agent in enumerate(agents)}

    def plain(self, infos: AgentInfos) -> list[list[Any]]:
        """Per environment: [place of the agent, its info]."""
        return [[[self._place[agent], dict(info)] for agent, info in each.items() if info] for each in infos]

    def sent(self, infos: AgentInfos, envs: Sequence[int], drop: Drop) -> list[list[Any]]:
        """Infos of environments with these numbers, as in `plain`, without entries that can't be packed."""
        plain = self.plain(infos)
        if can_pack(plain):
            return plain
        whose = [f"environment {self._first_env + env}, agent" for env in envs]
        return self.plain(
            [
                {agent: sendable_info(info, drop, where=f"{its} {agent!r}: info") for agent, info in each.items()}
                for its, each in zip(whose, infos, strict=True)
            ]
        )

    def infos(self, plain: Sequence[Sequence[Any]]) -> list[dict[Any, Mapping[str, Any]]]:
        """Per environment: agent -> info."""
        return [{self._agents[place]: info for place, info in each} for each in plain]


class StepBlock:
    """Views of a block that both ends have, for the N environments of a lane.

        parts     the agents by their spaces; a part of A agents has S = N * A agent slots
        block     u8[], at least `size` of it

    Of each part, with room for all slots: actions, observations and first observations, each with the slots that they
    are of, i64[S], and their number; rewards f32[S]; terminateds and truncateds bool[S]. Of the lane: i64[N]
    environments whose episodes have ended, their number, and bool[N] which of them were truncated. What is read are
    views, until the next step.
    """

    def __init__(self, parts: Sequence[AgentPart], num_envs: int, block: NDArray[np.uint8]) -> None:
        columns = _layout(parts, num_envs).columns(block)
        self._actions, self._observed, self._first = (
            [
                _SomeSlots(columns[f"{name} of part {part}"], columns[f"slots of {name} of part {part}"].row(0))
                for part in range(len(parts))
            ]
            for name in _OF_SOME
        )
        self._of_all = [[columns[f"{name} of part {part}"].row(0) for name in _OF_ALL] for part in range(len(parts))]
        self._ended: NDArray[np.int64] = columns["ended"].row(0)
        self._truncated: NDArray[np.bool_] = columns["truncated"].row(0)

    @staticmethod
    def size(parts: Sequence[AgentPart], num_envs: int) -> int:
        """Bytes of a block."""
        return _layout(parts, num_envs).size

    def write_actions(self, actions: Actions) -> None:
        """Put in what the agents are to do. Raises ColumnError if that is not of their action spaces' types."""
        for part, (slots, tree) in zip(self._actions, actions, strict=True):
            part.write(slots, tree)

    def actions(self) -> Actions:
        """Actions of the agents: copies, which environments may keep."""
        return [(slots, map_tree(np.array, tree)) for slots, tree in (part.read() for part in self._actions)]

    def write_first(self, observed: Sequence[Observed]) -> None:
        """Put in first observations."""
        for part, (slots, tree) in zip(self._first, observed, strict=True):
            part.write(slots, tree)

    def first(self) -> list[Observed]:
        """First observations."""
        return [Observed(*part.read()) for part in self._first]

    def write_step(self, step: VectorStep) -> None:
        """Put in all of a step but infos."""
        for observed, of_all, part_step in zip(self._observed, self._of_all, step.parts, strict=True):
            observed.write(*part_step.observed)
            for column, values in zip(of_all, part_step[1:], strict=True):
                column[:] = values
        count = self._ended[0] = len(step.ended)
        if count:
            self._ended[1 : 1 + count], self._truncated[:count] = step.ended, step.truncated
            self.write_first(step.first)

    def step(self, infos: AgentInfos, first_infos: AgentInfos) -> VectorStep:
        """The step, with infos that came beside it."""
        ended = self._ended[1 : 1 + int(self._ended[0])].copy()
        return VectorStep(
            parts=[
                PartStep(Observed(*observed.read()), *of_all)
                for observed, of_all in zip(self._observed, self._of_all, strict=True)
            ],
            ended=ended,
            truncated=self._truncated[: len(ended)].copy(),
            first=self.first() if len(ended) else (),
            infos=infos,
            first_infos=first_infos,
        )


class _SomeSlots:
    """Values of K of S slots, `any[K, ...]`, and which they are."""

    def __init__(self, values: Column, slots: NDArray[np.int64]) -> None:
        self._values, self._slots = values, slots
        self._all = np.arange(len(slots) - 1)

    def write(self, slots: NDArray[np.int64] | None, values: Tree) -> None:
        slots = self._all if slots is None else slots
        count = self._slots[0] = len(slots)
        self._slots[1 : 1 + count] = slots
        if count:
            self._values.write_items(0, self._all[:count], values)

    def read(self) -> tuple[NDArray[np.int64] | None, Tree]:
        count = int(self._slots[0])
        values = map_tree(lambda leaf: leaf[0, :count], self._values.tree)
        return (None if count == len(self._all) else self._slots[1 : 1 + count].copy()), values


def _layout(parts: Sequence[AgentPart], num_envs: int) -> BlockLayout:
    columns: dict[str, tuple[Any, int]] = {
        "ended": (np.zeros(1 + num_envs, np.int64), 1),
        "truncated": (np.zeros(num_envs, np.bool_), 1),
    }
    for index, part in enumerate(parts):
        slots = num_envs * len(part.agents)
        actions, observations = row_of(part.action_space, slots), row_of(part.observation_space, slots)
        for name, row in zip(_OF_SOME, (actions, observations, observations), strict=True):
            columns[f"{name} of part {index}"] = row, 1
            columns[f"slots of {name} of part {index}"] = np.zeros(1 + slots, np.int64), 1  # how many, and then they
        for name, dtype in zip(_OF_ALL, (np.float32, np.bool_, np.bool_), strict=True):
            columns[f"{name} of part {index}"] = np.zeros(slots, dtype), 1
    return BlockLayout(columns)
