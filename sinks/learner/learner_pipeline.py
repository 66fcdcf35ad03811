"""Learner pipelines as nodes: they gather fragments and make train batches of them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rollflow.nodes.argument_checks import check_numbers
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.stages.module_set import AgentLearner
from rollflow.nodes.stages.rounds import LagBound
from rollflow.stream.data.loss_ledger import BatchOrigins, Origin
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment

F = TypeVar("F", bound=AnyFragment)
Batch = dict[str, Any]


class LearnerOutput(NamedTuple):
    """Output of one call: a train batch once enough fragments are there, else None."""

    batches: Batch | None


class FragmentGatherer(Generic[F]):
    """Node that gathers fragments for train batches; the last batch, at the end of the stream, may have fewer.

    fragments_per_batch    number of fragments in a batch, which takes them in the order in which they come
    batch_of               makes a train batch of fragments, {} if there is nothing to learn

    is_running             True once it has taken a fragment, until its run is over
    """

    where: Literal["inline", "thread"] = "thread"

    def __init__(
        self, fragments_per_batch: int, lag: LagBound | None, batch_of: Callable[[Sequence[F]], Batch]
    ) -> None:
        check_numbers(fragments_per_batch=(fragments_per_batch, 1))
        self.fragments_per_batch = fragments_per_batch
        self._lag, self._batch_of = lag, batch_of
        self._waiting: list[F] = []
        self._origins = BatchOrigins()
        self.is_running = False

    def finish(self) -> Iterator[LearnerOutput]:
        """Make a batch of the fragments that are left."""
        if self._waiting:
            yield self._make_batch()

    def held(self) -> list[F]:
        """Fragments that are in no batch yet."""
        return list(self._waiting)

    def origins_of(self, batch: Any) -> Iterator[Origin]:
        """Origins of the fragments that a batch was made of; none for a batch that another node made."""
        return self._origins.of(batch)

    def close(self) -> None:
        """End the run, so that the pipeline may be edited again."""
        self.is_running = False

    def _take(self, fragment: F) -> LearnerOutput:
        self.is_running = True
        if fragment.num_steps and (self._lag is None or self._lag.admits(fragment)):
            self._waiting.append(fragment)
        if len(self._waiting) < self.fragments_per_batch:
            return LearnerOutput(None)
        return self._make_batch()

    def _make_batch(self) -> LearnerOutput:
        fragments = self._waiting
        batch = self._batch_of(fragments)
        self._waiting = []
        if batch:
            self._origins.note(batch, fragments)
        return LearnerOutput(batch or None)


class LearnerPipeline(FragmentGatherer[Fragment]):
    """Node that turns fragments into train batches, column name -> tensor `any[B, ...]`, in a worker thread.

        pipeline               makes the batches: `rollout.learner_pipeline`
        module                 passed to the pieces as `rl_module`, in evaluation mode and with the weights that it has
                               during a pass; pass a copy if an update under way must not be seen
        fragments_per_batch    number of fragments in a batch; best the number of the rollout's lanes
        lag                    how old a fragment may be, and what is done with one that is older: `rollout.lag`
        metrics                passed to the pieces as `metrics`

    The last batch, at the end of the stream, may have fewer fragments. The pieces get the `episodes` of all fragments
    of a batch, fragment by fragment.
    """

    def __init__(
        self,
        pipeline: LearnerConnectorPipeline,
        module: Any,
        *,
        fragments_per_batch: int = 1,
        lag: LagBound | None = None,
        metrics: Any = None,
    ) -> None:
        batch_of = partial(pipeline.of_fragments, rl_module=module, metrics=metrics)
        super().__init__(fragments_per_batch, lag, batch_of)
        self.pipeline = pipeline
        pipeline.refuse_edits_while_run_by(self)

    def __call__(self, fragments: Fragment) -> LearnerOutput:
        """Take one fragment; gives a batch once enough of them are there."""
        return self._take(fragments)

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece([self.pipeline])


class MultiAgentLearnerPipeline(FragmentGatherer[MultiAgentFragment]):
    """Node that turns fragments of a `MultiAgentRollout` into batches: module id -> train batch.

        learner                makes the batches: `rollout.learner`
        fragments_per_batch    number of fragments in a batch; best the number of the rollout's lanes
        lag                    how old a fragment may be: `rollout.lag`

    Pieces get copies of the modules as `rl_module`, with the weights that were published last, so that `rollout.module`
    may be trained meanwhile.
    """

    def __init__(self, learner: AgentLearner, *, fragments_per_batch: int = 1, lag: LagBound | None = None) -> None:
        if not isinstance(learner, AgentLearner):
            raise ValueError(f"learner is a {type(learner).__name__}, expected rollout.learner")
        super().__init__(fragments_per_batch, lag, partial(learner.batch_of, as_published=True))
        self.learner = learner

    def __call__(self, fragments: MultiAgentFragment) -> LearnerOutput:
        """Take one fragment; gives a batch once enough of them are there."""
        return self._take(fragments)
