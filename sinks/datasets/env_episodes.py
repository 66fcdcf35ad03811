"""Episodes of environments with several agents in Parquet files, and the episodes of their agents by module."""

from typing import Any, NamedTuple

import numpy as np

from rollflow.sinks.datasets.agent_tables import ids_by_text
from rollflow.sinks.datasets.arrow_columns import import_pyarrow
from rollflow.sinks.datasets.dataset_folder import ENV_EPISODES, ENV_EPS_ID, EPISODES, DatasetFolder
from rollflow.sinks.datasets.episode_index import EpisodeIndex, damaged, numbers_in
from rollflow.sinks.datasets.episode_summary import EpisodeSummary, step_bytes, windows_of
from rollflow.sinks.datasets.parquet_episodes import ParquetEpisodes
from rollflow.sinks.datasets.stored_steps import Ints
from rollflow.stream.data.columns import Columns

_STOPPED, _AGENT_STEPS, _RETURN = "env_t_stopped", "agent_steps", "return"
_STEPS_AT_ONCE = 1 << 20


class ModuleEpisodes(NamedTuple):
    """The A episodes of agents that one module has acted in.

    agents     ids of the agents that it has served
    agent      i64[A]    place in `agents`
    piece      i64[A]    number of the environment's episode
    last_t     i64[A]    steps of the environment's episode before the agent's last observation
    returns    f64[A]
    """

    module_id: Any
    store: ParquetEpisodes
    agents: tuple[Any, ...]
    agent: Ints
    piece: Ints
    last_t: Ints
    returns: Any


class EnvEpisodes:
    """E episodes of environments, a row of numbers each, and the agents' episodes in them.

    agents                               all ids
    modules                              `ModuleEpisodes` of those that have acted
    columns                              module id -> name -> description
    observation_space, action_space      module id -> space

    The others are those of an `EpisodeStore`, in env steps. Raises DatasetError where there is no dataset, or one that
    is damaged.
    """

    def __init__(self, folder: DatasetFolder) -> None:
        import_pyarrow()
        # A sink describes runs and modules before it commits their files: those that are listed first are described.
        folder = DatasetFolder(folder.path, folder.numbers())
        self.description = folder.read()
        self.agents: list[Any] = self.description["agents"]
        self.index = index = EpisodeIndex(folder, ENV_EPISODES, [_AGENT_STEPS])
        self.version = index.numbers
        self.num_steps, self.t_started, self.ids, self.runs = index.num_steps, index.t_started, index.ids, index.runs
        self.lost = index.lost
        self._places = {(run, id_): place for place, (run, id_) in enumerate(self._keys())}
        folders = [(each, folder.module(name, index.numbers)) for name, each in self.description["modules"].items()]
        self.modules = [self._module(module_id, each) for module_id, each in folders if each.numbers()]
        self.columns = {each.module_id: each.store.columns for each in self.modules}
        self.observation_space = {each.module_id: each.store.observation_space for each in self.modules}
        self.action_space = {each.module_id: each.store.action_space for each in self.modules}
        found = sum(int(each.store.index.chunk_steps.sum()) for each in self.modules)
        if (wanted := int(index.more[_AGENT_STEPS].to_numpy().sum())) != found:
            raise damaged(folder.path, f"its modules have {found} steps of agents, {ENV_EPISODES} says {wanted}")

    @property
    def step_nbytes(self) -> int:
        """Bytes of an env step in memory, with the steps of all agents in it, on average."""
        steps = [(int(each.store.num_steps.sum()), step_bytes(each.store.columns)) for each in self.modules]
        return 1 + sum(count * size for count, size in steps) // max(1, int(self.num_steps.sum()))

    def summary(self) -> EpisodeSummary:
        """Returns of all agents together, lengths in env steps, and the policy versions of all modules."""
        count = len(self.num_steps)
        returns, oldest, newest = np.zeros(count), np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
        for each in self.modules:
            np.add.at(returns, each.piece, each.returns)
            for episodes in windows_of(each.store.num_steps, np.arange(len(each.piece)), _STEPS_AT_ONCE):
                if Columns.POLICY_VERSION not in each.store.columns:
                    break
                read = each.store.read(episodes, [Columns.POLICY_VERSION], with_last=False)
                versions = read.taken(Columns.POLICY_VERSION)
                pieces = np.repeat(each.piece[episodes], each.store.num_steps[episodes])
                np.minimum.at(oldest, pieces, versions)
                np.maximum.at(newest, pieces, versions)
        is_whole = (self.t_started == 0) & (self.index.terminated | self.index.truncated)
        return EpisodeSummary(returns, self.num_steps, self.runs, is_whole, np.minimum(oldest, newest), newest)

    def _keys(self) -> list[tuple[int, str]]:
        """Run and id of each episode; pieces of one episode have the same."""
        return list(zip(self.runs.tolist(), self.ids.tolist(), strict=True))

    def _module(self, module_id: Any, folder: DatasetFolder) -> ModuleEpisodes:
        """The episodes of a module's agents. Raises DatasetError where one is of no environment's episode."""
        more = [Columns.AGENT_ID, _RETURN, _STOPPED, ENV_EPS_ID]

        def piece_of(table: Any) -> Ints:
            return self._pieces(folder, table)

        index = EpisodeIndex(folder, EPISODES, more, piece_of)
        head = index.order[index.first]
        texts = index.more[Columns.AGENT_ID].cast("string").dictionary_encode()
        by_text = {text: place for place, text in enumerate(ids_by_text("agent", self.agents))}
        found = [by_text.get(text, -1) for text in texts.dictionary.to_pylist()]
        if -1 in found:
            unknown = texts.dictionary[found.index(-1)]
            raise damaged(folder.path, f"it has the agent {unknown}, expected one of {self.agents}")
        numbers, agent = np.unique(np.array(found, np.int64)[texts.indices.to_numpy()], return_inverse=True)
        returns = np.add.reduceat(index.more[_RETURN].to_numpy()[index.order], index.first)
        return ModuleEpisodes(
            module_id,
            ParquetEpisodes(folder, index),
            tuple(self.agents[each] for each in numbers.tolist()),
            agent[head],
            index.pieces[head],
            index.more[_STOPPED].to_numpy()[index.last],
            returns,
        )

    def _pieces(self, folder: DatasetFolder, table: Any) -> Ints:
        """The number of the environment's episode of each of a module's chunks, i64[P].

        Where fragments are missing, an episode is there in pieces: a chunk is of the piece in which its last step ends.
        """
        stops = self.t_started + self.num_steps
        most = 1 + int(stops.max(initial=0))
        first_of = np.array([self._places[key] for key in self._keys()], np.int64)  # one number for each run and id
        order = np.lexsort((stops, first_of))
        ends = first_of[order] * most + stops[order]
        texts = table.column(ENV_EPS_ID).combine_chunks().cast("string").to_pylist()
        keys = zip(numbers_in(table, "run").tolist(), texts, strict=True)
        mine = np.array([self._places.get(key, -1) for key in keys], np.int64)
        stopped = numbers_in(table, _STOPPED)
        at = np.searchsorted(ends, mine * most + np.minimum(stopped, most - 1))
        pieces: Ints = order[np.minimum(at, len(order) - 1)]
        wrong = (
            (mine < 0) | (first_of[pieces] != mine) | (stopped > stops[pieces]) | (stopped <= self.t_started[pieces])
        )
        if wrong.any():
            row = int(np.argmax(wrong))
            raise damaged(folder.path, f"its chunk {row} ends in no chunk of {ENV_EPISODES}")
        return pieces
