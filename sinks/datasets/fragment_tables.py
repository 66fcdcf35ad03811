"""Fragments as Arrow tables: a row for each step, and a row for each chunk of an episode."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import ids_by_text
from rollflow.nodes.policies.artifact_files import folder_of
from rollflow.sinks.datasets.arrow_columns import array_of, arrow_of, empty_tree, import_pyarrow, table_of
from rollflow.sinks.datasets.dataset_folder import ENV_EPISODES, ENV_EPS_ID, ENV_T, EPISODES, LAST_OBS, MODULES, STEPS
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.multi_agent.agent_fragment import ModuleFragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

_LEAST_BYTES = 4096  # of a fragment of one step, about


class FragmentRows:
    """What is stored of a fragment's C chunks, copied from it.

        columns    name -> description of what is stored of each step
        runs       i32[C]    number of each chunk's run, or i32[1]: of all
        texts      of a module's fragment: name -> text of each chunk, such as its agent
        env_t      of a module's fragment: steps of the environment's episode before each step's observation, i64[n] in
                   chunk order, and before the observation behind each chunk's last step, i64[C]

        lengths, t_started       i64[C]
        slots                    i64[C]    of the lane
        totals                   f64[C]    sums of rewards
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

    total = "return"

    def __init__(
        self,
        fragment: Fragment,
        columns: Mapping[str, Any],
        runs: NDArray[np.int32],
        texts: Mapping[str, Sequence[str]] | None = None,
        env_t: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> None:
        chunks = fragment.chunks
        self.columns, self.texts, self.env_t, self.lane = columns, texts or {}, env_t, fragment.lane
        self.lengths, self.t_started = chunks.stop - chunks.start, chunks.t_started
        self.terminated, self.truncated = chunks.terminated, chunks.truncated
        self.runs = np.broadcast_to(runs, len(self.lengths))
        self.slots = np.asarray(fragment.env_slots(chunks.slot, chunks.number), np.int64)
        self._episode_id, self._keys = fragment.layout.episode_id, (chunks.slot.tolist(), chunks.number.tolist())
        self.trees = {name: fragment.gather(name) for name in columns}
        rewards = self.trees[Columns.REWARDS].astype(np.float64)
        self.totals: NDArray[Any] = np.add.reduceat(rewards, np.cumsum(self.lengths) - self.lengths)
        self.last_obs = fragment.last_observations()
        self.state_in: Tree = None
        if Columns.STATE_OUT in columns:
            like = map_tree(lambda leaf: leaf[0], empty_tree(columns[Columns.STATE_OUT], 1))
            self.state_in, known = fragment.initial_states(like)
            if (~known & (self.t_started == 0)).any():
                raise DatasetError(
                    f"{fragment.describe()}: the state before an episode's first step is not recorded, expected "
                    "episodes with their initial_state"
                )
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


def tables_of(rows: "Sequence[FragmentRows] | Sequence[EnvChunks]") -> dict[str, Any]:
    """Arrow tables by their kinds: of the steps of some fragments, in chunk order, and of their chunks, a row each.

    Of chunks of environments' episodes, their table alone.
    """
    pa, _ = import_pyarrow()
    first = rows[0]
    lengths, t_started, slots, runs, terminated, truncated, totals = (
        np.concatenate([getattr(each, name) for each in rows])
        for name in ("lengths", "t_started", "slots", "runs", "terminated", "truncated", "totals")
    )
    ids = _texts(each.ids() for each in rows)
    named: dict[str, Any] = {"run": array_of(runs), Columns.EPS_ID: ids}
    numbers = {
        "lane": array_of(np.repeat([each.lane for each in rows], [len(each.lengths) for each in rows])),
        "slot": array_of(slots),
        "t_started": array_of(t_started),
        "num_steps": array_of(lengths),
        first.total: array_of(totals),
        "terminated": array_of(terminated),
        "truncated": array_of(truncated),
        "lost": _texts(each.lost for each in rows),
    }
    if isinstance(first, EnvChunks):
        return {ENV_EPISODES: table_of(named | numbers, optional=["lost"])}
    columns, made = first.columns, [each for each in rows if isinstance(each, FragmentRows)]
    trees = {name: concatenate_trees([each.trees[name] for each in made]) for name in columns}
    total, firsts = int(lengths.sum()), np.cumsum(lengths) - lengths
    of_step = np.repeat(np.arange(len(lengths)), lengths)

    def repeated(texts: Any) -> Any:
        """The text of each step's chunk, by a dictionary; from the chunks' texts, by a dictionary."""
        return pa.DictionaryArray.from_arrays(array_of(texts.indices.to_numpy()[of_step]), texts.dictionary)

    step = {
        "run": array_of(runs[of_step]),
        Columns.EPS_ID: repeated(ids.dictionary_encode()),
        Columns.T: array_of(np.arange(total) - np.repeat(firsts - t_started, lengths)),
    }
    if first.texts:
        texts = {name: _texts(each.texts[name] for each in made).dictionary_encode() for name in first.texts}
        env_t, stopped = map(np.concatenate, zip(*(each.env_t for each in made if each.env_t), strict=True))
        step |= {name: repeated(each) for name, each in texts.items()}
        step[ENV_T] = array_of(env_t)
        named |= texts | {"env_t_stopped": array_of(stopped)}
    step |= {name: arrow_of(trees[name], description) for name, description in columns.items()}
    last_obs = concatenate_trees([each.last_obs for each in made])
    episode = named | numbers | {LAST_OBS: arrow_of(last_obs, columns[Columns.OBS])}
    if Columns.STATE_OUT in columns:
        states = concatenate_trees([each.state_in for each in made])
        episode[Columns.STATE_IN] = arrow_of(states, columns[Columns.STATE_OUT])
    return {EPISODES: table_of(episode, optional=["lost"]), STEPS: table_of(step)}


def _texts(parts: Iterable[Iterable[str | None]]) -> Any:
    """Arrow array of all texts."""
    pa, _ = import_pyarrow()
    return pa.array(chain.from_iterable(parts), pa.string())


Ints = NDArray[np.int64]


def modules_of(fragment: MultiAgentFragment) -> dict[str, ModuleFragment]:
    """The steps of each module that has made some: name of its folder -> its fragment."""
    return {folder_of(checked_id("module", module_id)): part for module_id, part in fragment.by_module().items()}


def checked_id(whose: str, id_: Any) -> str:
    """The text of an id. Raises DatasetError for one that no dataset can hold."""
    if type(id_) not in (str, int) or id_ == "":
        raise DatasetError(f"the {whose} {id_!r} has an id of {type(id_).__name__}, expected text or a whole number")
    return str(id_)


def stored_ids(whose: str, ids: Iterable[Any]) -> dict[str, Any]:
    """Text -> id. Raises DatasetError for an id that no dataset can hold, and where two have one text."""
    return ids_by_text(whose, ids, DatasetError, partial(checked_id, whose))


class EnvChunks:
    """The M chunks of environments' episodes in a fragment, environment by environment, in the order of time.

    start         i64[M]    vector step at which the episode began
    end           i64[M]    vector step at which the chunk ends
    totals        i64[M]    steps of agents in it

    The others are those of `FragmentRows`, in env steps; `slots` are environments.
    """

    total = "agent_steps"

    def __init__(self, fragment: MultiAgentFragment, runs: NDArray[np.int32]) -> None:
        clock, last = fragment.clock, fragment.clock.first + fragment.num_rows
        rows, self._ids, self.lost = [], list[str](), list[str | None]()
        for env in range(fragment.num_envs):
            for nth in range(clock.count(env)):
                start, ended = clock.start(env, nth), clock.end_of(env, nth)
                begin, end = max(clock.first, start), last if ended is None else ended[0]
                if begin < end:
                    key = env, int(clock.numbers[env]) + nth
                    data = fragment.custom_data.get(key, {})
                    how = ended[1] if ended is not None and "cut" not in data else None  # whether it was truncated
                    is_terminated = how is not None and not how
                    rows.append((env, fragment.env_slot(env), start, begin, end, is_terminated, bool(how)))
                    self._ids.append(fragment.episode_id(*key))
                    self.lost.append(None if ended is None else data.get("lost"))
        table = np.array(rows, np.int64).reshape(-1, 7)
        self._envs, self.slots, self.start, begins, self.end, terminated, truncated = np.ascontiguousarray(table.T)
        self.terminated, self.truncated = terminated.astype(np.bool_), truncated.astype(np.bool_)
        self.lane, self.runs = fragment.lane, np.broadcast_to(runs, len(self.slots))
        self.lengths, self.t_started, self.totals = self.end - begins, begins - self.start, np.zeros_like(begins)
        self.nbytes = table.nbytes

    def ids(self) -> list[str]:
        """Ids of the chunks' episodes, M of them."""
        return self._ids

    def of(self, part: ModuleFragment) -> tuple[Ints, Ints]:
        """The env chunk of each chunk of a module, i64[C], and the vector step of its last observation, i64[C]."""
        chunks = part.chunks
        seen = part.clock[chunks.stop, chunks.slot]
        ended = np.flatnonzero(chunks.terminated | chunks.truncated)
        keys = zip((chunks.stop[ended] - 1).tolist(), chunks.slot[ended].tolist(), strict=True)
        seen[ended] = [part.ends.get(key, last) for key, last in zip(keys, seen[ended].tolist(), strict=True)]
        # A chunk's last step is made within the env chunk: after its begin, and not after its end.
        most = 1 + int(max(self.end.max(initial=0), seen.max(initial=0)))
        envs = chunks.slot // len(part.part.agents)
        return np.searchsorted(self._envs * most + self.end, envs * most + seen), seen


def agent_rows_of(
    fragment: MultiAgentFragment, columns: Mapping[str, Mapping[str, Any]], runs: NDArray[np.int32]
) -> "dict[str, FragmentRows | EnvChunks]":
    """What is stored of each module's steps, by its folder, and behind these, by "", of the environments' episodes.

    columns    name of the module's folder -> name -> description of what is stored
    runs       i32[M]    number of the run of each of `EnvChunks`, or i32[1] of all
    """
    envs = EnvChunks(fragment, runs)
    ids = envs.ids()
    rows: dict[str, FragmentRows | EnvChunks] = {}
    for name, part in modules_of(fragment).items():
        chunks, (of, stopped) = part.chunks, envs.of(part)
        lengths = chunks.stop - chunks.start
        np.add.at(envs.totals, of, lengths)
        seen = part.in_chunk_order(part.clock[part.first_row : part.last_row])
        module_id = part.module_ids[int(part.chunk_modules[0])]
        agents = [part.part.agents[place] for place in (chunks.slot % len(part.part.agents)).tolist()]
        texts = {
            Columns.AGENT_ID: [checked_id("agent", each) for each in agents],
            Columns.MODULE_ID: [str(module_id)] * len(lengths),
            ENV_EPS_ID: [ids[each] for each in of.tolist()],
        }
        env_t = seen - np.repeat(envs.start[of], lengths), stopped - envs.start[of]
        rows[f"{MODULES}/{name}/"] = FragmentRows(part, columns[name], envs.runs[of], texts, env_t)
    return rows | {"": envs}
