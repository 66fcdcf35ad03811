"""Folder of a dataset: its files, its description in `dataset.json`, and the lock of the sink that writes.

    dataset.json                format, spaces, columns, and a record of each run that has written
    steps/000001.parquet        a row for each step; a row group for each large fragment, or some
    episodes/000001.parquet     a row for each chunk of an episode, with its last observation; row groups as above
    .lock                       held by the sink that writes

A dataset of several agents has a folder for each module, which is a dataset by itself, and no steps of its own:

    dataset.json                    agents, modules, and a record of each run
    modules/NAME/dataset.json       as above; the runs are the same
    modules/NAME/steps/…            as above, with the agent and the time of its environment
    modules/NAME/episodes/…
    env_episodes/000001.parquet     a row for each chunk of an environment's episode; commits all files of its number

A file is written under a name that begins with a dot, which Parquet's readers pass over, and is renamed when it is
whole. The file of episodes is renamed first: the file of steps, which comes after it, commits both.
"""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollflow.nodes.argument_checks import ids_by_text
from rollflow.nodes.policies.space_text import space_of
from rollflow.sinks.datasets.arrow_columns import first_difference
from rollflow.stream.data.errors import DatasetError, PolicyError
from rollflow.stream.data.stored_files import LOCK, LockedFolder, StoredKind, replacing, sync, write_file

DESCRIPTION = "dataset.json"
DATASET = StoredKind("rollflow dataset", 3, DESCRIPTION, "a dataset", DatasetError, oldest=3)
STEPS, EPISODES, ENV_EPISODES, MODULES = "steps", "episodes", "env_episodes", "modules"
LAST_OBS, ENV_EPS_ID, ENV_T = "last_obs", "env_eps_id", "env_t"
MARK = "rollflow.files"
_SUFFIX = ".parquet"
_KINDS = {"observation_space": (dict, type(None)), "action_space": (dict,), "columns": (dict,), "runs": (list,)}
_AGENTS_KINDS = {"agents": (list,), "modules": (dict,), "runs": (list,)}
_OF_OTHERS = {  # files that tell what a folder is, and whose it is
    "data/metadata.json": "a dataset of Minari's",
    "metadata.json": "the data of a dataset of Minari's",
    "meta/info.json": "another library's dataset",
    "manifest.json": "a replay's checkpoint or a policy",
    **{f"{kind}/*{_SUFFIX}": f"a dataset without its {DESCRIPTION}" for kind in (STEPS, EPISODES, ENV_EPISODES)},
}

logger = logging.getLogger(__name__)


