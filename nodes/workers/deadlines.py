"""What is due when, of many that are given one of a few times each."""

from time import monotonic


class Deadlines:
    """Lanes, and when each is due. What is asked at every step takes no longer with a thousand lanes than with one."""

    def __init__(self) -> None:
        # By how long they were given, then by lane: whoever was given as long last is due last.
        self._due: dict[float, dict[int, float]] = {}

    def begin(self, lane: int, seconds: float) -> None:
        """Have a lane due in so many seconds, whatever it was before."""
        self.end(lane)
        self._due.setdefault(seconds, {})[lane] = monotonic() + seconds

    def end(self, lane: int) -> None:
        """Have it due no more."""
        for lanes in self._due.values():
            lanes.pop(lane, None)

    @property
    def left(self) -> float | None:
        """Seconds until the next one is due; None where there is none."""
        first = [next(iter(lanes.values())) for lanes in self._due.values() if lanes]
        return max(0.0, min(first) - monotonic()) if first else None

    def due(self) -> list[int]:
        """The lanes that are due now, and stay so until they are begun anew or ended."""
        found, now = [], monotonic()
        for lanes in self._due.values():
            for lane, when in lanes.items():
                if when > now:
                    break
                found.append(lane)
        return found
