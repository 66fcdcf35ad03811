"""Requests for an action and their answers, and the errors that a server gives instead."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from rollflow.stream.data.errors import RollflowError
from rollflow.stream.data.tree import Tree

PROTOCOL = 1  # version of the messages over WebSocket


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
    """Raised when no policy of the name, or of the version, is served."""

    status = 404


class SessionLostError(ServingError, LookupError):
    """Raised when a session goes on that the server has no memory of: it never began here, or it was forgotten."""

    status = 410


class OverloadedError(ServingError):
    """Raised when as many requests wait as may wait; ask again later."""

    status = 429


class ClosedError(ServingError):
    """Raised when the server is closing."""

    status = 503


class UnansweredError(ServingError, TimeoutError):
    """Raised when no answer has come in time; what the server has made of the request is not known."""

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
    number         of the request in its session, from 0 on; None: not counted. The number that came last gets the
                   same answer again, without another pass: a client may ask twice where its connection broke
    deliver        takes (ticket, outcome) of some requests; called from another thread, once for each batch
    ticket         by which `deliver` knows the request
    """

    session: Hashable
    observation: Tree
    reward: float
    begins: bool
    number: int | None
    deliver: "Callable[[Sequence[tuple[Any, Outcome]]], None]"
    ticket: Any


class Acted(NamedTuple):
    """An action, and which policy chose it.

    action      an item of the action space
    version     of the artifact that is served
    weights     policy version of the weights that it was chosen with
    number      of the request
    """

    action: Tree
    version: str
    weights: int
    number: int | None


Outcome = Acted | Exception
