"""Messages of a running connection, after the handshake."""

import traceback
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_AGENTS, MOST_NUMBER, MOST_SLOTS, LaneId, Number, WireMessage

_BLOCK = field.whole(0, MOST_NUMBER)
ID_BYTES = 8  # of a trainer's weights
ModuleName = Annotated[str | None, field.nullable(field.text(256))]
PolicyVersion = Annotated[int, field.whole(0, MOST_NUMBER)]
BlockNumbers = Annotated[tuple[int, ...], field.list_of(_BLOCK, 4096)]
ShortText = Annotated[str, field.text(4096)]
_MOST_TEXT = 1 << 16
AgentSlots = tuple[NDArray[np.int64] | None, ...]
Floats = tuple[NDArray[np.float32], ...]
Flags = tuple[NDArray[np.bool_], ...]
Infos = Sequence[list[list[Any]]]

_SLOTS = field.list_of(field.nullable(field.numbers("<i8")), MOST_AGENTS)
_TREES = field.list_of(field.tree, MOST_AGENTS)
_FLAGS = field.nullable(field.list_of(field.numbers("|b1"), MOST_AGENTS))


class LaneMessage(WireMessage):
    """A request or answer of a lane.

    lane, number    the lane, and the request's number: 1, 2, … for each lane
    """

    lane: LaneId
    number: Number


class Reset(LaneMessage):
    """Gateway to host: reset all environments of a lane.

    lane, number    the lane, and the request's number: 1, 2, … for each lane
    seeds           one for each slot; None: keep the random generators
    options         gymnasium's reset options; None: none
    """

    seeds: Annotated[tuple[int, ...] | None, field.nullable(field.list_of(field.whole(0, (1 << 64) - 1), MOST_SLOTS))]
    options: Annotated[Mapping[str, Any] | None, field.nullable(field.mapping)]


class Step(LaneMessage):
    """Gateway to host: step all environments of a lane.

    actions        tree of arrays `any[slots, ...]` in the action space; for several agents: one tree `any[K, ...]` for
                   each part, with the actions of its K agents that act
    agent_slots    for several agents: i64[K] ascending for each part, the agent slots that act; None: all
    """

    actions: Annotated[Tree, field.tree]
    agent_slots: Annotated[AgentSlots | None, field.nullable(_SLOTS)] = None


class Rows(LaneMessage):
    """Host to gateway: results of the Reset or Step with this number.

    obs                     tree of arrays `any[slots, ...]` in the observation space
    rewards                 f64[slots]; None after a Reset, as the two below
    terminateds,            bool[slots]
    truncateds
    final_slots             slots whose episode ended in this step, with the next episode's first observation in
                            `obs`; ascending; none under NEXT_STEP
    final_obs               their last observations, tree of arrays `any[len(final_slots), ...]`; None: none
    infos, final_infos      infos of `obs`, and of the ended episodes: gymnasium's vector form, or SlotInfos
    """

    obs: Annotated[Tree, field.tree]
    rewards: Annotated[NDArray[np.float64] | None, field.nullable(field.numbers("<f8"))]
    terminateds: Annotated[NDArray[np.bool_] | None, field.nullable(field.numbers("|b1"))]
    truncateds: Annotated[NDArray[np.bool_] | None, field.nullable(field.numbers("|b1"))]
    final_slots: Annotated[tuple[int, ...], field.list_of(field.whole(0, MOST_SLOTS - 1), MOST_SLOTS)]
    final_obs: Annotated[Tree | None, field.nullable(field.tree)]
    infos: Annotated[Mapping[str, Any], field.infos]
    final_infos: Annotated[Mapping[str, Any], field.infos]


class AgentRows(LaneMessage):
    """Host to gateway: what a Reset or Step with this number gave to the agents, part by part.

    agent_slots         i64[K] ascending: who has an observation; None: all
    obs                 trees of arrays `any[K, ...]`, in the parts' spaces: after the step, the last ones of those that
                        ended with it among them
    rewards             f4[S], 0 if none came; None after a Reset, as all below
    terminateds,        bool[S]: who ended with the step, if it had come; of an environment that ended, all that were
    truncateds          still there
    ended               i64[E] ascending: environments whose episodes ended; they have been reset
    ended_truncated     bool[E]: whether that was by truncation
    first_agent_slots,  as the first two, of the episodes that began then; None if none ended
    first_obs
    infos               of each environment: [number of the agent among all, its info]; none at all if all are empty
    first_infos         of each of `ended`, likewise
    """

    agent_slots: Annotated[AgentSlots, _SLOTS]
    obs: Annotated[tuple[Tree, ...], _TREES]
    rewards: Annotated[Floats | None, field.nullable(field.list_of(field.numbers("<f4"), MOST_AGENTS))]
    terminateds: Annotated[Flags | None, _FLAGS]
    truncateds: Annotated[Flags | None, _FLAGS]
    ended: Annotated[NDArray[np.int64] | None, field.nullable(field.numbers("<i8"))]
    ended_truncated: Annotated[NDArray[np.bool_] | None, field.nullable(field.numbers("|b1"))]
    first_agent_slots: Annotated[AgentSlots | None, field.nullable(_SLOTS)]
    first_obs: Annotated[tuple[Tree, ...] | None, field.nullable(_TREES)]
    infos: Annotated[Infos, field.list_of(field.agent_infos, MOST_SLOTS)]
    first_infos: Annotated[Infos, field.list_of(field.agent_infos, MOST_SLOTS)]


