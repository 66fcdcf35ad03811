"""TrainerTrace: the updates of a trainer in another process, in the trace of the rollout that feeds it."""

from collections.abc import Iterable, Sequence
from typing import Any

from rollflow.stream.data.loss_ledger import Origin
from rollflow.stream.traces.fragment_trace import FragmentName, FragmentTrace
from rollflow.stream.traces.peer_spans import PeerSpans
from rollflow.stream.traces.trace import MOST_ARROWS


class TrainerTrace:
    """Writes the spans of a trainer, with an arrow to each update from the fragments that it used. From any thread.

    The trace is that of the rollout's lanes, which begins and ends with theirs; spans may come a little later.

    rollout    that feeds the trainer
    """

    def __init__(self, rollout: Any) -> None:
        self._environments = rollout.environments
        self._trace: FragmentTrace | None = None
        self._fragments: dict[int, Sequence[FragmentName]] = {}  # by the numbers of items

    def note(self, number: int, origins: Iterable[Origin]) -> None:
        """Note which fragments an item of the stream to the trainer is made of, where there is a trace."""
        if self._newest is None:
            return
        self._fragments[number] = [origin.name for origin in origins]
        while len(self._fragments) > MOST_ARROWS:
            del self._fragments[next(iter(self._fragments))]

    def awaits(self, lanes: Iterable[int]) -> None:
        """Nothing: a trainer has no lanes."""

    def take_there(self, spans: PeerSpans) -> None:
        """Write spans of the trainer."""
        if (trace := self._newest) is not None:
            trace.take_updates(spans, lambda item: self._fragments.get(item, ()))

    def end(self) -> None:
        """Forget a trace that has ended."""
        self._trace = None
        self._fragments.clear()

    @property
    def _newest(self) -> FragmentTrace | None:
        """The trace of the lanes; once they have ended theirs, the one that they had."""
        self._trace = self._environments.trace or self._trace
        return self._trace
