"""A replay host: rollouts feed it and trainers sample from it, over sockets, and across processes that are killed."""

import multiprocessing
import random
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import numpy as np
import pytest
import torch
from anyio import wait_all_tasks_blocked
from feeding_rollouts import SHORT, feeding, rollout_of, weights
from held_envs import await_that
from killable_trainer import forked
from leftovers import held_here
from newest_sampler import Newest
from replayed import Played, client_of, serving

from rollflow import Replay, Rollout, feed
from rollflow.cli.main import main
from rollflow.sinks import Prioritized, ReplayClient, SamplesPerInsert
from rollflow.sinks.replay.host import SampleServer
from rollflow.stream import ReplayError
from rollflow.stream.data.errors import WireError
from rollflow.stream.net.endpoint import endpoint_at
from rollflow.stream.observe.run_socket import FOLDER, snapshots
from rollflow.stream.wire import Fragment, Limits, ReceiverSession

SECRET = "correct horse battery staple"


def check_rows(batch: dict[str, Any]) -> None:
    """Each row is a step as its environment made it: three columns name it, and the next observation follows it."""
    assert torch.equal(batch["seen"], batch["obs"])
    assert torch.equal(batch["new_obs"], batch["obs"] + torch.tensor([0, 0, 1]))
    assert (batch["rewards"] > batch["obs"][:, 2]).all()


def steps_by_slot(batch: dict[str, Any]) -> dict[int, list[int]]:
    """Slot -> the numbers of its steps, ascending."""
    slots, numbers = batch["obs"][:, 0].tolist(), batch["rewards"].long().tolist()
    return {slot: sorted(number for each, number in zip(slots, numbers, strict=True) if each == slot) for slot in slots}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["unix", "tcp", "shm"])
def test_what_is_sampled_is_what_several_rollouts_have_inserted_each_step_once(tmp_path: Path, scheme: str) -> None:
    replay = Replay(4096, sampler=Newest())
    before = held_here()
    with (
        serving(replay, tmp_path, scheme, secret=SECRET) as host,
        client_of(host, secret=SECRET) as one,
        client_of(host, secret=SECRET) as other,
    ):
        options: dict[str, Any] = {"num_fragments": 4, "sink": {"secret": SECRET}}
        more = feeding(host.rollouts, [2], seed=1, **options)
        with feeding(host.rollouts, [0, 1], seed=0, **options) as first, more as second:
            check_rows(one.sample(8))
        made = first.rollout.num_steps + second.rollout.num_steps
        del first, second  # which hold memory that was lent
        batch = other.sample(made)
        check_rows(batch)
        by_slot = steps_by_slot(batch)
        assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_slot.values())
        assert (sorted(by_slot), len(batch["rewards"])) == ([0, 1, 2], made)
        assert one.report().inserted == made
    after = held_here()
    for name in ("descriptors", "mappings"):  # of earlier tests some may have gone meanwhile
        assert after[name] <= before[name]


