"""A rollout that feeds a trainer, as the trainer knows it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.nodes.env_source import is_whole
from rollflow.nodes.remote.fragment_message import fragment_of
from rollflow.nodes.remote.lines import quoted
from rollflow.sinks.trainer.by_module import is_by_module
from rollflow.sinks.trainer.compression import decompressed
from rollflow.sinks.trainer.finished import NONE, Finished
from rollflow.sinks.trainer.item_message import Batch, batch_of_message, is_batch, layout_told, told_of_batch
from rollflow.stream import wire
from rollflow.stream.errors import WireError
from rollflow.stream.fragment import Fragment, FragmentLayout
from rollflow.stream.wire import Aside, Come, Hello, Receipt, TrainerConnection, TrainerSession
from rollflow.stream.wire.handshake import MOST_LANES, MOST_NUMBER
from rollflow.stream.wire.spaces import read_space

_MOST_SPACES, _MOST_NODES = 64, 4096
_NONE_GONE: frozenset[int] = frozenset()


class Arrived(NamedTuple):
    """An item that has come.

    number            in the source's stream
    item              a fragment, or a train batch
    policy_version    the oldest that an action was computed with; None: nobody knows
    batch_steps       transitions in a train batch, as its sender has counted them
    finished          episodes that a train batch tells of
    """

    source: "Source"
    number: int
    item: Fragment | Batch
    policy_version: int | None
    batch_steps: int = 0
    finished: Finished = NONE

    @property
    def lane(self) -> int:
        """The lane that it comes from."""
        return self.item.lane if isinstance(self.item, Fragment) else 0

    @property
    def told(self) -> str:
        """What it is, for people."""
        if isinstance(self.item, Fragment):
            return f"fragment {self.item.sequence} of lane {self.lane} of rollout {self.source.name}"
        return f"train batch {self.number - 1} of rollout {self.source.name}"

    @property
    def batch(self) -> Batch:
        """The item, of a source that sends train batches."""
        assert not isinstance(self.item, Fragment)
        return self.item

    @property
    def num_steps(self) -> int:
        """Transitions."""
        return self.item.num_steps if isinstance(self.item, Fragment) else self.batch_steps

    @property
    def is_left_out(self) -> bool:
        """Whether it is not for the trainer: there is no transition in it, or it was handed over before a restart."""
        is_empty = isinstance(self.item, Fragment) and self.item.is_empty
        return is_empty or self.number in self.source.beyond


class Source:
    """What is known of one rollout.

    called               as it calls itself
    name                 the same, and where it is
    session              what outlives its connections
    connection           the newest; None: there has been none
    lost_at              since when it has none; None: it has one
    reason               why the connection before was lost
    has_left             whether it has said goodbye
    has_finished         whether it has said that no more comes
    has_ended            whether that is so, or it has said goodbye, or did not come back
    is_lost              whether it did not come back, and had not finished
    joined_at            policy version at the trainer when it was last taken in, or rounds began to have lanes of it
    sends_batches        whether it sends train batches
    is_by_module         whether each of them is module id -> train batch
    can_be_paced         whether it knows which fragments go into which of them, and all that it makes comes
    lanes                of its rollout that there are, and those that are gone of which it may want something again; of
                         train batches there is one, 0
    awaited              those of them that rounds are made of
    has_fixed_lanes      whether no others come
    spaces               that observations may be in, as they come
    action_space         of the rollout
    told                 what it has been told through its connection
    is_stateful          whether the rollout's module is
    weights              shapes of the module's weights
    seed                 of its environments; None: nobody knows
    version              the policy version that the rollout came with
    digest               of its weights, if they are a trainer's that it was told by this connection; None: nobody knows
    compressions         that it can compress by
    needs                items of it that the trainer has to have at a time, see `Window`
    aside                lanes that are gone -> number of the last item behind which there is none of theirs
    receipts             forward node -> what it last said to use
    beyond               numbers of items that were handed over, behind others that were not
    """

    def __init__(self, session: TrainerSession) -> None:
        self.called = self.name = "?"
        self.session = session
        self.connection: TrainerConnection | None = None
        self.lost_at: float | None = None
        self.reason = ""
        self.has_left = self.has_finished = self.has_ended = self.is_lost = False
        self.joined_at = 0
        self.sends_batches = self.is_by_module = self.can_be_paced = False
        self.lanes: set[int] = set()
        self.awaited: frozenset[int] = frozenset()
        self.has_fixed_lanes = True
        self.spaces: list[gym.Space[Any]] = []
        self.action_space: gym.Space[Any] | None = None
        self.is_stateful = False
        self.module = ""
        self.weights: dict[str, tuple[int, ...]] = {}
        self.seed: int | None = None
        self.version = 0
        self.digest: bytes | None = None
        self.compressions: list[Any] = []
        self.needs = 1
        self.aside: dict[int, int] = {}
        self.receipts: dict[str, Receipt] = {}
        self.beyond: set[int] = set()
        self.told: _Told = _Told()
        self._layouts: dict[int, FragmentLayout] = {}  # of the last fragment of each lane

    @property
    def streams(self) -> int:
        """How many of its items go into one batch for the trainer."""
        return max(1, len(self.lanes) - len(self.gone))

    @property
    def unfinished(self) -> int:
        """Of how many lanes there may be items that the trainer is not done with."""
        done = self.session.done
        return max(1, len(self.lanes) - sum(number <= done for number in self.aside.values()))

    @property
    def gone(self) -> frozenset[int]:
        """Lanes of which all has come that comes."""
        if not self.aside:
            return _NONE_GONE
        return frozenset(lane for lane, number in self.aside.items() if number <= self.session.taken)

    @property
    def is_present(self) -> bool:
        """Whether more may come of it."""
        return self.connection is not None and not self.has_ended

    @property
    def is_connected(self) -> bool:
        """Whether it can be told something."""
        return self.connection is not None and self.connection.is_open

    def whereabouts(self, grace_s: float) -> str:
        """Whether it is there or is waited for, at most so many seconds, and how long still, for people."""
        if self.lost_at is None or self.is_connected:
            return f"{self.name} is there"
        gone = monotonic() - self.lost_at
        left = max(0.0, grace_s - gone)
        return f"{self.name} is lost since {gone:.0f} s, and waited for {left:.0f} s more (Limits.grace_s)"

    @property
    def waits_soon(self) -> bool:
        """Whether half of what it may send has been done with since it was told last."""
        return 2 * (self.session.done - self.told.done[0]) >= (self.session.window or 0)

    def told_through(self, connection: TrainerConnection) -> "_Told":
        """What it has been told through a connection; nothing where that is new."""
        if self.told.connection is not connection:
            self.told = _Told(connection)
        return self.told

    def introduce(self, hello: Hello, where: str) -> None:
        """Take down what it says of itself. Raises WireError where it makes no sense."""
        told = hello.metadata
        spaces = _entry(told, "spaces", list)
        if not 1 <= len(spaces) <= _MOST_SPACES:
            raise WireError(f"hello.metadata: {len(spaces)} spaces, expected 1 to {_MOST_SPACES}", "message")
        version: Any = told.get("version")
        if not is_whole(version) or not 0 <= version < MOST_NUMBER:
            raise WireError(f"hello.metadata: version is {version!r:.100}, expected a whole number", "message")
        digest: Any = told.get("digest")
        if digest is not None and not (isinstance(digest, bytes) and len(digest) == 32):
            raise WireError(f"hello.metadata: digest is {digest!r:.100}, expected 32 bytes or nil", "message")
        seed: Any = told.get("seed")
        if seed is not None and not is_whole(seed):
            raise WireError(f"hello.metadata: seed is {seed!r:.100}, expected a whole number or nil", "message")
        weights = _entry(told, "weights", dict)
        if not all(isinstance(shape, list) and all(map(is_whole, shape)) for shape in weights.values()):
            raise WireError("hello.metadata: weights are no shapes, expected lists of whole numbers", "message")
        sends = told.get("sends")
        if not isinstance(sends, str) or sends not in ("fragments", "batches"):
            raise WireError(f"hello.metadata: sends is {sends!r:.100}, expected 'fragments' or 'batches'", "message")
        self.sends_batches, self.compressions = sends == "batches", _entry(told, "compressions", list)
        self.is_by_module = told.get("is_by_module") is True
        self.can_be_paced = told.get("can_be_paced", not self.sends_batches) is True
        self.spaces = [read_space(space, "hello.metadata.spaces") for space in spaces]
        self._layouts = {}
        self.action_space = read_space(hello.action_space, "hello.action_space")
        self.version, self.digest = version, digest
        self._introduce_lanes(len(hello.slots), told)
        self.seed = seed
        self.is_stateful, self.module = _entry(told, "is_stateful", bool), _entry(told, "module", str)
        self.weights = {name: tuple(shape) for name, shape in weights.items()}
        self.called = hello.name
        self.name = f"{quoted(hello.name)} ({where})"

    def read(self, messages: Iterable[wire.Fragment]) -> Iterator[Arrived]:
        """What is in messages that came together. Raises WireError at one that is nothing for a trainer."""
        rest: Mapping[str, Any] | None = None
        told: tuple[int | None, int, Finished] = (None, 0, NONE)
        for message in map(decompressed, messages):
            if not self.sends_batches:
                yield self._read_fragment(message)
                continue
            if message.rest is not rest:  # of most that came together it is the same
                rest, told = message.rest, self._told_of_batch(message)
            if self.is_by_module and not is_by_module(message.columns):
                raise WireError("it is no train batch by module: expected module id -> columns", "fragment")
            yield Arrived(self, message.number, batch_of_message(message), *told)

    def _told_of_batch(self, message: wire.Fragment) -> tuple[int | None, int, Finished]:
        """Oldest policy version, steps, and finished episodes of a train batch. Raises WireError where it is none."""
        self._check_kind(message)
        if (message.rest.get("by_module") is True) != self.is_by_module:
            raise WireError("a train batch of one module among others, or the other way round", "fragment")
        finished = Finished.of(message.rest.get("episodes"), is_by_module=self.is_by_module)
        return *told_of_batch(message), finished

    def _check_kind(self, message: wire.Fragment) -> None:
        if is_batch(message) != self.sends_batches:
            raise WireError("a train batch among fragments, or the other way round, expected one of them", "fragment")

    def _read_fragment(self, message: wire.Fragment) -> Arrived:
        assert self.action_space is not None
        self._check_kind(message)
        if self.has_fixed_lanes and message.lane not in self.lanes:
            raise WireError(f"lane {message.lane}, expected one of {len(self.lanes)}", "fragment")
        if message.number > self.aside.get(message.lane, message.number):
            last = self.aside[message.lane]
            told = f"fragment {message.number} of lane {message.lane}, which is set aside behind {last}"
            raise WireError(f"{told}, expected another lane", "fragment")
        layout = layout_told(message.rest.get("layout"), self.action_space, self._layouts.get(message.lane))
        if message.lane in self.lanes:
            self._layouts[message.lane] = layout
        fragment = fragment_of(message, layout, self.spaces)
        version = fragment.policy_version if fragment.num_rows else None
        return Arrived(self, message.number, fragment, version)

    def unlike(self, other: "Source") -> str:
        """Why it can't be learnt from together with another one: what it has, and the other; "": it can."""
        mine, theirs = self._traits, other._traits
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return f"{name} is {mine.get(name)!r:.200}, expected {theirs.get(name)!r:.200}"
        return ""

    @property
    def _traits(self) -> dict[str, Any]:
        """What those have in common that can be learnt from together, by its name for people."""
        told: dict[str, Any] = {name: getattr(self, name) for name in ("is_by_module", "is_stateful", "action_space")}
        told |= {f"spaces[{index}]": space for index, space in enumerate(self.spaces)}
        return told | {f"the shape of weight {name!r}": shape for name, shape in self.weights.items()}

    def take_news(self, news: Receipt | Come | Aside) -> None:
        """Take down what a forward node uses, or that a lane has come or is gone.

        Raises WireError where there are more nodes or lanes than there may be, or no such lane.
        """
        if isinstance(news, Aside):
            self._set_aside(news.lane, news.number)
            return
        if isinstance(news, Come):
            self._take_lane(news.lane)
            return
        self.receipts[news.node] = news
        if len(self.receipts) > _MOST_NODES:
            raise WireError(f"receipts of more than {_MOST_NODES} nodes, expected one for each lane", "message")

    def await_all(self, version: int) -> bool:
        """Have rounds be made of all lanes that there are, when the newest policy version is this; whether that is new.

        A lane begins nothing before: what it gives is as fresh as what others give.
        """
        lanes = frozenset(self.lanes - self.gone)
        if lanes == self.awaited:
            return False
        if not self.awaited:
            self.joined_at = version
        self.awaited = lanes
        return True

    def move_on(self, number: int) -> None:
        """Be done with an item, in whichever order they were handed over."""
        self.beyond.add(number)
        session = self.session
        while session.done + 1 in self.beyond:
            session.done += 1
            self.beyond.remove(session.done)

    def keep(self) -> None:
        """Never want again what is done."""
        self.session.kept = self.session.done

    def _introduce_lanes(self, count: int, told: Mapping[str, Any]) -> None:
        """Take down the lanes of a hello with so many. Raises WireError where it makes no sense."""
        self.has_fixed_lanes = _entry(told, "has_fixed_lanes", bool)
        lanes = list(range(count)) if self.has_fixed_lanes else _entry(told, "lanes", list)
        if not all(is_whole(lane) and 0 <= lane < MOST_NUMBER for lane in lanes) or len(lanes) > count:
            raise WireError(f"hello.metadata: lanes is {lanes!r:.100}, expected {count} whole numbers", "message")
        aside = told.get("aside", [])
        if not isinstance(aside, list) or not all(isinstance(each, list) and len(each) == 2 for each in aside):
            raise WireError(f"hello.metadata: aside is {aside!r:.100}, expected pairs of lane and number", "message")
        self.lanes, self.aside = {0} if self.sends_batches else set(lanes), {}
        for lane, number in aside:
            self._set_aside(lane, number)
        # Where it had ended, others went on without it.
        self.awaited = frozenset() if self.has_ended else self.awaited & self.lanes

    def _take_lane(self, lane: int) -> None:
        """Take down that a lane has come, unless a hello has said so. Raises WireError where none may."""
        if self.sends_batches or lane in self.lanes:
            return
        if self.has_fixed_lanes:
            raise WireError(f"lane {lane} has come, expected none but the {len(self.lanes)} of the hello", "message")
        over = {each for each, number in self.aside.items() if number <= self.session.kept}
        self.lanes -= over
        self.awaited -= over
        self.aside = {each: number for each, number in self.aside.items() if each not in over}
        self._layouts = {each: layout for each, layout in self._layouts.items() if each not in over}
        if len(self.lanes) >= MOST_LANES:
            told = f"at most {MOST_LANES}, those among them that are gone and not acknowledged in full"
            raise WireError(f"lane {lane} has come, expected {told}", "message")
        self.lanes.add(lane)

    def _set_aside(self, lane: Any, number: Any) -> None:
        """Take down that no item behind this one is of a lane. Raises WireError where there is none of them."""
        if self.sends_batches:
            return
        if not is_whole(lane) or (self.has_fixed_lanes and lane not in self.lanes):
            raise WireError(f"lane {lane!r:.100} is set aside, expected one of {len(self.lanes)}", "message")
        if lane not in self.lanes:
            return  # it has been forgotten
        if not is_whole(number) or not 0 <= number < MOST_NUMBER:
            raise WireError(f"lane {lane} is set aside behind {number!r:.100}, expected a number", "message")
        self.aside[lane] = number


@dataclass(slots=True)
class _Told:
    """What a source has been told through a connection."""

    connection: TrainerConnection | None = None
    version: int = -1
    done: tuple[int, int] = (-1, -1)
    wanted: tuple[int | None, frozenset[int]] = (-1, frozenset())


def _entry(told: Mapping[str, Any], name: str, kind: type) -> Any:
    value = told.get(name)
    if not isinstance(value, kind):
        raise WireError(f"hello.metadata: {name} is {value!r:.100}, expected a {kind.__name__}", "message")
    return value
