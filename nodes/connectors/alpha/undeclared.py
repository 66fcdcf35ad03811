"""Detection of Alpha connectors that change while they run, and say nothing of it when they are saved."""

from collections.abc import Iterator
from typing import Any

from rollflow.nodes.connectors.alpha.connector import Connector
from rollflow.nodes.connectors.state_watch import Fingerprint, fingerprint
from rollflow.stream.data.errors import StateError

_NO_STATE = {"ctx", "_is_training"}  # attributes that every connector has


class UndeclaredState:
    """Fingerprints of connectors that declare no state, taken after their first call."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._after: dict[str, Fingerprint] | None = None  # by the connectors' names

    def note_call(self) -> None:
        """Take the fingerprints, the first time."""
        if self._after is None:
            self._after = {name: _fingerprint_of(each) for name, each in _undeclaring(self._pipeline)}

    def check(self) -> None:
        """Raise StateError for a connector that has changed since its first call."""
        after = self._after or {}
        for name, connector in _undeclaring(self._pipeline):
            if name in after and after[name] != _fingerprint_of(connector):
                raise StateError(
                    f"{name} changes its attributes while it runs but declares no state, so that would be lost; "
                    "expected to_state and from_state, and merge_states where copies run in workers; or a "
                    "learnt_state that returns {} where nothing has to last"
                )


def _undeclaring(pipeline: Any) -> Iterator[tuple[str, Any]]:
    """(name, connector) of those without a `to_state` or `learnt_state` of their own, also in nested pipelines."""
    for name, connector in zip(pipeline.names, pipeline, strict=True):
        if hasattr(connector, "connectors"):
            yield from ((f"{name}/{inner}", each) for inner, each in _undeclaring(connector))
        elif type(connector).to_state is Connector.to_state and type(connector).learnt_state is Connector.learnt_state:
            yield name, connector


def _fingerprint_of(connector: Any) -> Fingerprint:
    attributes = {name: value for name, value in vars(connector).items() if name not in _NO_STATE}
    return fingerprint(attributes, within=connector)