def test_top_shows_a_host_with_its_counts_and_the_side_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "runs"))
    rate = SamplesPerInsert(1.0, min_size=16, error_buffer=32)
    with serving(Replay(4096, batch_size=16, rate=rate), tmp_path) as host, feeding(host.rollouts, seed=0):
        await_that(lambda: host.replay.report().waiting == "insert")
        [shown] = [run for run in snapshots() if run["kind"] == "ReplayHost"]
        assert shown["conclusion"].startswith("32 steps inserted, 0 removed, 0 sampled: 0.00 samples per insert")
        assert "inserts wait for samples" in shown["conclusion"]
        assert main(["top", "--once"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"ReplayHost unix:{tmp_path}"[:60] in text
    assert "32 steps inserted, 0 removed, 0 sampled" in text


@pytest.mark.slow
def test_a_side_that_stands_still_holds_the_other_one_within_the_ratio(tmp_path: Path) -> None:
    replay = Replay(4096, rate=SamplesPerInsert(2.0, min_size=32, error_buffer=64), batch_size=8, seed=0)
    with serving(replay, tmp_path) as host, client_of(host) as client:
        with feeding(host.rollouts, [0, 1]) as running:  # without an end
            await_that(lambda: client.report().waiting == "insert")
            held = client.report()
            assert 2 * held.inserted <= 2 * 32 + 64
            assert client.report().insert_wait_s > held.insert_wait_s  # also while the wait lasts
            steps = running.rollout.num_steps
            for _ in range(50):
                check_rows(client.sample())
                report = client.report()
                assert 2 * 32 - 64 <= 2 * report.inserted - report.sampled <= 2 * 32 + 64
            assert running.rollout.num_steps > steps
        with pytest.raises(ReplayError, match=r"the rate holds this sample back.*feed this host: none is there"):
            while True:
                client.sample(wait_s=0.1)
        waits = threading.Thread(target=pytest.raises, args=(ReplayError, client.sample), kwargs={"wait_s": 1.0})
        waits.start()
        await_that(lambda: client.report().waiting == "sample")
        waits.join()
        assert client.report().sample_wait_s > 0 < client.report().insert_wait_s


def test_a_batch_that_is_too_large_for_the_sampler_is_not_drawn(tmp_path: Path) -> None:
    replay = Replay(4096, seed=0)
    limits = Limits(max_frame=1 << 16, undelivered=1 << 17)
    with serving(replay, tmp_path) as host, client_of(host, limits=limits) as client:
        with feeding(host.rollouts, [0, 1], num_fragments=6):
            pass
        there = len(replay)
        with pytest.raises(ReplayError, match=r"the batch has [\d,]+ bytes, expected at most 49,152: ask for fewer"):
            client.sample(2000)
        assert (client.report().sampled, len(replay)) == (0, there)
        check_rows(client.sample(8))
        assert client.report().sampled == 8


def test_priorities_and_weights_come_from_the_trainer(tmp_path: Path) -> None:
    checkpoint = tmp_path / "replay"
    options: dict[str, Any] = {"checkpoint": checkpoint, "every": 0.05}

    def prioritized() -> Replay:
        return Replay(4096, sampler=Prioritized(alpha=1.0, epsilon=1e-9), batch_size=64, seed=0)

    with serving(prioritized(), tmp_path, **options) as host, client_of(host) as client:
        assert client.publish(weights(5.0)) == 1
        with feeding(host.rollouts, [0], num_fragments=2):
            pass
        batch = client.sample()
        assert (batch["weight"] == 5.0).all()
        assert (batch["policy_version"] == 1).all()
        ids = np.unique(client.sample(4096)["ids"])
        client.update_priorities(ids, np.arange(len(ids)) == 3)
        assert set(client.sample()["ids"].tolist()) == {ids[3]}
    with serving(prioritized(), tmp_path, **options) as host, client_of(host) as client:
        drawn = client.sample()
        assert len(set(drawn["rewards"].tolist())) == 1  # priorities were saved
        client.update_priorities(ids, np.ones(len(ids)))  # positions of before the start may be other steps' now
        assert len(set(client.sample()["ids"].tolist())) == 1
        client.update_priorities(drawn["ids"], np.zeros(64))
        with pytest.raises(ReplayError, match="ids are"):
            client.update_priorities([1, 2], [1.0])


def test_who_does_not_fit_is_refused_in_words_and_the_others_go_on(tmp_path: Path) -> None:
    with serving(Replay(512), tmp_path, secret=SECRET) as host, client_of(host, secret=SECRET) as client:
        with client_of(host, secret="another") as stranger, pytest.raises(WireError, match="secret"):
            stranger.report()
        with feeding(host.rollouts, [0], num_fragments=2, sink={"secret": SECRET}):
            pass
        other = Rollout("CartPole-v1", num_envs=2, fragment_length=8, num_fragments=2, seed=0)
        with pytest.raises(WireError, match=r"column '\w+'.*one replay for each kind of environment"):
            feed(other, host.rollouts, secret=SECRET, linger=20.0)
        with pytest.raises(ReplayError, match="count is 513, expected 1 to 512"):
            client.sample(513)
        with pytest.raises(ReplayError, match="Uniform has no priorities"):
            client.update_priorities([1], [1.0])
        with feeding(host.rollouts, [1], num_fragments=2, sink={"secret": SECRET}):
            pass
        assert set(steps_by_slot(client.sample(500))) == {0, 1}


def test_a_client_too_many_is_told_so_and_served_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleServer, "most_clients", 1)
    with serving(Replay(512), tmp_path) as host, client_of(host) as one:
        assert one.report().inserted == 0  # a client dials when it is made: the other comes later
        with client_of(host, timeout=0.3) as other:
            with pytest.raises(ReplayError, match="1 clients are served already, expected fewer"):
                other.report()
            one.close()
            other.timeout = 20.0
            assert other.report().inserted == 0


def server_of(replay: Replay, folder: Path) -> SampleServer:
    return SampleServer(replay, endpoint_at(f"unix:{folder}/to", None, None, None, listens=True), Mock())


def test_a_client_that_was_lost_makes_room_for_a_new_one(tmp_path: Path) -> None:
    server = server_of(Replay(512), tmp_path)
    server.most_clients = 3
    for number in range(6):
        server._take_in(Mock(lost_at=None), Mock(session=bytes([number])))
        server._clients[bytes([number])].lost_at = None if number == 1 else float(number)
    assert list(server._clients) == [bytes([number]) for number in (1, 4, 5)]
    server._clients.clear()
    server.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_samples_that_the_rate_holds_back_are_answered_in_order(wait_s: float, backend: str, tmp_path: Path) -> None:
    """An insert lets three samples through, and another one comes before those that wait have got their turn."""
    replay = Replay(512, rate=SamplesPerInsert(1.0, min_size=8, error_buffer=16), batch_size=16, seed=0)
    server = server_of(replay, tmp_path)
    answered: list[tuple[int, bool]] = []

    def come(number: int, wait_s: float) -> None:
        peer: Any = Mock(lost_at=None, session=ReceiverSession(bytes([number]), window=64))
        peer.connection.peer_max_frame = 1 << 20
        peer.connection.answer = lambda _, columns, rest: answered.append((number, rest["problem"] is None))
        server._clients[peer.session.token] = peer
        server.handle(peer, Fragment(0, 1, {}, {"name": "sample", "done": 0, "wait_s": wait_s}), 0.0)

    async def serve() -> None:
        replay.turns.enter_loop()
        async with anyio.create_task_group() as server._waiting:
            for number in range(4):
                come(number, 60.0)
                await wait_all_tasks_blocked()
            assert answered == []
            replay.insert(Played(2, 1, fragment_length=16).fragments[0])
            come(9, wait_s)
            await wait_all_tasks_blocked()
            server._waiting.cancel_scope.cancel()

    server._loop.write = Mock()  # type: ignore[method-assign]
    anyio.run(serve, backend=backend)
    server._clients.clear()
    server.close()
    numbers = [number for number, is_given in answered if is_given]
    assert numbers == [0, 1, 2]
    assert [number for number, is_given in answered if not is_given] == ([] if wait_s else [9])


@pytest.mark.slow
def test_a_host_over_tls_takes_who_has_a_certificate(tmp_path: Path, certificates: dict[str, ssl.SSLContext]) -> None:
    replay = Replay(512)
    with serving(replay, tmp_path, "tcp", secret=SECRET, tls=certificates["server"]) as host:
        mine = {"secret": SECRET, "tls": certificates["client"]}
        with client_of(host, **mine) as client, feeding(host.rollouts, [0], num_fragments=2, sink=mine):
            check_rows(client.sample(8))
        stranger = {"secret": SECRET, "tls": certificates["other client"]}
        with client_of(host, **stranger) as other, pytest.raises((WireError, ReplayError), match=r"certificate|TLS"):
            other.sample(8)
        with client_of(host, secret=SECRET) as bare, pytest.raises((WireError, ReplayError), match="TLS"):
            bare.sample(8)


def test_a_process_that_is_forked_keeps_no_address_of_a_host_taken(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_forked = context.Event()
    process = context.Process(target=_pause, args=(is_forked,), daemon=True)
    with serving(Replay(64), tmp_path, "tcp") as host, client_of(host) as client:
        assert client.report().inserted == 0
        process.start()
        assert is_forked.wait(20)
    addresses: list[Any] = [host.rollouts, host.trainers]
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.host, address.port), timeout=20)
    process.kill()
    process.join()


