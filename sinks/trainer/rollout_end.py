"""The rollout of a sink: held back by the trainer, seen by the sink, and given the trainer's weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from rollflow.nodes.loaded_weights import Loaded
from rollflow.nodes.multi_agent.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout import Rollout
from rollflow.nodes.weights_codec import to_arrays
from rollflow.nodes.weights_digest import digest_of
from rollflow.sinks.learner_pipeline import Gathering
from rollflow.sinks.trainer.any_rollout import (
    AnyRollout,
    Described,
    check_rollout,
    claimed_ids,
    described,
    publish_as,
    returns_for,
    seen_in,
    version_of,
)
from rollflow.sinks.trainer.batch_credits import BatchCredits
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.lane_news import LaneNews
from rollflow.sinks.trainer.pace_gate import PaceGate
from rollflow.sinks.trainer.seen import Seen
from rollflow.sinks.trainer.subscribers import Subscriber
from rollflow.stream.errors import GraphError
from rollflow.stream.wire import Receipt

_MOST_VERSIONS = 64  # of weights that were converted


class RolloutEnd:
    """What a sink has to do with its rollout.

    kept       what is given to the trainer
    sends      "fragments" or "batches"
    shares     whether fragments are to lie where the trainer sees them
    look_up    called when another trainer of the rollout has left, or has come back
    trainer    its name, in reports
    ring       called when a lane of the rollout has come, or is gone

    subscriber    the trainer, as one of the rollout's
    gate          holds the rollout back
    lanes         of the rollout, as a trainer that gets fragments is to know them
    seen          sees its fragments, where train batches are sent
    ids           modules whose weights the trainer publishes; None: there is one module

    Raises GraphError where the rollout is in its graph already, ModuleError for module ids that are no strings, and
    ValueError where its fragments can't be sent.
    """

    def __init__(
        self,
        rollout: AnyRollout,
        kept: Kept,
        *,
        sends: str,
        shares: bool,
        look_up: Callable[[], None],
        trainer: str,
        ring: Callable[[], None],
    ) -> None:
        check_rollout(rollout)
        if isinstance(rollout, MultiAgentRollout) and sends != "batches":
            raise ValueError(
                "fragments of several agents can't be sent to a trainer, expected sends='batches' and a "
                "MultiAgentLearnerPipeline between the rollout and this"
            )
        self.rollout, self._sends = rollout, sends
        self.ids = claimed_ids(rollout)
        self.subscriber = Subscriber(rollout, look_up)
        self.lanes = LaneNews(range(rollout.environments.num_lanes) if sends == "fragments" else None, ring)
        self.gate = PaceGate(kept, self.subscriber, trainer, self.lanes)
        self.seen = Seen(returns_for(rollout), self.ids, self.gate.see)
        rollout.hold_back(self.gate)
        if sends == "batches":
            rollout.watch(self.seen)
        self._can_be_paced = sends == "fragments"
        self._converted: dict[int, bytes] = {}  # version -> digest of weights as the module has them, if otherwise
        # Of a trainer: how often it had come, and forward node -> the weights that it was told to be in use.
        self._told: tuple[int, dict[str, Loaded]] = 0, {}
        if isinstance(rollout, Rollout):
            rollout.digest_loaded()
        if shares and sends == "fragments":
            rollout.environments.share()

    def describe(self) -> Described:
        """Its part of a `Hello`."""
        lanes = self.lanes.told  # before the others: one that comes meanwhile has its slots among them
        told = described(self.rollout, self.ids)
        aside = [[lane, number] for lane, number in lanes.items() if number is not None]
        has_fixed_lanes = self.rollout.environments.has_fixed_lanes
        # Of several trainers, one might have a lane that comes in another round than the others.
        is_common = has_fixed_lanes or self._sends == "batches" or self.subscriber.is_alone
        metadata = told.metadata | {"can_be_paced": self._can_be_paced and is_common, "aside": aside}
        if has_fixed_lanes:
            return told._replace(metadata=metadata)
        slots = tuple(told.slots[lane] for lane in lanes) or told.slots[:1]
        return told._replace(slots=slots, metadata=metadata | {"lanes": list(lanes)})

    def take_makers(self, sources: Sequence[Any], changed: Callable[[], None], *, drops: bool) -> None:
        """Know which fragments go into which train batch, if one node alone makes them of the rollout's.

        sources    lead to the sink
        changed    called from any thread when some have gone into none
        drops      whether some may be lost on their way

        Raises GraphError where there can't be what is to be sent.
        """
        makers = [node for node in sources if node is not self.rollout]
        if self._sends == "batches" and not makers:
            raise GraphError(
                "fragments come to a sink with sends='batches', expected a LearnerPipeline between it and the rollout, "
                "or sends='fragments'"
            )
        if self._sends == "fragments" and any(isinstance(node, Gathering) for node in makers):
            raise GraphError("train batches come to a sink with sends='fragments', expected sends='batches'")
        if self.gate.credits is None and len(makers) == 1 and isinstance(makers[0], Gathering):
            self.gate.credits = BatchCredits(makers[0])
            makers[0].watch(changed)
        self._can_be_paced = not drops and (self._sends == "fragments" or self.gate.credits is not None)

    @cached_property
    def spaces(self) -> list[Any]:
        """What a fragment's observations may be in; once the rollout runs, its pipelines stay as they are."""
        assert isinstance(self.rollout, Rollout)
        return seen_in(self.rollout)

    @property
    def version(self) -> int:
        """The policy version that it acts with."""
        return version_of(self.rollout)

    def publish(self, version: int, weights: Mapping[str, Any]) -> bool:
        """Have it act with weights of this version; False: they are not newer than its own. From any thread."""
        if isinstance(self.rollout, Rollout) and self.rollout.loaded is not None:
            self._note_conversion(version, weights)
        return publish_as(self.rollout, version, weights, self.ids)

    def receipt_of(self, lane: int, version: int | None, came: Mapping[int, bytes], welcomes: int) -> Receipt | None:
        """What a lane's forward node is seen to use; None: that is not known, or no news for the trainer.

        version     that it last acted with; None: it has not
        came        version -> digest, of weights as they came from the trainer
        welcomes    how often the trainer had come
        """
        used = None if version is None else self._used_in(lane, version, came)
        if used is None:
            return None
        if self._told[0] != welcomes:
            self._told = welcomes, {}
        node = f"lane {lane}"
        if self._told[1].get(node) == used:
            return None
        self._told[1][node] = used
        return Receipt(node, *used)

    def _used_in(self, lane: int, version: int, came: Mapping[int, bytes]) -> Loaded | None:
        """The newest weights, of those that came, that a lane's forward node is known to have; None: of none."""
        elsewhere = self.rollout.loaded if isinstance(self.rollout, Rollout) else None
        if elsewhere is None:
            return Loaded(version, came[version]) if version in came else None
        loaded = elsewhere.get(lane)
        if loaded is None or loaded.version not in came:
            return None
        is_converted = loaded.digest == self._converted.get(loaded.version)
        return Loaded(loaded.version, came[loaded.version]) if is_converted else loaded

    def _note_conversion(self, version: int, weights: Mapping[str, Any]) -> None:
        """Take down what weights become in a module that has other dtypes."""
        own = {name: value.dtype for name, value in self.rollout.module.state_dict().items() if torch.is_tensor(value)}
        given = {name: value for name, value in weights.items() if torch.is_tensor(value)}
        converted = {name: value.to(own.get(name, value.dtype)) for name, value in given.items()}
        if any(converted[name].dtype != value.dtype for name, value in given.items()):
            arrays = to_arrays(converted)
            self._converted[version] = digest_of(arrays.tensors, arrays.dtypes)
            while len(self._converted) > _MOST_VERSIONS:
                del self._converted[next(iter(self._converted))]


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
        told = ", ".join(type(node).__name__ for node in sources) or "nothing"
        raise GraphError(
            f"no rollout leads to {where}, but {told}; expected a Rollout or a MultiAgentRollout upstream of it, as in "
            "graph.connect(rollout.fragments, TrainerSink(...)), or the rollout as its argument"
        )
    return found[0] if found else None
