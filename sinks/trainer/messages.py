"""Messages of a rollout to its trainer: fragments, train batches, finished episodes, and the agents that there are.

A batch of several modules is module id -> train batch. Their weights go as those of one module do, by names
`module id/name`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.nodes.offloaded.fragment_message import PartSpaces, layout_entries, layout_in, message_of, spaces_seen
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.stream import wire
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ColumnError, ModuleError, WireError, shown
from rollflow.stream.data.space import describe_space
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment as AnyFragment, MultiAgentFragment
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_AGENTS, MOST_LANES, MOST_NUMBER
from rollflow.stream.wire.codec.messages import ID_BYTES
from rollflow.stream.wire.codec.spaces import read_space

HAS_ENDED = "the trainer has ended"  # reason of its goodbye, if it leaves without an error
Batch = dict[str, Any]
ByModule = Mapping[str, Mapping[str, Any]]
MOST = 1 << 62
MOST_KEPT = 100  # episodes whose returns one batch tells: as many as a window of `EpisodeReturns` has
MOST_MODULES = 256  # that one batch tells of


def message_of_fragment(number: int, fragment: Fragment, spaces: Sequence[gym.Space[Any]]) -> wire.Fragment:
    """A fragment of a rollout, whose observations are in one of `spaces`; the columns are referred to."""
    return message_of(number, fragment, spaces, {"layout": layout_entries(fragment.layout)})


def layout_told(entries: Any, action_space: gym.Space[Any], before: FragmentLayout | None = None) -> FragmentLayout:
    """The layout of fragments, as their messages tell of it. Raises WireError where it is none.

    before    that of the fragment before, which is given again where this is the same
    """
    layout = layout_in(entries, action_space)
    return before if before is not None and before == layout else layout


def message_of_batch(
    number: int, batch: Batch, *, modules: Collection[str] | None = None, episodes: Mapping[str, Any] | None = None
) -> wire.Fragment:
    """A train batch: tensors and arrays `any[B, ...]`. Raises ColumnError for a column of anything else.

    modules     it is module id -> train batch; ids of those that the trainer publishes weights for. None: it is not
    episodes    fields of `FinishedEpisodes`; None: none have finished
    """
    columns = {name: map_tree(lambda leaf, name=name: _array(leaf, name), tree) for name, tree in batch.items()}
    rest: dict[str, Any] = {"batch": True}
    if modules is not None:
        rest["by_module"] = True
    counted = [each for name, each in columns.items() if name in modules] if modules is not None else [columns]
    rest["policy_version"] = oldest_version(counted)
    rest["steps"] = num_steps(batches_in(columns, is_by_module=modules is not None))
    if episodes is not None:
        rest["episodes"] = episodes
    return wire.Fragment(0, number, columns, rest)


def told_of_batch(message: wire.Fragment) -> tuple[int | None, int]:
    """Oldest policy version and steps of a train batch. Raises WireError where a message says no such thing."""
    rest = message.rest
    oldest: int | None = field.nullable(field.whole(-MOST, MOST))(rest.get("policy_version"), "policy_version")
    steps: int = field.whole(0, MOST)(rest.get("steps", 0), "steps")
    return oldest, steps


def batch_of_message(message: wire.Fragment) -> Batch:
    """The train batch in a message, tensors over the memory that they came in. Raises WireError where it is none."""
    try:
        return tensors_of(message.columns)
    except (TypeError, ValueError) as error:
        raise WireError(f"it is no train batch: {error}", "fragment") from error


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
    """The oldest policy version that actions were computed with; None where a batch does not say, or has no steps."""
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


def newest_version(batches: Iterable[Batch]) -> int | None:
    """The newest policy version that actions were computed with; None where no batch says."""
    versions = [each[Columns.POLICY_VERSION] for each in batches if Columns.POLICY_VERSION in each]
    return max((int(each.max()) for each in versions if len(each)), default=None)


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


def _episodes(value: Any, where: str) -> "FinishedEpisodes":
    finished: FinishedEpisodes = field.record(FinishedEpisodes)({"by_module": {}, **field.mapping(value, where)}, where)
    expected = min(finished.count, MOST_KEPT)
    if len(finished.returns) != expected or len(finished.lengths) != expected:
        raise WireError(f"{where} has {shown(value)}, expected {expected} returns and lengths", "fragment")
    return finished


def _by_module(value: Any, where: str) -> dict[str, "FinishedEpisodes"]:
    parts: dict[str, FinishedEpisodes] = field.map_of(_episodes)(value, where)
    if len(parts) > MOST_MODULES:
        raise WireError(f"{where} is {shown(value)}, expected at most {MOST_MODULES} module ids", "fragment")
    return parts


_RETURN = field.check_that(lambda value: isinstance(value, float) and value == value, "a number")


@dataclass(frozen=True, slots=True)
class FinishedEpisodes:
    """Episodes that have finished.

    count        how many
    returns      of the last of them, 100 at most, oldest first
    lengths      their steps
    by_module    module id -> the same of the agents that it served
    """

    count: Annotated[int, field.whole(0, MOST)]
    returns: Annotated[Sequence[float], field.list_of(_RETURN, MOST_KEPT)]
    lengths: Annotated[Sequence[int], field.list_of(field.whole(0, MOST), MOST_KEPT)]
    by_module: Annotated[Mapping[str, "FinishedEpisodes"], _by_module] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, entries: Any, *, is_by_module: bool) -> "FinishedEpisodes":
        """As it came over the wire; nil: none. Raises WireError where it is something else."""
        if entries is None:
            return NO_EPISODES
        finished = _episodes(entries, "episodes")
        if finished.by_module and not is_by_module:
            raise WireError("episodes.by_module of a rollout with one module, expected none", "fragment")
        return finished


NO_EPISODES = FinishedEpisodes(0, [], [])


def finished_since(returns: EpisodeReturns | AgentReturns, count: int) -> dict[str, Any]:
    """The episodes that have finished since there were so many, as `FinishedEpisodes` goes over the wire."""
    new = returns.count - count
    kept = min(new, MOST_KEPT, len(returns.returns))
    last = [list(islice(each, len(each) - kept, None)) for each in (returns.returns, returns.lengths)]
    return {"count": new, "returns": last[0], "lengths": last[1]}


def _is_id(agent: Any) -> bool:
    """True for a string or a number, or a tuple of these."""
    return isinstance(agent, str | int | float) or (isinstance(agent, tuple) and all(map(_is_id, agent)))


_PART = field.entries(
    agents=field.list_of(field.check_that(_is_id, "an id"), MOST_AGENTS),
    spaces=field.list_of(read_space, 64),
    action_space=read_space,
)
_IDS = field.list_of(field.text(1 << 16), MOST_AGENTS)


def _part_in(value: Any, where: str) -> PartSpaces:
    agents, spaces, action_space = _PART(value, where).values()
    if not agents or not spaces:
        raise WireError(f"{where} is {shown(value)}, expected agents and spaces")
    return PartSpaces(AgentPart(agents, spaces[0], action_space), spaces)


def _parts_in(value: Any, where: str) -> Sequence[PartSpaces]:
    if not value:
        raise WireError(f"{where} is {shown(value)}, expected 1 or more of them")
    parts: Sequence[PartSpaces] = field.list_of(_part_in, MOST_AGENTS)(value, where)
    return parts


_NUMBER = field.whole(0, MOST_NUMBER)


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
    lanes              that there are, also gone ones of `aside`, if lanes come and go
    aside              lane that is gone, and number of its last item; of each
    shares_memory      whether it lends its fragments
    is_by_module       train batches, or what is made of its fragments, are module id -> train batch: there are several
                       agents
    to_train           ids of the modules that train batches are made for; None: all that act
    published          ids of the modules whose weights the trainer publishes
    can_be_paced       whether it knows which fragments go into which batch, and sends all that it makes; None: it does
                       if it sends fragments
    """

    sends: Annotated[str, field.one_of("fragments", "batches")]
    parts: Annotated[Sequence[PartSpaces], _parts_in]
    weights: Annotated[Mapping[str, tuple[int, ...]], field.map_of(field.list_of(_NUMBER, 64))]
    has_fixed_lanes: Annotated[bool, field.flag]
    is_stateful: Annotated[bool, field.flag]
    module: Annotated[str, field.text(1 << 16)]
    version: Annotated[int, _NUMBER]
    weights_id: Annotated[bytes | None, field.nullable(field.raw(0, ID_BYTES))] = None
    seed: Annotated[int | None, field.nullable(field.whole(-MOST_NUMBER, MOST_NUMBER))] = None
    lanes: Annotated[Sequence[int] | None, field.nullable(field.list_of(_NUMBER, MOST_LANES))] = None
    aside: Annotated[Sequence[Sequence[int]], field.list_of(field.items(_NUMBER, _NUMBER), MOST_LANES)] = ()
    shares_memory: Annotated[bool, field.flag] = False
    is_by_module: Annotated[bool, field.flag] = False
    to_train: Annotated[Collection[str] | None, field.nullable(_IDS)] = None
    published: Annotated[Sequence[str], _IDS] = ()
    can_be_paced: Annotated[bool | None, field.nullable(field.flag)] = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "RolloutDescription":
        """The description in the metadata of a hello. Raises WireError where they make no sense."""
        told = cls(**field.checked_fields(cls, metadata, "hello.metadata"))
        return dataclasses.replace(told, can_be_paced=not told.sends_batches) if told.can_be_paced is None else told

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


# News of a rollout: a lane that has joined, and is about to begin its first fragment; a lane that is gone, with the
# number of an item behind which none is from it, 0 where it had none; number of the last item, 0 where there is none.
NEWS = field.entries(
    joined=field.nullable(_NUMBER), left=field.nullable(field.items(_NUMBER, _NUMBER)), last=field.nullable(_NUMBER)
)
UNKNOWN = RolloutDescription("fragments", (), {}, has_fixed_lanes=True, is_stateful=False, module="", version=0)


def acting_versions(fragment: MultiAgentFragment, ids: Sequence[str]) -> tuple[int | None, int | None]:
    """The oldest and the newest policy version of the steps that modules `ids` have made; None: there are none."""
    parts = [part for module_id, part in fragment.by_module().items() if module_id in ids]
    versions = np.concatenate([np.zeros(0, np.int64), *(part.gather(Columns.POLICY_VERSION) for part in parts)])
    return (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
