"""Every fragment is handed over once, whoever is killed, cut off or frozen meanwhile."""

import os
import random
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import HASTY, Feed, feeding, sequences_of, trainer
from hypothesis import Phase, given, settings, strategies as st
from killable_trainer import FeedChild, Record, TrainerChild, check_whole, record_of, records_of
from memory_lending import shared_address
from property_examples import examples
from remote_hosts import BrokenWire
from remote_rollouts import await_that

from rollflow import Fragment, TrainerStream
from rollflow.stream import RunError
from rollflow.stream.net.dialler import Dialler
from rollflow.stream.wire import Limits

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)

AGENTS = pytest.mark.parametrize("agents", [0, 2], ids=["one agent", "several agents"])


def cut_off(cuts: Sequence[int], fragments: int, agents: int) -> tuple[list[Fragment], int]:
    """Return the items that come through a wire that is cut after so many bytes, and the number of steps made."""
    left = list(cuts)
    with trainer(yields="fragments", limits=HASTY) as stream:
        wire = BrokenWire(stream.address, lambda: left.pop() if left else None)
        try:
            more = {"lanes": 2, "num_fragments": fragments, "agents": agents, "sink": {"limits": HASTY}}
            with feeding(wire.address, **more) as feed:
                taken = list(stream)
        finally:
            wire.close()
    return taken, feed.rollout.num_steps


@settings(max_examples=examples(8), phases=[Phase.explicit, Phase.generate])
@given(cuts=st.lists(st.integers(0, 20_000), max_size=5), agents=st.sampled_from([0, 2]))
def test_a_connection_that_is_cut_loses_nothing_and_doubles_nothing(cuts: list[int], agents: int) -> None:
    taken, steps = cut_off(cuts, fragments=8, agents=agents)
    assert sequences_of(taken) == {0: list(range(8)), 1: list(range(8))}
    check_whole([record_of(fragment) for fragment in taken])
    assert sum(fragment.num_steps for fragment in taken) == steps


def end_whole(feed: Feed, child: TrainerChild, folder: Path) -> None:
    """Have the rollout end, and its trainer with it, which has been handed over every step once."""
    feed.drain()
    feed.ended.result(60)
    child.process.join()
    assert child.process.exitcode == 0
    check_whole(records_of(folder))
    assert sum(record.steps for record in records_of(folder)) == feed.rollout.num_steps
    assert feed.sink.lost == {}


def killed_again_and_again(
    folder: Path,
    kills: int,
    ack: str,
    seed: int,
    *,
    address: str = "",
    yields: str = "fragments",
    max_lag: int | None = None,
    agents: int = 0,
) -> None:
    options: dict[str, Any] = {"ack": ack, "yields": yields, "max_lag": max_lag, "agents": agents}
    address, drawn = address or f"unix:{folder}/trainer", random.Random(seed)
    with feeding(address, lanes=2, agents=agents, sink={"max_bytes": 1 << 20}) as feed:
        for _ in range(kills):
            child = TrainerChild(address, folder, **options)
            # Somewhere in what it does: a little after it has got so far.
            goal = len(records_of(folder)) + drawn.randrange(6)
            await_that(lambda goal=goal: len(records_of(folder)) >= goal)
            threading.Event().wait(drawn.random() * 0.02)
            child.kill()
        assert feed.sink._buffer.nbytes <= (1 << 20)
        child = TrainerChild(address, folder, **options)
        end_whole(feed, child, folder)


@pytest.mark.slow
@AGENTS
@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_a_trainer_that_is_killed_and_started_again_gets_the_rest(tmp_path: Path, ack: str, agents: int) -> None:
    killed_again_and_again(tmp_path, 5, ack, seed=1, agents=agents)


@pytest.mark.slow
@AGENTS
@pytest.mark.parametrize("yields", ["fragments", "batches"])
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_so_it_is_by_other_ways_and_with_train_batches(scheme: str, yields: str, agents: int, tmp_path: Path) -> None:
    with shared_address() as shared, socket.create_server(("127.0.0.1", 0)) as unused:
        address = shared if scheme == "shm" else f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        unused.close()
        killed_again_and_again(tmp_path, 8, "auto", seed=4, address=address, yields=yields, agents=agents)


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "agents", "kills"), [(0, 0, 12), (2, 0, 12), (0, 2, 6), (2, 2, 6)])
def test_so_it_is_under_pace_with_one_that_saves_before_it_publishes(
    max_lag: int, agents: int, kills: int, tmp_path: Path
) -> None:
    killed_again_and_again(tmp_path, kills, "auto", seed=6, yields="batches", max_lag=max_lag, agents=agents)


