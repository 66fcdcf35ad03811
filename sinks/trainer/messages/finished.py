"""Episodes that have finished, as a rollout that sends train batches tells of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from rollflow.nodes.metrics.episode_returns import AgentReturns, EpisodeReturns
from rollflow.nodes.offloaded.fragment_checks import MOST, check_whole
from rollflow.stream.data.errors import WireError, shown

MOST_KEPT = 100  # episodes whose returns one batch tells: as many as a window of `EpisodeReturns` has
MOST_MODULES = 256  # that one batch tells of


@dataclass(frozen=True, slots=True)
class FinishedEpisodes:
    """Episodes that have finished.

    count        how many
    returns      of the last of them, 100 at most, oldest first
    lengths      their steps
    by_module    module id -> the same of the agents that it served
    """

    count: int
    returns: list[float]
    lengths: list[int]
    by_module: "Mapping[str, FinishedEpisodes]" = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Any, *, is_by_module: bool) -> "FinishedEpisodes":
        """As it came over the wire; nil: none. Raises WireError where it is something else."""
        if entries is None:
            return NONE
        finished = _read("episodes", entries)
        parts = entries.get("by_module", {})
        if not isinstance(parts, dict) or len(parts) > MOST_MODULES or not all(isinstance(each, str) for each in parts):
            expected = f"a map from at most {MOST_MODULES} module ids"
            raise WireError(f"episodes.by_module is {shown(parts)}, expected {expected}", "fragment")
        if parts and not is_by_module:
            raise WireError("episodes.by_module of a rollout with one module, expected none", "fragment")
        by_module = {
            module_id: _read(f"episodes.by_module[{shown(module_id)}]", part) for module_id, part in parts.items()
        }
        return replace(finished, by_module=by_module)

    def told(self) -> dict[str, Any]:
        """As it goes over the wire."""
        entries: dict[str, Any] = {"count": self.count, "returns": self.returns, "lengths": self.lengths}
        if self.by_module:
            entries["by_module"] = {module_id: part.told() for module_id, part in self.by_module.items()}
        return entries


NONE = FinishedEpisodes(0, [], [])


def finished_since(returns: EpisodeReturns | AgentReturns, count: int) -> FinishedEpisodes:
    """The episodes that have finished since there were so many."""
    new = returns.count - count
    return FinishedEpisodes(new, _last(returns.returns, new), _last(returns.lengths, new))


def _last(kept: Any, count: int) -> list[Any]:
    most = min(count, MOST_KEPT, len(kept))
    return list(islice(kept, len(kept) - most, None))


def _read(name: str, entries: Any) -> FinishedEpisodes:
    if not isinstance(entries, dict):
        raise WireError(f"{name} is {shown(entries)}, expected a map", "fragment")
    count: Any = entries.get("count")
    returns: Any = entries.get("returns")
    lengths: Any = entries.get("lengths")
    check_whole(f"{name}.count", count, 0, MOST)
    expected = min(count, MOST_KEPT)
    if not _is_list(returns, expected) or not all(isinstance(each, float) and each == each for each in returns):
        raise WireError(f"{name}.returns is {shown(returns)}, expected {expected} floats", "fragment")
    if not _is_list(lengths, expected):
        raise WireError(f"{name}.lengths is {shown(lengths)}, expected {expected} whole numbers", "fragment")
    for each in lengths:
        check_whole(f"{name}.lengths", each, 0, MOST)
    return FinishedEpisodes(count, returns, lengths)


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length
