"""How long connector pieces take."""

from dataclasses import dataclass


@dataclass(slots=True)
class Timer:
    """How often a piece was called, and the time it took in all."""

    calls: int = 0
    total_ns: int = 0

    @property
    def mean_us(self) -> float:
        """Microseconds a call."""
        return self.total_ns / self.calls / 1e3 if self.calls else 0.0
