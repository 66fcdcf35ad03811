"""Requests for an action and their answers, and the errors that a server gives instead."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from rollflow.stream.data.errors import RollflowError
from rollflow.stream.data.tree import Tree


class ServingError(RollflowError):
    """Raised when a server can't answer a request; `status` is the HTTP status that says so."""

    status = 500


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


class ActRequest(NamedTuple):
    """One observation that wants an action.

    session        whose memory acts; None: an observation by itself, with no memory before or after it
    observation    an item of the observation space: a tree of arrays dtype[...]
    reward         for the session's action before; NaN: none came
    begins         True: a new episode begins with this observation
    number         of the request in its session, from 0 on; None: not counted. The number that came last gets the
                   same answer again, without another pass: a client may ask twice where its connection broke
    front          where the answer goes
    ticket         by which the front knows the request
    """

    session: Hashable
    observation: Tree
    reward: float
    begins: bool
    number: int | None
    front: "Front"
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


class Front(Protocol):
    """A way in, such as HTTP, that takes its requests' answers."""

    def deliver(self, outcomes: Sequence[tuple[Any, Outcome]]) -> None:
        """Take answers to some tickets; called from another thread, once for each batch."""
        ...
