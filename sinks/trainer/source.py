"""A rollout that feeds a trainer, as the trainer knows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from rollflow.nodes.env_source import is_whole
from rollflow.sinks.trainer.compression import decompressed
from rollflow.sinks.trainer.item_message import Batch, batch_of_message, fragment_of_message, is_batch
from rollflow.stream import wire
from rollflow.stream.errors import WireError
from rollflow.stream.fragment import Fragment
from rollflow.stream.space_codec import space_of
from rollflow.stream.wire import Hello, Receipt, TrainerConnection, TrainerSession

_MOST_SPACES, _MOST_LANES = 64, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """An item that has come.

    number            in the source's stream
    item              a fragment, or a train batch
    policy_version    the oldest that an action was computed with; None: nobody knows
    """

    source: "Source"
    number: int
    item: Fragment | Batch
    policy_version: int | None

    @property
    def lane(self) -> int:
        """The lane that it comes from."""
        return self.item.lane if isinstance(self.item, Fragment) else 0

    @property
    def num_steps(self) -> int:
        """Transitions; 0 for a train batch: nobody counts them there."""
        return self.item.num_steps if isinstance(self.item, Fragment) else 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no transition in it."""
        return isinstance(self.item, Fragment) and not self.item.num_steps


class Source:
    """What is known of one rollout.

    name                 as it calls itself, and where it is
    session              what outlives its connections
    connection           the newest; None: there has been none
    lost_at              since when it has none; None: it has one
    has_ended            whether it has said that no more comes, has said goodbye, or did not come back
    is_lost              whether it did not come back
    sends_batches        whether it sends train batches
    lanes                of its rollout, at the beginning
    spaces               that observations may be in, as they come
    seen_space, action_space    of what a module sees, and of its actions
    is_stateful          whether the rollout's module is
    weights              shapes of the module's weights
    version              the policy version that the rollout came with
    compressions         that it can compress by
    receipts             forward node -> what it last said to use
    beyond               numbers of items that were handed over, behind others that were not
    """

    def __init__(self, session: TrainerSession) -> None:
        self.name = "?"
        self.session = session
        self.connection: TrainerConnection | None = None
        self.lost_at: float | None = None
        self.has_ended = self.is_lost = False
        self.sends_batches = False
        self.lanes = 1
        self.has_fixed_lanes = True
        self.spaces: list[gym.Space[Any]] = []
        self.action_space: gym.Space[Any] | None = None
        self.is_stateful = False
        self.module = ""
        self.weights: dict[str, tuple[int, ...]] = {}
        self.version = 0
        self.compressions: list[Any] = []
        self.receipts: dict[str, Receipt] = {}
        self.beyond: set[int] = set()
        self.told: _Told = _Told()

    @property
    def is_present(self) -> bool:
        """Whether more may come of it."""
        return self.connection is not None and not self.has_ended

    @property
    def is_connected(self) -> bool:
        """Whether it can be told something."""
        return self.connection is not None and self.connection.is_open

    def introduce(self, hello: Hello, where: str) -> None:
        """Take down what it says of itself. Raises WireError where it makes no sense."""
        told = hello.metadata
        spaces = _entry(told, "spaces", list)
        if not 1 <= len(spaces) <= _MOST_SPACES:
            raise WireError(f"hello.metadata: {len(spaces)} spaces, expected 1 to {_MOST_SPACES}", "message")
        for name, most in (("lanes", _MOST_LANES), ("version", 1 << 53)):
            if not is_whole(told.get(name)) or not 0 <= told[name] <= most:
                raise WireError(
                    f"hello.metadata: {name} is {told.get(name)!r:.100}, expected a whole number up to {most}",
                    "message",
                )
        weights = _entry(told, "weights", dict)
        if not all(isinstance(shape, list) and all(map(is_whole, shape)) for shape in weights.values()):
            raise WireError("hello.metadata: weights are no shapes, expected lists of whole numbers", "message")
        sends = told.get("sends")
        if sends not in ("fragments", "batches"):
            raise WireError(f"hello.metadata: sends is {sends!r:.100}, expected 'fragments' or 'batches'", "message")
        self.sends_batches, self.compressions = sends == "batches", _entry(told, "compressions", list)
        self.spaces = [space_of(space) for space in spaces]
        self.action_space = space_of(dict(hello.action_space))
        self.lanes, self.version = told["lanes"], told["version"]
        self.has_fixed_lanes = _entry(told, "has_fixed_lanes", bool)
        self.is_stateful, self.module = _entry(told, "is_stateful", bool), _entry(told, "module", str)
        self.weights = {name: tuple(shape) for name, shape in weights.items()}
        self.name = f"{ascii(hello.name)[1:-1]} ({where})"

    def read(self, message: wire.Fragment) -> Arrived:
        """What is in a message. Raises WireError where it is nothing for a trainer."""
        assert self.action_space is not None
        message = decompressed(message)
        if is_batch(message) != self.sends_batches:
            raise WireError("a train batch among fragments, or the other way round, expected one of them", "fragment")
        if self.sends_batches:
            return Arrived(self, message.number, *batch_of_message(message))
        fragment = fragment_of_message(message, self.spaces, self.action_space)
        version = fragment.policy_version if fragment.num_rows else None
        return Arrived(self, message.number, fragment, version)

    def is_known(self, number: int) -> bool:
        """Whether an item was handed over already: before a restart."""
        return number in self.beyond

    def move_on(self, number: int) -> None:
        """Be done with an item, in whichever order they were handed over."""
        self.beyond.add(number)
        while self.session.done + 1 in self.beyond:
            self.session.done += 1
            self.beyond.remove(self.session.done)

    def keep(self) -> None:
        """Never want again what is done."""
        self.session.kept = self.session.done


@dataclass(slots=True)
class _Told:
    """What a source has been told through a connection."""

    connection: TrainerConnection | None = None
    version: int = -1
    done: tuple[int, int] = (0, 0)


def _entry(told: Mapping[str, Any], name: str, kind: type) -> Any:
    value = told.get(name)
    if not isinstance(value, kind):
        raise WireError(f"hello.metadata: {name} is {value!r:.100}, expected a {kind.__name__}", "message")
    return value
