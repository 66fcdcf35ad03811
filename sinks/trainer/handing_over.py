"""What a trainer is handed over of the items that have come."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from rollflow.nodes.connectors.common.numpy_to_tensor import NumpyToTensor
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.learner.learner_connector_pipeline import LearnerConnectorPipeline
from rollflow.nodes.given import check_connector, pieces_given
from rollflow.sinks.trainer.by_module import concatenated
from rollflow.sinks.trainer.item_message import Batch
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.stream_returns import StreamReturns
from rollflow.stream.errors import RunError
from rollflow.stream.fragment import Fragment

Yields = Literal["batches", "fragments", "episodes"]
LearnerConnector = Callable[[Any, Any], ConnectorV2 | list[ConnectorV2]]


class HandedOver(NamedTuple):
    """Something for the trainer.

    item      a train batch, a fragment or an episode
    of        what it was made of
    is_last   whether there is nothing more of that
    """

    item: Any
    of: Sequence[Arrived]
    is_last: bool


class HandingOver:
    """Makes train batches, fragments or episodes of what has come.

    yields                        which
    learner_connector, module,    for train batches: see `TrainerStream`
    metrics

    returns    of the episodes in what was handed over, or told of by train batches
    """

    def __init__(self, yields: Yields, learner_connector: LearnerConnector | None, module: Any, metrics: Any) -> None:
        if learner_connector is not None:
            check_connector(learner_connector, "learner_connector", "obs_space, act_space")
        self.returns = StreamReturns()
        self._yields = yields
        self._taught, self._module, self._metrics = learner_connector, module, metrics
        self._pipeline: LearnerConnectorPipeline | None = None

    def made_of(self, taken: Sequence[Arrived]) -> Iterator[HandedOver]:
        """What there is to hand over, one by one. Raises RunError where it can't be made of what came."""
        fragments = [arrived.item for arrived in taken if isinstance(arrived.item, Fragment)]
        if fragments and len(fragments) < len(taken):
            raise RunError("some rollouts send fragments and some train batches, expected all to send the same")
        made: Iterator[HandedOver]
        if self._yields == "batches":
            made = iter((HandedOver(self._batch(fragments, taken), taken, True),))  # if it fails, nothing is counted
        else:
            made = self._one_by_one(taken, fragments)
        for arrived, fragment in zip(taken, fragments, strict=False):
            self.returns.add(fragment, arrived.source.session.token)
        for arrived in taken:
            self.returns.take_finished(arrived.finished)
        return made

    def _one_by_one(self, taken: Sequence[Arrived], fragments: Sequence[Fragment]) -> Iterator[HandedOver]:
        for arrived, fragment in zip(taken, fragments, strict=True):
            items = [fragment] if self._yields == "fragments" else list(fragment.episodes())
            for item in items:
                yield HandedOver(item, [arrived], item is items[-1])

    def _batch(self, fragments: Sequence[Fragment], taken: Sequence[Arrived]) -> Batch:
        if fragments:
            pipeline = self._pipeline_of(taken[0].source)
            batch = pipeline.of_fragments(fragments, self._module, self._metrics)
            return NumpyToTensor().converted(batch) if self._module is None else batch
        batches: list[Any] = [arrived.item for arrived in taken]
        return concatenated(batches, is_by_module=taken[0].source.is_by_module)

    def _pipeline_of(self, source: Source) -> LearnerConnectorPipeline:
        if self._pipeline is None:
            spaces = source.spaces[-1], source.action_space
            taught = pieces_given(self._taught, "learner_connector", *spaces)
            self._pipeline = LearnerConnectorPipeline.default(*spaces, taught, stateful=source.is_stateful)
        return self._pipeline
