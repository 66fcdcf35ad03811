"""Several replay hosts as shards of one replay: what is drawn, its weights, the rate over all, and hosts that die."""

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feeding_rollouts import SHORT, feeding
from held_envs import await_that
from killable_trainer import forked
from replayed import Played, rows_of
from replayed_agents import fragments_of, rows_in, steps_by_module
from serial_module import at_of

from rollflow.sinks import (
    Episodes,
    Mixture,
    Newest,
    Prioritized,
    Replay,
    ReplayClient,
    ReplayHost,
    SamplesPerInsert,
    Sequences,
    Uniform,
)
from rollflow.stream import ReplayError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

COUNTS = (1, 3, 6)  # fragments of 10 steps on each host


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(2, sum(COUNTS), lengths=(100, 100), fragment_length=5)


@contextmanager
def shards(replays: list[Replay], folder: Path, **options: Any) -> Iterator[tuple[list[ReplayHost], ReplayClient]]:
    """Hosts of some replays, and a client of all of them."""
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(
                ReplayHost(
                    replay,
                    rollouts=f"unix:{folder}/rollouts {number}",
                    trainers=f"unix:{folder}/trainers {number}",
                    limits=SHORT,
                    **options,
                )
            )
            for number, replay in enumerate(replays)
        ]
        yield hosts, stack.enter_context(ReplayClient([str(host.trainers) for host in hosts], timeout=30.0))


def filled(make: Callable[[], Any], played: Played) -> list[Replay]:
    """A replay for each host, with 10, 30 and 60 steps."""
    replays, fragments = [], iter(played.fragments)
    for count in COUNTS:
        replay = Replay(4096, sampler=make(), seed=len(replays))
        for _ in range(count):
            replay.insert(next(fragments))
        replays.append(replay)
    return replays


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("make", [Uniform, lambda: Prioritized(alpha=1.0, epsilon=0.1)])
def test_steps_are_drawn_over_all_hosts_as_from_one_replay(
    make: Callable[[], Any], played: Played, tmp_path: Path
) -> None:
    with shards(filled(make, played), tmp_path) as (_, client):
        ids = np.unique(np.concatenate([client.sample(1000)["ids"].numpy() for _ in range(2)]))
        assert len(ids) == 100
        priorities = np.ones(100)
        if make is not Uniform:
            values = np.random.default_rng(1).gamma(1.0, size=100)
            client.update_priorities(ids, values)
            priorities = values + 0.1
        batches = [client.sample(2000) for _ in range(25)]
    drawn = np.searchsorted(ids, np.concatenate([each["ids"].numpy() for each in batches]))
    # With 99 degrees of freedom 161 is exceeded once in 10,000 times.
    assert chi_square(np.bincount(drawn, minlength=100), priorities / priorities.sum()) < 161
    for row in rows_of(batches[0])[:50]:
        played.check_row(row)


def test_importance_weights_over_all_hosts_worked_by_hand(played: Played, tmp_path: Path) -> None:
    with shards(filled(lambda: Prioritized(alpha=1.0, beta=0.5, epsilon=1e-9), played), tmp_path) as (_, client):
        batch = client.sample(500)
        assert torch.allclose(batch["weights"], torch.ones(500))  # all priorities are the same
        ids = np.unique(client.sample(2000)["ids"])
        hosts = np.unique(ids >> 40, return_counts=True)
        small = ids >> 40 == hosts[0][np.argmin(hosts[1])]
        assert (small.sum(), len(ids)) == (10, 100)
        client.update_priorities(ids, np.where(small, 4.0, 1.0))
        # Of 100 steps with a sum of 130, 10 have the probability 4/130, the others 1/130: the weights are
        # (100 * 4/130)**-0.5 and (100 * 1/130)**-0.5, over the larger one 0.5 and 1. Each host by itself has 1 alone.
        batch = client.sample(500)
        wanted = torch.where(torch.from_numpy(np.isin(batch["ids"].numpy(), ids[small])), 0.5, 1.0)
        torch.testing.assert_close(batch["weights"], wanted)
        assert 0.2 < (wanted == 0.5).double().mean() < 0.42  # 40/130


