"""How long environments may take for a step or a reset before they are taken for hung."""

from time import monotonic


class Patience:
    """Deadlines of lanes that somebody else works on.

    step_timeout     seconds that a vector step may take, with the resets after episodes that end in it; None: for ever
    reset_timeout    seconds that the first reset may take, the making of the environments and the start of a process
                     for them included; None: for ever

    What it is asked at every step takes no longer with a thousand lanes than with one.
    """

    def __init__(self, step_timeout: float | None, reset_timeout: float | None) -> None:
        self.step_timeout = step_timeout
        self.reset_timeout = reset_timeout
        # By lane, in the order of time: whoever is asked last has the latest deadline of its kind.
        self._steps: dict[int, float] = {}
        self._resets: dict[int, float] = {}

    def begin(self, lane: int, *, resets: bool = False) -> None:
        """The lane's environments have been asked for something."""
        self.end(lane)
        seconds, deadlines = (self.reset_timeout, self._resets) if resets else (self.step_timeout, self._steps)
        if seconds is not None:
            deadlines[lane] = monotonic() + seconds

    def end(self, lane: int) -> None:
        """They have answered, or are not waited for any more."""
        self._steps.pop(lane, None)
        self._resets.pop(lane, None)

    @property
    def left(self) -> float | None:
        """Seconds until the next deadline; None where there is none."""
        first = [next(iter(deadlines.values())) for deadlines in (self._steps, self._resets) if deadlines]
        return max(0.0, min(first) - monotonic()) if first else None

    def overdue(self) -> dict[int, str]:
        """The lanes whose deadline has passed, with what they were late with."""
        late: dict[int, str] = {}
        now = monotonic()
        for deadlines, told in (
            (self._steps, f"step within {self.step_timeout} s, the resets after ended episodes included"),
            (self._resets, f"reset within {self.reset_timeout} s"),
        ):
            for lane, deadline in deadlines.items():
                if deadline > now:
                    break
                late[lane] = f"no answer to a {told}"
        return late
