"""Item maker: makes train batches, or hands over fragments, of the items that have come to a trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollflow.nodes.argument_checks import check_numbers, checking_constructor
from rollflow.nodes.connectors.common.batches import NumpyToTensor
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.metrics.episode_returns import EpisodeReturns
from rollflow.nodes.stages.acting import check_connector, pieces_given
from rollflow.nodes.stages.rounds import check_bounded
from rollflow.sinks.trainer.messages import (
    AnyFragment,
    Batch,
    FinishedEpisodes,
    RolloutDescription,
    concatenated,
)
from rollflow.sinks.trainer.rollout_peer import ArrivedItem
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError, RunError, noted, shown
from rollflow.stream.data.infos import copied
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment, parts_by_module

LearnerConnector = Callable[[Any, Any], ConnectorV2 | list[ConnectorV2]]


@checking_constructor()
@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Train batches that a `TrainerStream` gives: `TrainerStream(address, yields=Batches(fragments=8))`.

    fragments            number of fragments in a batch, in the order in which they come. None: as many as there are
                         lanes in all the rollouts that are there or may come back; under "pace", one of each
    learner_connector    `lambda obs_space, act_space: piece or list of pieces`, before the default ones

    Raises ValueError for a number that is not whole, or below 1; ConnectorError for what makes no pieces.
    """

    fragments: int | None = None
    learner_connector: LearnerConnector | None = None

    def __post_init__(self) -> None:
        check_numbers(fragments=(self.fragments, 1))
        if self.learner_connector is not None:
            check_connector(self.learner_connector, "learner_connector", "obs_space, act_space")


Yields = Literal["batches", "fragments"] | Batches