def test_sequences_come_from_all_hosts(played: Played, tmp_path: Path) -> None:
    replays = filled(lambda: Sequences(3, 2, of=Prioritized(alpha=1.0)), played)
    with shards(replays, tmp_path) as (_, client):
        batch = client.sample(64)
        assert batch["obs"].shape[:2] == (64, 5)
        assert len(np.unique(batch["ids"] >> 40)) == 3
        assert batch["weights"].shape == (64,)
        assert client.report().sampled == batch["loss_mask"].sum()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Mixture([(Prioritized(), 0.5), (Newest(), 0.5)]), "a Mixture with priorities can't be drawn from sev"),
        (Episodes, "Episodes can't be drawn from several hosts"),
    ],
)
def test_what_can_not_be_drawn_from_several_hosts_is_refused(
    make: Callable[[], Any], error: str, played: Played, tmp_path: Path
) -> None:
    with shards(filled(make, played), tmp_path) as (_, client), pytest.raises(ReplayError, match=error):
        client.sample(8)


def test_wrong_calls_of_several_hosts_are_refused(played: Played, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="expected one or more, each once"):
        ReplayClient([])
    with pytest.raises(ReplayError, match="expected one or more, each once"):
        ReplayClient(["unix:/a", "unix:/a"])
    with shards(filled(Uniform, played), tmp_path) as (_, client):
        with pytest.raises(ReplayError, match=r"count is \d+, expected 1 to 4096.*at unix:.*trainers \d"):
            client.sample(50_000)
        with pytest.raises(ReplayError, match=r"ids are \[2\] and values \[1\]"):
            client.update_priorities([1, 2], [1.0])
        with pytest.raises(ReplayError, match="Uniform has no priorities"):
            client.update_priorities(client.sample(8)["ids"], np.ones(8))
    with (
        ReplayClient([f"unix:{tmp_path}/nobody {each}" for each in range(2)], timeout=0.3) as client,
        pytest.raises(ReplayError, match=r"nobody 0 has not answered within 0\.3 s"),
    ):
        client.sample(8)


def test_any_number_of_threads_may_make_the_first_calls(played: Played, tmp_path: Path) -> None:
    threads = 6
    with shards(filled(Uniform, played), tmp_path) as (hosts, _), ThreadPoolExecutor(threads) as pool:
        for _ in range(20):
            with ReplayClient([str(host.trainers) for host in hosts], timeout=30.0) as client:
                client.publish({})  # all hosts are there
                meet = threading.Barrier(threads)

                def call(number: int, client: ReplayClient = client, meet: threading.Barrier = meet) -> int:
                    meet.wait(30)
                    return len(client.sample(8)["ids"]) if number % 3 else client.report().inserted

                assert set(pool.map(call, range(threads))) == {8, 100}


def test_a_client_that_is_closed_says_so_at_once(played: Played, tmp_path: Path) -> None:
    with shards(filled(Uniform, played), tmp_path) as (_, client):
        client.sample(8)
        client.close()
        for call in (lambda: client.sample(8), client.report):
            with pytest.raises(ReplayError, match="this client is closed"):
                call()


def test_the_rate_holds_over_all_hosts_also_where_only_one_is_fed(tmp_path: Path) -> None:
    rate = SamplesPerInsert(2.0, min_size=64, error_buffer=64)
    replays = [Replay(4096, rate=rate, batch_size=8, seed=seed) for seed in range(2)]
    with shards(replays, tmp_path) as (hosts, client):
        with pytest.raises(ReplayError, match=r"the rate holds this sample back.*, at unix:"):
            client.sample(wait_s=0.3)
        with feeding(hosts[0].rollouts, [0, 1]):
            await_that(lambda: client.report().waiting == "insert")
            for _ in range(20):
                client.sample()
            alone = client.report()
            with feeding(hosts[1].rollouts, [2], seed=1):
                for _ in range(60):
                    client.sample()
                    report = client.report()
                    # A host may be ahead by what the others have inserted since it was told.
                    assert 2 * 64 - 64 <= 2 * report.inserted - report.sampled <= 2 * 64 + 2 * 64
    assert alone.sampled == 160
    assert report.inserted > alone.inserted
    assert replays[1].report().inserted > 0
    assert sum(replay.report().sampled for replay in replays) == report.sampled == 160 + 60 * 8
    assert abs(report.ratio - 2.0) < 1.0


