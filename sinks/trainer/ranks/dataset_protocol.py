"""Protocol of a stream's dataset: what its clients, workers and ranks, call, and shares of items as answers.

A client calls, by `query` and `result` of the wire:

    begin        `rank`; `workers` of its loop, 0: it is the loop itself, and nothing more is said. `worker`: which of
                 these it is; `prefetch`: items that each makes ahead; `loop`: text that identifies the loop;
                 `is_followed`: whether the loop says what it is given; `has_learner_connector`, `has_module`:
                 whether this process has one. Answer: `yields`, `max_lag`, `on_excess` of the stream
    next         `done`: shares that are done with, where the loop is not followed; `masked`: steps that were masked
                 since the last call. Answer: a part of a share, or `share` alone, nil, at the end of the stream
    take_up      `share`: number of one of which the loop is given an item; `is_last`: whether that is its last.
                 Answer: `items`, lists of the fields of `BatchItem`
    move_on      `share`: number of one that the loop has moved on from
    give_back    `share`: number of one that the loop took up last, and was not given after all

A part of a share has `share`, its number; `left`, how many items more parts have; `version`, the newest policy version;
`rollouts` that are new to the client: token, name, and the frame of the hello; `items`: token of the rollout, and lane,
number and rest of its fragment, whose columns are in the result's. Columns `weights`, with `dtypes` and `others`, are
weights that were published since the last answer. An error has its class in `error`, and its notes.
"""

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollflow.nodes.modules.weights_codec import Arrays
from rollflow.nodes.offloaded.agent_fragment_message import message_of_agents
from rollflow.sinks.trainer.messages.item_message import arrays_of, message_of_fragment
from rollflow.sinks.trainer.trainer_side.item_maker import LearnerConnector, Yields
from rollflow.sinks.trainer.trainer_side.rollout_peer import ArrivedItem, RolloutPeer
from rollflow.sinks.trainer.trainer_side.staleness import OnExcess
from rollflow.stream import wire
from rollflow.stream.data import errors
from rollflow.stream.data.errors import RollflowError, RunError, WireError, error_field
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

_ITEMS, _WEIGHTS = "items", "weights"  # columns of a part


class DatasetPlace(NamedTuple):
    """Address of a stream's dataset, and what both ends of a connection to it have; see `TrainerStream`."""

    address: wire.Address
    secret: bytes | None = None
    tls: ssl.SSLContext | None = None
    limits: wire.Limits = wire.Limits()


def places_of(own: str, shared: str | None, **ends: Any) -> list[DatasetPlace]:
    """Places to listen at: for the workers of this process, and for other ranks, if there are any.

    ends    what the stream has, for the connections of others

    Raises WireError for an address that is none, or not without a secret.
    """
    places = [DatasetPlace(wire.parse_address(own), limits=ends["limits"])]
    if shared is not None:
        places.append(DatasetPlace(wire.parse_address(shared), **ends))
        wire.check_secret(places[1].address, places[1].secret)
    return places


class BatchParts(NamedTuple):
    """Parts that train batches are made with; see `TrainerStream`."""

    learner_connector: LearnerConnector | None = None
    module: Any = None


class StreamSetup(NamedTuple):
    """Arguments of a `TrainerStream` that a process needs to make its items."""

    yields: Yields
    max_lag: int | None
    on_excess: OnExcess
    parts: BatchParts


class Share(NamedTuple):
    """Share of items for a worker.

    number     of the share
    items      that came from rollouts
    version    newest policy version
    weights    that were published since the last share, for the client's module; None: none were
    """

    number: int
    items: Sequence[ArrivedItem]
    version: int
    weights: Arrays | None


def part_of_share(
    number: int,
    head: Mapping[str, Any],
    items: Sequence[tuple[ArrivedItem, wire.Fragment]],
    newcomers: Mapping[bytes, RolloutPeer],
    weights: wire.Weights | None,
) -> wire.Result:
    """The answer to a `next`, with these items and their messages.

    number       of the call
    head         `share`, `left` and `version`
    newcomers    rollouts by their tokens that the client does not know
    """
    columns: dict[str, Any] = {_ITEMS: [message.columns for _, message in items]}
    values: dict[str, Any] = dict(head)
    values[_ITEMS] = [
        [arrived.source.session.token, message.lane, message.number, message.rest] for arrived, message in items
    ]
    values["rollouts"] = [[token, source.name, _hello_of(source)] for token, source in newcomers.items()]
    if weights is not None:
        columns[_WEIGHTS] = dict(weights.tensors)
        values |= {"dtypes": dict(weights.dtypes), "others": dict(weights.others)}
    return wire.Result(number, columns, values, None)


def message_of_item(arrived: ArrivedItem) -> wire.Fragment:
    """The message of an item that has come, as its rollout might have sent it; the columns are referred to."""
    item, source = arrived.item, arrived.source
    if isinstance(item, MultiAgentFragment):
        assert source.agents is not None
        return message_of_agents(arrived.number, item, source.agents.parts, {})
    if isinstance(item, Fragment):
        return message_of_fragment(arrived.number, item, source.spaces)
    rest: dict[str, Any] = {"batch": True, "by_module": source.is_by_module}
    rest |= {"policy_version": arrived.policy_version, "steps": arrived.batch_steps}
    return wire.Fragment(0, arrived.number, arrays_of(item), rest)


class ShareReader:
    """Reader of the parts of shares, with a memory of the rollouts that items are from."""

    def __init__(self) -> None:
        self._sources: dict[bytes, RolloutPeer] = {}

    def read(self, parts: Sequence[wire.Result]) -> Share:
        """The share that parts make. Raises WireError where they make none."""
        try:
            items = [arrived for part in parts for arrived in self._items_of(part)]
            first = parts[0]
            weights = None
            if _WEIGHTS in first.columns:
                tensors: Any = first.columns[_WEIGHTS]
                weights = Arrays(dict(tensors), dict(first.values["dtypes"]), dict(first.values["others"]))
            return Share(first.values["share"], items, first.values["version"], weights)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, WireError):
                raise
            raise WireError(f"it is no share: {type(error).__name__}: {error}") from error

    def _items_of(self, part: wire.Result) -> list[ArrivedItem]:
        for token, name, frame in part.values["rollouts"]:
            hello = wire.decode(frame)
            if not isinstance(hello, wire.Hello):
                raise WireError(f"a rollout is introduced by {hello.kind}, expected its hello")
            source = self._sources[token] = RolloutPeer(wire.TrainerSession(token))
            source.introduce(hello, "")
            source.name = name
        items: list[ArrivedItem] = []
        columns: Any = part.columns[_ITEMS]
        for (token, lane, number, rest), each in zip(part.values[_ITEMS], columns, strict=True):
            items += self._sources[token].read([wire.Fragment(lane, number, each, rest)])
        return items


def refusal(number: int, error: Exception) -> wire.Result:
    """The answer to a call that an error refuses, or that an error has ended the stream before."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return wire.Result(number, {}, {"error": type(error).__name__, "notes": notes}, error_field(error))


def error_in(result: wire.Result) -> RollflowError:
    """The error in an answer, of its own class where that is rollflow's."""
    kind = getattr(errors, str(result.values.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, RollflowError)):
        kind = RunError
    error = kind(result.problem)
    for note in result.values.get("notes", ()):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(str(note))
    return error


def _hello_of(source: RolloutPeer) -> bytes:
    """The frame of a rollout's newest hello."""
    assert source.connection is not None
    assert source.connection.hello is not None
    return b"".join(wire.encode(source.connection.hello))