def test_a_host_that_is_gone_is_named_once_the_time_is_over(tmp_path: Path) -> None:
    with serving(Replay(64), tmp_path) as host:
        client = client_of(host)
        assert client.report().inserted == 0
    client.timeout = 0.3
    told = "host at unix:.* has not answered within 0.3 s: .*(is closing|No such file)"
    with client, pytest.raises(ReplayError, match=told):
        client.report()


def test_a_client_that_is_closed_says_so_at_once(tmp_path: Path) -> None:
    with serving(Replay(64), tmp_path) as host, client_of(host) as client:
        client.close()
        for call in (lambda: client.sample(8), client.report):
            with pytest.raises(ReplayError, match="this client is closed"):
                call()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"replay": "replay"}, "replay is 'replay', expected a Replay"),
        ({"trainers": "udp:1"}, "udp"),
        ({"rollouts": "tcp://0.0.0.0:0"}, "secret"),
    ],
)  # others: tests/cli/test_wrong_arguments.py
def test_a_host_that_can_not_be_is_refused(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    made = serving(**{"replay": Replay(64)} | options, tmp_path=tmp_path)
    with pytest.raises((ValueError, WireError), match=error), made:
        pass


@pytest.mark.wait_times(first_word_s=0.01)
def test_a_client_whose_host_is_away_says_so_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ReplayClient(f"unix:{tmp_path}/nobody", timeout=0.3) as client, pytest.raises(ReplayError, match="answered"):
        client.sample()
    assert f"waiting for 0 s: the replay host at unix:{tmp_path}/nobody is away" in caplog.text


@pytest.mark.wait_times(first_word_s=0.01)
@pytest.mark.parametrize(
    ("call", "given"), [("publish", [weights(0)]), ("report", []), ("update_priorities", [[], []])]
)
def test_a_client_whose_host_stands_still_says_so_in_the_log(
    call: str, given: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = SampleServer._called

    def stand_still(self: SampleServer, *args: Any, **options: Any) -> Any:
        await_that(lambda: "has not answered yet" in caplog.text)
        return called(self, *args, **options)

    monkeypatch.setattr(SampleServer, "_called", stand_still)
    replay = Replay(64, sampler=Prioritized())
    with serving(replay, tmp_path) as host, client_of(host) as client:
        getattr(client, call)(*given)
        assert f"waiting for 0 s: the replay host at {host.trainers} has not answered yet" in caplog.text


def test_what_is_held_back_when_the_host_ends_is_counted_as_undelivered(tmp_path: Path) -> None:
    replay = Replay(4096, rate=SamplesPerInsert(1.0, min_size=32), batch_size=8, seed=0)
    rollout: Any = rollout_of([0, 1])
    with serving(replay, tmp_path) as host:
        feeds = threading.Thread(target=feed, args=(rollout, host.rollouts), kwargs={"limits": SHORT, "linger": 20.0})
        feeds.start()
        await_that(lambda: replay.report().waiting == "insert")
    feeds.join()
    assert rollout.lost["undelivered"] > 0
    assert rollout.num_steps == replay.report().inserted + sum(rollout.lost.values())


def test_an_error_inside_a_host_comes_out_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="the disk is gone"), serving(Replay(64), tmp_path) as host:
        monkeypatch.setattr(SampleServer, "_forget_lost", Mock(side_effect=OSError("the disk is gone")))
        host.wait()


def test_a_checkpoint_that_can_not_be_written_acknowledges_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    with serving(Replay(512), tmp_path, checkpoint=folder / "replay", every=0.05) as host:
        folder.rename(tmp_path / "away")
        with client_of(host) as client, feeding(host.rollouts, [0], num_fragments=2) as running:
            await_that(lambda: running.sink._session.done == 2)
            assert client.report().inserted == running.rollout.num_steps
            assert running.sink._session.kept == 0
            (tmp_path / "away").rename(folder)
        assert running.sink._session.kept == running.sink._session.given  # it has waited for that
    again = Replay(512, sampler=Newest())
    again.load(folder / "replay")
    assert len(again) == running.rollout.num_steps
    with pytest.raises(ReplayError, match="of a replay with sampler=<one without a state>, expected Prioritized"):
        Replay(512, sampler=Prioritized()).load(folder / "replay")


# Processes that are killed


def _host(folder: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(1)
    replay = Replay(1 << 14, rate=SamplesPerInsert(1.0, min_size=32), batch_size=16, seed=0)
    checkpoint = Path(folder) / "replay"
    with serving(replay, Path(folder), checkpoint=checkpoint, every=0.1) as host:
        host.wait()


def _pause(is_forked: Any) -> None:
    is_forked.set()
    signal.pause()


def _rollout(folder: str, slots: list[int], count: int | None) -> None:
    torch.set_num_threads(1)
    rollout: Any = rollout_of(slots, num_fragments=count, seed=slots[0])
    feed(rollout, f"unix:{folder}/rollouts", limits=SHORT, name=f"of {slots}")
    (Path(folder) / f"made by {slots[0]}").write_text(str(rollout.num_steps))


def _sampler(folder: str) -> None:
    with ReplayClient(f"unix:{folder}/trainers") as client:
        while True:
            check_rows(client.sample())


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """A process, killed when it is left."""
    process = forked().Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_nothing_is_drawn_for_a_sampler_that_was_killed_while_it_waited(tmp_path: Path) -> None:
    with serving(Replay(512), tmp_path) as host, client_of(host) as client:
        with child(_sampler, str(tmp_path)):
            await_that(lambda: client.report().waiting == "sample")
        with feeding(host.rollouts, [0], num_fragments=2):
            pass
        assert client.report().inserted > 0
        assert client.report().sampled == 0
        check_rows(client.sample(8))
        assert client.report().sampled == 8


@pytest.mark.slow
def test_whoever_is_killed_each_acknowledged_step_is_there_once(tmp_path: Path) -> None:
    folder, kills = str(tmp_path), ["host", "host", "host", "rollout", "sampler"]
    random.Random(0).shuffle(kills)
    started: list[Any] = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        context = child(target, folder, *arguments)
        process = context.__enter__()
        started.append(context)
        return process

    try:
        whole = [start(_rollout, [slot, slot + 1], 40) for slot in (0, 2)]
        killed = {name: start(*how) for name, how in _kinds(100).items()}
        with ReplayClient(f"unix:{folder}/trainers", timeout=60.0) as client:
            for turn, name in enumerate(kills):
                inserted = client.report().inserted
                await_that(lambda inserted=inserted: client.report().inserted > inserted)  # type: ignore[misc]
                killed[name].kill()
                killed[name].join()
                killed[name] = start(*_kinds(101 + turn)[name])
            for process in whole:
                process.join(60)
                assert process.exitcode == 0
        killed["rollout"].kill()
        killed["host"].terminate()
        killed["host"].join(30)
        assert killed["host"].exitcode == 0
    finally:
        for context in started:
            context.__exit__(None, None, None)
    replay = Replay(1 << 14, sampler=Newest())
    replay.load(tmp_path / "replay")
    batch = replay.sample(len(replay))
    check_rows(batch)
    by_slot = steps_by_slot(batch)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_slot.values())
    for slot in (0, 2):
        made = int((tmp_path / f"made by {slot}").read_text())
        assert len(by_slot[slot]) + len(by_slot[slot + 1]) == made
    assert replay.report().inserted == len(replay)


def _kinds(slot: int) -> dict[str, tuple[Any, ...]]:
    """What is killed and started again: with this slot, of a rollout without an end."""
    return {"host": (_host,), "rollout": (_rollout, [slot], None), "sampler": (_sampler,)}