# Several agents


@pytest.fixture(scope="module")
def agents() -> list[MultiAgentFragment]:
    return fragments_of(count=5)


def filled_by_agents(make: Callable[[], Any], agents: list[MultiAgentFragment], **options: Any) -> list[Replay]:
    """A replay with the first fragment, and one with the others."""
    replays = [Replay(4096, sampler=make(), seed=seed, **options) for seed in range(2)]
    for number, fragment in enumerate(agents):
        replays[number > 0].insert(fragment)
    return replays


@pytest.mark.parametrize("make", [Uniform, lambda: Prioritized(alpha=1.0, epsilon=0.1)])
def test_steps_of_each_module_are_drawn_over_all_hosts_as_from_one_replay(
    make: Callable[[], Any], agents: list[MultiAgentFragment], tmp_path: Path
) -> None:
    expected = steps_by_module(agents)
    with shards(filled_by_agents(make, agents), tmp_path) as (_, client):
        first = client.sample(2000)
        assert first.keys() == expected.keys()
        ids = {each: np.unique(first[each]["ids"]) for each in first}
        priorities = {each: np.ones(len(found)) for each, found in ids.items()}
        if make is not Uniform:
            for number, (each, found) in enumerate(ids.items()):
                values = np.random.default_rng(number).gamma(1.0, size=len(found))
                client.update_priorities(found, values, each)
                priorities[each] = values + 0.1
        batches = [client.sample(2000) for _ in range(5)]
        report = client.report()
    for each, found in ids.items():
        assert len(found) == len(expected[each])
        rows = [at for batch in batches for at, row in rows_in(batch[each]) if expected[each][at] == row]
        assert len(rows) == 5 * 2000
        drawn = np.searchsorted(found, np.concatenate([batch[each]["ids"].numpy() for batch in batches]))
        counts = np.bincount(drawn, minlength=len(found))
        # By chance it is beyond five standard deviations of its distribution once in 100,000 times or less often.
        most = len(found) - 1 + 5 * np.sqrt(2 * (len(found) - 1))
        assert chi_square(counts, priorities[each] / priorities[each].sum()) < most
    assert report.inserted == sum(map(len, expected.values()))
    assert report.sampled == 6 * 2000 * len(expected)


def test_counts_priorities_and_refusals_are_by_module(agents: list[MultiAgentFragment], tmp_path: Path) -> None:
    expected = steps_by_module(agents)
    with shards(filled_by_agents(Prioritized, agents), tmp_path) as (_, client):
        first, *others = client.sample(64)
        for each in expected:
            assert client.report(each).inserted == len(expected[each])
            assert client.report(each).sampled == 64
        ids = np.unique(client.sample(2000)[first]["ids"])
        client.update_priorities(ids, np.where(np.arange(len(ids)) < 3, 1.0, 1e-9), first)
        batch = client.sample(500)
        assert set(batch[first]["ids"].tolist()) == set(ids[:3].tolist())
        assert all(len(np.unique(batch[each]["ids"])) > 3 for each in others)
        for call in (lambda: client.report("nobody"), lambda: client.update_priorities([1], [1.0], "nobody")):
            with pytest.raises(ReplayError, match="there are no steps of module 'nobody', expected one of"):
                call()


