"""Messages of a client that wants actions, and of the server of policies that gives them."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER, Number

MOST_OBSERVATIONS = 4096  # in one message
PolicyName = Annotated[str, field.text(256)]
SessionName = Annotated[str | int | None, field.nullable(field.agent_id)]
Place = field.whole(0, MOST_OBSERVATIONS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Act:
    """Client to server: N observations that want an action each.

    number      of the request: 1, 2, … over the client's whole session
    done        every request up to this number is answered: the server may forget its answers
    policy      name of the policy that is to act
    version     of the policy; None: each session's own, or the newest
    sessions    N names of sessions: whose memory acts; None: an observation by itself
    begins      bool[N]  True: an episode begins with the observation
    rewards     f32[N]   for each session's action before, NaN where there is none; None: there are none
    obs         tree of arrays `any[N, ...]` in the policy's observation space
    """

    kind: ClassVar[str] = "act"
    number: Number
    done: Annotated[int, field.whole(0, MOST_NUMBER)]
    policy: PolicyName
    version: Annotated[str | None, field.nullable(field.text(256))]
    sessions: Annotated[tuple[str | int | None, ...], field.list_of(SessionName.__metadata__[0], MOST_OBSERVATIONS)]
    begins: Annotated[NDArray[np.bool_], field.numbers("|b1")]
    rewards: Annotated[NDArray[np.float32] | None, field.nullable(field.numbers("<f4"))]
    obs: Annotated[Tree, field.tree]


@dataclass(frozen=True, slots=True, eq=False)
class Acted:
    """Server to client: the answer to the Act with this number.

    places      K places of observations in the request that have an action, ascending
    actions     tree of arrays `any[K, ...]` in the policy's action space; None: there are none
    versions    K versions of the policy that chose them
    weights     K policy versions of the weights that they were chosen with
    refused     [place, status, text] of each other observation; place None: of all that are left
    """

    kind: ClassVar[str] = "acted"
    number: Number
    places: Annotated[tuple[int, ...], field.list_of(Place, MOST_OBSERVATIONS)]
    actions: Annotated[Tree | None, field.nullable(field.tree)]
    versions: Annotated[tuple[str, ...], field.list_of(field.text(256), MOST_OBSERVATIONS)]
    weights: Annotated[tuple[int, ...], field.list_of(field.whole(0, MOST_NUMBER), MOST_OBSERVATIONS)]
    refused: Annotated[
        tuple[list[Any], ...],
        field.list_of(
            field.items(field.nullable(Place), field.whole(400, 599), field.text(4096)),
            MOST_OBSERVATIONS,
        ),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """Client to server: these sessions are over, and their memory may be released."""

    kind: ClassVar[str] = "release"
    policy: PolicyName
    sessions: Annotated[tuple[str | int, ...], field.list_of(field.agent_id, MOST_OBSERVATIONS)]
