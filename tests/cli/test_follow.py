"""`rollflow serve --follow`: served policies act with a running trainer's weights, whatever becomes of the trainer."""

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from served_policies import Echo, policy_of
from serving_process import serving

TRAINER = """
import sys, threading
sys.path[:] = {path!r}
import torch
from rollflow import TrainerStream
from rollflow.sinks import Sources
with TrainerStream(sys.argv[1], secret="of the trainer", sources=Sources(1, join_timeout=None)) as stream:
    threading.Thread(target=lambda: next(iter(stream), None), daemon=True).start()
    print(stream.address, flush=True)
    for line in sys.stdin:
        print(stream.publish({{line.split()[0]: torch.tensor([float(line.split()[1])])}}), flush=True)
"""


class Trainer:
    """A trainer in a process of its own, without rollouts, which publishes what it is told to."""

    def __init__(self, address: str = "tcp://127.0.0.1:0") -> None:
        command = [sys.executable, "-c", TRAINER.format(path=sys.path), address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def publish(self, offset: float, name: str = "offset") -> int:
        """Publish weights; their version."""
        assert self._process.stdin is not None
        print(name, offset, file=self._process.stdin, flush=True)
        return int(self._line())

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file with the trainer's secret."""
    (tmp_path / "key").write_text("of the trainer\n")
    return tmp_path / "key"


@contextmanager
def asking(url: str, count: int = 3) -> Iterator["queue.Queue[tuple[int, float]]"]:
    """Clients that ask all the time, each for itself: versions of weights, and offsets of the actions, as they come."""
    answers: queue.Queue[tuple[int, float]] = queue.Queue()
    failures: list[BaseException] = []
    is_over = threading.Event()

    def ask(number: int) -> None:
        try:
            with httpx.Client(base_url=url) as client:
                while not is_over.is_set():
                    answer = client.post("/v1/policies/echo/act", json={"observation": [number, 0]})
                    assert answer.status_code == 200, answer.text
                    body = answer.json()
                    assert body["action"][0] == number
                    answers.put((body["weights"], body["action"][1]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failures == []


def await_answer(answers: "queue.Queue[tuple[int, float]]", expected: tuple[int, float]) -> set[tuple[int, float]]:
    """Take answers until one is as expected; those before it."""
    before = set()
    while (answer := answers.get(timeout=30)) != expected:
        before.add(answer)
    return before


def await_line(process: "subprocess.Popen[str]", text: str) -> None:
    """Read what a process says until a line has a text."""
    assert process.stderr is not None
    assert any(text in line for line in process.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "shm:{tmp}/trainer"])
def test_a_server_follows_a_trainer_that_is_killed_and_comes_back(address: str, tmp_path: Path, secret: Path) -> None:
    policy_of(Echo, 5.0).save(tmp_path / "echo")
    trainer = Trainer(address.replace("{tmp}", str(tmp_path)))
    follow = ("--follow", trainer.address, "--follow-secret-file", str(secret))
    with serving(str(tmp_path / "echo"), *follow) as (process, url):
        with asking(url) as answers:
            await_answer(answers, (0, 5.0))
            assert trainer.publish(10.0) == 1
            assert await_answer(answers, (1, 10.0)) <= {(0, 5.0)}
            assert trainer.publish(20.0) == 2
            assert await_answer(answers, (2, 20.0)) <= {(0, 5.0), (1, 10.0)}
            trainer.kill()
            await_line(process, f"trainer {trainer.address} is away, weights 2 of it act on")
            answers.queue.clear()
            assert {answers.get(timeout=30) for _ in range(20)} == {(2, 20.0)}
            trainer = Trainer(trainer.address)
            await_line(process, f"trainer {trainer.address} is there, and is followed")
            assert trainer.publish(70.0) == 1
            assert await_answer(answers, (1, 70.0)) <= {(2, 20.0)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    trainer.kill()


@pytest.mark.slow
def test_weights_that_do_not_fit_and_another_secret_are_said_and_nothing_ends(tmp_path: Path, secret: Path) -> None:
    policy_of(Echo, 5.0).save(tmp_path / "echo")
    trainer = Trainer()
    with (
        serving(str(tmp_path / "echo"), "--follow", f"echo={trainer.address}") as (process, url),
        asking(url) as answers,
    ):
        await_line(process, f"trainer {trainer.address} is away, the weights that were saved act on: ")
        await_answer(answers, (0, 5.0))
    follow = ("--follow", f"echo={trainer.address}", "--follow-secret-file", str(secret))
    with serving(str(tmp_path / "echo"), *follow) as (process, url), asking(url) as answers:
        trainer.publish(3.0, "others")
        await_line(process, "do not act: weights do not fit module 'Echo': missing ['offset'], unknown ['others']")
        await_answer(answers, (0, 5.0))
        assert trainer.publish(4.0, "echo/offset") == 2
        await_answer(answers, (2, 4.0))
    trainer.kill()
