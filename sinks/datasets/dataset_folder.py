"""Folder of a dataset: its files, its description in `dataset.json`, and the lock of the sink that writes.

    dataset.json                format, spaces, columns, and a record of each run that has written
    steps/000001.parquet        a row for each step; a row group for each fragment
    episodes/000001.parquet     a row for each chunk of an episode, with its last observation; row groups as above
    .lock                       held by the sink that writes

A file is written under a name that begins with a dot, which Parquet's readers pass over, and is renamed when it is
whole. The file of episodes is renamed first: the file of steps, which comes after it, commits both.
"""

import fcntl
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollflow.nodes.policies.artifact_files import write_file
from rollflow.nodes.policies.space_text import space_of
from rollflow.sinks.datasets.arrow_columns import first_difference, import_pyarrow
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import DatasetError, PolicyError

FORMAT, VERSION = "rollflow dataset", 1
STEPS, EPISODES = "steps", "episodes"
LAST_OBS = "last_obs"
_REPEATED = [Columns.EPS_ID]  # columns of steps that are written with a dictionary: numbers take longer, for no less
_SOUGHT = ["run", Columns.EPS_ID, Columns.T]  # and those with least and largest values, by which readers seek rows
DESCRIPTION, _LOCK, _SUFFIX = "dataset.json", ".lock", ".parquet"
_KINDS = {"observation_space": (dict, type(None)), "action_space": (dict,), "columns": (dict,), "runs": (list,)}


logger = logging.getLogger(__name__)


class DatasetFolder:
    """Files of one dataset; nothing is opened or made before a method is called.

    path    of the folder
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def numbers(self) -> list[int]:
        """The numbers of the committed files, ascending."""
        names = [path.stem for path in (self.path / STEPS).glob(f"*{_SUFFIX}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def check_pairs(self) -> list[int]:
        """Return `numbers()`. Raises DatasetError where steps are missing that were committed.

        A kill leaves only the last file of episodes without its steps.
        """
        numbers = self.numbers()
        for path in sorted((self.path / EPISODES).glob(f"*{_SUFFIX}")):
            if path.stem.isdecimal() and numbers and int(path.stem) < numbers[-1] and int(path.stem) not in numbers:
                raise DatasetError(
                    f"{self.path / STEPS / path.name} is missing, expected a file for each in {STEPS} and {EPISODES}"
                ).see("dataset")
        return numbers

    def file(self, kind: str, number: int) -> Path:
        """The committed file of a kind, `STEPS` or `EPISODES`."""
        return self.path / kind / f"{number:06d}{_SUFFIX}"

    def partial(self, kind: str, number: int) -> Path:
        """The file of a kind while it is written."""
        return self.path / kind / f".{number:06d}{_SUFFIX}.part"

    # Reading

    def read(self) -> dict[str, Any]:
        """The description. Raises DatasetError where there is none, or it is damaged or of a newer format."""
        path = self.path / DESCRIPTION
        try:
            text = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing() from None
        except (ValueError, OSError) as error:
            raise DatasetError(f"{path} can't be read: {error}; it was truncated or altered").see("dataset") from None
        if not isinstance(text, dict) or text.get("format") != FORMAT or type(text.get("version")) is not int:
            raise DatasetError(f"{path} describes no dataset, expected the format {FORMAT!r} and a version")
        if text["version"] > VERSION:
            raise DatasetError(
                f"{path} has version {text['version']}, expected at most {VERSION}: a newer rollflow has written it"
            ).see("dataset")
        for field, kinds in _KINDS.items():
            if not isinstance(text.get(field), kinds):
                raise DatasetError(f"{path}: {field} is {str(text.get(field))[:80]}, expected that of a dataset")
        return text

    def _missing(self) -> DatasetError:
        if self.path.is_file():
            return DatasetError(f"{self.path} is a file, expected the folder of a dataset")
        if (self.path / _LOCK).exists():
            return no_steps(self.path)
        return DatasetError(f"there is no dataset at {self.path}, expected a folder with {DESCRIPTION}")

    def space(self, description: dict[str, Any], name: str) -> Any:
        """The space of a name in a description; None if it is not known. Raises DatasetError if it is damaged."""
        if description[name] is None:
            return None
        try:
            return space_of(description[name], name)
        except PolicyError as error:
            raise DatasetError(f"{self.path / DESCRIPTION}: {error}") from None

    # Writing

    def lock(self) -> None:
        """Make the folder, and hold it against other sinks.

        Raises DatasetError where another one writes there, and where no folder can be made.
        """
        if self.path.is_file():
            raise DatasetError(f"{self.path} is a file, expected a folder, or a path where one can be made")
        try:
            for kind in (STEPS, EPISODES):
                (self.path / kind).mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DatasetError(f"no dataset can be written to {self.path}: {error}").see("dataset") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DatasetError(
                f"another sink writes to {self.path}, expected one at a time: close it, or use another folder"
            ).see("dataset") from None
        self._lock = fd
        self._check_is_dataset()

    def _check_is_dataset(self) -> None:
        """Raise DatasetError for a folder with files of somebody else, which a sink would take for its own."""
        if (self.path / DESCRIPTION).exists():
            return
        for kind in (STEPS, EPISODES):
            if found := sorted((self.path / kind).glob(f"*{_SUFFIX}")):
                raise DatasetError(
                    f"{self.path} has {kind}/{found[0].name} but no {DESCRIPTION}, expected a dataset, or a folder "
                    f"without files in {STEPS} and {EPISODES}"
                ).see("dataset")

    def unlock(self) -> None:
        """Let other sinks write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_left(self) -> list[int]:
        """Remove files that were never committed, which a killed sink has left; return the numbers of the others.

        Raises DatasetError where a file of steps is missing that was committed.
        """
        committed = self.check_pairs()
        for kind in (STEPS, EPISODES):
            for path in (self.path / kind).glob(f".*{_SUFFIX}.part"):
                path.unlink(missing_ok=True)
        for path in (self.path / EPISODES).glob(f"*{_SUFFIX}"):
            if path.stem.isdecimal() and int(path.stem) not in committed:
                path.unlink(missing_ok=True)
        for path in self.path.glob(f".{DESCRIPTION}.*"):
            path.unlink(missing_ok=True)
        return committed

    def add_runs(self, kind: dict[str, Any], version: str, runs: Sequence[dict[str, Any]]) -> int:
        """Add records of runs to the description, which is made if there is none; returns the first one's number.

        kind    `observation_space`, `action_space` and `columns` of what the runs will write

        Logs that the runs are of other environments than those before. Raises DatasetError where the dataset is of
        another kind, and where it can't be written to.
        """
        if (self.path / DESCRIPTION).exists():
            description = self.read()
            self.check_kind(description, kind)
        else:
            description = {"format": FORMAT, "version": VERSION, "rollflow": version, **kind, "runs": []}
        first = len(description["runs"])
        description["runs"] += runs
        envs = [env for run in description["runs"] if (env := environment_of(run)) is not None]
        if others := sorted({*envs[1:]} - {*envs[:1]}):
            logger.warning("%s has steps of %s and of %s: expected one environment", self.path, envs[0], others[0])
        try:
            write_file(self.path / DESCRIPTION, json.dumps(description, indent=1).encode())
            sync_folder(self.path)
        except OSError as error:
            raise DatasetError(f"no dataset can be written to {self.path}: {error}").see("dataset") from error
        return first

    def check_kind(self, description: dict[str, Any], kind: dict[str, Any]) -> None:
        """Raise DatasetError, with the first field that differs, unless fragments of a kind fit a description."""
        for field in ("observation_space", "action_space", "columns"):
            ours, others = description[field], kind[field]
            if field == "columns" and ours.keys() != others.keys():
                difference: str | None = (
                    f"columns are {sorted(ours)} in the dataset, but {sorted(others)} in the fragment"
                )
            else:
                difference = first_difference(ours, others, field)
            if difference:
                raise DatasetError(
                    f"a fragment does not fit the dataset at {self.path}: {difference}; expected fragments of one kind"
                ).see("dataset")


