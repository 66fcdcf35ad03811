"""Runners of a connector pipeline, during whose runs the pipeline stays as it is."""

import weakref
from typing import Any, Protocol

from rollflow.stream.data.errors import StateError


class PipelineRunner(Protocol):
    """A rollout, or another runner of pipelines, which can't be changed meanwhile."""

    @property
    def is_running(self) -> bool:
        """True while it runs."""


class Runners:
    """The runners of a pipeline, by weak references; a copy has none."""

    def __init__(self) -> None:
        self._runners: tuple[weakref.ref[PipelineRunner], ...] = ()

    def add(self, runner: PipelineRunner) -> None:
        """Have one more."""
        self._runners = (*self._runners, weakref.ref(runner))

    @property
    def are_running(self) -> bool:
        """True while one of them runs."""
        return any(runner is not None and runner.is_running for runner in (each() for each in self._runners))

    def __reduce__(self) -> tuple[Any, ...]:
        return Runners, ()


def states_elsewhere(name: str, method: str) -> StateError:
    """The error of a pipeline that is given a state while workers or hosts have its states."""
    return StateError(
        f"{name} is given a state, but the workers or hosts of a rollout that runs have states of their own, which "
        f"would overwrite it; expected {method} before the run"
    )
