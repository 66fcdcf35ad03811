"""The rollout of a sink: held back by the trainer, seen by the sink, and given the trainer's weights."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.nodes.modules.policy_weights import shapes_of
from rollflow.nodes.offloaded.fragment_message import message_of
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.rollout import Rollout
from rollflow.sinks.learner.learner_pipeline import FragmentGatherer
from rollflow.sinks.trainer.messages import (
    MOST_MODULES,
    AgentsDescription,
    AnyFragment,
    finished_since,
    joined_weights,
    message_of_fragment,
    parted_weights,
)
from rollflow.sinks.trainer.pace_gate import BatchCredits, PaceGate, ResendBuffer
from rollflow.stream import wire
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.errors import GraphError, ModuleError, shown
from rollflow.stream.data.loss_ledger import Origin, origins_of
from rollflow.stream.data.space import describe_space
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.wire.codec.handshake import MOST_NUMBER


class BatchObserver:
    """Node without outputs that observes every fragment as it leaves its rollout.

    rollout    of the fragments
    see        called with every fragment
    """

    def __init__(self, rollout: Rollout | MultiAgentRollout, see: Callable[[Any], None]) -> None:
        self._see = see
        self._returns: Any = EpisodeReturns()
        if isinstance(rollout, MultiAgentRollout):
            modules, observer = rollout.module, weakref.proxy(self)  # which holds the returns
            self._returns = AgentReturns(lambda module_id: module_id in modules or observer._untold(module_id) > 0)
        # Count of each one's episodes when they were last taken; a module of an id that was removed has its own.
        self._told: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __call__(self, fragments: Any) -> None:
        """Observe one fragment."""
        self._see(fragments)
        self._returns(fragments)

    def describe(self) -> str:
        """Text for `explain()`."""
        return "returns for the trainer"

    def take_episodes(self) -> dict[str, Any] | None:
        """Take the episodes that have finished since the last call, as they go over the wire; None: there are none."""
        returns = self._returns
        by_module = returns.by_module if isinstance(returns, AgentReturns) else {}
        ids = islice([each for each in by_module if self._untold(each)], MOST_MODULES)  # others come with the next
        parts = {each: self._taken(by_module[each]) for each in ids}
        finished = self._taken(returns)
        if parts:
            finished["by_module"] = parts
        return finished if finished["count"] or parts else None

    def _taken(self, returns: Any) -> dict[str, Any]:
        finished = finished_since(returns, self._told.get(returns, 0))
        self._told[returns] = returns.count
        return finished

    def _untold(self, module_id: Any) -> int:
        """Number of a module's episodes that have not been taken."""
        own = self._returns.by_module[module_id]
        return own.count - self._told.get(own, 0) if isinstance(module_id, str) else 0


AnyRollout = Rollout | MultiAgentRollout

_ends: "weakref.WeakKeyDictionary[Any, weakref.WeakSet[RolloutEnd]]" = weakref.WeakKeyDictionary()  # by rollout


def check_rollout(rollout: object) -> None:
    """Raise ValueError for anything but a rollout."""
    if not isinstance(rollout, AnyRollout):
        raise ValueError(f"rollout is {shown(rollout)}, expected a Rollout or a MultiAgentRollout")