class StreamReturns(EpisodeReturns):
    """Returns and lengths of episodes of several rollouts, from their fragments or from their train batches.

    by_module    module id -> returns of the agents that it served; {} if rollouts have one agent
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_module: dict[str, EpisodeReturns] = {}

    def add_item(self, arrived: ArrivedItem) -> None:
        """Add the episodes that have ended in a fragment, or that its message or a train batch lists."""
        if isinstance(arrived.item, Fragment):
            self.add(arrived.item, arrived.source.session.token.hex())
        else:
            self.take_finished(arrived.finished)

    def take_finished(self, finished: Sequence[FinishedEpisodes]) -> None:
        """Add the finished episodes that a message lists."""
        for module_id, count, episode_returns, lengths in finished:
            returns: Any = self if module_id is None else self.by_module.setdefault(module_id, EpisodeReturns())
            returns.take(count, episode_returns.tolist(), lengths.tolist())

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "by_module": {name: each.get_state() for name, each in self.by_module.items()}}

    def set_state(self, state: Mapping[str, Any], *, goes_on: bool = True) -> None:
        super().set_state(state, goes_on=goes_on)
        for name, each in state["by_module"].items():
            self.by_module[name] = returns = EpisodeReturns()
            returns.set_state(each, goes_on=goes_on)


class ItemMaker:
    """Makes items for the trainer's loop: train batches by the learner pipeline, or the fragments, one at a time.

    batches    how train batches are made; None: fragments are handed over
    module     that their pieces see; of several modules module id -> module
    metrics    that their pieces see

    returns    of the episodes in what was made
    """

    def __init__(self, batches: Batches | None, module: Any, metrics: Any) -> None:
        self.returns = StreamReturns()
        self._gives_batches, batches = batches is not None, batches or Batches()
        self._learner_connector, self._module, self._metrics = batches.learner_connector, module, metrics
        # By what they are made for: the module, of several, the part of its agents, and whether it is stateful.
        self._pipelines: dict[tuple[str | None, int, bool], LearnerConnectorPipeline] = {}
        self._before: dict[tuple[str | None, int, bool], Any] = {}  # states of those that are not made yet

    def get_state(self) -> dict[str, Any]:
        """What pieces have learnt and logged, and the returns."""
        of_pieces = {**self._before, **{key: each.get_state() for key, each in self._pipelines.items()}}
        states = {"pieces": of_pieces, "metrics": self._metrics.get_state(), "returns": self.returns.get_state()}
        copies: dict[str, Any] = copied(states)
        return copies

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave."""
        self._before = dict(state["pieces"])
        self._metrics.set_state(state["metrics"])
        self.returns.set_state(state["returns"])

    def item_of(self, arrived_items: Sequence[ArrivedItem]) -> Any:
        """The item of a set of arrived items; None: a batch without steps. Raises RunError if none can be made."""
        fragments: list[Any] = [arrived.item for arrived in arrived_items if isinstance(arrived.item, AnyFragment)]
        if fragments and len(fragments) < len(arrived_items):
            raise RunError("some rollouts send fragments and some train batches, expected all to send the same")
        # A batch is made first: if that fails, no episode is counted.
        item = self._batch_of(fragments, arrived_items) or None if self._gives_batches else fragments[0]
        for arrived in arrived_items:
            self.returns.add_item(arrived)
        return item

    def _batch_of(self, fragments: Sequence[Any], arrived_items: Sequence[ArrivedItem]) -> Batch:
        """Train batch of fragments, or of the batches that the rollouts have made.

        Column -> any[B, ...]; of several agents module id -> such a batch, which is empty if no module has steps.
        """
        source = arrived_items[0].source
        rollout = source.rollout
        if fragments and rollout.is_by_module:
            return self._batches_by_module(fragments, rollout)
        if fragments:
            spaces = rollout.parts[0].seen[-1], rollout.parts[0].part.recorded_space
            return self._made((None, 0, rollout.is_stateful), spaces, fragments, self._module)
        if self._learner_connector is not None:
            raise RunError(
                f"rollout {source.name} sends train batches already made, so learner_connector would be passed over; "
                "expected it at the rollout, or fragments: feed(..., sends='fragments')"
            )
        return concatenated([arrived.batch for arrived in arrived_items], is_by_module=rollout.is_by_module)

    def _batches_by_module(self, fragments: Sequence[MultiAgentFragment], rollout: RolloutDescription) -> Batch:
        """Module id -> its train batch, of modules that are trained and have made steps."""
        modules, batches = self._module if isinstance(self._module, Mapping) else {}, {}
        for module_id, parts in parts_by_module(fragments, rollout.trains).items():
            agents_of_parts = [each.part.agents for each in rollout.parts]
            index = agents_of_parts.index(parts[0].part.agents)  # which may be of another rollout
            spaces = rollout.parts[index].seen[-1], parts[0].part.recorded_space
            key = module_id, index, Columns.STATE_OUT in parts[0].outputs[module_id]
            with noted(f"of module '{module_id}'"):
                batches[module_id] = self._made(key, spaces, parts, modules.get(module_id))
        return batches

    def _made(
        self, key: tuple[str | None, int, bool], spaces: tuple[Any, Any], fragments: Sequence[Any], module: Any
    ) -> Batch:
        """The train batch of one module's fragments, in tensors also if the pieces see no module."""
        if key not in self._pipelines:
            pieces = pieces_given(self._learner_connector, "learner_connector", *spaces)
            pipeline = LearnerConnectorPipeline.default(*spaces, pieces, stateful=key[2])
            pipeline.check_lookback(fragments[0])
            if key in self._before:
                pipeline.set_state(self._before.pop(key))
            self._pipelines[key] = pipeline
        batch = self._pipelines[key].of_fragments(fragments, module, self._metrics)
        return NumpyToTensor().converted(batch) if module is None else batch


def checked_batches(yields: Yields, on_excess: str, ack: str, max_lag: int | None) -> Batches | None:
    """How train batches are made; None: fragments are handed over.

    Raises ValueError for an unknown option, or one that does not go with another; see `TrainerStream`.
    """
    batches = Batches() if yields == "batches" else yields if isinstance(yields, Batches) else None
    if batches is None:
        _check("yields", yields, ("batches", "fragments", "Batches(...)"))
    _check("on_excess", on_excess, ("drop", "pace", "mask", "raise"))
    _check("ack", ack, ("auto", "manual"))
    if on_excess == "mask" and batches is None:
        raise ValueError(f"on_excess='mask' is for batches, expected another one with yields={yields!r}")
    if on_excess == "pace" and batches is not None and batches.fragments is not None:
        raise ValueError(
            "under on_excess='pace' a batch is one fragment of every lane, expected Batches(fragments=None)"
        )
    check_bounded(on_excess, max_lag)
    return batches


def check_module(module: Any) -> None:
    """Raise ModuleError for what can't be the module that a learner pipeline's pieces see."""
    if isinstance(module, str | bytes | int | float | list | tuple | type):
        raise ModuleError(f"module is {shown(module)}, expected a module, or module id -> module")


def _check(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {shown(value)}, expected one of {', '.join(map(repr, choices))}")
