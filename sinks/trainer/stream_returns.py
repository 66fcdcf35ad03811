"""Returns and lengths of finished episodes, as a trainer knows them of all its rollouts."""

from rollflow.nodes.episode_returns import EpisodeReturns
from rollflow.sinks.trainer.finished import NONE, Finished

_MOST_MODULES = 1024


class StreamReturns(EpisodeReturns):
    """The returns of several rollouts, from their fragments, or from what their train batches tell.

    by_module    module id -> the returns of the agents that it served; {} where rollouts have one agent. Of modules
                 that come and go, those 1024 that were heard of last
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_module: dict[str, EpisodeReturns] = {}

    def take_finished(self, finished: Finished) -> None:
        """Add the episodes that a train batch tells of."""
        if finished is NONE:
            return
        self.take(finished.count, finished.returns, finished.lengths)
        for module_id, part in finished.by_module.items():
            returns = self.by_module.pop(module_id, None) or EpisodeReturns()
            returns.take(part.count, part.returns, part.lengths)
            self.by_module[module_id] = returns  # last of all
        for module_id in list(self.by_module)[: max(0, len(self.by_module) - _MOST_MODULES)]:
            del self.by_module[module_id]
