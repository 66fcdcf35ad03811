"""A trainer that the rollout's process starts, and what is left of it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from feeding_rollouts import SHORT
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Graph, Rollout, feed
from rollflow.sinks import TrainerProcess, TrainerSink
from rollflow.stream.data.errors import RunError

pytestmark = pytest.mark.slow  # processes that import torch, in every test

FRAGMENTS: dict[str, Any] = {"yields": "fragments"}


def rollout_of(**options: Any) -> Rollout:
    return Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, seed=0, **options)


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


def test_it_gets_what_the_rollout_makes_and_ends_after_it(tmp_path: Path) -> None:
    with TrainerProcess(counting(tmp_path / "told"), stream=FRAGMENTS) as trainer:
        fed(rollout_of(num_fragments=3), trainer)
    assert (tmp_path / "told").read_text() == f"{trainer.pid} [0, 1, 2]"
    assert trainer.pid != os.getpid()
    assert is_gone(trainer)


def test_a_trainer_that_has_enough_ends_the_rollout() -> None:
    def train(stream: Any, count: int) -> int:
        for number, _ in enumerate(stream, start=1):
            stream.publish({"weight": stream_weight(number)})
            if number == count:
                return number
        return 0

    def stream_weight(number: int) -> Any:
        import torch

        return torch.tensor(float(number))

    rollout = rollout_of()
    with TrainerProcess(train, 3, stream=FRAGMENTS) as trainer:
        assert fed(rollout, trainer) == "the trainer has ended"
    assert trainer.result == 3
    assert rollout.policy_version >= 2
    assert is_gone(trainer)


def test_what_it_raises_is_raised_here_with_its_traceback() -> None:
    def train(stream: Any) -> None:
        for _ in stream:
            raise ArithmeticError("it broke")

    with pytest.raises(RunError, match="the trainer train has failed: ArithmeticError: it broke") as raised:
        with TrainerProcess(train) as trainer:
            fed(rollout_of(), trainer)
    assert any('raise ArithmeticError("it broke")' in note for note in raised.value.__notes__)
    assert is_gone(trainer)


def test_one_that_is_killed_is_named_at_once() -> None:
    def train(stream: Any) -> None:
        for _ in stream:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunError, match=r"the trainer train, process \d+, was killed by SIGKILL"):
        with TrainerProcess(train) as trainer:
            fed(rollout_of(), trainer)  # which would wait for another one
    assert is_gone(trainer)


def test_one_that_nobody_feeds_ends_with_the_block(tmp_path: Path) -> None:
    with TrainerProcess(counting(tmp_path / "told"), stream={"join_timeout": None}) as trainer:
        pass
    assert (tmp_path / "told").read_text() == f"{trainer.pid} []"
    assert is_gone(trainer)


@pytest.mark.parametrize("is_deaf", [False, True])
def test_one_that_does_not_end_is_made_to(is_deaf: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_deaf:
        monkeypatch.setattr("rollflow.sinks.trainer.process.CLOSE_TIMEOUT_S", 0.5)

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
        ({"transport": "tcp"}, "transport is 'tcp', expected 'shm' or 'unix'"),
        ({"stream": ["max_lag"]}, r"stream is \['max_lag'\], expected the arguments of a TrainerStream by their names"),
    ],
)
def test_what_can_not_be_run_is_refused_when_it_is_made(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainerProcess(**{"train": counting(Path("nowhere")), **given})


def test_it_runs_once() -> None:
    trainer = TrainerProcess(counting(Path("nowhere")))
    with pytest.raises(RunError, match="has not been started"):
        trainer.check()
    with pytest.raises(ValueError, match="linger is -1"):
        TrainerProcess(counting(Path("nowhere")), linger=-1)


_PARENT = """
import signal, sys; sys.path[:] = {path!r}
from rollflow.sinks import TrainerProcess
def train(stream):
    signal.pause()
with TrainerProcess(train) as trainer:
    print(trainer.pid, flush=True)
    signal.pause()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing tells when another's child has ended")
def test_it_ends_with_its_parent_even_where_that_is_killed() -> None:
    program = _PARENT.format(path=sys.path)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        select.select([child], [], [])
        os.close(child)


def test_a_graph_of_ones_own_ends_with_its_trainer() -> None:
    def train(stream: Any) -> None:
        raise ArithmeticError("it broke")

    async def main(trainer: TrainerProcess) -> None:
        rollout = rollout_of()
        graph = Graph("mine")
        graph.connect(rollout.fragments, TrainerSink(trainer.address, watch=trainer.watch))
        async with graph.run() as run:
            await run.wait()

    with pytest.raises(RunError, match="it broke") as raised:
        with TrainerProcess(train) as trainer:
            anyio.run(main, trainer)
    assert "in node 'trainer_sink'" in raised.value.__notes__


def test_a_trainer_that_ends_before_a_rollout_has_come_ends_it_as_well() -> None:
    def train(stream: Any) -> int:
        return 7  # it was at its last step when it was saved

    with TrainerProcess(train) as trainer:
        assert fed(rollout_of(), trainer) == "the trainer has ended"
    assert trainer.result == 7


def test_arguments_that_a_stream_has_not_are_refused_before_there_is_a_process() -> None:
    for unknown in ("foo", "address"):
        with pytest.raises(
            ValueError, match=rf"stream has \['{unknown}'\], expected arguments of a TrainerStream among"
        ):
            TrainerProcess(print, stream={unknown: 1})
