"""A trainer that the rollout's process starts, and what is left of it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import feeding_rollouts
import pytest
from feeding_rollouts import SHORT

from rollflow import Rollout, feed
from rollflow.sinks import Sources, TrainerProcess
from rollflow.stream.data.errors import RunError

FRAGMENTS: dict[str, Any] = {"yields": "fragments"}


def rollout_of(**options: Any) -> Any:
    return feeding_rollouts.rollout_of([0], **options)


def fed(rollout: Rollout, trainer: TrainerProcess) -> str | None:
    return feed(rollout, trainer.address, limits=SHORT, watch=trainer.watch)


def is_gone(trainer: TrainerProcess) -> bool:
    try:
        os.kill(trainer.pid, 0)
    except ProcessLookupError:
        return not Path(trainer.address.partition(":")[2]).parent.exists()
    return False


def counting(path: Path) -> Callable[[Any], None]:
    def train(stream: Any) -> None:
        sequences = [fragment.sequence for fragment in stream]
        path.write_text(f"{os.getpid()} {sequences}")

    return train


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [0, 3], ids=["nobody feeds it", "it is fed"])
def test_it_gets_what_the_rollout_makes_and_ends_after_it(fragments: int, tmp_path: Path) -> None:
    with TrainerProcess(
        counting(tmp_path / "told"), stream={**FRAGMENTS, "sources": Sources(1, join_timeout=None)}
    ) as trainer:
        if fragments:
            fed(rollout_of(num_fragments=fragments), trainer)
    assert (tmp_path / "told").read_text() == f"{trainer.pid} {list(range(fragments))}"
    assert trainer.pid != os.getpid()
    assert is_gone(trainer)


@pytest.mark.slow
def test_a_trainer_that_has_enough_ends_the_rollout() -> None:
    def train(stream: Any, enough: int) -> int:
        import torch

        for number, fragment in enumerate(stream, start=1):
            stream.publish({"weight": torch.tensor(float(number))})
            if fragment.policy_version >= enough:
                return int(fragment.policy_version)
        return 0

    rollout = rollout_of()
    with TrainerProcess(train, 2, stream=FRAGMENTS) as trainer:
        assert fed(rollout, trainer) == "the trainer has ended"
    assert 2 <= trainer.result <= rollout.policy_version
    assert is_gone(trainer)


def broken(stream: Any) -> None:
    for _ in stream:
        raise ArithmeticError("it broke")


def killed(stream: Any) -> None:
    for _ in stream:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "told", "notes"),
    [
        (broken, "the trainer broken has failed: ArithmeticError: it broke", 'raise ArithmeticError("it broke")'),
        (killed, r"the trainer killed, process \d+, was killed by SIGKILL", ""),
    ],
    ids=["raises", "is killed"],
)
def test_how_it_has_failed_is_raised_here_at_once(train: Any, told: str, notes: str) -> None:
    with pytest.raises(RunError, match=told) as raised:
        with TrainerProcess(train) as trainer:
            fed(rollout_of(), trainer)  # which would wait for another one
    assert notes in "".join(getattr(raised.value, "__notes__", ()))
    assert is_gone(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("is_deaf", [False, pytest.param(True, marks=pytest.mark.wait_times(close_s=0.5))])
def test_one_that_does_not_end_is_made_to(is_deaf: bool, tmp_path: Path) -> None:
    def train(stream: Any) -> None:
        if is_deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            (tmp_path / "begun").touch()
            signal.pause()
        finally:
            (tmp_path / "left").touch()

    with TrainerProcess(train, linger=0) as trainer:
        while not (tmp_path / "begun").exists():
            trainer.check()
    assert is_gone(trainer)
    assert (tmp_path / "left").exists() == (not is_deaf)
    trainer.check()


@pytest.mark.slow
def test_one_that_can_not_be_given_its_work_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollflow.sinks.trainer.process.Connection.send_bytes", interrupt)
    trainer = TrainerProcess(broken)
    with pytest.raises(KeyboardInterrupt):
        trainer.__enter__()
    assert is_gone(trainer)


@pytest.mark.slow
def test_an_error_in_the_block_ends_it_and_is_the_one_that_is_raised() -> None:
    def train(stream: Any) -> None:
        signal.pause()

    with pytest.raises(ZeroDivisionError):
        with TrainerProcess(train, linger=None) as trainer:
            _ = 1 / 0
    assert is_gone(trainer)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train": None}, r"train is None, expected a function that is called as train\(stream, \*args\)"),
        ({"linger": -1}, "linger is -1"),
        ({"stream": ["max_lag"]}, r"stream is \['max_lag'\], expected the arguments of a TrainerStream by their names"),
    ],
)
def test_what_can_not_be_run_is_refused_when_it_is_made(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainerProcess(**{"train": broken, **given})


def test_one_that_was_not_started_can_not_be_asked() -> None:
    with pytest.raises(RunError, match="has not been started"):
        TrainerProcess(broken).check()


_PARENT = """
import signal, sys; sys.path[:] = {path!r}
from rollflow.sinks import TrainerProcess
def train(stream):
    signal.pause()
with TrainerProcess(train) as trainer:
    print(trainer.pid, flush=True)
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing tells when another's child has ended")
def test_it_ends_with_its_parent_even_where_that_is_killed() -> None:
    program = _PARENT.format(path=sys.path)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        select.select([child], [], [])
        os.close(child)


@pytest.mark.slow
def test_a_trainer_that_ends_before_a_rollout_has_come_ends_it_as_well() -> None:
    def train(stream: Any) -> int:
        return 7  # it was at its last step when it was saved

    with TrainerProcess(train) as trainer:
        assert fed(rollout_of(), trainer) == "the trainer has ended"
        folder = Path(trainer.address.removeprefix("shm:")).parent
        assert folder.exists()
    assert trainer.result == 7
    assert not folder.exists()
