"""What a sink that gets train batches sees of the fragments behind them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rollflow.nodes.episode_returns import EpisodeReturns
from rollflow.nodes.multi_agent.agent_returns import AgentReturns
from rollflow.sinks.trainer.any_rollout import newest_version
from rollflow.sinks.trainer.finished import MOST_MODULES, finished_since


class Seen:
    """A node without outputs that sees every fragment of a rollout as it leaves it.

    returns    adds up its episodes
    ids        modules whose weights the trainer publishes; None: there is one module
    see        sees them as well
    """

    def __init__(
        self, returns: EpisodeReturns | AgentReturns, ids: Sequence[str] | None, see: Callable[[Any], None]
    ) -> None:
        self._returns: Any = returns  # for fragments of the rollout's kind
        self._see = see
        self._ids = ids
        self._count = 0  # of episodes that have been told
        self._counted: dict[str, tuple[EpisodeReturns, int]] = {}  # of each module: what had finished, when last seen
        self._untold: dict[str, EpisodeReturns] = {}  # by module
        self._versions: dict[int, int] = {}

    def __call__(self, fragments: Any) -> None:
        """See one fragment."""
        self._see(fragments)
        self._returns(fragments)
        version = newest_version(fragments, self._ids)
        if version is not None:
            self._versions[fragments.lane] = version
        if isinstance(self._returns, AgentReturns):
            self._look_at_modules(self._returns)

    def describe(self) -> str:
        """For `explain()`."""
        return "returns, and weights in use, for the trainer"

    def take_episodes(self) -> dict[str, Any] | None:
        """What has finished since this was asked last, as it goes over the wire; None: nothing."""
        finished = finished_since(self._returns, self._count)
        self._count = self._returns.count
        ids = list(islice(self._untold, MOST_MODULES))  # others come with the next
        parts = {module_id: finished_since(self._untold.pop(module_id), 0) for module_id in ids}
        return replace(finished, by_module=parts).told() if finished.count or parts else None

    def take_versions(self) -> dict[int, int]:
        """Lane -> the version of the newest weights that acted in it, of lanes seen since this was asked last."""
        versions, self._versions = self._versions, {}
        return versions

    def _look_at_modules(self, returns: AgentReturns) -> None:
        """Take down what has finished by module: the returns of one that goes, go with it."""
        counted: dict[str, tuple[EpisodeReturns, int]] = {}
        for module_id, own in returns.by_module.items():
            if not isinstance(module_id, str):
                continue
            known, before = self._counted.get(module_id, (own, 0))
            finished = finished_since(own, before if known is own else 0)
            if finished.count:
                untold = self._untold.setdefault(module_id, EpisodeReturns())
                untold.take(finished.count, finished.returns, finished.lengths)
            counted[module_id] = own, own.count
        self._counted = counted