class RolloutEnd:
    """A sink's side of its rollout.

    kept       what is given to the trainer
    sends      "fragments" or "batches"
    shares     whether fragments are to lie where the trainer sees them
    trainer    its name, in reports
    ring       called when a lane of the rollout has come, or is gone

    gate     holds the rollout back, and knows its lanes as a trainer that gets fragments is to know them
    seen     sees its fragments, where train batches are sent
    ids      modules whose weights the trainer publishes; None: there is one module

    Raises GraphError where the rollout is in its graph already, and ModuleError for module ids that are no strings.
    """

    def __init__(
        self,
        rollout: AnyRollout,
        kept: ResendBuffer,
        *,
        sends: str,
        shares: bool,
        trainer: str,
        ring: Callable[[], None],
    ) -> None:
        self.rollout, self._sends, self._shares = rollout, sends, shares
        self.ids = _claimed_ids(rollout) if isinstance(rollout, MultiAgentRollout) else None
        self._all_ends = _ends.setdefault(rollout, weakref.WeakSet())
        self._all_ends.add(self)
        lanes = range(rollout.environments.num_lanes) if sends == "fragments" else None
        self.gate = PaceGate(kept, trainer, lanes, ring)
        self.seen = BatchObserver(rollout, self.gate.see)
        rollout.hold_back(self.gate)
        if sends == "batches":
            rollout.watch(self.seen)
        self._can_be_paced = sends == "fragments"
        self._makers: list[Any] = []  # the nodes before the sink that know which fragments a batch is made of
        if shares and sends == "fragments":
            rollout.environments.share()

    def hello(self, newest: tuple[int, bytes] | None) -> dict[str, Any]:
        """What the first message of a connection to the trainer says of the rollout as it is now.

        newest    version and id of the newest weights that came from a trainer; None: none have
        """
        lanes = self.gate.last_items  # before the others: one that comes meanwhile has its slots among them
        environments = self.rollout.environments
        slots = tuple(env.num_envs for env in environments.envs) or (1,)
        if not environments.has_fixed_lanes:
            slots = tuple(slots[lane] for lane in lanes) or slots[:1]
        observation_space, action_space = self._agents_spaces or (
            environments.observation_space,
            environments.chosen_space,
        )
        return {
            "slots": slots,
            "observation_space": describe_space(observation_space),
            "action_space": describe_space(action_space),
            "metadata": self._metadata(lanes, newest),
        }

    def take_makers(self, sources: Sequence[Any], changed: Callable[[], None], *, drops: bool) -> None:
        """Know which fragments go into which train batch, if one node alone makes them of the rollout's.

        sources    lead to the sink
        changed    called from any thread when some have gone into none
        drops      whether some may be lost on their way

        Raises GraphError where there can't be what is to be sent.
        """
        makers = [node for node in sources if node is not self.rollout]
        self._makers = [node for node in makers if hasattr(node, "origins_of")]
        if self._sends == "batches" and not makers:
            raise GraphError(
                "fragments come to a sink with sends='batches', expected a LearnerPipeline between it and the rollout, "
                "or sends='fragments'"
            )
        if self._sends == "fragments" and any(isinstance(node, FragmentGatherer) for node in makers):
            raise GraphError("train batches come to a sink with sends='fragments', expected sends='batches'")
        if self.gate.credits is None and len(makers) == 1 and isinstance(makers[0], FragmentGatherer):
            self.gate.credits = BatchCredits(makers[0])
            makers[0].watch(changed)
        self._can_be_paced = not drops and (self._sends == "fragments" or self.gate.credits is not None)

    def origins_of(self, item: Any) -> list[Origin]:
        """The origins of a fragment, or of those that a train batch is made of."""
        return [*origins_of(item, self._makers)]

    def message_of(self, number: int, fragment: AnyFragment) -> wire.Fragment:
        """A fragment as a message of this number; one of several agents tells of episodes that have ended in it."""
        if isinstance(fragment, MultiAgentFragment):
            self.seen(fragment)
            return message_of(number, fragment, self._spaces, {"episodes": self.seen.take_episodes()})
        return message_of_fragment(number, fragment, self._spaces)

    @property
    def version(self) -> int:
        """Policy version that it acts with; of several modules that of the trainer's weights."""
        rollout = self.rollout
        return rollout.version_elsewhere if isinstance(rollout, MultiAgentRollout) else rollout.policy_version

    def publish(self, version: int, weights: Mapping[str, Any]) -> bool:
        """Have it act with weights of this version; False: they are not newer than its own. From any thread.

        Raises ModuleError where they are not those of its module, or of modules `ids` where it has several.
        """
        if isinstance(self.rollout, MultiAgentRollout):
            return self.rollout.publish_as(version, parted_weights(weights, self.ids or ()))
        return self.rollout.publish_as(version, weights)

    # Inside

    @cached_property
    def _agents_spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]] | None:
        """Dict spaces of observations and of actions: agent id, as text -> its space; None: there is one agent."""
        if not isinstance(self.rollout, MultiAgentRollout):
            return None
        by_agent = {str(agent): part for part in self.rollout.environments.parts for agent in part.agents}
        observations = gym.spaces.Dict({agent: part.observation_space for agent, part in by_agent.items()})
        return observations, gym.spaces.Dict({agent: part.recorded_space for agent, part in by_agent.items()})

    @cached_property
    def _spaces(self) -> Sequence[Any]:
        """Spaces that observations may be in; once the rollout runs, its pipelines stay as they are."""
        if isinstance(self.rollout, MultiAgentRollout):
            return AgentsDescription.of(self.rollout, ()).parts
        return _spaces_of(self.rollout)

    def _metadata(self, lanes: Mapping[int, int | None], newest: tuple[int, bytes] | None) -> dict[str, Any]:
        """Entries of a hello: the trainer makes batches by them, and compares weights.

        lanes     lane -> number of the item after which it has none; None while it is there
        newest    as in `hello`
        """
        rollout, has_fixed_lanes = self.rollout, self.rollout.environments.has_fixed_lanes
        metadata: dict[str, Any] = {}
        if isinstance(rollout, MultiAgentRollout):
            ids, spaces = self.ids or (), list(self._agents_spaces or ())[:1]
            weights = joined_weights({module_id: rollout.module[module_id].state_dict() for module_id in ids})
            if self._sends == "fragments":
                metadata["agents"] = AgentsDescription.of(rollout, ids).plain()
        else:
            spaces, weights = _spaces_of(rollout), rollout.module.state_dict()
        if not has_fixed_lanes:
            metadata["lanes"] = list(lanes)
        # Of several trainers, one might have a lane that comes in another round than the others.
        is_common = has_fixed_lanes or self._sends == "batches" or len(self._all_ends) == 1
        return metadata | {
            "sends": self._sends,
            "shares_memory": self._shares,
            "has_fixed_lanes": has_fixed_lanes,
            "spaces": [describe_space(space) for space in spaces],
            "is_stateful": isinstance(rollout, Rollout) and is_stateful(rollout.module),
            "is_by_module": isinstance(rollout, MultiAgentRollout),
            "module": type(rollout.module).__name__,
            "weights": {name: list(shape) for name, shape in shapes_of(weights).items()},
            "version": self.version,
            "weights_id": newest[1] if newest is not None and newest[0] == self.version else None,
            "seed": rollout.seed if rollout.seed < MOST_NUMBER else None,
            "can_be_paced": self._can_be_paced and is_common,
            "aside": [[lane, number] for lane, number in lanes.items() if number is not None],
        }


