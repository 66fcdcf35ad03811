"""A replay keeps to its ratio, and neither side is held back for ever."""

import random
import threading
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedModule, numbered_envs
from property_examples import examples
from replayed import Played

from rollflow import Graph, Replay, Rollout
from rollflow.sinks import Episodes, SamplesPerInsert
from rollflow.stream import ReplayError

pytestmark = pytest.mark.anyio


@settings(max_examples=examples(40), deadline=None)
@given(
    rate=st.builds(
        SamplesPerInsert,
        st.sampled_from([0.05, 0.3, 1.0, 2.5, 8.0, 100.0]),
        st.integers(1, 1000),
        st.sampled_from([0.0, 100.0, 1e5]),
    ),
    sizes=st.tuples(st.integers(1, 500), st.integers(1, 500)),
    seed=st.integers(0, 1000),
    bias=st.sampled_from([0.02, 0.5, 0.98]),
)
def test_one_side_always_goes_on_and_the_ratio_keeps_its_bounds(
    rate: SamplesPerInsert, sizes: tuple[int, int], seed: int, bias: float
) -> None:
    draws, capacity = random.Random(seed), 1000 + sizes[0]
    table = Replay(capacity, rate=rate, batch_size=8)._tables[None]
    rows: Any = SimpleNamespace(inserted=0, removed=0)
    table.rows = rows
    wanted = {"insert": 1, "sample": 8}  # what each side comes with until it is let through
    for _ in range(1000):
        side, most = ("insert", sizes[0]) if draws.random() < bias else ("sample", sizes[1])
        wanted[side] = draws.randint(1, most)
        table.announce(wanted["insert"])
        may_insert, may_sample = table.admits_insert(wanted["insert"]), table.admits_sample(wanted["sample"])
        assert may_insert or may_sample
        if may_insert and (side == "insert" or not may_sample):
            rows.inserted += wanted["insert"]
            rows.removed = max(rows.removed, rows.inserted - capacity)
        else:
            table.sampled += wanted["sample"]
            table.most_samples = max(table.most_samples, wanted["sample"])
        beyond = (rows.inserted - rate.min_size) * rate.ratio - table.sampled
        buffer = rate.buffer(table.most_inserts, table.most_samples)
        assert beyond <= buffer + 1e-6
        assert table.sampled == 0 or beyond >= -max(buffer, table.most_samples) - 1e-6


def test_to_ask_changes_nothing() -> None:
    replay = Replay(4096, rate=SamplesPerInsert(1.0, min_size=500), batch_size=8, seed=0)
    replay.insert(Played(2, 1, fragment_length=16).fragments[0])
    before = replay.get_state()["tables"][0][1]["rate"]
    assert not replay.may_sample(700)
    with pytest.raises(ReplayError, match="holds this sample back"):
        replay.sample(700)
    assert replay.get_state()["tables"][0][1]["rate"] == before


def test_in_a_plain_loop_batches_come_as_the_ratio_asks() -> None:
    played = Played(4, 40, lengths=(100, 100), fragment_length=4)
    replay = Replay(500, rate=SamplesPerInsert(2.0, min_size=64), batch_size=8, seed=0)
    batches = 0
    for fragment in played.fragments:
        replay.insert(fragment)
        batches += sum(1 for _ in replay.batches())
    report = replay.report()
    assert (report.inserted, report.sampled) == (640, 8 * batches)
    assert abs((640 - 64) * 2 - report.sampled) <= 32  # the smallest error buffer for such inserts and samples
    assert "2.0" in str(report)
    with pytest.raises(ReplayError, match="the rate holds this sample back"):
        for _ in range(100):
            replay.sample()


def test_threads_wait_for_each_other_and_all_is_done() -> None:
    played = Played(4, 60, lengths=(3, 9), fragment_length=4)
    replay = Replay(200, rate=SamplesPerInsert(2.0, min_size=32), batch_size=8, seed=0)
    total, sampled = sum(fragment.num_steps for fragment in played.fragments), 0

    def insert() -> None:
        for fragment in played.fragments:
            replay.insert(fragment, wait_s=None)

    thread = threading.Thread(target=insert)
    thread.start()
    while sampled < (total - 32) * 2 - 32:  # then all inserts are let through
        sampled += len(replay.sample(wait_s=None)["ids"])
    thread.join(30)
    assert not thread.is_alive()
    assert replay.report().inserted == total
    assert replay.report().waiting is None
    with pytest.raises(ReplayError, match="the rate holds this sample back"):
        while True:
            replay.sample(wait_s=0.01)


