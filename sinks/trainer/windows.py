"""How much each of a trainer's rollouts may send, and how much of it the trainer needs."""

from typing import NamedTuple

from rollflow.sinks.trainer.age import AgeBound
from rollflow.sinks.trainer.alike import MOST_ALIKE
from rollflow.sinks.trainer.handing_over import Yields
from rollflow.sinks.trainer.pace_gate import Wanted
from rollflow.sinks.trainer.source import Source
from rollflow.stream.errors import WireError


class Window(NamedTuple):
    """Of one rollout, in items.

    window    that it may send beyond what is done
    needs     that the trainer has to have at a time before it is done with any: at most `window`
    """

    window: int
    needs: int


class Windows:
    """Says it of every rollout.

    age         how old items may be
    yields      what is handed over
    prefetch    batches that may be sent ahead
    count       items of a batch; None: one of every lane

    held        items that may be on their way to loops in other processes
    """

    def __init__(self, age: AgeBound, yields: Yields, *, prefetch: int, count: int | None) -> None:
        self.held = 0
        self._age, self._yields, self._prefetch, self._count = age, yields, prefetch, count

    def of(self, source: Source) -> Window:
        """Of this one. Raises WireError where what it sends is not what is wanted."""
        ahead = self._age.ahead
        if source.sends_batches and self._yields != "batches":
            raise WireError(
                f"this rollout sends train batches, and the trainer has yields={self._yields!r}: expected fragments",
                "role",
            )
        if ahead is None:
            together = (self._count or source.streams) if self._yields == "batches" else 1
            window = (1 + self._prefetch + self.held) * max(source.streams, self._count or 1)
            return Window(window, (1 + self.held) * together)
        if self._age.world_size > 1 and not source.has_fixed_lanes:
            raise WireError(
                "the trainer's dataset has other ranks and holds rollouts back by on_excess='pace', and this one's "
                "lanes are on hosts that come and go, expected world_size=1 or another on_excess",
                "pace",
            )
        if not source.can_be_paced:
            raise WireError(
                "the trainer holds rollouts back by on_excess='pace', and nobody knows which of this one's fragments "
                "come, or go into which train batch or round: expected no edge that drops, no other trainers of "
                "RemoteEnvs or RemoteRollouts, and a LearnerPipeline alone between the rollout and a sink that sends "
                "batches, or another on_excess",
                "pace",
            )
        # A lane may have begun as many before the slowest has given its first; and what is done may lie behind what is
        # not, from lanes that are faster.
        return Window(2 * ahead * source.unfinished, ahead * source.unfinished)

    def wanted(self, source: Source, version: int, compression: str | None) -> Wanted:
        """What it is told of this: how it is to send, from when on it is to act with weights of this version."""
        ahead, window = self._age.ahead, source.session.window or 1
        return Wanted(
            window, ahead, version, compression, MOST_ALIKE, source.needs, None if ahead is None else source.awaited
        )

    def widen(self, source: Source) -> None:
        """Have a rollout that is there send as many more as it may by now; never less than before."""
        window, source.needs = self.of(source)
        source.session.window = max(window, source.session.window or 0)