def _spaces_of(rollout: Rollout) -> list[gym.Space[Any]]:
    """Spaces that a fragment's observations may be in."""
    return [rollout.environments.observation_space, *rollout.env_to_module.observation_spaces]


def _claimed_ids(rollout: MultiAgentRollout) -> tuple[str, ...]:
    """Ids of the modules whose weights the trainer publishes, which have to stay from now on.

    Raises ModuleError for ids that are no strings.
    """
    trained = [module_id for module_id in rollout.module if rollout.learner.trains(module_id)]
    if not all(isinstance(module_id, str) for module_id in trained):
        raise ModuleError(f"module ids are {trained}, expected strings where a trainer elsewhere gets their batches")
    ids = tuple(module_id for module_id in trained if shapes_of(rollout.module[module_id].state_dict()))
    rollout.be_published_elsewhere(ids)
    return ids


def rollout_among(sources: Sequence[Any], where: str, *, is_all: bool) -> AnyRollout | None:
    """The rollout among the nodes that lead to a sink; None: it has not been connected yet.

    where     the sink, for messages
    is_all    whether there are no others to come

    Raises GraphError where there are several, or none is to come.
    """
    found = [node for node in sources if isinstance(node, AnyRollout)]
    if len(found) > 1:
        raise GraphError(
            f"{len(found)} rollouts lead to {where}, expected one: give each a sink of its own to the same trainer"
        )
    if not found and is_all:
        names = ", ".join(type(node).__name__ for node in sources) or "nothing"
        raise GraphError(
            f"no rollout leads to {where}, but {names}; expected a Rollout or a MultiAgentRollout upstream of it, as "
            "in graph.connect(rollout.fragments, TrainerSink(...))"
        )
    return found[0] if found else None
