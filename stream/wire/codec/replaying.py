"""Messages of ends that call another: a sampler its replay host, and a rank the trainer that it belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.tree import Tree
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_NUMBER, Number

QueryName = Literal[
    "sample", "update_priorities", "publish", "report", "begin", "next", "take_up", "move_on", "give_back"
]
SAMPLER_QUERIES, RANK_QUERIES = get_args(QueryName)[:4], get_args(QueryName)[4:]
_MOST_TEXT = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """Sampler to replay host: a call of the replay. Rank to trainer: a call of its dataset.

    number      of the query: 1, 2, … over the whole session
    done        every query up to this number is answered: its answer may be forgotten
    name        what is called
    values      its arguments that are no arrays, by name
    arrays      its arguments that are arrays `any[...]`, by name
    """

    kind: ClassVar[str] = "query"
    number: Number
    done: Annotated[int, field.whole(0, MOST_NUMBER)]
    name: Annotated[QueryName, field.one_of(*get_args(QueryName))]
    values: Annotated[Mapping[str, Any], field.mapping]
    arrays: Annotated[Mapping[str, NDArray[np.generic]], field.map_of(field.array)]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Answer to the Query with this number.

    columns    of a batch, name -> tree of arrays `any[B, ...]`; to a rank, of items by their places
    values     what else there is to say, by name
    problem    why the call has failed, with what was expected; None: it has not
    """

    kind: ClassVar[str] = "result"
    number: Number
    columns: Annotated[Mapping[str, Tree], field.map_of(field.tree)]
    values: Annotated[Mapping[str, Any], field.mapping]
    problem: Annotated[str | None, field.nullable(field.text(_MOST_TEXT))]
