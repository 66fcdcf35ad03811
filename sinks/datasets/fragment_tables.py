"""Fragments as Arrow tables: a row for each step, and a row for each chunk of an episode."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import array_of, arrow_of, import_pyarrow, table_of
from rollflow.sinks.datasets.dataset_folder import ENV_EPS_ID, ENV_T, LAST_OBS
from rollflow.stream.data.columns import Columns
from rollflow.stream.fragments.fragment import Fragment


class AgentTimes(NamedTuple):
    """The agents that the chunks of a module's fragment are of, and the times of their environments.

    agents, module    text of each chunk's agent, and of the module
    env_ids           id of each chunk's environment's episode
    env_t             i64[n]    steps of the environment's episode before each step's observation, in chunk order
    env_t_stopped     i64[C]    and before the observation behind each chunk's last step
    """

    agents: Sequence[str]
    module: str
    env_ids: Sequence[str]
    env_t: NDArray[np.int64]
    env_t_stopped: NDArray[np.int64]


def tables_of(
    fragment: Fragment, columns: Mapping[str, Any], runs: Any, times: AgentTimes | None = None
) -> tuple[Any, Any]:
    """Arrow tables of a fragment's steps, a row each in chunk order, and of its chunks, a row each.

    columns    name -> description of what is written
    runs       i32[C]    number of each chunk's run, or i32[1]: of all
    times      of a module's fragment; None: the fragment is of one agent

    A chunk that another dataset has cut is written without the end that it has not reached.
    """
    pa, _ = import_pyarrow()
    chunks = fragment.chunks
    lengths = chunks.stop - chunks.start
    count, total = len(lengths), int(lengths.sum())
    runs = np.ascontiguousarray(np.broadcast_to(runs, count))
    slots, numbers = chunks.slot.tolist(), chunks.number.tolist()
    ids = pa.array(list(map(fragment.layout.episode_id, slots, numbers)), pa.string())
    firsts = np.cumsum(lengths) - lengths
    trees = {name: fragment.gather(name) for name in columns}
    truncated, lost = chunks.truncated, pa.nulls(count, pa.string())
    if fragment.custom_data:
        custom = [fragment.custom_data.get(key, {}) for key in zip(slots, numbers, strict=True)]
        truncated = truncated & np.array(["cut" not in each for each in custom])
        trees[Columns.TRUNCATEDS][firsts + lengths - 1] = truncated
        lost = pa.array([each.get("lost") for each in custom], pa.string())
    of_step = np.repeat(np.arange(count, dtype=np.int32), lengths)
    step = {
        "run": array_of(runs[of_step]),
        Columns.EPS_ID: pa.DictionaryArray.from_arrays(array_of(of_step), ids),
        Columns.T: array_of(np.arange(total) - np.repeat(firsts - chunks.t_started, lengths)),
    }
    episode = {"run": array_of(runs), Columns.EPS_ID: ids}
    if times is not None:
        names = {Columns.AGENT_ID: times.agents, Columns.MODULE_ID: [times.module] * count, ENV_EPS_ID: times.env_ids}
        texts = {name: pa.array(each, pa.string()).dictionary_encode() for name, each in names.items()}
        step |= {name: each.take(array_of(of_step)) for name, each in texts.items()}
        step[ENV_T] = array_of(times.env_t)
        episode |= texts | {"env_t_stopped": array_of(times.env_t_stopped)}
    step |= {name: arrow_of(trees[name], description) for name, description in columns.items()}
    episode |= {
        "lane": array_of(np.full(count, fragment.lane)),
        "slot": array_of(np.asarray(fragment.env_slots(chunks.slot, chunks.number), np.int64)),
        "t_started": array_of(chunks.t_started),
        "num_steps": array_of(lengths),
        "return": array_of(np.add.reduceat(trees[Columns.REWARDS].astype(np.float64), firsts)),
        "terminated": array_of(chunks.terminated),
        "truncated": array_of(truncated),
        "lost": lost,
        LAST_OBS: arrow_of(fragment.last_observations(), columns[Columns.OBS]),
    }
    return table_of(step), table_of(episode, optional=["lost"])
