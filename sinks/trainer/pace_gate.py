"""How far a rollout may run ahead of its trainer."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from rollflow.nodes.env_source import is_whole
from rollflow.nodes.pace import Paced, nobody
from rollflow.nodes.rounds import Emitted
from rollflow.sinks.trainer.batch_credits import BatchCredits
from rollflow.sinks.trainer.compression import available
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.lane_news import LaneNews
from rollflow.sinks.trainer.subscribers import Subscriber
from rollflow.stream.errors import WireError

_MOST = 1 << 53


class Wanted:
    """How a trainer wants a stream.

    window         items that it takes beyond the last one that it is done with
    ahead          fragments that a lane may have begun beyond that, or train batches that may have been; None: any
                   number, within the window
    version        of the newest weights that it has published: a rollout is to act with these, or newer ones
    lanes          that may begin fragments: the others are to wait until the trainer waits for theirs; None: all
    compression    of observations; None: there is none
    series         how many items it takes as one
    needs          how many it has to have at a time before it is done with any
    """

    def __init__(
        self,
        window: int,
        ahead: int | None,
        version: int,
        compression: str | None = None,
        series: int = 1,
        needs: int = 1,
        lanes: Collection[int] | None = None,
    ) -> None:
        self.window, self.ahead, self.version = window, ahead, version
        self.compression, self.series, self.needs = compression, series, needs
        self.lanes = None if lanes is None else frozenset(lanes)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Wanted":
        """As it came over the wire. Raises WireError where it is something else."""
        read: dict[str, Any] = {name: settings.get(name) for name in ("window", "ahead", "version")}
        read |= {name: settings.get(name, 1) for name in ("series", "needs")}
        for name, value in read.items():
            if (name != "ahead" or value is not None) and not (is_whole(value) and 0 <= value <= _MOST):
                raise WireError(f"settings: {name} is {value!r:.100}, expected a whole number", "message")
        compression = settings.get("compression")
        if compression not in (None, *available()):
            raise WireError(f"settings: compression is {compression!r:.100}, expected one of {available()}", "message")
        lanes = settings.get("lanes")
        if lanes is not None and not (isinstance(lanes, list) and all(map(is_whole, lanes))):
            raise WireError(f"settings: lanes is {lanes!r:.100}, expected a list of whole numbers", "message")
        return cls(**read, compression=compression, lanes=lanes)

    def told(self) -> dict[str, Any]:
        """As it goes over the wire."""
        names = "window", "ahead", "version", "series", "needs"
        told = {name: getattr(self, name) for name in names}
        if self.lanes is not None:
            told["lanes"] = sorted(self.lanes)
        return told if self.compression is None else told | {"compression": self.compression}


class PaceGate:
    """Lets a lane begin a fragment once the trainer is there, its weights are in use, and it is far enough.

    kept        what has been given to the trainer
    trainer     that is waited for, unless others go on without it
    name        of the trainer, in reports
    lanes       takes down which there are

    credits   where train batches are given that are to be paced; None: others are, or fragments
    done      number of the last item that it is done with
    wanted    None: it has not been there yet
    """

    def __init__(self, kept: Kept, trainer: Subscriber, name: str, lanes: LaneNews) -> None:
        self.credits: BatchCredits | None = None
        self.wanted: Wanted | None = None
        self.done = 0
        self.version = 0  # that the rollout acts with
        self.lanes = lanes
        self._kept, self._trainer, self._name = kept, trainer, name
        self._passed_over = 0  # items, without a number
        self._begun: dict[int, int] = {}  # lane -> its last fragment that was let through
        self._changed: Callable[[], None] = nobody

    @property
    def holder(self) -> str | None:
        """The trainer, where it is to come, or to be done with what it was given, or its weights are; None: not it."""
        wanted = self.wanted
        is_awaited = wanted is None or self.version < wanted.version or self._kept.last > self.done
        return self._name if is_awaited else None

    @property
    def wants_newest(self) -> bool:
        """Whether what is begun is to begin with the newest weights: the trainer takes nothing that is too old."""
        return self.wanted is not None and self.wanted.ahead is not None

    def admits(self, lane: Paced) -> bool:
        """Whether the lane may take its next step."""
        if not lane.at_start or self._begun.get(lane.index) == lane.sequence:
            return True
        self.lanes.see(lane.index)
        if not self._trainer.is_passed_over and not self._is_wanted(lane):
            return False
        self._begun[lane.index] = lane.sequence
        if self.credits is not None:
            self.credits.begin(lane.index, lane.sequence, self.done + self._passed_over)
        return True

    def see(self, fragment: Emitted) -> None:
        """A fragment has left the rollout, to go into a train batch."""
        if self.credits is not None:
            self.credits.come(fragment.lane, fragment.sequence)
            self._changed()

    def leave(self, lane: int) -> None:
        """Nothing comes of a lane any more."""
        if self.credits is not None:
            self.credits.leave(lane)
            self._changed()

    def gone(self, lane: int, fragments: int) -> None:
        """A lane is gone, or has ended, and gives so many fragments in all, of which some may be on their way."""
        self._begun.pop(lane, None)
        self.lanes.gone(lane, fragments)

    def pass_over(self) -> None:
        """An item that has come is for nobody."""
        self._passed_over += 1

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when a lane that was refused might be admitted."""
        self._changed = changed

    def look_again(self) -> None:
        """Something has changed. In the thread that the graph runs in."""
        self._changed()

    def _is_wanted(self, lane: Paced) -> bool:
        """Whether the trainer takes another fragment of a lane, with the weights that there are."""
        wanted = self.wanted
        if wanted is None or self.version < wanted.version:
            return False
        if wanted.ahead is None:
            return True
        if wanted.lanes is not None and (lane.index if self.credits is None else 0) not in wanted.lanes:
            return False
        if self.credits is not None:
            return self.credits.admits(self.done + self._passed_over, wanted.ahead)
        under_way = lane.sequence - self.lanes.given(lane.index)  # made and on their way to the sink
        return under_way + self._kept.count(lane.index, self.done) < wanted.ahead
