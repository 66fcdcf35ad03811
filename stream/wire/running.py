"""The messages of a connection that is under way."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.errors import WireError
from rollflow.stream.tree import Tree
from rollflow.stream.wire.agent_rows import AgentRows, AgentSlots
from rollflow.stream.wire.field import (
    array,
    infos,
    list_of,
    map_of,
    mapping,
    nullable,
    numbers,
    octets,
    raw,
    raw_up_to,
    text,
    tree,
    whole,
)
from rollflow.stream.wire.handshake import MOST_AGENTS, MOST_NUMBER, MOST_SLOTS, LaneId, Number
from rollflow.stream.wire.joined import Joined
from rollflow.stream.wire.limits import MAX_HEADER

BlockNumber = Annotated[int, whole(0, MOST_NUMBER)]
MOST_SERIES = 1024  # fragments that go as one
BlockNumbers = Annotated[tuple[int, ...], list_of(whole(0, MOST_NUMBER), 4096)]
Told = Annotated[str, text(4096)]
_MOST_TEXT = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """Gateway to host: reset all environments of a lane.

    lane, number    which, and the request's number: 1, 2, … for each lane
    seeds           one for each slot; None: go on with the generators that there are
    options         gymnasium's; None: none
    """

    kind: ClassVar[str] = "reset"
    lane: LaneId
    number: Number
    seeds: Annotated[tuple[int, ...] | None, nullable(list_of(whole(0, (1 << 64) - 1), MOST_SLOTS))]
    options: Annotated[Mapping[str, Any] | None, nullable(mapping)]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Gateway to host: step all environments of a lane.

    actions        a tree of arrays `any[slots, ...]`, as the action space says; of several agents: of every part, those
                   of its K agents that are to act, `any[K, ...]`
    agent_slots    of several agents, and of every part: i64[K] ascending, the agent slots that are to act; None: all
    """

    kind: ClassVar[str] = "step"
    lane: LaneId
    number: Number
    actions: Annotated[Tree, tree]
    agent_slots: Annotated[AgentSlots | None, nullable(list_of(nullable(numbers("<i8")), MOST_AGENTS))] = None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Host to gateway: what a Reset or Step with this number gave.

    obs                     a tree of arrays `any[slots, ...]`, as the observation space says
    rewards                 f8[slots]; None after a Reset, as the two below
    terminateds,            bool[slots]
    truncateds
    final_slots             slots whose episode ended in this step and that `obs` has the next episode's first
                            observation of, ascending; none under NEXT_STEP
    final_obs               their last observations, a tree of arrays `any[len(final_slots), ...]`; None: none
    infos, final_infos      of `obs`, and of the episodes that ended: gymnasium's vector form, or SlotInfos
    """

    kind: ClassVar[str] = "rows"
    lane: LaneId
    number: Number
    obs: Annotated[Tree, tree]
    rewards: Annotated[NDArray[np.float64] | None, nullable(numbers("<f8"))]
    terminateds: Annotated[NDArray[np.bool_] | None, nullable(numbers("|b1"))]
    truncateds: Annotated[NDArray[np.bool_] | None, nullable(numbers("|b1"))]
    final_slots: Annotated[tuple[int, ...], list_of(whole(0, MOST_SLOTS - 1), MOST_SLOTS)]
    final_obs: Annotated[Tree | None, nullable(tree)]
    infos: Annotated[Mapping[str, Any], infos]
    final_infos: Annotated[Mapping[str, Any], infos]


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """Host to gateway: the request with this number raised; a lane of environments is to be reset next.

    type, text    of what was raised
    notes         where it was: the slot, the step
    traceback     for people
    """

    kind: ClassVar[str] = "failed"
    lane: LaneId
    number: Number
    type: Annotated[str, text(256)]
    text: Annotated[str, text(_MOST_TEXT)]
    notes: Annotated[tuple[str, ...], list_of(text(4096), 64)]
    traceback: Annotated[str, text(_MOST_TEXT)]

    @classmethod
    def of(cls, request: "Request", error: Exception) -> "Failed":
        """What to answer where `error` was raised; its texts are cut where they are too long."""
        notes = getattr(error, "__notes__", [])
        return cls(
            request.lane,
            request.number,
            type(error).__name__[:256],
            _plain(str(error)[:_MOST_TEXT]),
            tuple(_plain(str(note)[:4096]) for note in notes[:64]),
            _plain("".join(traceback.format_exception(error))[-_MOST_TEXT:]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Gateway to a rollout host: the next fragment of a lane is wanted."""

    kind: ClassVar[str] = "turn"
    lane: LaneId
    number: Number


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Gateway to a rollout host: the Turn with this number is to end now, with what there is of its Fragment.

    It has no answer of its own: the Turn is answered, with fewer rows, or was answered already.
    """

    kind: ClassVar[str] = "cut"
    lane: LaneId
    number: Number


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Rollout host to gateway: what a Turn with this number gave. Source to trainer: the next one of its stream.

    number     of the Turn; or of the fragment in the stream, whatever its lane: 1, 2, …
    columns    name -> a tree of arrays `any[rows, slots, ...]`
    rest       what else there is to say of it, as the rollout's software has it
    """

    kind: ClassVar[str] = "fragment"
    lane: LaneId
    number: Number
    columns: Annotated[Mapping[str, Tree], map_of(tree)]
    rest: Annotated[Mapping[str, Any], mapping]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Source to trainer: memory that is shared with it from now on. Its descriptor comes before this does.

    number    that it is called by in this connection, new there
    size      bytes of it
    """

    kind: ClassVar[str] = "block"
    number: BlockNumber
    size: Annotated[int, whole(1, 1 << 40)]


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """Source to trainer: nothing will be lent in these blocks any more."""

    kind: ClassVar[str] = "forget"
    blocks: BlockNumbers


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """Source to trainer: a Fragment whose arrays lie in blocks.

    blocks     those that they lie in, each of which is lent once by this
    columns    the columns, packed: see `lent_columns`
    """

    kind: ClassVar[str] = "lent"
    lane: LaneId
    number: Number
    blocks: BlockNumbers
    columns: Annotated[bytes, raw_up_to(MAX_HEADER)]
    rest: Annotated[Mapping[str, Any], mapping]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Source to trainer: several Fragments that differ in their numbers, arrays' values and `each` alone.

    lane       of those that don't have their own in `each`
    number     of the first
    count      how many
    blocks     that their arrays lie in, each of which is lent once by this; none: they lie in `data`
    stride     bytes from the arrays of each to those of the next; 0: each has as many of the `blocks` for itself
    columns    of the first, packed: see `lent_columns`
    rest       of all; where there is an entry `each`, it has a map for each of them, of what is in its rest beside
    data       u1[n], or `Joined` where it is sent; None: there are blocks
    """

    kind: ClassVar[str] = "series"
    lane: LaneId
    number: Number
    count: Annotated[int, whole(1, MOST_SERIES)]
    blocks: BlockNumbers
    stride: Annotated[int, whole(0, MOST_NUMBER)]
    columns: Annotated[bytes, raw_up_to(MAX_HEADER)]
    rest: Annotated[Mapping[str, Any], mapping]
    data: Annotated[NDArray[np.uint8] | Joined | None, nullable(octets)]


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Trainer to source: nobody there reads any more what was lent in these blocks, once for each time it is named."""

    kind: ClassVar[str] = "free"
    blocks: BlockNumbers


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """Gateway to rollout host, after every Welcome: what it needs to know of the rollout, the same for a session.

    A Turn that comes before it waits for it, on the host's side. Trainer to source: how the stream is wanted.
    """

    kind: ClassVar[str] = "settings"
    settings: Annotated[Mapping[str, Any], mapping]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Gateway to rollout host, trainer to source: a module's parameters.

    They are to be used from the next forward pass on, and from the next Turn on at the latest. Versions may be left
    out: only the newest counts.

    version    the policy version, growing
    tensors    name -> array
    dtypes     name -> what the bits of a tensor are, where numpy has no such dtype: "bfloat16"
    others     what is no tensor
    """

    kind: ClassVar[str] = "weights"
    version: Annotated[int, whole(0, MOST_NUMBER)]
    tensors: Annotated[Mapping[str, NDArray[Any]], map_of(array)]
    dtypes: Annotated[Mapping[str, str], map_of(text(64))]
    others: Annotated[Mapping[str, Any], mapping]


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """Trainer to source: how far it is.

    number    of the last fragment that it has moved on from, with all before it
    kept      of the last one that it never wants again, with all before it: the source may forget them
    """

    kind: ClassVar[str] = "done"
    number: Annotated[int, whole(0, MOST_NUMBER)]
    kept: Annotated[int, whole(0, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Source to trainer: no fragment comes after that with this number; 0: none at all."""

    kind: ClassVar[str] = "finished"
    number: Annotated[int, whole(0, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class Come:
    """Source to trainer: a lane has come, and is ready to begin its first fragment."""

    kind: ClassVar[str] = "come"
    lane: LaneId


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """Source to trainer: a lane is gone, and none of the fragments behind that with this number is of it.

    number    0: none has been
    """

    kind: ClassVar[str] = "aside"
    lane: LaneId
    number: Annotated[int, whole(0, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class Receipt:
    """Source to trainer: weights are in use.

    node       which of the rollout's forward nodes uses them
    version    the policy version
    digest     32 bytes, of what has arrived: see the protocol's documentation
    """

    kind: ClassVar[str] = "receipt"
    node: Annotated[str, text(256)]
    version: Annotated[int, whole(0, MOST_NUMBER)]
    digest: Annotated[bytes, raw(32)]


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Gateway to rollout host: the states of the connectors by their names, to be used from the next Turn on."""

    kind: ClassVar[str] = "states"
    states: Annotated[Mapping[str, Any], mapping]


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """Rollout host to gateway, unasked: how far it has come. Takes one credit."""

    kind: ClassVar[str] = "metrics"
    metrics: Annotated[Mapping[str, Any], mapping]


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """Gateway to host: so many messages more that nobody asks for."""

    kind: ClassVar[str] = "credit"
    count: Annotated[int, whole(1, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class Ping:
    """Either side: are you there? Answered by a Pong with the same number."""

    kind: ClassVar[str] = "ping"
    number: Number


@dataclass(frozen=True, slots=True, eq=False)
class Pong:
    """Either side: yes."""

    kind: ClassVar[str] = "pong"
    number: Number


@dataclass(frozen=True, slots=True, eq=False)
class Goodbye:
    """Either side: the last thing that it says, where all is well; whoever has got it closes the connection."""

    kind: ClassVar[str] = "goodbye"
    reason: Told


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """Either side: the last thing that it says, where something is wrong.

    code    what it is, in a word: see the protocol's documentation
    text    what is wrong, where, and what was expected
    """

    kind: ClassVar[str] = "refused"
    code: Annotated[str, text(64)]
    text: Told

    @classmethod
    def of(cls, error: WireError) -> "Refused":
        """What to say to the other side of an error; its text is cut where it is too long."""
        return cls(_plain(error.code[:64]), _plain(str(error)[:4096]))


Request = Reset | Step | Turn
Answer = Rows | AgentRows | Failed | Fragment


def _plain(told: str) -> str:
    """The same without what UTF-8 has no form for."""
    return told.encode(errors="replace").decode()
