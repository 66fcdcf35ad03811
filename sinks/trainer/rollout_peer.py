"""Peer of a trainer: one rollout that feeds it, and the items that come of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic
from typing import Any, NamedTuple

from rollflow.nodes.offloaded.fragment_message import agents_of_message, fragment_of, layout_in, share_layouts
from rollflow.sinks.trainer import messages
from rollflow.sinks.trainer.lending import FragmentBorrower
from rollflow.sinks.trainer.messages import AnyFragment, Batch, FinishedEpisodes, RolloutDescription
from rollflow.stream import wire
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.fragments.fragment import FragmentLayout
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.net.socket_loop import Peer
from rollflow.stream.wire.codec.handshake import MOST_LANES, MOST_NUMBER

_NONE: frozenset[int] = frozenset()


def number_in(value: Any) -> int:
    """A number in a state. Raises ValueError or TypeError for anything else."""
    number = int(value)
    if not 0 <= number < MOST_NUMBER:
        raise ValueError(f"{number} is out of range")
    return number


class ArrivedItem(NamedTuple):
    """Item that has come.

    number            in the source's stream
    item              a fragment, or a train batch
    policy_version    the oldest that an action was computed with; None: unknown
    batch_steps       transitions in a train batch, by its sender's count
    finished          finished episodes of a train batch
    """

    source: "RolloutPeer"
    number: int
    item: AnyFragment | Batch
    policy_version: int | None
    batch_steps: int = 0
    finished: Sequence[FinishedEpisodes] = ()

    @property
    def lane(self) -> int:
        """Lane that it comes from."""
        return self.item.lane if isinstance(self.item, AnyFragment) else 0

    def lag(self, version: int) -> int | None:
        """Policy versions up to this one since the oldest that its actions were computed with; None: it is unknown."""
        return None if self.policy_version is None else max(0, version - self.policy_version)

    @property
    def told(self) -> str:
        """The item's name, for people."""
        if isinstance(self.item, AnyFragment):
            return f"fragment {self.item.sequence} of lane {self.lane} of rollout {self.source.name}"
        return f"train batch {self.number - 1} of rollout {self.source.name}"

    @property
    def batch(self) -> Batch:
        """The item, of a source that sends train batches."""
        assert not isinstance(self.item, AnyFragment)
        return self.item

    @property
    def newest_version(self) -> int | None:
        """The newest policy version that an action of several agents was computed with; None: nobody knows."""
        assert isinstance(self.item, MultiAgentFragment)
        return messages.acting_versions(self.item, self.source.rollout.published)[1]

    @property
    def num_steps(self) -> int:
        """Number of transitions."""
        return self.item.num_steps if isinstance(self.item, AnyFragment) else self.batch_steps

    @property
    def is_left_out(self) -> bool:
        """True for an item without transitions, or one that was handed over before a restart."""
        is_empty = isinstance(self.item, AnyFragment) and self.item.is_empty
        return is_empty or self.number in self.source.beyond


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
        return cls(arrived.source.called, arrived.lane, sequence, arrived.lag(version), arrived.num_steps)


class PeerLife(Enum):
    """What a trainer expects of a rollout.

    NEW         nothing: it has not come; it is known from a state
    HERE        more items: it is connected
    AWAY        more items, once it is back: its connection is lost
    FINISHED    no more items: it has said so, connected or not
    LEFT        nothing: it has said goodbye
    LOST        nothing, but it is taken in if it comes: it did not come back in time, another one has come in its
                place, or it has failed
    """

    NEW = auto()
    HERE = auto()
    AWAY = auto()
    FINISHED = auto()
    LEFT = auto()
    LOST = auto()


