"""Fragments in, train batches out."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rollflow.nodes.connectors.learner.learner_connector_pipeline import LearnerConnectorPipeline
from rollflow.nodes.lag import LagBound
from rollflow.stream.fragment import Fragment

Batch = dict[str, Any]


class Learned(NamedTuple):
    """What a fragment's turn gives: at times a train batch."""

    batches: Batch | None


class LearnerPipeline:
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

    where: Literal["inline", "thread"] = "thread"

    def __init__(
        self,
        pipeline: LearnerConnectorPipeline,
        module: Any,
        *,
        fragments_per_batch: int = 1,
        lag: LagBound | None = None,
        metrics: Any = None,
    ) -> None:
        self.pipeline = pipeline
        self._module = module
        self._metrics = metrics
        self._fragments_per_batch = fragments_per_batch
        self._lag = lag
        self._waiting: list[Fragment] = []

    def __call__(self, fragments: Fragment) -> Learned:
        """Take one fragment; a batch when enough of them are there."""
        if fragments.num_steps and (self._lag is None or self._lag.admits(fragments)):
            self._waiting.append(fragments)
        if len(self._waiting) < self._fragments_per_batch:
            return Learned(None)
        return Learned(self._batch())

    def finish(self) -> Iterator[Learned]:
        """The batch of the fragments that are left."""
        if self._waiting:
            yield Learned(self._batch())

    def _batch(self) -> Batch:
        fragments, self._waiting = self._waiting, []
        return self.pipeline.of_fragments(fragments, self._module, self._metrics)
