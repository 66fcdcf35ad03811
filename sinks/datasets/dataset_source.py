"""DatasetSource: episodes, fragments and train batches of a dataset, as from a rollout."""

import os
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio.to_thread
import gymnasium as gym
import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from rollflow.nodes.argument_checks import check_flags, checked_count, checking_keywords
from rollflow.nodes.connectors.common.batches import NumpyToTensor
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.stages.acting import lookback_for, pieces_given
from rollflow.sinks.datasets.dataset_folder import ENV_EPISODES, EPISODES, STEPS, DatasetFolder, no_steps
from rollflow.sinks.datasets.episode_block import (
    AgentsBlock,
    EpisodeBlock,
    EpisodeSummary,
    Ints,
    ReadAhead,
    StoredAgents,
    StoredFragment,
    step_bytes,
    summary_of,
    windows_of,
)
from rollflow.sinks.datasets.minari_episodes import MinariEpisodes, minari_data_of
from rollflow.sinks.datasets.parquet_episodes import EnvEpisodes, ParquetEpisodes, opened, read_chunks
from rollflow.sinks.trainer.item_maker import check_module
from rollflow.stream.data.errors import DatasetError, shown
from rollflow.stream.graph.channel import Outlet
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment

Batch = dict[str, Any]


# Place in the passes over a dataset: the number of the pass, of the episode in its order, and of the step.
_PLACE = "pass", "episode", "step"