def environment_of(run: Mapping[str, Any]) -> str | None:
    """Id of the environment in the record of a run, as far as it is known."""
    rollout = run.get("rollout")
    return rollout.get("env") if isinstance(rollout, Mapping) else None


def no_steps(path: Path) -> DatasetError:
    """The error for a dataset without a committed file."""
    return DatasetError(
        f"the dataset at {path} has no steps yet: its sink has committed no file; expected one that was closed"
    ).see("dataset")


def sync_folder(path: Path) -> None:
    """Write a folder's names to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FilePair:
    """A file of steps and the file of their episodes, written together.

    folder      of the dataset, which is locked
    number      of the two files

    nbytes      written so far to both
    num_steps   written so far
    """

    def __init__(self, folder: DatasetFolder, number: int) -> None:
        self._folder, self.number = folder, number
        self._files: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}
        self.num_steps = 0

    @property
    def nbytes(self) -> int:
        """Bytes written so far to both files."""
        return sum(file.tell() for file in self._files.values())

    def write(self, kind: str, table: Any) -> None:
        """Write a table as one row group."""
        _, pq = import_pyarrow()
        if kind not in self._writers:
            file = self._files[kind] = self._folder.partial(kind, self.number).open("wb")
            self._writers[kind] = pq.ParquetWriter(
                file,
                table.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=_REPEATED if kind == STEPS else False,
                write_statistics=_SOUGHT if kind == STEPS else True,
                write_page_checksum=True,
            )
        self._writers[kind].write_table(table, row_group_size=max(1, table.num_rows))
        self.num_steps += table.num_rows if kind == STEPS else 0

    def commit(self) -> None:
        """End both files, write them to the disk, and give them their names."""
        for kind, writer in self._writers.items():
            writer.close()
            self._files[kind].flush()
            os.fsync(self._files[kind].fileno())
            self._files[kind].close()
        for kind in (EPISODES, STEPS):
            self._folder.partial(kind, self.number).replace(self._folder.file(kind, self.number))
            sync_folder(self._folder.path / kind)

    def discard(self) -> None:
        """Close both files and remove them, as far as the disk allows."""
        for kind, file in self._files.items():
            # A disk that has failed may fail again, of which nobody needs to know.
            with suppress(OSError, ValueError):
                if kind in self._writers:
                    self._writers[kind].close()
            with suppress(OSError, ValueError):
                file.close()
            with suppress(OSError):
                self._folder.partial(kind, self.number).unlink()