class DatasetFolder(LockedFolder):
    """Files of one dataset; nothing is opened or made before a method is called.

    path         of the folder
    committed    numbers of the files that are committed, in the folder of a module; None: the names say it
    """

    kind, writer = DATASET, "another sink"

    def __init__(self, path: str | os.PathLike[str], committed: Collection[int] | None = None) -> None:
        super().__init__(path)
        self._committed = committed

    @property
    def has_agents(self) -> bool:
        """True if this is the dataset of several agents, by its description. Raises DatasetError for a damaged one."""
        return (self.path / DESCRIPTION).exists() and "agents" in self.read()

    @property
    def last_kind(self) -> str:
        """The kind of the file that commits those of its number."""
        return ENV_EPISODES if self.has_agents else STEPS

    def module(self, name: str, committed: Collection[int] | None = None) -> "DatasetFolder":
        """The folder of a module."""
        return DatasetFolder(self.path / MODULES / name, committed)

    def numbers(self) -> list[int]:
        """The numbers of the committed files, ascending."""
        names = [path.stem for path in (self.path / self.last_kind).glob(f"*{_SUFFIX}")]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        return numbers if self._committed is None else [each for each in numbers if each in self._committed]

    def check_pairs(self) -> list[int]:
        """Return `numbers()`. Raises DatasetError if steps are missing that were committed.

        A kill leaves only the last file of episodes without its steps.
        """
        numbers = self.numbers()
        for name in self._module_names():
            self.module(name, numbers).check_pairs()
        for path in sorted((self.path / EPISODES).glob(f"*{_SUFFIX}")):
            if path.stem.isdecimal() and numbers and int(path.stem) < numbers[-1] and int(path.stem) not in numbers:
                raise DatasetError(
                    f"{self.path / STEPS / path.name} is missing, expected a file for each in {STEPS} and {EPISODES}"
                )
        return numbers

    def file(self, kind: str, number: int) -> Path:
        """The committed file of a kind, `STEPS` or `EPISODES`."""
        return self.path / kind / f"{number:06d}{_SUFFIX}"

    def partial(self, kind: str, number: int) -> Path:
        """The file of a kind while it is written."""
        return self.path / kind / f".{number:06d}{_SUFFIX}.part"

    # Reading

    def read(self) -> dict[str, Any]:
        """The description, also of formats 1 and 2. Raises DatasetError if there is none, or it is damaged."""
        path = self.path / DESCRIPTION
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing() from None
        except OSError as error:
            raise DatasetError(f"{path} can't be read: {error}") from None
        text = DATASET.json_of(data, path)
        if isinstance(text, dict) and text.get("format") == DATASET.name and text.get("version") in (1, 2):
            text = {name: each for name, each in text.items() if name != "version"}  # which had no digest
        else:
            text = DATASET.manifest_of(data, path)
        for field, kinds in (_AGENTS_KINDS if "agents" in text else _KINDS).items():
            if not isinstance(text.get(field), kinds):
                raise DatasetError(f"{path}: {field} is {str(text.get(field))[:80]}, expected that of a dataset")
        return {**text, "kind": DATASET.name, "format": DATASET.format}

    def _missing(self) -> DatasetError:
        if self.path.is_file():
            return DatasetError(f"{self.path} is a file, expected the folder of a dataset")
        if theirs := self.of_others():
            return theirs
        if (self.path / LOCK).exists():
            return no_steps(self.path)
        return DatasetError(
            f"there is no dataset at {self.path}, expected a folder with {DESCRIPTION}, or a dataset of Minari's"
        )

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
        """See `LockedFolder`. Raises DatasetError for the folder of a module."""
        if self.path.absolute().parent.name == MODULES and (self.path.parent.parent / DESCRIPTION).exists():
            raise DatasetError(f"{self.path} is a module's part of the dataset at {self.path.parent.parent}")
        super().lock()

    def of_others(self) -> DatasetError | None:
        """The error for a folder with files of somebody else; None: it has none."""
        for pattern, owner in _OF_OTHERS.items():
            for found in sorted(self.path.glob(pattern)):
                name = found.relative_to(self.path)
                text = f"{self.path} has {name}, as {owner} has, expected a dataset, or a folder without such files"
                return DatasetError(text)
        return None

    def remove_left(self) -> list[int]:
        """Remove files that were never committed, which a killed sink has left; return the numbers of the others.

        Raises DatasetError if a file of steps is missing that was committed.
        """
        committed = self.check_pairs()
        for kind in self._kinds():
            for path in (self.path / kind).glob(f".*{_SUFFIX}.part"):
                path.unlink(missing_ok=True)
            for path in (self.path / kind).glob(f"*{_SUFFIX}"):
                if path.stem.isdecimal() and int(path.stem) not in committed:
                    path.unlink(missing_ok=True)
        for path in [*self.path.glob(f".{DESCRIPTION}.*"), *self.path.glob(f"{MODULES}/*/.{DESCRIPTION}.*")]:
            path.unlink(missing_ok=True)
        return committed

    def _module_names(self) -> list[str]:
        return sorted(path.name for path in (self.path / MODULES).glob("*"))

    def _kinds(self) -> list[str]:
        """All kinds of files, the one that commits last."""
        of_modules = [f"{MODULES}/{name}/{kind}" for name in self._module_names() for kind in (EPISODES, STEPS)]
        return [*of_modules, *([ENV_EPISODES] if self.has_agents else [EPISODES, STEPS])]

    def describe(self, description: dict[str, Any], modules: Mapping[str, dict[str, Any]]) -> None:
        """Write the description, and then those of modules, with the same runs.

        modules    name of the folder -> `observation_space`, `action_space` and `columns`, or all that was read there

        Logs that the runs are of several environments. Raises DatasetError if the dataset can't be written to.
        """
        envs = [env for run in description["runs"] if (env := environment_of(run)) is not None]
        if others := sorted({*envs[1:]} - {*envs[:1]}):
            logger.warning("%s has steps of %s and of %s: expected one environment", self.path, envs[0], others[0])
        self._write(description)
        own = {"rollflow": description["rollflow"]}
        for name, kind in modules.items():
            make_folder(self.module(name).path, self.path)
            self.module(name)._write({**own, **kind, "runs": description["runs"]})

    def _write(self, description: dict[str, Any]) -> None:
        try:
            write_file(self.path / DESCRIPTION, DATASET.manifest_bytes(description))
            sync(self.path)
        except OSError as error:
            raise DatasetError(f"a dataset can't be written to {self.path}: {error}") from error

    def check_kind(self, description: dict[str, Any], kind: dict[str, Any]) -> None:
        """Raise DatasetError, with the fields that differ, unless fragments of a kind fit a description."""
        if difference := kind_difference(description, kind, ("in the dataset", "in the fragment")):
            raise DatasetError(
                f"a fragment does not fit the dataset at {self.path}: {difference}; expected fragments of one kind"
            )