class Failed(LaneMessage):
    """Host to gateway: the request with this number raised; a lane of environments must be reset next.

    type, text    type and text of the exception
    notes         notes of the exception: the slot, the step
    traceback     for people
    """

    type: Annotated[str, field.text(256)]
    text: Annotated[str, field.text(_MOST_TEXT)]
    notes: Annotated[tuple[str, ...], field.list_of(field.text(4096), 64)]
    traceback: Annotated[str, field.text(_MOST_TEXT)]

    @classmethod
    def of(cls, request: "Request", error: Exception) -> "Failed":
        """The answer to a request that raised `error`; long texts are cut."""
        notes = getattr(error, "__notes__", [])
        return cls(
            request.lane,
            request.number,
            type(error).__name__[:256],
            _plain(str(error)[:_MOST_TEXT]),
            tuple(_plain(str(note)[:4096]) for note in notes[:64]),
            _plain("".join(traceback.format_exception(error))[-_MOST_TEXT:]),
        )


class Turn(LaneMessage):
    """Gateway to a rollout host: the next fragment of a lane is wanted, which begins at this vector step of the run."""

    step: Annotated[int, field.whole(0, MOST_NUMBER)] = 0


class Cut(LaneMessage):
    """Gateway to a rollout host: the Turn with this number is to end now, with the rows of its Fragment so far.

    It has no answer of its own: the Turn is answered with fewer rows, or was answered already.
    """


class Fragment(LaneMessage):
    """Rollout host to gateway: the result of the Turn with this number. Source to trainer: the next fragment.

    Sampler to replay host: a query, or its answer; the arguments and results that are arrays are columns.

    number     number of the Turn; or of the item in the stream, whatever its lane: 1, 2, …
    columns    name -> tree of arrays `any[rows, slots, ...]`
    rest       other data of the fragment, in the form of the rollout's software
    """

    columns: Annotated[Mapping[str, Tree], field.mapping]
    rest: Annotated[Mapping[str, Any], field.mapping]


class Settings(WireMessage):
    """Gateway to rollout host, after every Welcome: settings of the rollout, the same throughout a session.

    The host lets an earlier Turn wait for them. Trainer to source: settings of the stream.
    """

    settings: Annotated[Mapping[str, Any], field.mapping]


class Weights(WireMessage):
    """Gateway to rollout host, trainer to source: a module's parameters.

    They apply from the next forward pass, or at the latest from the next Turn. Only the newest version counts.

    version    policy version, growing
    tensors    name -> array any[...]
    dtypes     name -> dtype of a tensor's bits if numpy has no such dtype: "bfloat16"
    others     values that are no tensors
    module     id of the module, if there are several, each with versions of its own
    id         a trainer's name for them: with the same version and id they are the same weights
    """

    version: PolicyVersion
    tensors: Annotated[Mapping[str, NDArray[Any]], field.mapping]
    dtypes: Annotated[Mapping[str, str], field.mapping]
    others: Annotated[Mapping[str, Any], field.mapping]
    module: ModuleName = None
    id: Annotated[bytes, field.raw(0, ID_BYTES)] = b""


class Done(WireMessage):
    """Trainer to source: its progress.

    number    the trainer has moved on from the fragments up to this one
    kept      it never wants the fragments up to this one again: the source may forget them
    freed     blocks of shared memory that it has stopped reading from; each mention ends one lending
    """

    number: Annotated[int, field.whole(0, MOST_NUMBER)]
    kept: Annotated[int, field.whole(0, MOST_NUMBER)]
    freed: BlockNumbers = ()


class States(WireMessage):
    """Gateway to rollout host: states of connectors by their names, which apply from the next Turn."""

    states: Annotated[Mapping[str, Any], field.mapping]


class Metrics(WireMessage):
    """Rollout host to gateway, unrequested: its progress. Source to trainer: lanes, and its end."""

    metrics: Annotated[Mapping[str, Any], field.mapping]


class Ping(WireMessage):
    """Either side: a heartbeat, answered by a Pong with the same number."""

    number: Number


class Pong(WireMessage):
    """Either side: the answer to a Ping."""

    number: Number


class Goodbye(WireMessage):
    """Either side: its last message if all is well; the receiver closes the connection.

    drained    a host's: it has answered whatever it had begun, and has not begun what it has not answered
    """

    reason: ShortText
    drained: Annotated[bool, field.flag] = False


class Refused(WireMessage):
    """Either side: its last message if something is wrong.

    code    the reason in one word: see the protocol's documentation
    text    the place, the fault, and what was expected
    """

    code: Annotated[str, field.text(64)]
    text: ShortText

    @classmethod
    def of(cls, error: WireError) -> "Refused":
        return cls(_plain(error.code[:64]), _plain(str(error)[:4096]))


Request = Reset | Step | Turn
Answer = Rows | AgentRows | Failed | Fragment
_News = Cut | Settings | Weights | States | Done | Metrics
Running = Request | Answer | _News | Ping | Pong | Goodbye | Refused


def _plain(value: str) -> str:
    """A text with characters that UTF-8 can't encode replaced."""
    return value.encode(errors="replace").decode()
