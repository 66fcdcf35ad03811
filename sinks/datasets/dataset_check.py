"""Check of a dataset's files: checksums, counts, ids, the order of the steps, and flags."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.arrow_columns import arrow_type, import_pyarrow, is_alike
from rollflow.sinks.datasets.dataset_folder import ENV_EPISODES, ENV_EPS_ID, EPISODES, STEPS, DatasetFolder
from rollflow.sinks.datasets.parquet_episodes import UNREADABLE, EpisodeIndex, damaged, open_file, read_chunks
from rollflow.sinks.datasets.stored_agents import EnvEpisodes
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError

_TEXTS = (Columns.EPS_ID, Columns.AGENT_ID, Columns.MODULE_ID, ENV_EPS_ID)


def check_dataset(folder: DatasetFolder) -> Iterator[tuple[Path, str | None]]:
    """Each file of steps and what is wrong with it or with its file of episodes; None: nothing.

    Every byte is read, and has its checksum. Raises DatasetError where there is no dataset, where a file is missing,
    and where no file is there.
    """
    description = folder.read()
    numbers = folder.check_pairs()
    wrong = 0
    parts = [folder]
    if folder.has_agents:
        parts = [folder.module(name, numbers) for name in description["modules"]]
        parts = [each for each in parts if each.numbers()]
    for part in parts:
        described = part.read()
        for number in part.numbers():
            try:
                faults = list(_faults_of(part, number, described))
            except DatasetError as error:
                faults = [str(error)]
            wrong += len(faults)
            yield part.file(STEPS, number), "; ".join(faults) or None
    if not wrong:
        for part in parts:
            yield from _twice(part, EpisodeIndex(part))
        if folder.has_agents:
            yield from _of_environments(folder, numbers)


def _twice(folder: DatasetFolder, index: EpisodeIndex) -> Iterator[tuple[Path, str]]:
    """The first steps that are there twice, as where a file was copied beside itself, with the file that has them."""
    _, ids = np.unique(index.ids.astype(str), return_inverse=True)
    order = np.lexsort((index.t_started, index.runs, ids))
    one, other = order[:-1], order[1:]
    is_same = (ids[one] == ids[other]) & (index.runs[one] == index.runs[other])
    again = other[is_same & (index.t_started[other] < (index.t_started + index.num_steps)[one])]
    if len(again):
        episode = int(again[0])
        file = folder.file(STEPS, int(index.file[index.order[index.first[episode]]]))
        yield file, f"{file}: steps of run {index.runs[episode]} and episode '{index.ids[episode]}' are there twice"


def _of_environments(folder: DatasetFolder, numbers: list[int]) -> Iterator[tuple[Path, str | None]]:
    """The files of the environments' episodes, and what is wrong with one of them or with the modules' beside it."""
    for number in numbers:
        try:
            _whole(folder, ENV_EPISODES, number)
            if number == numbers[-1]:
                EnvEpisodes(folder)  # every agent's episode is within one of an environment
        except DatasetError as error:
            yield folder.file(ENV_EPISODES, number), str(error)
        else:
            yield folder.file(ENV_EPISODES, number), None


def _faults_of(folder: DatasetFolder, number: int, description: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a file of steps and its file of episodes. Raises DatasetError where one can't be read."""
    read_chunks(folder, number)
    steps, episodes = (_whole(folder, kind, number) for kind in (STEPS, EPISODES))
    of_steps, of_episodes = folder.file(STEPS, number), folder.file(EPISODES, number)
    for name, each in description["columns"].items():
        expected = arrow_type(each)
        found = steps.schema.field(name).type if name in steps.column_names else None
        if found is None or not is_alike(found, expected):
            yield f"{of_steps}: column {name} is {'missing' if found is None else found}, expected {expected}"
            return
    lengths, runs = _numbers(episodes, "num_steps"), _numbers(episodes, "run")
    if not 0 <= runs.min() <= runs.max() < len(description["runs"]):
        yield f"{of_episodes}: runs are {runs.min()} to {runs.max()}, expected those of {len(description['runs'])}"
    for name, expected in _expected_steps(episodes, lengths).items():
        found = _texts(steps, name) if name in _TEXTS else _numbers(steps, name)
        if len(differing := np.flatnonzero(found != expected)):
            row = int(differing[0])
            yield f"{of_steps}: {name} of row {row} is {found[row]}, expected {expected[row]} as in {EPISODES}"
    sums = np.add.reduceat(_numbers(steps, Columns.REWARDS).astype(np.float64), np.cumsum(lengths) - lengths)
    returns = _numbers(episodes, "return")
    if len(differing := np.flatnonzero(~np.isclose(sums, returns, equal_nan=True))):
        row = int(differing[0])
        yield f"{of_episodes}: return of row {row} is {returns[row]}, expected {sums[row]}, the sum of its steps"


def _expected_steps(episodes: Any, lengths: NDArray[np.int64]) -> dict[str, Any]:
    """What the steps must have in the columns that follow from the episodes: name -> any[n].

    lengths    i64[C]    steps of each chunk
    """
    chunk, firsts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    expected = {
        "run": _numbers(episodes, "run")[chunk],
        Columns.T: np.arange(len(chunk)) - (firsts - _numbers(episodes, "t_started"))[chunk],
        **{name: _texts(episodes, name)[chunk] for name in _TEXTS if name in episodes.column_names},
    }
    for name, flag in ((Columns.TERMINATEDS, "terminated"), (Columns.TRUNCATEDS, "truncated")):
        expected[name] = np.zeros(len(chunk), np.bool_)
        expected[name][firsts + lengths - 1] = _numbers(episodes, flag)
    return expected


def _whole(folder: DatasetFolder, kind: str, number: int) -> Any:
    """The table of a file, of which every byte is read."""
    with open_file(folder, kind, number) as file:
        try:
            return file.read(use_threads=False)
        except UNREADABLE as error:
            raise damaged(folder.file(kind, number), error) from None


def _numbers(table: Any, name: str) -> Any:
    return table.column(name).to_numpy()


def _texts(table: Any, name: str) -> Any:
    """A column of texts, object[n]."""
    pa, _ = import_pyarrow()
    return table.column(name).cast(pa.string()).to_numpy()
