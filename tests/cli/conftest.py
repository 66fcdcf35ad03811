"""Runs that commands look at."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_errors import Says, assert_one_line
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Rollout
from rollflow.cli.main import main


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Says:
    """Runs a command that does what is asked: what it prints."""

    def run(*words: Any) -> str:
        assert main(list(map(str, words))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Says:
    """Runs a command that can't do what is asked: the error, of one line."""

    def run(*words: Any) -> str:
        capsys.readouterr()
        assert main(list(map(str, words))) == 1
        error = capsys.readouterr().err
        assert_one_line(error)
        return error

    return run


@pytest.fixture
def running(folder: Path) -> Iterator[Rollout]:
    """A rollout that has given a batch."""
    env = [partial(NumberedEnv, 0), partial(NumberedEnv, 1)]
    with Rollout(env, module=NumberedModule(), fragment_length=8, seed=0) as rollout:
        next(rollout.batches())
        yield rollout