def rollouts_killed(kills: int, folder: Path, agents: int = 0) -> None:
    """A rollout is killed and another one started, while a second one goes on."""
    drawn = random.Random(3)
    limits = {"limits": HASTY}
    with trainer(yields="fragments", prefetch=2, **limits) as stream:
        more = {"lanes": 1, "agents": agents}
        with feeding(stream.address, (10, 11), **more, sink={"name": "steady", **limits}) as steady:
            taken: dict[str, list[Record]] = {}
            fragments = iter(stream)
            for life in range(kills):
                sink = {"name": f"life {life}", **limits}
                child = FeedChild(str(stream.address), [0, 1], seed=life, agents=agents, sink=sink)
                last = 1 + drawn.randrange(4)
                while len(taken.get(f"life {life}", ())) < last:
                    take(stream, next(fragments), taken)
                child.kill()
            steady.drain()
            for fragment in fragments:
                take(stream, fragment, taken)
    for records in taken.values():
        check_whole(records)
    assert len(taken) == kills + 1
    assert sum(record.steps for record in taken["steady"]) == steady.rollout.num_steps


def take(stream: TrainerStream, fragment: Fragment, taken: dict[str, list[Record]]) -> None:
    [told] = stream.handed
    taken.setdefault(told.source, []).append(record_of(fragment))


@pytest.mark.slow
@AGENTS
def test_a_rollout_that_is_killed_is_nobody_elses_trouble(agents: int, tmp_path: Path) -> None:
    rollouts_killed(3, tmp_path, agents)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["unix", "shm"])
@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_one_that_is_frozen_beyond_every_limit_loses_nothing(
    scheme: str, ack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken for lost, dialled in vain until several handshakes were given up, and passes all its own limits."""
    dialled: list[int] = []
    call = Dialler._call
    monkeypatch.setattr(Dialler, "_call", lambda self, *given: dialled.append(1) or call(self, *given))
    with shared_address() as shared:
        address = f"{scheme}:{shared.removeprefix('shm:')}"
        with feeding(address, lanes=2, sink={"limits": HASTY}) as feed:
            child = TrainerChild(address, tmp_path, ack=ack, limits=Limits(heartbeat_s=0.3, grace_s=0.5))
            for _ in range(2):
                goal = len(records_of(tmp_path)) + 5
                await_that(lambda goal=goal: len(records_of(tmp_path)) >= goal)
                assert child.process.pid is not None
                os.kill(child.process.pid, signal.SIGSTOP)
                await_that(lambda: feed.sink._uplink.problem)
                held, most = feed.sink.given, len(dialled) + 4
                await_that(lambda most=most: len(dialled) >= most)
                assert feed.sink.given <= held + 2 * 2  # a window of both lanes' fragments
                os.kill(child.process.pid, signal.SIGCONT)
                await_that(lambda: not feed.sink._uplink.problem)
            end_whole(feed, child, tmp_path)


def test_a_trainer_that_raises_is_waited_for_and_one_that_ends_says_goodbye(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=6) as feed:
        with pytest.raises(KeyError), TrainerStream(address, yields="fragments") as stream:
            first = [next(iter(stream))]
            raise KeyError
        assert feed.sink.goodbye is None
        with TrainerStream(address, yields="fragments") as stream:
            items = iter(stream)
            second = [next(items) for _ in range(3)]
        await_that(lambda: feed.sink.goodbye == "the trainer has ended")
        with TrainerStream(address, yields="fragments") as stream:
            third = list(stream)
    assert sequences_of(first) == {0: [0]}
    assert sequences_of([*second, *third]) == {0: [0, 1, 2, 3, 4, 5]}  # the first one had not moved on


@pytest.mark.wait_times(first_word_s=0.05)
def test_a_rollout_with_no_trainer_keeps_what_it_has_within_bounds_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with feeding(f"unix:{tmp_path}/trainer", sink={"linger": 0.1}) as feed:
        await_that(lambda: "has not been reached" in caplog.text or "No such file" in caplog.text)
        assert feed.rollout.num_steps == 0  # it begins with its trainer's weights
    assert feed.sink.lost == {}


def test_what_a_trainer_never_got_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address) as feed:
        with pytest.raises(KeyError), TrainerStream(address, yields="fragments", prefetch=0) as stream:
            next(iter(stream))
            raise KeyError
        await_that(lambda: feed.sink._uplink.problem)
    assert feed.sink.lost == {"undelivered": feed.sink.given * 8 * 4}
    assert "transitions not delivered: trainer unix:" in caplog.text


def test_a_state_is_loaded_before_the_stream_begins_and_must_be_one() -> None:
    with trainer() as stream:
        with pytest.raises(ValueError, match=r"state is \{'version': 0\}, expected what state_dict"):
            stream.load_state_dict({"version": 0})
        with pytest.raises(RunError), trainer(join_timeout=0.01) as other:
            next(iter(other))
        with pytest.raises(RunError, match="the stream has begun, expected load_state_dict before the first batch"):
            other.load_state_dict({"version": 0, "sources": {}})
