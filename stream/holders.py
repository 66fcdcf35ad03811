"""Who has items wait at gates, and for how long."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rollflow.stream.meter import NodeMeter


class Holders:
    """Those who hold the gates of a run.

    meters    by name, of those who have had items wait: how often, and the time in which there was nothing else to do.
              Where several chains wait for one at once, that is one wait, from the first to the last
    """

    def __init__(self) -> None:
        self.meters: dict[str, NodeMeter] = {}
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def awaited(self, name: str | None) -> Iterator[None]:
        """Within this a chain waits for the holder of this name; None: for one who is not known."""
        if name is None:
            yield
            return
        meter = self.meters.setdefault(name, NodeMeter(name))
        meter.items += 1
        meter.begin_life()
        self._waiting[name] += 1
        try:
            yield
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                meter.end_life()
