"""Runs that commands look at."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Rollout
from rollflow.stream.observe import run_socket


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the sockets of the test's runs alone."""
    monkeypatch.setenv(run_socket.FOLDER, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def running(folder: Path) -> Iterator[Rollout]:
    """A rollout that has given a batch."""
    env = [partial(NumberedEnv, 0), partial(NumberedEnv, 1)]
    with Rollout(env, module=NumberedModule(), fragment_length=8, seed=0) as rollout:
        next(rollout.batches())
        yield rollout
