"""Fragments of several agents as Arrow tables: of each module's steps and chunks, and of the environments' episodes."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import array_of, import_pyarrow, table_of
from rollflow.sinks.datasets.dataset_folder import MODULES
from rollflow.sinks.datasets.fragment_tables import AgentTimes, FragmentRows
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.multi_agent.agent_fragment import ModuleFragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

Ints = NDArray[np.int64]


def modules_of(fragment: MultiAgentFragment) -> dict[str, ModuleFragment]:
    """The steps of each module that has made some: name of its folder -> its fragment."""
    parts = {module_id: fragment.of_module(module_id) for module_id in fragment.module_ids}
    return {folder_of(module_id): part for module_id, part in parts.items() if len(part.chunks.slot)}


def folder_of(module_id: Any) -> str:
    """Name of a module's folder: its id, with what no folder's name may have replaced."""
    name = quote(checked_id("module", module_id), safe=" ")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def checked_id(whose: str, id_: Any) -> str:
    """The text of an id. Raises DatasetError for one that no dataset can hold."""
    if type(id_) not in (str, int) or id_ == "":
        raise DatasetError(f"the {whose} {id_!r} has an id of {type(id_).__name__}, expected text or a whole number")
    return str(id_)


def ids_by_text(whose: str, ids: Iterable[Any]) -> dict[str, Any]:
    """Text -> id. Raises DatasetError where two ids, such as 1 and "1", have one text, which is all that files have."""
    found: dict[str, Any] = {}
    for id_ in ids:
        if (other := found.setdefault(checked_id(whose, id_), id_)) != id_:
            raise DatasetError(
                f"the {whose}s {other!r} and {id_!r} have one text as their ids, expected another text for each {whose}"
            ).see("dataset")
    return found


class EnvChunks:
    """The M chunks of environments' episodes in a fragment, environment by environment, in the order of time.

    env, nth      i64[M]    environment, and number of the episode among those of the environment in the fragment
    start         i64[M]    vector step at which the episode began
    begin, end    i64[M]    vector steps at which the chunk begins and ends
    number        i64[M]    episodes that the environment had before
    """

    def __init__(self, fragment: MultiAgentFragment) -> None:
        clock, last = fragment.clock, fragment.clock.first + fragment.num_rows
        rows = []
        for env in range(fragment.num_envs):
            for nth in range(clock.count(env)):
                start, ended = clock.start(env, nth), clock.end_of(env, nth)
                begin, end = max(clock.first, start), last if ended is None else ended[0]
                if begin < end:
                    rows.append((env, nth, start, begin, end, int(clock.numbers[env]) + nth))
        table = np.array(rows, np.int64).reshape(-1, 6)
        self.env, self.nth, self.start, self.begin, self.end, self.number = table.T
        self._fragment = fragment

    def ids(self) -> list[str]:
        """The episodes' ids."""
        keys = zip(self.env.tolist(), self.number.tolist(), strict=True)
        return [self._fragment.episode_id(*key) for key in keys]

    def of(self, part: ModuleFragment) -> tuple[Ints, Ints]:
        """The env chunk of each chunk of a module, i64[C], and the vector step of its last observation, i64[C]."""
        chunks = part.chunks
        seen = part.clock[chunks.stop, chunks.slot]
        ended = np.flatnonzero(chunks.terminated | chunks.truncated)
        keys = zip((chunks.stop[ended] - 1).tolist(), chunks.slot[ended].tolist(), strict=True)
        seen[ended] = [part.ends.get(key, last) for key, last in zip(keys, seen[ended].tolist(), strict=True)]
        # A chunk's last step is made within the env chunk: after its begin, and not after its end.
        most = 1 + int(max(self.end.max(initial=0), seen.max(initial=0)))
        envs = part.env_slots(chunks.slot, chunks.number)
        return np.searchsorted(self.env * most + self.end, envs * most + seen), seen


def agent_rows_of(
    fragment: MultiAgentFragment, columns: Mapping[str, Mapping[str, Any]], runs: NDArray[np.int32]
) -> tuple[dict[str, FragmentRows], Any]:
    """What is stored of each module's steps, by its folder, and the Arrow table of the environments' chunks.

    columns    name of the module's folder -> name -> description of what is stored
    runs       i32[M]    number of the run of each of `EnvChunks`, or i32[1] of all
    """
    envs = EnvChunks(fragment)
    runs = np.ascontiguousarray(np.broadcast_to(runs, len(envs.env)))
    ids, agent_steps = envs.ids(), np.zeros(len(envs.env), np.int64)
    rows: dict[str, FragmentRows] = {}
    for name, part in modules_of(fragment).items():
        chunks, (of, stopped) = part.chunks, envs.of(part)
        lengths = chunks.stop - chunks.start
        np.add.at(agent_steps, of, lengths)
        seen = part.in_chunk_order(part.clock[part.first_row : part.last_row])
        module_id = part.module_ids[int(part.chunk_modules[0])]
        times = AgentTimes(
            [checked_id("agent", part.part.agents[place]) for place in (chunks.slot % len(part.part.agents)).tolist()],
            [str(module_id)] * len(lengths),
            [ids[each] for each in of.tolist()],
            seen - np.repeat(envs.start[of], lengths),
            stopped - envs.start[of],
        )
        rows[f"{MODULES}/{name}/"] = FragmentRows(part, columns[name], runs[of], times)
    return rows, _env_table(fragment, envs, ids, runs, agent_steps)


def _env_table(
    fragment: MultiAgentFragment, envs: EnvChunks, ids: list[str], runs: NDArray[np.int32], agent_steps: Ints
) -> Any:
    """The table of the environments' chunks, whose columns are those of agents' chunks where they mean the same."""
    pa, _ = import_pyarrow()
    clock, keys = fragment.clock, list(zip(envs.env.tolist(), envs.number.tolist(), strict=True))
    ends = [clock.end_of(*key) for key in zip(envs.env.tolist(), envs.nth.tolist(), strict=True)]
    kept = [fragment.custom_data.get(key, {}) for key in keys]
    ended = np.array([each is not None for each in ends]) & np.array(["cut" not in each for each in kept])
    truncated = np.array([each is not None and each[1] for each in ends])
    lost = [data.get("lost") if end is not None else None for data, end in zip(kept, ends, strict=True)]
    return table_of(
        {
            "run": array_of(runs),
            Columns.EPS_ID: pa.array(ids, pa.string()),
            "lane": array_of(np.full(len(keys), fragment.lane)),
            "slot": array_of(envs.env.copy()),
            "t_started": array_of(envs.begin - envs.start),
            "num_steps": array_of(envs.end - envs.begin),
            "agent_steps": array_of(agent_steps),
            "terminated": array_of(ended & ~truncated),
            "truncated": array_of(ended & truncated),
            "lost": pa.array(lost, pa.string()),
        },
        optional=["lost"],
    )
