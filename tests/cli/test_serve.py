"""`rollflow serve`: saved policies answer, take what is saved anew or published by a trainer, and end."""

import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from feeding_rollouts import trainer
from remote_hosts import BrokenWire
from served_policies import Echo, Sums, policy_of
from serving_process import Program, serving

from rollflow import PolicyClient, TrainerStream


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_saved_policies_are_served_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    policy_of(Echo, 1.0).save(tmp_path / "echo")
    policy_of(Sums, 2.0).save(tmp_path / "sums.zip")
    (tmp_path / "key").write_text("correct horse\n")
    served = (str(tmp_path / "echo"), f"adds={tmp_path / 'sums.zip'}", "--secret-file", str(tmp_path / "key"))
    with serving(*served) as (process, url):
        with PolicyClient(url, secret="correct horse", policy="adds", timeout=30.0) as client:
            assert [client.act([3, 0]).tolist() for _ in range(2)] == [[3.0, 2.0], [6.0, 2.0]]
            assert client.act([3, 0], policy="echo").tolist() == [3.0, 1.0]
            policy_of(Echo, 5.0).save(tmp_path / "echo")
            while client.act([3, 0], policy="echo").tolist() != [3.0, 5.0]:  # pytest's limit of time ends it
                pass
            assert client.act([3, 0]).tolist() == [9.0, 2.0]
        process.send_signal(number)
        assert process.wait(30) == 128 + number


@contextmanager
def followed(address: Any = "tcp://127.0.0.1:0") -> Iterator[TrainerStream]:
    """A trainer without rollouts, which takes followers in."""
    with trainer(str(address), secret="of the trainer") as stream:
        stream._listener.open()
        yield stream


def publish(stream: TrainerStream, offset: float, name: str = "offset") -> int:
    """Publish weights; their version."""
    return stream.publish({name: torch.tensor([offset])})


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file with the trainer's secret."""
    (tmp_path / "key").write_text("of the trainer\n")
    return tmp_path / "key"


@contextmanager
def asking(url: str, count: int = 3) -> Iterator["queue.Queue[tuple[int, float]]"]:
    """Clients that ask all the time, each for itself: versions of weights, and offsets of the actions, as they come."""
    answers: queue.Queue[tuple[int, float]] = queue.Queue()
    is_over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url) as client:
            while not is_over.is_set():
                answer = client.post("/v1/policies/echo/act", json={"observation": [number, 0]})
                assert answer.status_code == 200, answer.text
                body = answer.json()
                assert body["action"][0] == number
                answers.put((body["weights"], body["action"][1]))

    with ThreadPoolExecutor(count) as threads:
        asking = [threads.submit(ask, number) for number in range(count)]
        try:
            yield answers
        finally:
            is_over.set()
    for each in asking:
        each.result()


def await_answer(answers: "queue.Queue[tuple[int, float]]", expected: tuple[int, float]) -> set[tuple[int, float]]:
    """Take answers until one is as expected; those before it."""
    before = set()
    while (answer := answers.get(timeout=30)) != expected:
        before.add(answer)
    return before


def await_line(process: Program, text: str) -> None:
    """Read what a process says until a line has a text."""
    assert any(text in line for line in process.stderr)


@pytest.mark.slow
def test_a_server_follows_a_trainer_that_is_lost_and_comes_back(tmp_path: Path, secret: Path) -> None:
    policy_of(Echo, 5.0).save(tmp_path / "echo")
    with ExitStack() as trainers:
        stream = trainers.enter_context(followed())
        with closing(BrokenWire(stream.address, lambda: None)) as wire:
            follow = ("--follow", wire.address, "--follow-secret-file", str(secret))
            with serving(str(tmp_path / "echo"), *follow) as (process, url):
                with asking(url) as answers:
                    await_answer(answers, (0, 5.0))
                    assert publish(stream, 10.0) == 1
                    assert await_answer(answers, (1, 10.0)) <= {(0, 5.0)}
                    assert publish(stream, 20.0) == 2
                    assert await_answer(answers, (2, 20.0)) <= {(0, 5.0), (1, 10.0)}
                    wire.go_down()
                    await_line(process, f"trainer {wire.address} is away, weights 2 of it act on")
                    answers.queue.clear()
                    assert {answers.get(timeout=30) for _ in range(20)} == {(2, 20.0)}
                    trainers.close()
                    stream = trainers.enter_context(followed(stream.address))
                    wire.is_down = False
                    await_line(process, f"trainer {wire.address} is there, and is followed")
                    assert publish(stream, 70.0) == 1
                    assert await_answer(answers, (1, 70.0)) <= {(2, 20.0)}
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_weights_that_do_not_fit_and_another_secret_are_said_and_nothing_ends(tmp_path: Path, secret: Path) -> None:
    policy_of(Echo, 5.0).save(tmp_path / "echo")
    with followed() as stream:
        command = str(tmp_path / "echo"), "--follow", f"echo={stream.address}"
        with serving(*command) as (process, url), asking(url) as answers:
            await_line(process, f"trainer {stream.address} is away, the weights that were saved act on: ")
            await_answer(answers, (0, 5.0))
        with serving(*command, "--follow-secret-file", str(secret)) as (process, url), asking(url) as answers:
            publish(stream, 3.0, "others")
            await_line(process, "do not act: weights do not fit module 'Echo': missing ['offset'], unknown ['others']")
            await_answer(answers, (0, 5.0))
            assert publish(stream, 4.0, "echo/offset") == 2
            await_answer(answers, (2, 4.0))
