"""How long environments may take for a step or a reset before they are taken for hung."""

from dataclasses import dataclass, field
from time import monotonic


@dataclass(slots=True)
class Patience:
    """Deadlines of lanes that somebody else works on.

    step_timeout     seconds that a vector step may take; None: for ever
    reset_timeout    seconds that the first reset may take, the making of the environments included; None: for ever
    """

    step_timeout: float | None
    reset_timeout: float | None
    _deadlines: dict[int, tuple[float, bool]] = field(default_factory=dict)  # by lane; whether it resets

    def begin(self, lane: int, *, resets: bool = False) -> None:
        """The lane's environments have been asked for something."""
        seconds = self.reset_timeout if resets else self.step_timeout
        if seconds is None:
            self.end(lane)
        else:
            self._deadlines[lane] = monotonic() + seconds, resets

    def end(self, lane: int) -> None:
        """They have answered, or are not waited for any more."""
        self._deadlines.pop(lane, None)

    @property
    def left(self) -> float | None:
        """Seconds until the next deadline; None where there is none."""
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values())[0] - monotonic())

    def overdue(self) -> dict[int, str]:
        """The lanes whose deadline has passed, with what they were late with."""
        now = monotonic()
        told = (
            f"no answer to a step within {self.step_timeout} s",
            f"no answer to a reset within {self.reset_timeout} s",
        )
        return {index: told[resets] for index, (deadline, resets) in self._deadlines.items() if deadline <= now}
