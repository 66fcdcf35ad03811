"""Temporary files of killed processes are removed by other processes."""

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from remote_rollouts import await_that

from rollflow.sinks.trainer.process import OwnFolder
from rollflow.stream.observe.run_socket import FOLDER

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(FOLDER, "")  # runs have no sockets in it
    return tmp_path


def left(told: Any, *, forks: bool) -> None:
    """Make a folder, and be gone at once; a child may go on."""
    folder = OwnFolder()
    (folder.path / "socket").touch()
    if forks and not os.fork():
        told.recv()
        os._exit(0)
    told.send(str(folder.path))
    os._exit(1)


@pytest.mark.parametrize("forks", [False, True])
def test_a_folder_is_removed_once_nobody_is_left_who_has_it(folders: Path, forks: bool) -> None:
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=left, args=(theirs,), kwargs={"forks": forks})
    process.start()
    path = Path(mine.recv())
    process.join()
    others = OwnFolder()
    assert path.exists() == forks
    if forks:
        mine.send("go")
        theirs.close()
        with pytest.raises(EOFError):
            mine.recv()  # the child is going: what it has open is closed one by one
        await_that(lambda: OwnFolder().close() or not path.exists())
    assert others.path.exists()
    others.close()
    others.close()
    assert list(folders.iterdir()) == []


def test_what_is_not_one_is_left_alone(folders: Path) -> None:
    (folders / "rollflow-mine").mkdir()
    (folders / "rollflow-mine" / "lock").touch()
    (folders / "rollflow-notes").touch()
    OwnFolder().close()
    assert sorted(path.name for path in folders.iterdir()) == ["rollflow-mine", "rollflow-notes"]