class DatasetSource(IterableDataset[Any]):
    """Reads the dataset in a folder: episodes, fragments, and train batches by a learner pipeline.

        path                 folder that a `DatasetSink` has written, or a dataset's folder of Minari's
        batch_size           steps in a fragment, and in a batch; the last one of a pass may have fewer
        complete_episodes    whether a fragment has whole episodes alone: then as many as make `batch_size` steps
        shuffle_seed         of the order of the episodes, which is another one in each pass; None: as they were made
        window_steps         episodes of so many steps, which were made one after the other, are in memory together,
                             and as many of the next, which a thread reads meanwhile. The order of these windows is
                             shuffled, and that of the episodes in each
        passes               how often each episode comes in a loop; None: for ever
        lookback             steps before a chunk that its episode shows, if a fragment begins within an episode;
                             None: as many as the learner pieces and the module need, and at least 1
        episodes             numbers of the episodes that are read, such as `numpy.flatnonzero(summary.returns > 400)`,
                             with the `summary` of a source without `episodes`, or `range(rank, num_episodes, ranks)`,
                             the share of one process; None: all
        module               passed to the learner pieces as `rl_module`; of several agents: module id -> module
        learner_connector    `lambda obs_space, act_space: piece or list of pieces`, before the default ones

        agents               ids of the agents; None: there is one
        learner_pipeline     makes the batches
        observation_space    of what the module got, as stored
        action_space         of what it chose
        num_episodes         that are read, cut ones included
        num_steps            of these
        columns              name -> what is stored of each step, in JSON's types
        description          what `dataset.json` says, with the record of each run

    Of several agents, an episode is that of an environment, a `MultiAgentEpisode`; steps are env steps; and a batch has
    one for each module that has acted: module id -> column name -> tensor. The spaces, `columns` and
    `learner_pipeline` are by module, too. An episode whose beginning is missing begins a fragment.

    What was committed when the source was made is read. An episode whose end is not in the dataset is truncated at
    its last step, and has `custom_data["cut"]`; one whose beginning is missing has `t_started` above 0.

    A loop that is left early goes on in the next one. After its last pass the next loop makes further passes, with
    orders of their own. `DataLoader(source, batch_size=None, num_workers=…)` gives the batches; each worker has a share
    of the episodes.

    Raises ValueError for arguments out of bounds, and for a `lookback` that is less than the pieces need; DatasetError
    if there is no dataset, or one that is damaged. A batch raises ConnectorError if a piece looks back before the
    first stored step of an episode whose beginning is missing: leave it out by `episodes`.
    """

    @checking_keywords("DatasetSource")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int = 2048,
        complete_episodes: bool = False,
        shuffle_seed: int | None = None,
        window_steps: int = 65_536,
        passes: int | None = 1,
        lookback: int | None = None,
        episodes: Sequence[int] | Ints | None = None,
        module: Any = None,
        learner_connector: Callable[[gym.Space[Any], gym.Space[Any]], Any] | None = None,
    ) -> None:
        self.batch_size = checked_count("batch_size", batch_size, 1)
        check_flags(complete_episodes=complete_episodes)
        self.complete_episodes = complete_episodes
        self._seed = None if shuffle_seed is None else checked_count("shuffle_seed", shuffle_seed, 0)
        self._window_steps = checked_count("window_steps", window_steps, 1)
        self.passes = None if passes is None else checked_count("passes", passes, 1)
        self._lookback_asked = None if lookback is None else checked_count("lookback", lookback, 0)
        check_module(module)
        self._path = Path(path)
        self._store = _episodes_at(self._path)
        self.description: dict[str, Any] = self._store.description
        self.columns: Mapping[Any, Any] = self._store.columns
        self.observation_space: Any = self._store.observation_space
        self.action_space: Any = self._store.action_space
        self._episodes = _checked_episodes(episodes, len(self._store.num_steps))
        self.agents: list[Any] | None = None
        spaces: dict[Any, tuple[Any, Any]] = {None: (self.observation_space, self.action_space)}
        self._modules: Mapping[Any, Any] = {None: module}  # by id; None: of one agent
        if isinstance(self._store, EnvEpisodes):
            self.agents, self._modules = self._store.agents, {} if module is None else module
            actions = self._store.action_space
            spaces = {each: (space, actions[each]) for each, space in self._store.observation_space.items()}
        self._pipelines = {
            each: _pipeline(learner_connector, *own, self._modules.get(each)) for each, own in spaces.items()
        }
        self._lookback = self._needed_lookback()
        self._at: tuple[int, ...] = 0, 0, 0  # see `_PLACE`
        self._is_in_worker = False
        self._sequence = 0
        self._tensors = NumpyToTensor()  # without a module, the pipeline's own leaves arrays as they are

    @property
    def learner_pipeline(self) -> Any:
        """The learner pieces and the default ones; of several agents: by RLModule id."""
        return self._pipelines[None] if self.agents is None else self._pipelines

    @property
    def num_episodes(self) -> int:
        """Number of episodes that are read, cut ones included."""
        return len(self._episodes)

    @property
    def num_steps(self) -> int:
        """Number of steps in these episodes, of several agents: of env steps."""
        return int(self._store.num_steps[self._episodes].sum())

    @property
    def step_nbytes(self) -> int:
        """Bytes of a step in memory; of several agents: of an env step, on average."""
        return self._store.step_nbytes if isinstance(self._store, EnvEpisodes) else step_bytes(self.columns)

    def summary(self) -> EpisodeSummary:
        """Returns, lengths and policy versions of all episodes of the dataset, to choose `episodes` by.

        Reads the rewards, ends and policy versions of every step. Raises DatasetError for a damaged file.
        """
        return self._store.summary() if isinstance(self._store, EnvEpisodes) else summary_of(self._store)

    # Reading

    def episodes(self) -> Iterator[Any]:
        """Whole episodes, one after the other; the first is the rest of one if a batch has had its beginning."""
        for fragment in self._fragments(1, whole=True):
            yield from fragment.episodes()  # none of an environment's in which no agent has made a step

    def fragments(self) -> Generator[Any, None, None]:
        """Fragments of `batch_size` steps each, of one slot in which chunks of episodes stand one behind the other.

        Of several agents each is a `MultiAgentFragment` of one environment.
        """
        yield from self._fragments(self.batch_size, whole=self.complete_episodes)

    def batches(self) -> Iterator[Batch]:
        """Train batches, column name -> tensor any[B, ...], by the learner pieces and the default ones."""
        for fragment in self.fragments():
            if self.agents is None:
                yield self._batch_of(fragment)
                continue
            yield {each: self._batch_of(part, each) for each, part in fragment.by_module().items()}

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    async def run(self, fragments: Outlet[AnyFragment]) -> None:
        """Send the fragments of one loop, as a node of a graph: `graph.connect("source.fragments", "learner")`."""
        with closing(self.fragments()) as made:
            while (fragment := await anyio.to_thread.run_sync(next, made, None)) is not None:
                await fragments.send(fragment)

    # Going on

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last item that a loop was given, in plain values; without workers of a `DataLoader`."""
        return {**dict(zip(_PLACE, self._at, strict=True)), **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly behind the place of a state. Raises DatasetError for a state of another dataset or order."""
        identity = self._identity()
        if not isinstance(state, Mapping) or not state.keys() >= {"pass", *identity}:
            raise DatasetError(f"the state is {shown(state)}, expected what state_dict() has given")
        for name, own in identity.items():
            if state.get(name) != own:
                raise DatasetError(f"the state has {name}={state.get(name)!r}, expected {own!r}")
        self._at = tuple(checked_count(name, state.get(name), 0) for name in _PLACE)

    def __repr__(self) -> str:
        size = f"{self.num_episodes} episodes, {self.num_steps} steps"
        return f"<DatasetSource {os.fspath(self._path)!r}: {size}>"

    # Inside

    def _batch_of(self, fragment: Any, module_id: Any = None) -> Batch:
        module = self._modules.get(module_id)
        batch = self._pipelines[module_id].of_fragments([fragment], module)
        return self._tensors.converted(batch) if module is None else batch

    def _needed_lookback(self) -> int:
        """Steps of lookback for the learner pieces that there are now. Raises ValueError if the user gave fewer."""
        stateful = any(map(is_stateful, self._modules.values()))
        return lookback_for(self._lookback_asked, self._pipelines.values(), stateful=stateful)

    def _identity(self) -> dict[str, Any]:
        """Files and arguments on which the order of the steps depends."""
        return {
            "files": self._store.version,
            "num_steps": self.num_steps,
            "episodes": zlib.crc32(self._episodes.tobytes()),
            "shuffle_seed": self._seed,
            "window_steps": self._window_steps,
        }

    def _fragments(self, size: int, *, whole: bool) -> Iterator[StoredFragment | StoredAgents]:
        """The next fragments, up to the end of the loop."""
        if get_worker_info() is not None:
            self._begin_in_worker()
        name, number, self._lookback = f"the dataset at {self._path}", None, self._needed_lookback()
        with closing(self._blocks(size, whole=whole)) as blocks:
            for number, is_last, block, ends in blocks:
                for begin, end in pairwise([block.row, *ends]):
                    self._at = number, *block.place_of(end)
                    options: dict[str, Any] = {"lookback": self._lookback, "sequence": self._sequence, "name": name}
                    self._sequence += 1
                    if isinstance(block, AgentsBlock):
                        yield StoredAgents(block, begin, end, **options)
                    else:
                        yield StoredFragment(block, begin, end, **options)
                if is_last:
                    self._at = number + 1, 0, 0
        if number is None:  # the place was the end of a loop, or a worker's share has no episodes
            self._at = self._at[0] + 1, 0, 0

    def _begin_in_worker(self) -> None:
        """Go to the beginning of the pass. Raises DatasetError for a place within one, which is not of this share."""
        beginning = self._at[0], 0, 0
        if not self._is_in_worker and self._at != beginning:
            raise DatasetError(
                "the source stands within a pass, and a DataLoader's workers have other shares; expected "
                "num_workers=0, or a source at the beginning of a pass"
            )
        self._is_in_worker, self._at = True, beginning

    def _blocks(self, size: int, *, whole: bool) -> Generator[tuple[int, bool, Any, list[int]], None, None]:
        """Each window up to the end of the loop, from the present place on; a thread reads the next one meanwhile.

        Gives the number of the pass, whether the pass ends with the window, its steps, and the rows at which its
        fragments end.
        """
        kind: Any = AgentsBlock if isinstance(self._store, EnvEpisodes) else EpisodeBlock
        make = partial(kind, self._store)
        windows, coming = self._upcoming(), None
        window = next(windows, None)
        try:
            while window is not None:
                number, is_last, *read = window
                block = make(*read) if coming is None else coming.result()
                if coming is None:
                    block.row = self._at[-1]
                ends = block.ends(block.row, size, whole=whole)
                end = ends[-1] if ends else block.row
                if is_last and end < block.num_rows:
                    ends.append(block.num_rows)
                rest = None if is_last else block.rest(end, self._lookback)
                window, coming = next(windows, None), None
                if window is not None:
                    coming = ReadAhead(partial(make, *window[2:], rest))
                yield number, is_last, block, ends
        finally:
            if coming is not None:
                coming.stop()

    def _upcoming(self) -> Iterator[tuple[int, bool, Ints, int]]:
        """The windows up to the end of the loop, from the present place on, of episodes that are in memory together.

        Gives the number of the pass, whether it ends with the window, the episodes, i64[K], and the number of the first
        one in the order of the pass.
        """
        number, first, _ = self._at
        while windows := self._windows(number):
            ordinal = 0
            for place, episodes in enumerate(windows):
                ordinal += len(episodes)
                if ordinal > first:
                    left = episodes[max(0, len(episodes) - (ordinal - first)) :]
                    yield number, place == len(windows) - 1, left, ordinal - len(left)
            number, first = number + 1, 0
            if self.passes is not None and number % self.passes == 0:
                return

    def _windows(self, number: int) -> list[Ints]:
        """The episodes of a pass, window by window, in their order; in a `DataLoader`'s worker those of its share."""
        windows = windows_of(self._store.num_steps, self._episodes, self._window_steps)
        if self._seed is not None:
            generator = np.random.default_rng([self._seed, number])
            windows = [generator.permutation(windows[each]) for each in generator.permutation(len(windows))]
        if (worker := get_worker_info()) is None:
            return windows
        firsts, count = np.cumsum([0, *map(len, windows)]).tolist(), worker.num_workers
        mine = [each[(worker.id - first) % count :: count] for each, first in zip(windows, firsts, strict=False)]
        return [each for each in mine if len(each)]


