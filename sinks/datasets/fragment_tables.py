"""Fragments as Arrow tables: a row for each step, and a row for each chunk of an episode."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import array_of, arrow_of, empty_tree, import_pyarrow, table_of
from rollflow.sinks.datasets.dataset_folder import ENV_EPS_ID, ENV_T, LAST_OBS
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment

_LEAST_BYTES = 4096  # of a fragment of one step, about


class AgentTimes(NamedTuple):
    """The agents that the chunks of a module's fragment are of, and the times of their environments.

    agents, modules    text of each chunk's agent, and of its module
    env_ids            id of each chunk's environment's episode
    env_t              i64[n]    steps of the environment's episode before each step's observation, in chunk order
    env_t_stopped      i64[C]    and before the observation behind each chunk's last step
    """

    agents: Sequence[str]
    modules: Sequence[str]
    env_ids: Sequence[str]
    env_t: NDArray[np.int64]
    env_t_stopped: NDArray[np.int64]


class FragmentRows:
    """What is stored of a fragment's C chunks, copied from it.

        columns    name -> description of what is stored of each step
        runs       i32[C]    number of each chunk's run, or i32[1]: of all
        times      of a module's fragment; None: the fragment is of one agent

        lengths, t_started       i64[C]
        slots                    i64[C]    of the lane
        terminated, truncated    bool[C]
        lost                     why an environment was lost, for each chunk that ended so, or None: C of them
        trees                    name -> tree of arrays any[n, ...], of the steps in chunk order
        last_obs                 tree of arrays any[C, ...]
        state_in                 tree of arrays any[C, ...]: a stateful module's states before the chunks that begin an
                                 episode; None: it has none
        nbytes                   of these, with what a fragment takes beside its arrays

    A chunk that another dataset has cut is stored without the end that it has not reached. Raises DatasetError for a
    stateful module's episode whose initial state is not recorded.
    """

    def __init__(
        self, fragment: Fragment, columns: Mapping[str, Any], runs: NDArray[np.int32], times: AgentTimes | None = None
    ) -> None:
        chunks = fragment.chunks
        self.columns, self.times, self.lane = columns, times, fragment.lane
        self.lengths, self.t_started = chunks.stop - chunks.start, chunks.t_started
        self.terminated, self.truncated = chunks.terminated, chunks.truncated
        self.runs = np.broadcast_to(runs, len(self.lengths))
        self.slots = np.asarray(fragment.env_slots(chunks.slot, chunks.number), np.int64)
        self._episode_id, self._keys = fragment.layout.episode_id, (chunks.slot.tolist(), chunks.number.tolist())
        self.trees = {name: fragment.gather(name) for name in columns}
        self.last_obs = fragment.last_observations()
        self.state_in: Tree = None
        if Columns.STATE_OUT in columns:
            like = map_tree(lambda leaf: leaf[0], empty_tree(columns[Columns.STATE_OUT], 1))
            self.state_in, known = fragment.initial_states(like)
            if (~known & (self.t_started == 0)).any():
                raise DatasetError(
                    f"{fragment.describe()}: the state before an episode's first step is not recorded, as in datasets "
                    "of earlier versions; expected DatasetSource(path, module=…), whose module gives it"
                ).see("dataset")
        self.lost: list[str | None] = [None] * len(self.lengths)
        if fragment.custom_data:
            custom = [fragment.custom_data.get(key, {}) for key in zip(*self._keys, strict=True)]
            self.truncated = self.truncated & np.array(["cut" not in each for each in custom])
            self.trees[Columns.TRUNCATEDS][np.cumsum(self.lengths) - 1] = self.truncated
            self.lost = [each.get("lost") for each in custom]
        leaves = [leaf for tree in (*self.trees.values(), self.last_obs) for leaf in leaves_of(tree)]
        self.nbytes = _LEAST_BYTES + sum(leaf.nbytes for leaf in leaves)

    def ids(self) -> list[str]:
        """Ids of the chunks' episodes, C of them."""
        return list(map(self._episode_id, *self._keys))


def tables_of(rows: Sequence[FragmentRows]) -> tuple[Any, Any]:
    """Arrow tables of the steps of some fragments, a row each in chunk order, and of their chunks, a row each."""
    pa, _ = import_pyarrow()
    columns = rows[0].columns
    lengths, t_started, slots, runs, terminated, truncated = (
        np.concatenate([getattr(each, name) for each in rows])
        for name in ("lengths", "t_started", "slots", "runs", "terminated", "truncated")
    )
    trees = {name: concatenate_trees([each.trees[name] for each in rows]) for name in columns}
    ids = pa.array(chain.from_iterable(each.ids() for each in rows), pa.string())
    count, total, firsts = len(lengths), int(lengths.sum()), np.cumsum(lengths) - lengths
    of_step = np.repeat(np.arange(count), lengths)

    def repeated(texts: Any) -> Any:
        """The text of each step's chunk, by a dictionary; from the chunks' texts, by a dictionary."""
        return pa.DictionaryArray.from_arrays(array_of(texts.indices.to_numpy()[of_step]), texts.dictionary)

    step = {
        "run": array_of(runs[of_step]),
        Columns.EPS_ID: repeated(ids.dictionary_encode()),
        Columns.T: array_of(np.arange(total) - np.repeat(firsts - t_started, lengths)),
    }
    episode = {"run": array_of(runs), Columns.EPS_ID: ids}
    if (times := _joined([each.times for each in rows if each.times is not None])) is not None:
        names = (Columns.AGENT_ID, times.agents), (Columns.MODULE_ID, times.modules), (ENV_EPS_ID, times.env_ids)
        texts = {name: pa.array(each, pa.string()).dictionary_encode() for name, each in names}
        step |= {name: repeated(each) for name, each in texts.items()}
        step[ENV_T] = array_of(times.env_t)
        episode |= texts | {"env_t_stopped": array_of(times.env_t_stopped)}
    step |= {name: arrow_of(trees[name], description) for name, description in columns.items()}
    episode |= {
        "lane": array_of(np.repeat([each.lane for each in rows], [len(each.lengths) for each in rows])),
        "slot": array_of(slots),
        "t_started": array_of(t_started),
        "num_steps": array_of(lengths),
        "return": array_of(np.add.reduceat(trees[Columns.REWARDS].astype(np.float64), firsts)),
        "terminated": array_of(terminated),
        "truncated": array_of(truncated),
        "lost": pa.array(chain.from_iterable(each.lost for each in rows), pa.string()),
        LAST_OBS: arrow_of(concatenate_trees([each.last_obs for each in rows]), columns[Columns.OBS]),
    }
    if Columns.STATE_OUT in columns:
        states = concatenate_trees([each.state_in for each in rows])
        episode[Columns.STATE_IN] = arrow_of(states, columns[Columns.STATE_OUT])
    return table_of(step), table_of(episode, optional=["lost"])


def _joined(times: Sequence[AgentTimes]) -> AgentTimes | None:
    """The times of several fragments, one behind the other; None: of none."""
    if not times:
        return None

    def texts(name: str) -> list[str]:
        return [*chain.from_iterable(getattr(each, name) for each in times)]

    def numbers(name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(each, name) for each in times])

    return AgentTimes(texts("agents"), texts("modules"), texts("env_ids"), numbers("env_t"), numbers("env_t_stopped"))
