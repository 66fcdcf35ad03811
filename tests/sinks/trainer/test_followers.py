"""Followers of a trainer: they get its newest weights, and nothing of the trainer waits for them."""

import queue
import ssl
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from feeding_rollouts import feeding, trainer, weights
from remote_rollouts import await_that

from rollflow import Columns, TrainerStream
from rollflow.sinks import WeightsFollower
from rollflow.stream import WireError
from rollflow.stream.wire import Fragment, SourceConnection

Taken = queue.Queue[tuple[int, float]]


def taking() -> tuple[Taken, Any]:
    """A queue of versions and weights, and what puts them there."""
    taken: Taken = queue.Queue()
    return taken, lambda version, came: taken.put((version, float(came["weight"])))


@pytest.mark.parametrize("options", [{}, {"max_lag": 0, "on_excess": "pace"}], ids=["free", "paced"])
@pytest.mark.parametrize("shares", [False, True], ids=["sent", "shared"])
def test_a_trainer_learns_as_without_its_followers(shares: bool, options: dict[str, Any], tmp_path: Path) -> None:
    taken, take = taking()
    address = f"shm:{tmp_path}/trainer" if shares else "tcp://127.0.0.1:0"
    with (
        trainer(address, **options) as stream,
        feeding(stream.address, num_fragments=6, lanes=2),
        WeightsFollower(stream.address, take),
    ):
        counts = []
        for batch in stream:
            counts.append(len(batch[Columns.REWARDS]))
            version = stream.publish(weights(float(len(counts))))
            while taken.get(timeout=30) != (version, float(len(counts))):
                pass
            assert len(stream.sources) <= 1
    assert len(set(counts)) == 1
    assert len(counts) == 6


@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_a_follower_begins_with_the_newest_weights_and_follows_the_next_trainer(scheme: str, tmp_path: Path) -> None:
    address, (taken, take) = f"{scheme}:{tmp_path}/trainer", taking()
    with WeightsFollower(address, take) as follower:
        assert follower.problem
        for value in (7.0, 9.0):  # the second one counts anew
            with TrainerStream(address) as stream:
                stream.publish(weights(value - 1.0))
                stream.publish(weights(value))
                stream._listener.open()
                assert taken.get(timeout=30) == (2, value)
                await_that(lambda: not follower.problem)
            await_that(lambda: "said goodbye" in follower.problem)
    assert taken.empty()


def test_a_follower_speaks_tls_and_proves_the_secret(tmp_path: Path) -> None:
    authority, (taken, take) = trustme.CA(), taking()
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    with TrainerStream("tcp://127.0.0.1:0", secret="one", tls=server) as stream:
        stream.publish(weights(3.0))
        stream._listener.open()
        with WeightsFollower(stream.address, take, secret="one", tls=client):
            assert taken.get(timeout=30) == (1, 3.0)
        with WeightsFollower(stream.address, take, secret="another", tls=client) as follower:
            await_that(lambda: follower.error is not None)
            assert "secret" in follower.problem
    with pytest.raises(WireError, match="memory is not encrypted, expected tls=None"):
        WeightsFollower("shm:/memory", take, tls=client)
    with pytest.raises(WireError, match=r"expected 'tcp:.*'unix:/path' or 'shm:/path'"):
        WeightsFollower("/memory", take)


def test_what_a_follower_raises_ends_its_following_alone() -> None:
    def take(version: int, came: Any) -> None:
        raise ValueError("not these")

    taken, other = taking()
    with trainer() as stream:
        stream._listener.open()
        with WeightsFollower(stream.address, take) as follower, WeightsFollower(stream.address, other):
            stream.publish({"weight": torch.tensor(1.0)})
            await_that(lambda: follower.error is not None)
            assert follower.problem == "not these"
            stream.publish(weights(2.0))
            while taken.get(timeout=30) != (2, 2.0):
                pass


def test_fragments_of_a_follower_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_one(self: Any, connection: SourceConnection) -> None:
        if connection.next == 1 and connection.phase.name == "RUNNING":
            self._session.given = 1
            connection.send(Fragment(0, 1, {}, {}))

    monkeypatch.setattr("rollflow.sinks.trainer.uplink.TrainerUplink._send", send_one)
    with trainer() as stream:
        stream._listener.open()
        with WeightsFollower(stream.address, taking()[1]) as follower:
            await_that(lambda: follower.error is not None)
            assert "fragment 1, expected at most 0" in follower.problem
