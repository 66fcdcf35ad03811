"""Messages of a rollout to its trainer: fragments, train batches, finished episodes, and the agents that there are.

A batch of several modules is module id -> train batch. Their weights go as those of one module do, by names
`module id/name`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.offloaded.fragment_message import PartSpaces, layout_entries, message_of, spaces_seen
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.stream import wire
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ModuleError
from rollflow.stream.data.space import describe_space
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment as AnyFragment, MultiAgentFragment
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_LANES, MOST_NUMBER
from rollflow.stream.wire.codec.spaces import read_space

HAS_ENDED = "the trainer has ended"  # reason of its goodbye, if it leaves without an error
Batch = dict[str, Any]
# Episodes that have finished: id of the module whose agents they were of, None for all; how many; of the last of them
# the returns f64[E], oldest first, and the lengths i64[E].
FinishedEpisodes = tuple[str | None, int, NDArray[np.float64], NDArray[np.int64]]
ByModule = Mapping[str, Mapping[str, Any]]
NUMBER = field.whole(0, MOST_NUMBER)
# What a rollout says beside its items: how many lanes there are; one that is gone, and its last item; its last item;
# the number of the checkpoint that it is asked for, with its state, `u8[n]` and the kinds of environments of every
# lane, or else the reason for which it has none.
LANE_NEWS = field.entries(
    lanes=field.nullable(NUMBER),
    left=field.nullable(field.list_of(NUMBER, 2)),
    last=field.nullable(NUMBER),
    cut=field.nullable(NUMBER),
    state=field.nullable(field.numbers("|u1")),
    environments=field.nullable(field.list_of(field.mapping, MOST_LANES)),
    refused=field.nullable(field.text(1 << 16)),
)
VERSION = field.nullable(field.whole(-MOST_NUMBER, MOST_NUMBER))
_MODULE = field.nullable(field.text(1 << 16))
_RETURNS, _LENGTHS = field.numbers("<f8"), field.numbers("<i8")


def message_of_fragment(number: int, fragment: Fragment, spaces: Sequence[gym.Space[Any]]) -> wire.Fragment:
    """A fragment of a rollout, whose observations are in one of `spaces`; the columns are referred to."""
    return message_of(number, fragment, spaces, {"layout": layout_entries(fragment.layout)})


def message_of_batch(
    number: int, batch: Batch, *, modules: Collection[str] | None = None, episodes: Sequence[Any] = ()
) -> wire.Fragment:
    """A train batch: tensors and arrays `any[B, ...]`. Raises ColumnError for a column of anything else.

    modules     it is module id -> train batch; ids of those that the trainer publishes weights for. None: it is not
    episodes    that have finished, see `BatchObserver.take_episodes`
    """
    columns = {name: map_tree(lambda leaf, name=name: _array(leaf, name), tree) for name, tree in batch.items()}
    counted = [each for name, each in columns.items() if name in modules] if modules is not None else [columns]
    rest = {
        "batch": True,
        "by_module": modules is not None,
        "policy_version": oldest_version(counted),
        "steps": num_steps(batches_in(columns, is_by_module=modules is not None)),
        "episodes": episodes,
    }
    return wire.Fragment(0, number, columns, rest)


def finished_in(rest: Mapping[str, Any]) -> list[Any]:
    """`FinishedEpisodes` that a message lists. Raises WireError, TypeError or ValueError for what is no such list."""
    checks = _MODULE, NUMBER, _RETURNS, _LENGTHS
    return [
        tuple([check(part, "episodes") for check, part in zip(checks, each, strict=True)]) for each in rest["episodes"]
    ]


def tensors_of(columns: Mapping[str, Any]) -> Batch:
    """A train batch over the memory of trees of arrays."""
    return {
        name: torch.from_numpy(tree) if isinstance(tree, np.ndarray) else map_tree(torch.from_numpy, tree)
        for name, tree in columns.items()
    }


def arrays_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of arrays under a train batch that has come."""
    return {name: map_tree(lambda tensor: tensor.numpy(), tree) for name, tree in batch.items()}


