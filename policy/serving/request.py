"""Requests for an action and their answers, the errors that a server gives instead, and items as clients write them.

Items are in JSON or msgpack; arrays in msgpack are as msgpack-numpy has them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import msgpack
import numpy as np
from gymnasium import spaces

from rollflow.stream.data.errors import RollflowError
from rollflow.stream.data.space import Leaf
from rollflow.stream.data.tree import Tree

PROTOCOL = 2  # version of the messages over WebSocket


class ServingError(RollflowError):
    """Raised when a server can't answer a request; `status` is the HTTP status that says so."""

    status = 500

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = self.status if status is None else status


class RequestError(ServingError, ValueError):
    """Raised when a request is malformed; the text names the field, what was expected and what came."""

    status = 422


class UnknownPolicyError(ServingError, LookupError):
    """Raised when no policy of the name is served."""

    status = 404


class SessionLostError(ServingError, LookupError):
    """Raised when a session goes on that the server has no memory of.

    It never began here, it was forgotten, or a new version of the policy acts since.
    """

    status = 410


class OverloadedError(ServingError):
    """Raised when as many requests wait as may wait; ask again later."""

    status = 429


class ClosedError(ServingError):
    """Raised when the server is closing."""

    status = 503


class UnansweredError(ServingError, TimeoutError):
    """Raised when no answer has come in time, or its connection broke: nobody knows what became of the request."""

    status = 504


class PartlyActedError(ServingError):
    """Raised when some observations of a request have an action, and others have none.

    actions    items of the action space by place: those sessions have gone on
    errors     why there is no action, by place
    """

    def __init__(self, actions: Mapping[int, Any], errors: Mapping[int, ServingError]) -> None:
        place, error = next(iter(errors.items()))
        total = len(actions) + len(errors)
        super().__init__(f"{len(errors)} of {total} observations have no action, such as {place}: {error}")
        self.actions, self.errors = actions, errors


class OwnSession(NamedTuple):
    """A session of one client: another client's of the same name is another one.

    client    text by which the server knows the client
    name      that the client has given
    """

    client: str
    name: Hashable

    def __repr__(self) -> str:
        return repr(self.name)


class ActRequest(NamedTuple):
    """One observation that wants an action.

    session        whose memory acts; None: an observation by itself, with no memory before or after it
    observation    an item of the observation space: a tree of arrays dtype[...]
    reward         for the session's action before; NaN: none came
    begins         True: a new episode begins with this observation
    deliver        takes (ticket, outcome) of some requests; called from another thread, once for each batch
    ticket         by which `deliver` knows the request
    """

    session: Hashable
    observation: Tree
    reward: float
    begins: bool
    deliver: "Callable[[Sequence[tuple[Any, Outcome]]], None]"
    ticket: Any


class Acted(NamedTuple):
    """An action, and which policy chose it.

    action      an item of the action space
    version     of the artifact that is served
    weights     policy version of the weights that it was chosen with
    """

    action: Tree
    version: str
    weights: int


Outcome = Acted | Exception


CONTENT_TYPE = "application/msgpack"
_NUMBERS = "biuf"  # kinds of their dtypes; never objects: their bytes are pickles
_ARRAY_MARK, _NUMBER_MARK = "__ndarray__", "__npgeneric__"


