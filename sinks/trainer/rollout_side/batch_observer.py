"""Observer of the fragments behind train batches, for a sink that gets the batches alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.sinks.trainer.messages.agents_description import newest_acting
from rollflow.sinks.trainer.messages.finished import MOST_MODULES, finished_since


class BatchObserver:
    """Node without outputs that observes every fragment as it leaves its rollout.

    returns    adds up the episodes
    ids        modules whose weights the trainer publishes; None: there is one module
    see        called with every fragment
    """

    def __init__(
        self, returns: EpisodeReturns | AgentReturns, ids: Sequence[str] | None, see: Callable[[Any], None]
    ) -> None:
        self._returns: Any = returns  # for fragments of the rollout's kind
        self._see = see
        self._ids = ids
        self._count = 0  # of episodes that have been taken
        # Module id -> returns, and their count when last seen.
        self._counted: dict[str, tuple[EpisodeReturns, int]] = {}
        self._pending: dict[str, EpisodeReturns] = {}  # module id -> episodes that have not been taken
        self._versions: dict[int, int] = {}

    def __call__(self, fragments: Any) -> None:
        """Observe one fragment."""
        self._see(fragments)
        self._returns(fragments)
        version = newest_acting(fragments, self._ids)
        if version is not None:
            self._versions[fragments.lane] = version
        if isinstance(self._returns, AgentReturns):
            self._collect_by_module(self._returns)

    def describe(self) -> str:
        """Text for `explain()`."""
        return "returns, and weights in use, for the trainer"

    def take_episodes(self) -> dict[str, Any] | None:
        """Take the episodes that have finished since the last call, as they go over the wire; None: there are none."""
        finished = finished_since(self._returns, self._count)
        self._count = self._returns.count
        ids = list(islice(self._pending, MOST_MODULES))  # others come with the next
        parts = {module_id: finished_since(self._pending.pop(module_id), 0) for module_id in ids}
        return replace(finished, by_module=parts).told() if finished.count or parts else None

    def take_versions(self) -> dict[int, int]:
        """Take lane -> version of the newest weights that acted in it, of lanes seen since the last call."""
        versions, self._versions = self._versions, {}
        return versions

    def _collect_by_module(self, returns: AgentReturns) -> None:
        """Keep what has finished by module, since the returns of a module that is removed go with it."""
        counted: dict[str, tuple[EpisodeReturns, int]] = {}
        for module_id, own in returns.by_module.items():
            if not isinstance(module_id, str):
                continue
            before, count = self._counted.get(module_id, (own, 0))
            finished = finished_since(own, count if before is own else 0)
            if finished.count:
                pending = self._pending.setdefault(module_id, EpisodeReturns())
                pending.take(finished.count, finished.returns, finished.lengths)
            counted[module_id] = own, own.count
        self._counted = counted