def _episodes_at(path: Path) -> ParquetEpisodes | MinariEpisodes | EnvEpisodes:
    """The episodes at a path, by its files. Raises DatasetError if they can't be read."""
    if (data := minari_data_of(path)) is not None:
        return MinariEpisodes(data)
    folder = DatasetFolder(path)
    return EnvEpisodes(folder) if folder.has_agents else ParquetEpisodes(folder)


def _pipeline(connector: Any, observation_space: Any, action_space: Any, module: Any) -> LearnerConnectorPipeline:
    """The learner pipeline of a module, with a user's pieces."""
    pieces = pieces_given(connector, "learner_connector", observation_space, action_space)
    return LearnerConnectorPipeline.default(observation_space, action_space, pieces, stateful=is_stateful(module))


def _checked_episodes(episodes: Sequence[int] | Ints | None, count: int) -> Ints:
    """The numbers of the episodes that are read, i64[K], ascending. Raises ValueError for others than there are."""
    if episodes is None:
        return np.arange(count)
    given = np.asarray(episodes)
    numbers = np.unique(given.nonzero()[0] if given.dtype == np.bool_ and given.shape == (count,) else given)
    if numbers.dtype.kind not in "iu" or not len(numbers) or not 0 <= numbers[0] <= numbers[-1] < count:
        raise ValueError(
            f"episodes are {shown(episodes)}, expected one or more numbers from 0 to {count - 1}, or bool[{count}]"
        )
    return numbers.astype(np.int64)


