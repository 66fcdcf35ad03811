"""What a trainer may choose, and what goes with what."""

from collections.abc import Sequence
from typing import Any

from rollflow.nodes.lag import check_bounded
from rollflow.stream.errors import ModuleError

# Why a loader can't have workers under "pace".
NO_WORKERS = (
    "on_excess='pace' has rollouts wait for the loop, and what a DataLoader's workers have prefetched is ahead of it, "
    "expected num_workers=0"
)


def check_choices(
    yields: str, on_excess: str, ack: str, *, count: int | None, max_lag: int | None, taught: object
) -> None:
    """Raise ValueError for a choice that there is not, or that does not go with another; see `TrainerStream`.

    count     fragments of a batch; None: that is not said
    taught    makes pieces for a learner pipeline; None: there are none
    """
    _check("yields", yields, ("batches", "fragments", "episodes"))
    _check("on_excess", on_excess, ("drop", "pace", "mask", "raise"))
    _check("ack", ack, ("auto", "manual"))
    if on_excess == "mask" and yields != "batches":
        raise ValueError(f"on_excess='mask' is for batches, expected another one with yields={yields!r}")
    if taught is not None and yields != "batches":
        raise ValueError(f"learner_connector makes batches, expected none with yields={yields!r}")
    if on_excess == "pace" and count is not None:
        raise ValueError(
            "under on_excess='pace' a batch is one fragment of every lane, expected no fragments_per_batch"
        )
    check_bounded(on_excess, max_lag)


def check_module(module: Any) -> None:
    """Raise ModuleError for what can't be the module that a learner pipeline's pieces see."""
    if isinstance(module, str | bytes | int | float | list | tuple | type):
        raise ModuleError(f"module is {module!r:.100}, expected a module, or module id -> module")


def _check(name: str, given: str, choices: Sequence[str]) -> None:
    if given not in choices:
        raise ValueError(f"{name} is {given!r}, expected one of {', '.join(map(repr, choices))}")
