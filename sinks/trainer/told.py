"""What a trainer is told beside its batches."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rollflow.sinks.trainer.age import lag_of
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.fragment import Fragment

HAS_ENDED = "the trainer has ended"  # why it leaves without an error


class Handed(NamedTuple):
    """One fragment of what was handed over last.

    source      name of the rollout
    sequence    number of the fragment in its lane
    lag         policy versions published since the oldest that its actions were computed with; None: nobody knows
    num_steps   transitions
    """

    source: str
    lane: int
    sequence: int
    lag: int | None
    num_steps: int


class InUse(NamedTuple):
    """Weights that a forward node was seen to use.

    source     name of the rollout
    node       the forward node
    version    policy version
    is_same    whether it has the weights that were published here under this version, bit for bit, in the dtypes of its
               module; None: they were not published here
    """

    source: str
    node: str
    version: int
    is_same: bool | None


def handed(arrived: Arrived, version: int) -> Handed:
    """What there is to say of an item, when the newest policy version is this."""
    item = arrived.item
    sequence = item.sequence if isinstance(item, Fragment) else arrived.number - 1
    return Handed(arrived.source.name, arrived.lane, sequence, lag_of(arrived, version), arrived.num_steps)


def in_use(sources: Iterable[Source], digests: Mapping[int, bytes]) -> list[InUse]:
    """What their forward nodes were last seen to use, where these weights were published, by their versions."""
    found = []
    for source in sources:
        for node, receipt in sorted(source.receipts.items()):
            published = digests.get(receipt.version)
            is_same = None if published is None else published == receipt.digest
            found.append(InUse(source.name, node, receipt.version, is_same))
    return found


def told_failure(error: BaseException | None) -> str | None:
    """Why the block was left, for rollouts that wait for another trainer; None: without an error."""
    if error is None:
        return None
    return f"it has failed: {type(error).__name__}: {error}" if isinstance(error, Exception) else "it was interrupted"