def kind_difference(ours: Mapping[str, Any], others: Mapping[str, Any], sides: tuple[str, str]) -> str | None:
    """Text of the places where the kinds of two fragments, or datasets, differ; None if they are equal.

    ours, others    with `observation_space`, `action_space` and `columns`
    sides           where each of them is found, for the text
    """
    spaces = ("observation_space", "action_space")
    texts = [first_difference(ours[each], others[each], each, sides) for each in spaces]
    mine, theirs = ours["columns"], others["columns"]
    alone = zip((sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())), sides, strict=True)
    texts += [f"the columns {names} are {side} alone" for names, side in alone if names]
    texts += [
        first_difference(mine[name], theirs[name], f"columns[{name!r}]", sides) for name in mine if name in theirs
    ]
    return ", ".join(filter(None, texts)) or None


def environment_of(run: Mapping[str, Any]) -> str | None:
    """Id of the environment in the record of a run, as far as it is known."""
    rollout = run.get("rollout")
    return rollout.get("env") if isinstance(rollout, Mapping) else None


def no_steps(path: Path) -> DatasetError:
    """The error for a dataset without a committed file."""
    return DatasetError(
        f"the dataset at {path} has no steps yet: no file is committed; expected a sink that had fragments, and closed"
    )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets the name `folder` at the end of the block; after an error nothing stays.

    Raises DatasetError if there is one of this name.
    """
    if folder.exists():
        raise DatasetError(f"{folder} is there already, expected another name")
    with replacing(folder) as partial:
        partial.mkdir()
        yield partial


def make_folder(path: Path, within: Path) -> None:
    """Make a folder, and those around it within one that is there, with their names on the disk."""
    if path != within and not path.is_dir():
        make_folder(path.parent, within)
        path.mkdir()
        sync(path.parent)


def checked_id(whose: str, id_: Any) -> str:
    """The text of an id. Raises DatasetError for one that no dataset can hold."""
    if type(id_) not in (str, int) or id_ == "":
        raise DatasetError(f"the {whose} {id_!r} has an id of {type(id_).__name__}, expected text or a whole number")
    return str(id_)


def stored_ids(whose: str, ids: Iterable[Any]) -> dict[str, Any]:
    """Text -> id. Raises DatasetError for an id that no dataset can hold, and if two have one text."""
    return ids_by_text(whose, ids, DatasetError, partial(checked_id, whose))
