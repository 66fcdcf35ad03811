"""Bound of the age of fragments, in policy versions, when a learner gets them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from rollflow.stream.data.errors import LagError
from rollflow.stream.observe.waits import Sign

OnExcess = Literal["drop", "pace"]
_MOST_DROPPED = 0.9  # share of the transitions that are left out as too old
_FRAGMENTS = 10  # that a share is told from
_TURNS = ", and allow by max_lag for steps that wait for their agent's next turn while fragments are cut"


class LagBound:
    """Refuses fragments that are more than `max_lag` policy versions old.

    versions     gives module -> policy version published last; "" stands for the only module
    max_lag      versions; None: any age will do
    on_excess    "drop": an older fragment is left out and counted
                 "pace": the rollout is held back so that none gets older, as long as the weights are published
                 once per batch; one that is older nonetheless raises LagError
    trained      ids of the modules whose age counts; None: all
    first        gives module -> policy version that it began with, where modules come and go; None: they don't

    Of several modules the oldest counts, each beside the newest of its own. Under "pace", what a removed module did
    while another of its id acts already is no older than that one: nobody can hold the rollout back so that there is
    none. A step that waits for its agent's next observation while a fragment is cut is as old as its action: where
    agents take turns, nobody can help that, either.

    dropped_fragments, dropped_steps    what was left out so far
    is_asked                            True to have the age of the next fragment looked at, also without a bound
    last                                age of the fragment that was admitted last, and looked at; None: none was
    """

    def __init__(
        self,
        versions: Callable[[], Mapping[Any, int]],
        max_lag: int | None,
        on_excess: OnExcess = "drop",
        *,
        trained: Collection[Any] | None = None,
        first: Callable[[], Mapping[Any, int]] | None = None,
    ) -> None:
        check_staleness(max_lag, on_excess)
        self.versions, self._first, self.max_lag = versions, first, max_lag
        self._trained = None if trained is None else frozenset(trained)  # the list is the caller's
        self.on_excess: OnExcess = on_excess
        self.dropped_fragments = 0
        self.dropped_steps = 0
        self.is_asked = False
        self.last: int | None = None

    @property
    def is_pacing(self) -> bool:
        """True if the rollout is held back so that no fragment gets too old."""
        return self.on_excess == "pace"

    def lag(self, fragment: Any) -> int:
        """Versions published since the oldest that an action of the fragment was computed with."""
        newest = self.versions()
        first = self._first() if self._first is not None and self.is_pacing else {}
        lags: list[int] = [
            newest[module_id] - max(version, first.get(module_id, 0))
            for module_id, version in fragment.policy_versions().items()
            if module_id in newest and (self._trained is None or module_id in self._trained)
        ]
        return max((*lags, 0))  # another place may know of a version a moment sooner

    def look_at(self, fragment: Any) -> None:
        """Look at the age of a fragment, if that is asked for: it takes a pass over a column."""
        if self.is_asked:
            self.is_asked, self.last = False, self.lag(fragment)

    def admits(self, fragment: Any) -> bool:
        """True if the fragment is fresh enough for a learner; others are counted. Raises LagError under "pace"."""
        if self.max_lag is None:
            self.look_at(fragment)
            return True
        lag = self.lag(fragment)
        if lag <= self.max_lag:
            self.last = lag
            return True
        if self.is_pacing:
            turns = "" if self._first is None else _TURNS
            raise LagError(
                f"{fragment!r} is {lag} policy versions old, expected at most max_lag={self.max_lag}: under "
                f"on_excess='pace' publish once per batch{turns}, or use on_excess='drop'"
            ).see("lag")
        self.dropped_fragments += 1
        self.dropped_steps += fragment.num_steps
        return False

    def signs(self, handed_steps: int) -> Sequence[Sign]:
        """A silent fault: nearly all fragments are left out because they are too old.

        handed_steps    transitions that were not left out
        """
        made = self.dropped_steps + handed_steps
        if self.dropped_fragments < _FRAGMENTS or self.dropped_steps < _MOST_DROPPED * made:
            return ()
        text = (
            f"{self.dropped_steps / made:.0%} of {made:,} transitions were left out as too old: max_lag={self.max_lag} "
            "with this prefetch and this rate of publishing leaves hardly any; raise max_lag, or on_excess='pace'"
        )
        return (Sign("lag", text),)


def check_staleness(max_lag: int | None, on_excess: str) -> None:
    """Raise ValueError for an `on_excess` that a rollout does not know, or that has no `max_lag` to act on."""
    if on_excess not in ("drop", "pace"):
        raise ValueError(f"on_excess is {on_excess!r}, expected 'drop' or 'pace'")
    check_bounded(on_excess, max_lag)


def check_bounded(on_excess: str, max_lag: int | None) -> None:
    """Raise ValueError for an `on_excess` other than "drop" without a `max_lag`, the bound that it acts on."""
    if on_excess != "drop" and max_lag is None:
        raise ValueError(f"on_excess={on_excess!r} is for fragments older than max_lag, expected max_lag=0 or more")