# Checking


def check_dataset(folder: DatasetFolder) -> Iterator[tuple[Path, str | None]]:
    """Each file of steps and what is wrong with it or with its file of episodes; None: nothing.

    Every byte is read, and has its checksum. Raises DatasetError if there is no dataset, if a file is missing,
    and if no file is there.
    """
    description, numbers = folder.read(), folder.check_pairs()
    if not numbers:
        raise no_steps(folder.path)
    has_agents = folder.has_agents
    for part in [folder.module(name, numbers) for name in description["modules"]] if has_agents else [folder]:
        for number in part.numbers():
            yield part.file(STEPS, number), _fault_of(part, number)
    for number in numbers if has_agents else ():
        yield folder.file(ENV_EPISODES, number), _fault_of(folder, number, is_last=number == numbers[-1])


def _fault_of(folder: DatasetFolder, number: int, *, is_last: bool = False) -> str | None:
    """What is wrong with the files of a number; None: nothing.

    is_last    whether the episodes of environments are compared with those of all their agents as well
    """
    try:
        for kind in (ENV_EPISODES,) if folder.has_agents else (STEPS, EPISODES):
            with opened(folder, kind, number) as file:
                file.read(use_threads=False)
        if not folder.has_agents:
            read_chunks(folder, number)
        elif is_last:
            EnvEpisodes(folder)
    except DatasetError as error:
        return str(error)
    return None
