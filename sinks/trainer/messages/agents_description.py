"""Description of a rollout's agents, modules and spaces, as a trainer that gets its fragments has to know them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.offloaded.agent_fragment_message import PartSpaces, spaces_seen
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.sinks.trainer.messages.item_message import AnyFragment
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.data.space import describe_space
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.wire.codec.handshake import MOST_AGENTS
from rollflow.stream.wire.codec.spaces import read_space

_MOST_SPACES = 64


@dataclass(frozen=True, slots=True)
class AgentsDescription:
    """Agents, spaces and modules of a rollout.

    parts        the agents by their spaces
    to_train     ids of the modules that train batches are made for; None: all that act
    published    ids of the modules whose weights the trainer publishes
    """

    parts: tuple[PartSpaces, ...]
    to_train: frozenset[str] | None
    published: tuple[str, ...]

    @classmethod
    def of(cls, rollout: MultiAgentRollout, published: Sequence[str]) -> "AgentsDescription":
        """The description of a rollout whose pipelines stay as they are."""
        parts = spaces_seen(rollout.environments.parts, rollout.env_to_module)
        return cls(tuple(parts), rollout.learner.to_train, tuple(published))

    @classmethod
    def read(cls, entries: Any) -> "AgentsDescription":
        """Read a description that came over the wire. Raises WireError where it is something else."""
        if not isinstance(entries, dict):
            raise WireError(f"hello.metadata: agents is {shown(entries)}, expected a map", "message")
        parts, to_train = entries.get("parts"), entries.get("to_train")
        published: Any = entries.get("published")
        if not isinstance(parts, list) or not 1 <= len(parts) <= MOST_AGENTS:
            raise WireError(f"hello.metadata: agents.parts is {shown(parts)}, expected a list of parts", "message")
        if to_train is not None:
            _check_ids("to_train", to_train)
        _check_ids("published", published)
        read = tuple(_part_in(part, f"hello.metadata.agents.parts[{index}]") for index, part in enumerate(parts))
        return cls(read, None if to_train is None else frozenset(to_train), tuple(published))

    def plain(self) -> dict[str, Any]:
        """The description as plain values, for the wire."""
        parts = [
            {
                "agents": list(each.part.agents),
                "spaces": [describe_space(space) for space in each.seen],
                "action_space": describe_space(each.part.recorded_space),
            }
            for each in self.parts
        ]
        to_train = None if self.to_train is None else sorted(self.to_train)
        return {"parts": parts, "to_train": to_train, "published": list(self.published)}

    def trains(self, module_id: str) -> bool:
        """True if train batches are made for a module."""
        return self.to_train is None or module_id in self.to_train


def acting_versions(fragment: AnyFragment, ids: Sequence[str] | None) -> NDArray[np.int64]:
    """The policy versions, i64[K], of a fragment's steps; of several agents, of those that modules `ids` have made."""
    if isinstance(fragment, Fragment):
        versions: NDArray[np.int64] = fragment.column(Columns.POLICY_VERSION).reshape(-1)
        return versions
    there = [fragment.of_module(module_id) for module_id in ids or () if module_id in fragment.module_ids]
    return np.concatenate([np.zeros(0, np.int64), *(part.gather(Columns.POLICY_VERSION) for part in there)])


def newest_acting(fragment: AnyFragment, ids: Sequence[str] | None) -> int | None:
    """The newest of `acting_versions`; None: there are none."""
    versions = acting_versions(fragment, ids)
    return int(versions.max()) if len(versions) else None


def _part_in(entries: Any, where: str) -> PartSpaces:
    agents: Any = entries.get("agents") if isinstance(entries, dict) else None
    spaces: Any = entries.get("spaces") if isinstance(entries, dict) else None
    if not isinstance(agents, list) or not 1 <= len(agents) <= MOST_AGENTS or not all(map(_is_id, agents)):
        raise WireError(f"{where}: agents is {shown(agents)}, expected a list of ids", "message")
    if not isinstance(spaces, list) or not 1 <= len(spaces) <= _MOST_SPACES:
        raise WireError(f"{where}: spaces is {shown(spaces)}, expected 1 to {_MOST_SPACES} of them", "message")
    seen = [read_space(space, f"{where}.spaces") for space in spaces]
    part = AgentPart(tuple(agents), seen[0], read_space(entries.get("action_space"), f"{where}.action_space"))
    return PartSpaces(part, seen)


def _check_ids(name: str, ids: Any) -> None:
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise WireError(f"hello.metadata: agents.{name} is {shown(ids)}, expected a list of ids", "message")


def _is_id(agent: Any) -> bool:
    """True for a string or a number, or a tuple of these."""
    return isinstance(agent, str | int | float) or (isinstance(agent, tuple) and all(map(_is_id, agent)))
