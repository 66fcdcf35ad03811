"""Ends of a loop over a rollout: what is lost with it, and the errors of one that can't begin, or can't go on."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollflow.nodes.stages.rounds import FragmentRounds
from rollflow.nodes.stages.staleness import LagBound
from rollflow.stream.data.errors import RunError
from rollflow.stream.data.loss_ledger import Ledger


def losses_of(
    environments: Any, lag: LagBound, rounds: FragmentRounds[Any], ended_by: str | None, ledger: Ledger | None
) -> dict[str, int]:
    """Transitions that were made and not handed out, by cause.

    ended_by    the cause of the end of a loop; None: it has not ended
    ledger      of a rollout that is in a graph; None: it is not
    """
    lost = Counter({"max_lag": lag.dropped_steps, "workers": environments.lost_steps})
    lost["interrupted"] = environments.interrupted_steps
    made = int(environments.num_steps) + environments.unrecorded_steps
    if ended_by is not None:
        lost["incomplete"] = rounds.incomplete_steps
        lost[ended_by] = made - rounds.handed_steps - lag.dropped_steps - lost["incomplete"]
    elif ledger is not None:
        lost += ledger.lost_of(made)
    return {cause: steps for cause, steps in lost.items() if steps}


def not_entered(state: str, driver: object, expected: str) -> RunError:
    """The error of a loop over a rollout that was not entered as this loop expects.

    driver    of a plain loop; None: it has none
    """
    entered = "by 'async with'" if driver is None else "by 'with' or start()"
    shown = f"running, entered {entered}" if state == "running" else state
    if state in ("closed", "finished"):
        return RunError(f"the rollout is {shown}; expected a new one, Rollout(...), for another loop")
    return RunError(f"the rollout is {shown}; this loop expects: {expected}")


def not_reported(state: str, *, is_in_graph: bool) -> RunError:
    """The error of a rollout that has no report."""
    if is_in_graph:
        return RunError(
            "the rollout is in a graph, whose run has the report: expected run.report(), of 'async with graph.run() "
            "as run'"
        )
    return RunError(f"the rollout is not running, it is {state}: nothing to report")


@contextmanager
def raising_when_closed(is_running: Callable[[], bool]) -> Iterator[None]:
    """Raise RunError where the rollout is closed already, or is closed while the block is at work."""
    closed = RunError(
        "the rollout is closed: close() was called while this loop ran; expected drain(), after which a loop ends "
        "by itself"
    )
    if not is_running():
        raise closed
    try:
        yield
    except Exception as error:
        if not is_running():
            raise closed from error
        raise
    if not is_running():
        raise closed