@pytest.mark.wait_times(first_word_s=0.01)
def test_a_wait_is_logged_from_some_seconds_on(caplog: pytest.LogCaptureFixture) -> None:
    replay = Replay(500, rate=SamplesPerInsert(1.0), batch_size=1, seed=0)
    with pytest.raises(ReplayError, match=r"in 0.2 s no other thread did"):
        replay.sample(wait_s=0.2)
    assert "sample() waits for 0 s: 0 steps inserted, 0 removed, 0 sampled" in caplog.text
    assert "samples wait for inserts" in caplog.text
    assert 1 < len(caplog.records) < 10  # at intervals that double


def in_graph(replay: Replay, envs: int = 4, **options: Any) -> tuple[Rollout, Graph]:
    _, makers = numbered_envs(envs)
    rollout = Rollout(makers, module=NumberedModule(), fragment_length=6, seed=0, **options)
    graph = Graph("replaying")
    graph.add(rollout=rollout, replay=replay)
    graph.connect("rollout.fragments", "replay")
    graph.output("batches", "replay")
    return rollout, graph


async def batches_of(graph: Graph) -> list[Any]:
    with anyio.fail_after(60):
        async with graph.run() as run:
            return [batch async for batch in run["batches"]]


async def test_a_graph_ends_with_the_ratio_that_was_asked_for() -> None:
    replay = Replay(2000, rate=SamplesPerInsert(2.0, min_size=100), batch_size=32, seed=0)
    rollout, graph = in_graph(replay, num_fragments=30)
    batches = await batches_of(graph)
    report = replay.report()
    assert report.inserted == rollout.num_steps - sum(rollout.lost.values())
    assert report.sampled == 32 * len(batches)
    assert abs((report.inserted - 100) * 2.0 - report.sampled) <= 32 + 24


async def test_a_stalled_reader_stops_the_environments_within_the_buffer() -> None:
    rate = SamplesPerInsert(1.0, min_size=50, error_buffer=60.0)
    replay = Replay(5000, rate=rate, batch_size=16, seed=0)
    rollout, graph = in_graph(replay)
    async with graph.run() as run:
        seen = []
        for _ in range(3):
            await wait_all_tasks_blocked()
            seen.append(rollout.num_steps)
            assert replay.report().waiting == "insert"
            assert replay.report().inserted * 1.0 - replay.report().sampled <= 50 + 60
        assert seen[0] == seen[1] == seen[2]
        for _ in range(8):  # the reader goes on, and so do the environments
            await run["batches"].receive()
        await wait_all_tasks_blocked()
        assert rollout.num_steps > seen[0]
        assert replay.report().insert_wait_s > 0


async def test_whole_episodes_come_from_a_graph_as_soon_as_there_are_some() -> None:
    replay = Replay(5000, sampler=Episodes(), rate=SamplesPerInsert(0.5, min_size=1), batch_size=2, seed=0)
    rollout, graph = in_graph(replay, num_fragments=20)
    batches = await batches_of(graph)
    assert batches
    assert replay.report().inserted == rollout.num_steps
    assert all(batch["seq_lens"].min() > 0 for batch in batches)


async def test_a_thread_that_inserts_beside_tasks_wakes_those_that_wait_for_steps() -> None:
    played, replay = Played(2, 1), Replay(500, rate=SamplesPerInsert(1.0), batch_size=1, seed=0)
    replay.turns.enter_loop()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as beside:
            beside.start_soon(replay.turns.relay)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replay.turns.wait_in_loop, "sample", replay.may_sample)
                await wait_all_tasks_blocked()
                assert replay.report().waiting == "sample"
                await anyio.to_thread.run_sync(lambda: replay.insert(played.fragments[0]))
            beside.cancel_scope.cancel()
    assert len(replay.sample()["ids"]) == 1


async def test_an_error_in_a_replay_ends_the_run_by_name() -> None:
    replay = Replay(10, batch_size=16)
    _, graph = in_graph(replay)
    with pytest.raises(ReplayError, match="expected a capacity of several fragments") as raised:
        await batches_of(graph)
    assert "in node 'replay'" in raised.value.__notes__


async def test_without_a_rate_batches_come_until_the_rollout_ends() -> None:
    replay = Replay(500, batch_size=16, seed=0)
    rollout, graph = in_graph(replay, num_fragments=5)
    assert {len(batch["ids"]) for batch in await batches_of(graph)} == {16}
    assert replay.report().inserted == rollout.num_steps
