"""Check of a dataset's files: checksums, and counts of steps and episodes."""

from collections.abc import Iterator
from pathlib import Path

from rollflow.sinks.datasets.dataset_folder import ENV_EPISODES, EPISODES, STEPS, DatasetFolder, no_steps
from rollflow.sinks.datasets.parquet_episodes import opened, read_chunks
from rollflow.sinks.datasets.stored_agents import EnvEpisodes
from rollflow.stream.data.errors import DatasetError


def check_dataset(folder: DatasetFolder) -> Iterator[tuple[Path, str | None]]:
    """Each file of steps and what is wrong with it or with its file of episodes; None: nothing.

    Every byte is read, and has its checksum. Raises DatasetError where there is no dataset, where a file is missing,
    and where no file is there.
    """
    description, numbers = folder.read(), folder.check_pairs()
    if not numbers:
        raise no_steps(folder.path)
    names = description["modules"] if folder.has_agents else ()
    for part in [folder.module(name, numbers) for name in names] if folder.has_agents else [folder]:
        for number in part.numbers():
            yield part.file(STEPS, number), _fault_of(part, number)
    for number in numbers if folder.has_agents else ():
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
