"""Messages of a sampler that wants steps of a replay elsewhere, and of the replay host that gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER, Number

QueryName = Literal["sample", "update_priorities", "publish", "report"]
_MOST_TEXT = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Sampler to replay host: a call of the replay.

    number      of the query: 1, 2, … over the sampler's whole session
    done        every query up to this number is answered: the host may forget its answers
    name        what is called
    values      its arguments that are no arrays, by name
    arrays      its arguments that are arrays `any[...]`, by name
    """

    kind: ClassVar[str] = "query"
    number: Number
    done: Annotated[int, field.whole(0, MOST_NUMBER)]
    name: Annotated[QueryName, field.one_of("sample", "update_priorities", "publish", "report")]
    values: Annotated[Mapping[str, Any], field.mapping]
    arrays: Annotated[Mapping[str, NDArray[np.generic]], field.map_of(field.array)]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Replay host to sampler: the answer to the Query with this number.

    columns    of a batch, name -> tree of arrays `any[B, ...]`
    values     what else there is to say, by name
    problem    why the call has failed, with what was expected; None: it has not
    """

    kind: ClassVar[str] = "result"
    number: Number
    columns: Annotated[Mapping[str, Tree], field.map_of(field.tree)]
    values: Annotated[Mapping[str, Any], field.mapping]
    problem: Annotated[str | None, field.nullable(field.text(_MOST_TEXT))]
