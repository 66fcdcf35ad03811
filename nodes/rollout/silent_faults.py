"""Silent faults: rollouts that flow, and can't be right. Each is read from what is counted anyway."""

from collections.abc import Sequence
from typing import Any

from rollflow.nodes.stages.staleness import LagBound
from rollflow.stream.observe.waits import Sign

_MOST_DROPPED = 0.9  # share of the transitions that are left out as too old
_FRAGMENTS = 10  # that a share is told from
_BATCHES = 10  # after which a module that was changed should have been published
_EPISODES = 100
_VERSIONS = 10  # over which returns are to have changed


def signs_of_lag(lag: LagBound, handed_steps: int) -> Sequence[Sign]:
    """A text where nearly all fragments are left out since they are too old."""
    made = lag.dropped_steps + handed_steps
    if lag.dropped_fragments < _FRAGMENTS or lag.dropped_steps < _MOST_DROPPED * made:
        return ()
    text = (
        f"{lag.dropped_steps / made:.0%} of {made:,} transitions were left out as too old: max_lag={lag.max_lag} with "
        "this prefetch and this rate of publishing leaves hardly any; raise max_lag, or on_excess='pace'"
    )
    return (Sign("lag", text),)


class ReturnsCheck:
    """Finds returns that are the same from the first on, to the last digit, while the policy changes.

    Where they have changed once, nothing is said any more: a policy that has learnt may well have one return.

    returns    has the last finished episodes' returns, and the count of all
    """

    def __init__(self, returns: Any) -> None:
        self._returns = returns
        self._since: tuple[float, int] | None = None  # return and version at the first look
        self._has_changed = False

    def signs(self, version: int) -> Sequence[Sign]:
        """A text where all returns that were looked at are one number, through many versions.

        version    published last
        """
        last, count = list(self._returns.returns), self._returns.count
        if not last or self._has_changed:
            return ()
        if self._since is None:
            self._since = last[0], version
        value, first = self._since
        self._has_changed = min(last) != value or max(last) != value
        if self._has_changed or version < first + _VERSIONS or count < _EPISODES:
            return ()
        text = (
            f"the returns of all {count:,} episodes are {value:g}, through "
            f"{version - first} published versions: look at the rewards, and whether actions reach the environment"
        )
        return (Sign("returns", text),)


class PublishCheck:
    """Finds a module that is trained and whose weights are never published.

    module    that is trained: changes in place are counted by torch itself
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._at_first = self._changes()

    def signs(self, version: int, batches: int) -> Sequence[Sign]:
        """A text where the module has changed, and the rollout acts with the weights that it began with.

        version    published last; 0: none was
        batches    that were handed out
        """
        if version or batches < _BATCHES or self._changes() == self._at_first:
            return ()
        text = (
            f"rollout.module was changed while {batches} batches were handed out, and none of its weights were "
            "published: the rollout acts with those it began with; rollout.publish(rollout.module.state_dict())"
        )
        return (Sign("publish", text),)

    def _changes(self) -> int:
        if not hasattr(self._module, "parameters"):
            return 0
        return sum(int(parameter._version) for parameter in self._module.parameters())
