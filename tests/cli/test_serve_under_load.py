"""Servers over HTTP that are killed, or frozen, under load: clients go on, and each answer is for its session, once."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from remote_rollouts import await_that
from served_policies import Sums, policy_of
from serving_process import serving

CLIENTS, STEPS = 6, 100  # steps between two looks


class Load:
    """Clients that ask one after the other, each for its session, and ask again by the same number for what was cut."""

    def __init__(self, url: str) -> None:
        self.answers, self.losses, self.cuts = (Counter[int]() for _ in range(3))
        self.is_over = threading.Event()
        self._url = url

    def play(self, session: int) -> None:
        """Add to the session's sum until it is over; each answer must be the sum of what it was told."""
        total, number = 0, 0
        with httpx.Client(base_url=self._url, timeout=0.5) as client:
            while not self.is_over.is_set():
                fields = {"observation": [session, 0], "session": session, "begins": number == 0, "number": number}
                try:
                    answer = client.post("/v1/policies/sums/act", json=fields)
                except httpx.TransportError:
                    self.cuts[session] += 1
                    continue
                if answer.status_code == 410:
                    self.losses[session] += 1
                    total = number = 0
                    continue
                assert answer.status_code == 200, answer.text
                total += session
                assert (answer.json()["action"][0], answer.json()["number"]) == (total, number)
                number += 1
                self.answers[session] += 1

    def await_steps(self) -> None:
        """Wait until every client has got further answers."""
        before = Counter(self.answers)
        await_that(lambda: all(self.answers[session] >= before[session] + STEPS for session in range(1, CLIENTS + 1)))


@contextmanager
def load_on(url: str) -> Iterator[Load]:
    """Clients that ask a server until the block ends."""
    load = Load(url)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.play, session) for session in range(1, CLIENTS + 1)]
        try:
            load.await_steps()
            yield load
        finally:
            load.is_over.set()
        for client in clients:
            client.result(60)


@pytest.mark.slow
def test_clients_of_a_server_that_is_killed_and_started_anew_go_on_and_are_told_of_their_losses(tmp_path: Path) -> None:
    policy_of(Sums).save(tmp_path / "sums")
    with serving(str(tmp_path / "sums")) as (first, url), load_on(url) as load:
        first.kill()
        await_that(lambda: len(load.cuts) == CLIENTS)
        with serving(str(tmp_path / "sums"), "--http", url.removeprefix("http://")):
            load.await_steps()
            load.is_over.set()
    assert load.losses == dict.fromkeys(range(1, CLIENTS + 1), 1)


@pytest.mark.slow
def test_clients_of_a_server_that_is_frozen_go_on_with_their_sessions(tmp_path: Path) -> None:
    policy_of(Sums).save(tmp_path / "sums")
    with serving(str(tmp_path / "sums")) as (process, url), load_on(url) as load:
        process.send_signal(signal.SIGSTOP)
        await_that(lambda: len(load.cuts) == CLIENTS)
        process.send_signal(signal.SIGCONT)
        load.await_steps()
    assert not load.losses
