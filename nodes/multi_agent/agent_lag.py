"""How old a multi-agent fragment may be, in policy versions of the modules that acted in it."""

from typing import Any

from rollflow.nodes.lag import LagBound, OnExcess
from rollflow.nodes.multi_agent.module_set import ModuleSet


class AgentLagBound(LagBound):
    """A `LagBound` for fragments of several modules: the oldest counts, each beside the newest of its own.

    Under "pace", what a removed module did while another of its id acts already is no older than that one: nobody can
    hold the rollout back so that there is none. A step that waits for its agent's next observation while a fragment is
    cut is as old as its action: where agents take turns, nobody can help that, either.

    modules    those that act
    trained    ids of those whose age counts; None: all
    """

    also = ", and allow by max_lag for steps that wait for their agent's next turn while fragments are cut"

    def __init__(
        self, modules: ModuleSet, trained: frozenset[Any] | None, max_lag: int | None, on_excess: OnExcess = "drop"
    ) -> None:
        super().__init__(None, max_lag, on_excess)
        self._modules, self._trained = modules, trained

    def lag(self, fragment: Any) -> int:
        """Versions published since the oldest that an action of the fragment was computed with."""
        newest = self._modules.versions()
        first = self._modules.first_versions() if self.on_excess == "pace" else {}
        lags = [
            newest[module_id] - max(version, first.get(module_id, 0))
            for module_id, version in fragment.policy_versions().items()
            if module_id in newest and (self._trained is None or module_id in self._trained)
        ]
        return max(lags, default=0)