def test_a_module_that_only_one_host_has_comes_from_that_one(tmp_path: Path) -> None:
    with shards([Replay(4096, seed=seed) for seed in range(2)], tmp_path) as (hosts, client):
        with feeding(hosts[0].rollouts, [0], agents=2, num_fragments=2):
            pass
        assert client.sample(8).keys() == {"nested", "plain"}
        assert client.report("plain").sampled == 8
        assert client.report().inserted == hosts[0].replay.report().inserted


def test_a_sample_that_waits_for_the_first_steps_gets_those_of_several_agents(tmp_path: Path) -> None:
    with (
        shards([Replay(4096, seed=seed) for seed in range(2)], tmp_path) as (hosts, client),
        ThreadPoolExecutor(1) as threads,
    ):
        with pytest.raises(ReplayError, match="has no steps"):
            client.sample(8, wait_s=0.0)
        sampled = threads.submit(client.sample, 8, wait_s=30.0)
        with feeding(hosts[1].rollouts, [0], agents=2, num_fragments=2):
            assert sampled.result().keys() <= {"nested", "plain"}


def test_the_rate_of_each_module_holds_over_all_hosts(tmp_path: Path) -> None:
    rate = SamplesPerInsert(1.0, min_size=64, error_buffer=64)
    replays = [Replay(4096, rate=rate, batch_size=8, seed=seed) for seed in range(2)]
    with shards(replays, tmp_path) as (hosts, client), feeding(hosts[0].rollouts, [0, 1], agents=2):
        await_that(lambda: client.report().waiting == "insert")
        for _ in range(10):
            client.sample()
        with feeding(hosts[1].rollouts, [2, 3], agents=2, seed=1, sink={"name": "other"}):
            for _ in range(60):
                assert client.sample(wait_s=30.0).keys() <= {"nested", "plain"}
                for each in ("nested", "plain"):
                    report = client.report(each)
                    # A host may be ahead by what the others have inserted since it was told.
                    assert report.inserted - report.sampled <= 64 + 2 * 64
    assert all(replay.report().inserted for replay in replays)


# Hosts that are killed


def _host(folder: str, number: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(1)
    addresses = {"rollouts": f"unix:{folder}/rollouts {number}", "trainers": f"unix:{folder}/trainers {number}"}
    checkpoint = Path(folder) / f"replay {number}"
    with ReplayHost(Replay(512, seed=0), **addresses, checkpoint=checkpoint, every=0.1, limits=SHORT) as host:
        host.wait()


@pytest.mark.slow
@pytest.mark.parametrize("agents", [0, 2])
def test_a_host_that_dies_is_named_the_others_go_on_and_it_comes_back_with_its_steps(
    agents: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def started(number: int) -> Any:
        process = forked().Process(target=_host, args=(str(tmp_path), number))
        process.start()
        return process

    def slots() -> set[int]:
        batch = client.sample(256)
        return set(at_of((batch["plain"] if agents else batch)["obs"])[:, 0].tolist())

    addresses = [f"unix:{tmp_path}/trainers {number}" for number in range(2)]
    processes = [started(number) for number in range(2)]
    try:
        with ReplayClient(addresses, timeout=60.0) as client:
            for number in range(2):
                rollout: dict[str, Any] = {"num_fragments": 3, "seed": number, "agents": agents}
                with feeding(f"unix:{tmp_path}/rollouts {number}", [number], **rollout):
                    pass  # it ends once a checkpoint has its steps
            assert slots() == {0, 1}
            inserted = client.report().inserted
            processes[1].kill()
            processes[1].join()
            assert slots() == {0}
            assert client.missing == addresses[1:]
            assert f"{addresses[1]} is away" in caplog.text
            assert client.report().inserted == inserted
            processes[1] = started(1)
            with caplog.at_level(logging.WARNING):
                await_that(lambda: not client.missing)
                assert slots() == {0, 1}
            assert f"{addresses[1]} is there again" in caplog.text
            assert client.report().inserted == inserted
    finally:
        for process in processes:
            process.kill()
            process.join()
