"""Table maker: new tables of a replay, of one agent or of each module, with what each has of its own."""

import copy
import os
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import numpy as np

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.sinks.replay.rate import RateLimiter, SamplesPerInsert
from rollflow.sinks.replay.removers import Remover
from rollflow.sinks.replay.replay_table import ReplayTable
from rollflow.sinks.replay.row_columns import Storage
from rollflow.sinks.replay.samplers import Sampler
from rollflow.stream.data.errors import ReplayError, shown


class TableMaker:
    """Makes tables with a replay's arguments; see `Replay`.

    sampler, remover    of one agent's table, of which no other table has been made; each module gets copies of them

    The text of a module's id tells its file and its seed from those of the others.
    """

    def __init__(
        self,
        capacity: int,
        sampler: Sampler,
        remover: Remover,
        *,
        rate: SamplesPerInsert | None,
        batch_size: int,
        storage: Storage,
        seed: int | None,
    ) -> None:
        self._capacity, self._rate, self._batch_size = capacity, rate, batch_size
        self._storage, self._seed = storage, seed
        self._unused = copy.deepcopy((sampler, remover))

    def of_one_agent(self, sampler: Sampler, remover: Remover) -> ReplayTable:
        """The table of one agent, which has this sampler and this remover."""
        return self._table(sampler, remover, self._storage, self._seed)

    def of_modules(self, module_ids: Iterable[Any], others: Iterable[Any] = ()) -> dict[Any, ReplayTable]:
        """New tables by the ids of their modules. Raises ReplayError where two ids, such as 1 and "1", have one text.

        others    ids of the modules that have a table already
        """
        texts = {str(each): each for each in others}
        tables: dict[Any, ReplayTable] = {}
        for module_id in dict.fromkeys(module_ids):
            text = str(module_id)
            if text in texts:
                raise ReplayError(
                    f"the modules {texts[text]!r} and {module_id!r} have one text as their ids, expected another text "
                    "for each module"
                ).see("replay")
            texts[text] = module_id
            storage, seed = self._storage, self._seed
            if storage.path is not None:
                storage = replace(storage, path=f"{os.fspath(storage.path)}.{quote(text, safe=' ')}")
            seed = None if seed is None else zlib.crc32(text.encode(), seed & 0xFFFFFFFF)
            tables[module_id] = self._table(*copy.deepcopy(self._unused), storage, seed)
        return tables

    def _table(self, sampler: Sampler, remover: Remover, storage: Storage, seed: int | None) -> ReplayTable:
        return ReplayTable(
            self._capacity,
            sampler,
            remover,
            storage=storage,
            rate=RateLimiter(self._rate, self._batch_size * sampler.steps),
            generator=np.random.default_rng(seed),
        )


def check_parts(sampler: Any, remover: Any, rate: Any, pieces: Iterable[Any], storage: Any) -> None:
    """Raise ReplayError for an argument of a replay that is of another kind."""
    expected = [
        ("sampler", sampler, Sampler, "a sampler such as Prioritized()"),
        ("remover", remover, Remover, "a remover such as Oldest()"),
        ("storage", storage, Storage, "a Storage(), or None"),
        *(("pieces", piece, ConnectorV2, "connector pieces such as SampledNStepReturns()") for piece in pieces),
    ]
    if rate is not None:
        expected.append(("rate", rate, SamplesPerInsert, "a SamplesPerInsert(), or None"))
    for name, given, kind, text in expected:
        if not isinstance(given, kind):
            raise ReplayError(f"{name} is {shown(given)}, expected {text}").see("replay")
    for piece in pieces:
        if piece.lookback:
            raise ReplayError(
                f"{piece.name} looks back {piece.lookback} steps, which a replay's samples do not show; expected "
                f"Storage(frames={piece.lookback + 1}) for stacks of observations, or the piece before a learner"
            ).see("replay")