@dataclass(eq=False)
class RolloutPeer:
    """Knowledge of one rollout, across its connections.

    Its life changes by `come`, `lose` and `finish`, and where it leaves, or is waited for no more.
    """

    session: wire.ReceiverSession  # memory that outlives its connections
    life: PeerLife = PeerLife.NEW
    connection: wire.ReceiverConnection | None = None  # the newest; None: there has been none
    lost_at: float = 0.0  # when its connection was lost last
    reason: str = ""  # why it was
    reminder: WaitReminder = field(default_factory=WaitReminder)  # when to log again that it is awaited
    joined_at: int = 0  # policy version here when it was last taken in, or joined rounds, or the version was raised

    # From its Hello
    called: str = "?"  # the name that it gives itself
    name: str = "?"  # that name, and where it is
    sends_nothing: bool = False  # it takes weights alone, as a follower
    rollout: RolloutDescription = messages.UNKNOWN

    lanes: frozenset[int] = _NONE  # fixed ones also if they are gone; as many as there are, if they come and go
    is_awaited: bool = False  # rounds are made of its lanes
    aside: dict[int, int] = field(default_factory=dict)  # fixed lane that is gone -> number of its last item
    needs: int = 1  # items of it that the trainer has to have at a time, see `Rounds`
    beyond: set[int] = field(default_factory=set)  # numbers of items handed over, behind others that were not
    told_done: tuple[int, int] = (-1, -1)  # numbers of the last `Done` through its connection
    born: bytes | None = None  # of the one that has come, or was given its state; None: neither
    asked: int | None = None  # number of the checkpoint that its state is awaited for; None: it is not
    answer: Mapping[str, Any] = field(default_factory=dict)  # to the last one that it was asked for
    _layouts: dict[int, tuple[Any, FragmentLayout]] = field(default_factory=dict)  # lane -> layout, as told last
    _agents_layouts: dict[int, list[FragmentLayout]] = field(default_factory=dict)  # lane -> those of its newest one

    @classmethod
    def of_state(cls, token: str, entry: Mapping[str, Any]) -> "RolloutPeer":
        """The rollout of an entry of a state. Raises ValueError, KeyError or TypeError for anything else."""
        done, beyond = number_in(entry["done"]), {number_in(number) for number in entry["beyond"]}
        if len(bytes.fromhex(token)) != wire.SESSION_BYTES or any(number <= done for number in beyond):
            raise ValueError(f"{token}: {entry}")
        source = cls(wire.ReceiverSession(bytes.fromhex(token), done, goes_on=True))
        source.beyond, source.session.missed = beyond, number_in(entry.get("missed", 0))
        return source

    def state(self, handed: Iterable[int]) -> dict[str, Any]:
        """Entry of a state for JSON, in which items with these numbers are handed over as well."""
        numbers, done = self.beyond.union(handed), self.session.done
        while done + 1 in numbers:
            done += 1
        beyond = sorted(number for number in numbers if number > done)
        return {"done": done, "beyond": beyond, "missed": self.session.missed}

    @property
    def streams(self) -> int:
        """Number of its items that go into one batch for the trainer."""
        return max(1, len(self.lanes) - len(self.gone))

    @property
    def awaited(self) -> frozenset[int]:
        """Lanes that rounds are made of."""
        return self.lanes - self.gone if self.is_awaited else _NONE

    @property
    def gone(self) -> frozenset[int]:
        """Lanes of which no more items come."""
        if not self.aside:
            return _NONE
        return frozenset(lane for lane, number in self.aside.items() if number <= self.session.taken)

    @property
    def is_present(self) -> bool:
        """True if more may come of it."""
        return self.life in (PeerLife.HERE, PeerLife.AWAY)

    @property
    def owes_state(self) -> bool:
        """True if it was asked for its state, and may still send it."""
        return self.asked is not None and (self.is_present or self.is_connected)

    @property
    def is_connected(self) -> bool:
        """True if it has an open connection."""
        return self.connection is not None and self.connection.is_open

    def whereabouts(self, grace_s: float) -> str:
        """Text for people: it is there, or it is waited for, and for how much longer of so many seconds."""
        if self.life is not PeerLife.AWAY:
            return f"{self.name} is there"
        gone = monotonic() - self.lost_at
        left = max(0.0, grace_s - gone)
        return f"{self.name} is lost since {gone:.0f} s, and waited for {left:.0f} s more (Limits.grace_s)"

    @property
    def waits_soon(self) -> bool:
        """True if half of its window has been done with since the last `Done` to it."""
        return 2 * (self.session.done - self.told_done[0]) >= (self.session.window or 0)

    def come(self, connection: wire.ReceiverConnection, version: int) -> None:
        """Take its connection, while this policy version is the newest."""
        self.connection, self.told_done, self.joined_at = connection, (-1, -1), version
        if self.life is not PeerLife.FINISHED:
            self.life = PeerLife.HERE

    def lose(self, now: float, reason: str, *, comes_back: bool) -> None:
        """Note that its connection is lost: it is waited for if it comes back, unless it has finished."""
        self.lost_at, self.reason, self.reminder = now, reason, WaitReminder()
        if self.life is not PeerLife.FINISHED:
            self.life = PeerLife.AWAY if comes_back else PeerLife.LOST

    def finish(self, number: int) -> None:
        """Note that nothing comes behind an item."""
        self.session.miss(number)
        self.life = PeerLife.FINISHED

    def introduce(self, rollout: RolloutDescription, lanes: int) -> None:
        """Take what a Hello says. Raises WireError if it makes no sense."""
        self.rollout, self._layouts, self._agents_layouts, self.aside = rollout, {}, {}, {}
        self.take_lanes(lanes)
        for lane, number in rollout.aside:
            self.set_aside(lane, number)
        self.is_awaited = self.is_awaited and self.is_present  # where it had ended, others went on without it

    def read(self, message: wire.Fragment) -> ArrivedItem:
        """The item of a message. Raises WireError if it is no item for a trainer."""
        if messages.is_batch(message) != self.rollout.sends_batches:
            raise WireError("a train batch among fragments, or the other way round, expected one of them", "fragment")
        try:
            return self._read_batch(message) if self.rollout.sends_batches else self._read_fragment(message)
        except WireError as error:
            raise WireError(str(error), "fragment") from error

    def _read_batch(self, message: wire.Fragment) -> ArrivedItem:
        rest, batch = message.rest, messages.tensors_of(message.columns)
        if self.rollout.is_by_module and not messages.is_by_module(message.columns):
            raise WireError("it is no train batch by module, expected module id -> columns", "fragment")
        oldest = messages.VERSION(rest["policy_version"], "policy_version")
        steps = messages.NUMBER(rest["steps"], "steps")
        return ArrivedItem(self, message.number, batch, oldest, steps, messages.finished_in(rest))

    def _read_fragment(self, message: wire.Fragment) -> ArrivedItem:
        self._check_lane(message)
        if self.rollout.is_by_module:
            of_agents = agents_of_message(message, self.rollout.parts)
            if message.lane < MOST_LANES:
                share_layouts(of_agents, self._agents_layouts.setdefault(message.lane, []))
            oldest, _ = messages.acting_versions(of_agents, self.rollout.published)
            return ArrivedItem(self, message.number, of_agents, oldest, 0, messages.finished_in(message.rest))
        spaces = self.rollout.parts[0]
        told = message.rest.get("layout")
        before, layout = self._layouts.get(message.lane, (None, None))
        if layout is None or told != before:
            layout = layout_in(told, spaces.part.recorded_space)
            if message.lane < MOST_LANES:
                self._layouts[message.lane] = told, layout
        fragment = fragment_of(message, layout, spaces.seen)
        version = fragment.policy_version if fragment.num_rows else None
        return ArrivedItem(self, message.number, fragment, version)

    def _check_lane(self, message: wire.Fragment) -> None:
        """Raise WireError if none of a fragment's lane may come."""
        if self.rollout.has_fixed_lanes and message.lane not in self.lanes:
            raise WireError(f"lane {message.lane}, expected one of {len(self.lanes)}", "fragment")
        if message.number > self.aside.get(message.lane, message.number):
            last = self.aside[message.lane]
            which = f"fragment {message.number} of lane {message.lane}, which is set aside behind {last}"
            raise WireError(f"{which}, expected another lane", "fragment")

    def move_on(self, number: int) -> None:
        """Be done with an item; the order may be any."""
        self.beyond.add(number)
        session = self.session
        while session.done + 1 in self.beyond:
            session.done += 1
            self.beyond.remove(session.done)

    def keep(self, most: int | None = None) -> None:
        """Let the rollout forget all items that are done, up to the number `most`; None: to the last."""
        session = self.session
        session.kept = max(session.kept, session.done if most is None else min(session.done, most))

    def take_lanes(self, count: int) -> None:
        """Take the number of lanes that there are; train batches come as if of one. Raises WireError for too many."""
        if count > MOST_LANES:
            raise WireError(f"{count} lanes, expected at most {MOST_LANES}", "message")
        self.lanes = frozenset(range(1 if self.rollout.sends_batches else count))

    def set_aside(self, lane: int, number: int) -> None:
        """Note that a lane has no item behind this one. Raises WireError if there is no such lane."""
        if self.rollout.sends_batches:
            return
        if lane not in self.lanes:
            raise WireError(f"lane {shown(lane)} is set aside, expected one of {len(self.lanes)}", "message")
        self.aside[lane] = number


@dataclass(slots=True, eq=False)
class RolloutConnection(Peer[wire.ReceiverConnection]):
    """Connection that somebody has made to a trainer.

    source      the rollout at its other end; None: it has not been taken in
    version     of the weights that were sent last
    wanted      window that was sent last, whether the source was awaited, and asked for its state
    borrower    of what is lent through it; None: nothing is
    """

    source: RolloutPeer | None = None
    version: int = -1
    wanted: tuple[int | None, bool, int | None] = (-1, False, None)
    borrower: FragmentBorrower | None = None
