"""State of a trainer's stream as plain data, and records of what it has handed over."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollflow.nodes.modules.weights_codec import DIGEST_BYTES
from rollflow.sinks.trainer.messages.item_message import AnyFragment
from rollflow.sinks.trainer.trainer_side.newest_weights import NewestWeights
from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.sinks.trainer.trainer_side.staleness import StalenessBound, lag_of
from rollflow.stream.data.errors import shown
from rollflow.stream.wire import SESSION_BYTES, TrainerSession
from rollflow.stream.wire.codec.handshake import MOST_NUMBER

HAS_ENDED = "the trainer has ended"  # reason of its goodbye, where it leaves without an error


class BatchItem(NamedTuple):
    """One fragment, or train batch of a rollout, in the batch that was handed over last.

    source      name of the rollout
    sequence    number of the fragment in its lane
    lag         policy versions published since the oldest that its actions were computed with; None: it is unknown
    num_steps   number of transitions
    """

    source: str
    lane: int
    sequence: int
    lag: int | None
    num_steps: int

    @classmethod
    def of(cls, arrived: ArrivedItem, version: int) -> "BatchItem":
        """Record of an arrived item, when `version` is the newest policy version."""
        item = arrived.item
        sequence = item.sequence if isinstance(item, AnyFragment) else arrived.number - 1
        return cls(arrived.source.called, arrived.lane, sequence, lag_of(arrived, version), arrived.num_steps)


class WeightsInUse(NamedTuple):
    """Weights that a forward node was seen to use.

    source     name of the rollout
    node       name of the forward node
    version    policy version
    is_same    True if they are the weights that were published here under this version, bit for bit, in the dtypes of
               the node's module; None: they were not published here
    """

    source: str
    node: str
    version: int
    is_same: bool | None


def weights_in_use(sources: Iterable[RolloutPeer], digests: Mapping[int, bytes]) -> list[WeightsInUse]:
    """Weights that the forward nodes of rollouts last used, compared with `digests` of those published, by version."""
    found = []
    for source in sources:
        for node, receipt in sorted(source.receipts.items()):
            published = digests.get(receipt.version)
            is_same = None if published is None else published == receipt.digest
            found.append(WeightsInUse(source.called, node, receipt.version, is_same))
    return found


def failure_of(error: BaseException | None) -> str | None:
    """Reason for rollouts, which then wait for another trainer, of an error that ended a stream; None for no error."""
    if error is None:
        return None
    return f"it has failed: {type(error).__name__}: {error}" if isinstance(error, Exception) else "it was interrupted"


class TrainerState(NamedTuple):
    """State that a trainer goes on from.

    sources    rollouts by their tokens; none of them has come yet
    version    newest policy version
    digest     of the weights that were published under it; None: there are none, or it is unknown
    lost       number of transitions that were left out, by cause
    counted    transitions, and items of the loop, that were handed over
    """

    sources: dict[bytes, RolloutPeer]
    version: int
    digest: bytes | None
    lost: dict[str, int]
    counted: tuple[int, int]

    def resume(self, sources: dict[bytes, RolloutPeer], weights: NewestWeights, staleness: StalenessBound) -> None:
        """Have a stream's parts go on from it, before any rollout has come."""
        sources.update(self.sources)
        weights.resume(self.version, self.digest)
        staleness.lost = Counter(self.lost)


def state_dict_of(
    sources: Mapping[bytes, RolloutPeer],
    current: Sequence[ArrivedItem],
    version: int,
    digest: bytes | None,
    lost: Mapping[str, int],
    counted: tuple[int, int],
) -> dict[str, Any]:
    """State for JSON: the items handed over, `current` included, the newest weights, and what was left out."""
    by_token = {}
    for token, source in sources.items():
        numbers = source.beyond | {arrived.number for arrived in current if arrived.source is source}
        done = source.session.done
        while done + 1 in numbers:
            done += 1
        beyond = sorted(number for number in numbers if number > done)
        by_token[token.hex()] = {"done": done, "beyond": beyond, "missed": source.session.missed}
    newest = {"version": version, "digest": None if digest is None else digest.hex()}
    so_far = {"counted": list(counted)} if any(counted) else {}
    return {**newest, "lost": dict(lost), **so_far, "sources": by_token}


def state_from(state: Mapping[str, Any]) -> TrainerState:
    """State from what `state_dict_of` gave; an older one may lack `digest`, `lost`, `counted` and `missed`.

    Raises ValueError for anything else.
    """
    if not (isinstance(state, Mapping) and "sources" in state):
        raise ValueError(f"state is {shown(state)}, expected what state_dict() of a TrainerStream gave, with 'sources'")
    try:
        sources = {}
        for token, entry in state["sources"].items():
            done, beyond = _number(entry["done"]), {_number(number) for number in entry["beyond"]}
            if len(bytes.fromhex(token)) != SESSION_BYTES or any(number <= done for number in beyond):
                raise ValueError(f"{token}: {entry}")
            source = RolloutPeer(TrainerSession(bytes.fromhex(token), done))
            source.beyond, source.session.missed = beyond, _number(entry.get("missed", 0))
            sources[source.session.token] = source
        lost = {str(cause): _number(count) for cause, count in state.get("lost", {}).items()}
        steps, items = map(_number, state.get("counted", (0, 0)))
        return TrainerState(sources, _number(state["version"]), _digest(state.get("digest")), lost, (steps, items))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"state is {shown(state)}, expected what state_dict() gave: {error!r}") from error


def _digest(text: Any) -> bytes | None:
    digest = None if text is None else bytes.fromhex(text)
    if digest is not None and len(digest) != DIGEST_BYTES:
        raise ValueError(f"digest {text}")
    return digest


def _number(value: Any) -> int:
    number = int(value)
    if not 0 <= number < MOST_NUMBER:
        raise ValueError(f"{number} is out of range")
    return number