def item_from(space: gym.Space[Any], value: Any, field: str, lead: tuple[int, ...] = ()) -> Tree:
    """An item of the space, a tree of arrays dtype[...] in the space's dtypes, out of what a client wrote.

        value    numbers, nested lists or arrays; objects for Dict spaces, lists for Tuple spaces
        field    the value's place in the request, for the error
        lead     (N,) for N items, in arrays dtype[N, ...]; (): for one

    Raises RequestError, with the field, for anything else: another shape, other keys, fractions if whole numbers
    belong, numbers that are NaN, and what lies outside of a discrete space.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            raise RequestError(f"{field} is {_kind(value)}, expected an object with {', '.join(map(repr, space))}")
        if value.keys() != space.keys():
            missing = ", ".join(repr(key) for key in space if key not in value)
            unknown = ", ".join(repr(key) for key in value if key not in space.keys())
            raise RequestError(f"{field}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
        return {key: item_from(part, value[key], f"{field}.{key}", lead) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != len(space):
            raise RequestError(f"{field} is {_kind(value)}, expected a list of {len(space)}")
        return tuple(item_from(part, value[i], f"{field}[{i}]", lead) for i, part in enumerate(space))
    return _array_from(space, value, field, lead)


def plain(tree: Tree) -> Any:
    """A tree of arrays any[...] as lists and numbers, for JSON."""
    if isinstance(tree, Mapping):
        return {key: plain(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return [plain(part) for part in tree]
    return tree.tolist() if isinstance(tree, np.ndarray | np.generic) else tree


def _array_from(space: gym.Space[Any], value: Any, field: str, lead: tuple[int, ...]) -> Any:
    shape = (*lead, *(space.shape or ()))
    expected = f"expected {space.dtype}{list(shape)}"
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        raise RequestError(f"{field} is a ragged list, {expected}") from None
    if array.dtype.kind not in _NUMBERS:
        where, part = _not_a_number(value, field)
        raise RequestError(f"{where} is {_kind(part)}, {expected}{'' if where == field else f' for {field}'}")
    if array.shape != shape:
        raise RequestError(f"{field} has shape {list(array.shape)}, {expected}")
    made = array.astype(space.dtype)
    if made.dtype.kind == "f":
        if not np.isfinite(made).all():
            raise RequestError(f"{field} has NaN or infinite numbers, {expected}, all of them finite")
    elif not np.array_equal(made, array):
        raise RequestError(f"{field} has numbers that are not {space.dtype}, {expected}")
    elif not isinstance(space, spaces.Box):
        low, high = Leaf(field, (), space).bounds()
        numbers = made.reshape(-1, low.size)  # of each item
        outside = ((numbers < low) | (numbers > high)).any(axis=1)
        if outside.any():
            place = int(np.argmax(outside))
            which, item = (f" of observation {place}", made[place]) if lead else ("", made)
            raise RequestError(f"{field}{which} is {item.tolist()}, expected an item of {space}")
    return made[()] if not made.ndim else made


def _not_a_number(value: Any, field: str) -> tuple[str, Any]:
    """Place and value of the first item within nested lists that is no number."""
    for place, item in enumerate(value if isinstance(value, list | tuple) else ()):
        if np.asarray(item).dtype.kind not in _NUMBERS:
            return _not_a_number(item, f"{field}[{place}]")
    return field, value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", str: "a text", type(None): "null"}
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return names.get(type(value), type(value).__name__)


def pack(message: Any) -> bytes:
    """A message as msgpack; arrays of bool, integer or float [...], and numpy's numbers, keep dtype and shape."""
    packed: bytes = msgpack.packb(message, default=_packed)
    return packed


def unpack(data: bytes) -> Any:
    """A message from msgpack; its arrays are read-only.

    Raises RequestError for what is no msgpack, and for arrays that are not numbers.
    """
    try:
        return msgpack.unpackb(data, object_hook=_unpacked, strict_map_key=False)
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"the message is no msgpack: {type(error).__name__}: {error}") from None


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
        return {_ARRAY_MARK.encode(): True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return {_NUMBER_MARK.encode(): True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} can't be sent, expected numbers, texts, lists, maps and arrays of numbers")


def _unpacked(message: dict[Any, Any]) -> Any:
    fields = {key.decode("ascii", "replace") if isinstance(key, bytes) else key: key for key in message}
    if _ARRAY_MARK not in fields and _NUMBER_MARK not in fields:
        return message
    try:
        name = message[fields["dtype"]]
        dtype = np.dtype(name.decode("ascii") if isinstance(name, bytes) else str(name))
        data = message[fields["data"]]
        if dtype.kind not in _NUMBERS:
            raise RequestError(f"an array has dtype {dtype}, expected numbers")
        if _NUMBER_MARK in fields:
            return dtype.type(data)
        return np.frombuffer(data, dtype).reshape(message[fields["shape"]])
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"an array can't be read: {error}; expected dtype, shape and data, the bytes of its items in C order"
        ) from None
