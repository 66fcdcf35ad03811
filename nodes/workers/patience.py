"""How long environments may take for a step or a reset before they are taken for hung."""

from rollflow.nodes.workers.deadlines import Deadlines


class Patience:
    """Deadlines of lanes that somebody else works on, of whom nothing is seen before they answer.

    step_timeout     seconds that a vector step may take, with the resets after episodes that end in it; None: for ever
    reset_timeout    seconds that the first reset may take, the making of the environments and the start of a process
                     for them included; None: for ever
    """

    def __init__(self, step_timeout: float | None, reset_timeout: float | None) -> None:
        self.step_timeout = step_timeout
        self.reset_timeout = reset_timeout
        self._deadlines = Deadlines()
        self._resets: set[int] = set()

    def begin(self, lane: int, *, resets: bool = False) -> None:
        """The lane's environments have been asked for something."""
        self.end(lane)
        seconds = self.reset_timeout if resets else self.step_timeout
        if resets:
            self._resets.add(lane)
        if seconds is not None:
            self._deadlines.begin(lane, seconds)

    def end(self, lane: int) -> None:
        """They have answered, or are not waited for any more."""
        self._deadlines.end(lane)
        self._resets.discard(lane)

    @property
    def left(self) -> float | None:
        """Seconds until the next deadline; None where there is none."""
        return self._deadlines.left

    def overdue(self) -> dict[int, str]:
        """The lanes whose deadline has passed, with what they were late with."""
        step = f"step within {self.step_timeout} s, the resets after ended episodes included"
        reset = f"reset within {self.reset_timeout} s"
        return {lane: f"no answer to a {reset if lane in self._resets else step}" for lane in self._deadlines.due()}
