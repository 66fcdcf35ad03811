"""Fragments in, train batches out."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rollflow.nodes.connectors.learner.learner_connector_pipeline import LearnerConnectorPipeline
from rollflow.nodes.given import check_numbers
from rollflow.nodes.lag import LagBound
from rollflow.nodes.multi_agent.agent_learner import AgentLearner
from rollflow.nodes.rounds import Emitted
from rollflow.stream.fragment import Fragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

F = TypeVar("F", bound=Emitted)
Batch = dict[str, Any]


class Learned(NamedTuple):
    """What a fragment's turn gives: at times a train batch."""

    batches: Batch | None


class Gathering(abc.ABC, Generic[F]):
    """Gathers so many fragments for each batch; a last batch of fewer comes when the stream ends.

    fragments_per_batch    that make one batch, in the order in which they come
    left_out               fragments that came into none: without a transition, too old, or with nothing to be learnt
    """

    where: Literal["inline", "thread"] = "thread"

    def __init__(self, fragments_per_batch: int, lag: LagBound | None) -> None:
        check_numbers(fragments_per_batch=(fragments_per_batch, 1))
        self.fragments_per_batch, self.left_out = fragments_per_batch, 0
        self._lag = lag
        self._waiting: list[F] = []
        self._watching: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Take a function to be called, in the thread that makes batches, when more is left out."""
        self._watching.append(changed)

    @abc.abstractmethod
    def _batch_of(self, fragments: Sequence[F]) -> Batch: ...

    def finish(self) -> Iterator[Learned]:
        """The batch of the fragments that are left."""
        if self._waiting:
            yield self._learned()

    def _take(self, fragment: F) -> Learned:
        if fragment.num_steps and (self._lag is None or self._lag.admits(fragment)):
            self._waiting.append(fragment)
        else:
            self._leave_out(1)
        if len(self._waiting) < self.fragments_per_batch:
            return Learned(None)
        return self._learned()

    def _learned(self) -> Learned:
        fragments, self._waiting = self._waiting, []
        batch = self._batch_of(fragments)
        if not batch:
            self._leave_out(len(fragments))
        return Learned(batch or None)

    def _leave_out(self, fragments: int) -> None:
        self.left_out += fragments
        for changed in self._watching:
            changed()


class LearnerPipeline(Gathering[Fragment]):
    """A node that turns fragments into train batches, in a worker thread, off the rollout's path.

        pipeline               makes the batch: column name -> tensor `any[B, ...]`
        module                 what the pieces see as `rl_module`; where a piece runs it, give a copy of what is trained
                               meanwhile
        fragments_per_batch    how many fragments make one batch; a rollout of several lanes wants as many
        lag                    how old a fragment may be, and what is done with one that is older
        metrics                what the pieces see as `metrics`

    A last batch of fewer fragments comes when the stream ends. `episodes` under the pieces are those of all the
    batch's fragments, fragment by fragment.
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
        super().__init__(fragments_per_batch, lag)
        self.pipeline = pipeline
        self._module = module
        self._metrics = metrics

    def __call__(self, fragments: Fragment) -> Learned:
        """Take one fragment; a batch when enough of them are there."""
        return self._take(fragments)

    def _batch_of(self, fragments: Sequence[Fragment]) -> Batch:
        return self.pipeline.of_fragments(fragments, self._module, self._metrics)


class MultiAgentLearnerPipeline(Gathering[MultiAgentFragment]):
    """The same for fragments of a `MultiAgentRollout`: a batch is a dict, module id -> train batch.

    Pieces see copies of the modules as `rl_module`, with the weights that were published last: `rollout.module` may be
    trained meanwhile.

    learner                makes the batches, as `rollout.learner` does
    fragments_per_batch    how many fragments make one batch; a rollout of several lanes wants as many
    lag                    how old a fragment may be: `rollout.lag`
    """

    def __init__(self, learner: AgentLearner, *, fragments_per_batch: int = 1, lag: LagBound | None = None) -> None:
        super().__init__(fragments_per_batch, lag)
        if not isinstance(learner, AgentLearner):
            raise ValueError(f"learner is a {type(learner).__name__}, expected rollout.learner")
        self.learner = learner

    def __call__(self, fragments: MultiAgentFragment) -> Learned:
        """Take one fragment; a batch when enough of them are there."""
        return self._take(fragments)

    def _batch_of(self, fragments: Sequence[MultiAgentFragment]) -> Batch:
        return self.learner.batch_of(fragments, as_published=True)