def nbytes_of(message: wire.Fragment) -> int:
    """Bytes of the columns."""
    return sum(leaf.nbytes for tree in message.columns.values() for leaf in leaves_of(tree))


def is_batch(message: wire.Fragment) -> bool:
    """True if a message has a train batch, and not a fragment."""
    return message.rest.get("batch") is True


def _array(leaf: Any, name: str) -> NDArray[Any]:
    if torch.is_tensor(leaf):
        leaf = leaf.detach().cpu().numpy()
    if not isinstance(leaf, np.ndarray) or leaf.dtype.hasobject:
        raise ColumnError(f"column '{name}' of the batch is {type(leaf).__name__}, expected tensors or arrays")
    return leaf


def is_by_module(tree: Any) -> bool:
    """True if weights, or a train batch, are those of several modules."""
    return isinstance(tree, Mapping) and bool(tree) and all(isinstance(each, Mapping) for each in tree.values())


def joined_weights(weights: ByModule) -> dict[str, Any]:
    """Join the weights of several modules under names `module id/name`."""
    return {f"{module_id}/{name}": value for module_id, each in weights.items() for name, value in each.items()}


def parted_weights(weights: Mapping[str, Any], ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Part joined weights by modules with these ids. Raises ModuleError for a name of another module."""
    parted: dict[str, dict[str, Any]] = {}
    longest_first = sorted(ids, key=len, reverse=True)
    for joined, value in weights.items():
        module_id = next((each for each in longest_first if joined.startswith(f"{each}/")), None)
        if module_id is None:
            raise ModuleError(f"weights have '{joined}', expected 'module id/name' with ids among {sorted(ids)}")
        parted.setdefault(module_id, {})[joined[len(module_id) + 1 :]] = value
    return parted


def batches_in(batch: Batch, *, is_by_module: bool) -> Iterable[Batch]:
    """The train batches that a batch is made of."""
    return batch.values() if is_by_module else [batch]


def oldest_version(batches: Iterable[Batch]) -> int | None:
    """The oldest policy version that actions were computed with; None if a batch does not say, or has no steps."""
    oldest = []
    for batch in batches:
        versions, mask = batch.get(Columns.POLICY_VERSION), batch.get(Columns.LOSS_MASK)
        if versions is None:
            return None
        if mask is not None and mask.shape == versions.shape:
            versions = versions[mask]  # without what rows are padded with
        if not len(versions):
            return None
        oldest.append(int(versions.min()))
    return min(oldest, default=None)


def num_steps(batches: Iterable[Batch]) -> int:
    """Steps in all of them: rows, or what the loss masks have of them."""
    count = 0
    for batch in batches:
        mask = batch.get(Columns.LOSS_MASK)
        count += len(leaves_of(batch)[0]) if mask is None else int(mask.sum())
    return count


def concatenated(batches: Sequence[Batch], *, is_by_module: bool) -> Batch:
    """Several as one; of several modules, each module's, of which some batches may have none."""
    if is_by_module:
        ids = dict.fromkeys(module_id for batch in batches for module_id in batch)
        return {module_id: _one_of([batch[module_id] for batch in batches if module_id in batch]) for module_id in ids}
    return _one_of(batches)


def _one_of(batches: Sequence[Batch]) -> Batch:
    """With the columns that all have: a module may have been followed by another that gives others."""
    if len(batches) == 1:
        return dict(batches[0])
    names = [name for name in batches[0] if all(name in batch for batch in batches)]
    return {name: map_tree(lambda *parts: torch.cat(parts), *(each[name] for each in batches)) for name in names}


@dataclass(frozen=True, slots=True)
class RolloutDescription:
    """What a rollout says of itself, in the metadata of its hello.

    sends              "fragments" or "batches"
    parts              the agents by their spaces; one agent is a part
    weights            name -> shape of the module's weights
    has_fixed_lanes    no other lanes come
    is_stateful        the module is
    module             name of the module's class
    version            policy version that it acts with
    weights_id         of its weights, if a trainer sent them; None: they have none
    seed               of its environments; None: unknown
    aside              fixed lane that is gone, and number of its last item; of each
    shares_memory      whether it lends its fragments
    is_by_module       train batches, or what is made of its fragments, are module id -> train batch: there are several
                       agents
    to_train           ids of the modules that train batches are made for; None: all that act
    published          ids of the modules whose weights the trainer publishes
    sends_all          whether all that it makes comes to its sink: no edge drops
    takes_state        whether it may be given a state to go on from: it has not begun
    born               random bytes of its own, also if it goes on from another's state under that one's token
    """

    sends: str
    parts: Sequence[PartSpaces]
    weights: Mapping[str, tuple[int, ...]]
    has_fixed_lanes: bool
    is_stateful: bool
    module: str
    version: int
    weights_id: bytes | None = None
    seed: int | None = None
    aside: Sequence[Sequence[int]] = ()
    shares_memory: bool = False
    is_by_module: bool = False
    to_train: Collection[str] | None = None
    published: Sequence[str] = ()
    sends_all: bool = True
    takes_state: bool = False
    born: bytes = b""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "RolloutDescription":
        """The description in the metadata of a hello. Raises WireError for a space that is none."""
        parts = []
        for each in metadata["parts"]:
            action_space, *seen = (
                read_space(space, "hello.metadata.parts") for space in [each["action_space"], *each["spaces"]]
            )
            parts.append(PartSpaces(AgentPart(tuple(each["agents"]), seen[0], action_space), seen))
        weights = {name: tuple(shape) for name, shape in metadata["weights"].items()}
        for number in (metadata["version"], *chain(*metadata.get("aside", ()))):
            NUMBER(number, "a number in hello.metadata")
        return cls(**{**metadata, "parts": parts, "weights": weights})

    def plain(self) -> dict[str, Any]:
        """The description as plain values, for the wire."""
        told = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        told["parts"] = [
            {
                "agents": list(each.part.agents),
                "spaces": [describe_space(space) for space in each.seen],
                "action_space": describe_space(each.part.recorded_space),
            }
            for each in self.parts
        ]
        told["weights"] = {name: list(shape) for name, shape in self.weights.items()}
        told["to_train"] = None if self.to_train is None else sorted(self.to_train)
        return {name: value for name, value in told.items() if value is not None}

    @property
    def sends_batches(self) -> bool:
        """True if it sends train batches."""
        return self.sends == "batches"

    def trains(self, module_id: str) -> bool:
        """True if train batches are made for a module."""
        return self.to_train is None or module_id in self.to_train


def parts_of(rollout: Rollout | MultiAgentRollout) -> Sequence[PartSpaces]:
    """Agents of a rollout by their spaces; one agent is a part."""
    if isinstance(rollout, MultiAgentRollout):
        return spaces_seen(rollout.environments.parts, rollout.env_to_module)
    environments = rollout.environments
    part = AgentPart(("agent",), environments.observation_space, environments.chosen_space)
    return spaces_seen([part], [rollout.env_to_module])


UNKNOWN = RolloutDescription("fragments", (), {}, has_fixed_lanes=True, is_stateful=False, module="", version=0)


def acting_versions(fragment: MultiAgentFragment, ids: Sequence[str]) -> tuple[int | None, int | None]:
    """The oldest and the newest policy version of the steps that modules `ids` have made; None: there are none."""
    parts = [part for module_id, part in fragment.by_module().items() if module_id in ids]
    versions = np.concatenate([np.zeros(0, np.int64), *(part.gather(Columns.POLICY_VERSION) for part in parts)])
    return (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
