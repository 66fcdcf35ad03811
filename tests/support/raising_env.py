"""Environments and modules that break in the middle of a run."""

from typing import Any

from rollflow import ConnectorV2


class Breaks(ConnectorV2):
    """Raises at its tenth call."""

    calls = 0

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 10:
            raise ZeroDivisionError("no more")
        return batch
