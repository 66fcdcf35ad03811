"""Items of rollouts at a trainer, and what is kept of them: within bounds, and none is lost."""

import logging
import os
import random
import signal
import sys
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from feeding_rollouts import HASTY, failing, feeding, sequences_of, trainer
from hypothesis import Phase, example, given, settings, strategies as st
from killable_trainer import FeedChild, TrainerChild, records_of
from memory_lending import shared_address
from numbered_env import WideEnv
from property_examples import examples
from remote_rollouts import await_that
from wire_values import same

from rollflow import Fragment as RolloutFragment, TrainerStream
from rollflow.sinks import Batches
from rollflow.sinks.trainer.pace_gate import ResendBuffer
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.sinks.trainer.rounds import Rounds
from rollflow.stream.data.errors import RunError, WireError
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import Done, Fragment, Limits, ReceiverSession


def test_what_comes_of_a_lane_that_is_gone_is_refused() -> None:
    source = RolloutPeer(ReceiverSession(bytes(16)))
    source.take_lanes(3)
    source.set_aside(1, 4)
    with pytest.raises(WireError, match="fragment 5 of lane 1, which is set aside behind 4, expected another lane"):
        source.read(Fragment(1, 5, {}, {}))
    with pytest.raises(WireError, match="lane 3 is set aside, expected one of 3"):
        source.set_aside(3, 0)


def rounds_of(count: int | None) -> Rounds:
    """Rounds of so many items, or of one for every lane that is there; of 0, rounds that have one of every lane."""
    return Rounds(0 if count == 0 else None, "drop" if count != 0 else "pace", batches=Batches(fragments=count or None))


def taken_of(rounds: Rounds, *present: RolloutPeer) -> list[int]:
    """Have a round taken of what waits: the numbers of its items."""
    rounds.take(lambda: present)
    taken, rounds.taken = rounds.taken, []
    return [item.number for item in taken]


def test_what_is_left_of_a_rollout_that_has_gone_is_not_waited_to_be_more() -> None:
    rounds = rounds_of(None)
    large, small = RolloutPeer(ReceiverSession(bytes(16))), RolloutPeer(ReceiverSession(bytes(range(16))))
    large.take_lanes(8)
    small.take_lanes(1)
    large.life, small.life = PeerLife.LEFT, PeerLife.HERE
    one, *others = ArrivedItem(large, 0, {}, None), *(ArrivedItem(small, number, {}, None) for number in range(1, 5))
    rounds.waiting = rounds.joined([one])
    assert taken_of(rounds, small) == []
    rounds.waiting = rounds.joined(others)
    assert [taken_of(rounds, small) for _ in range(4)] == [[0, 1], [2], [3], [4]]


def test_rounds_are_taken_that_are_whole() -> None:
    rounds, source = rounds_of(2), RolloutPeer(ReceiverSession(bytes(16)))
    items = [ArrivedItem(source, number, {}, None) for number in range(1, 8)]
    rounds.waiting = rounds.joined(items[:5])
    assert [taken_of(rounds, source) for _ in range(3)] == [[1, 2], [3, 4], []]
    rounds.waiting = rounds.joined(items[5:])
    assert [taken_of(rounds, source), taken_of(rounds), taken_of(rounds)] == [[5, 6], [7], []]  # nothing more comes
    rounds, lanes = rounds_of(0), (2, 0, 2, 1, 0)
    items = [ArrivedItem(source, n, Mock(spec=RolloutFragment, lane=lane), None) for n, lane in enumerate(lanes)]
    rounds.waiting = rounds.joined(items)
    assert [taken_of(rounds, source), taken_of(rounds, source)] == [[1, 3, 0], [4, 2]]  # by lane


@pytest.mark.parametrize("count", [2, None, 0], ids=["2", "lanes", "rounds"])
def test_an_interrupt_while_items_are_taken_loses_none(count: int | None) -> None:
    """The interrupt comes before each line in turn."""
    lines = 1
    while _is_interrupted(rounds_of(count), lines):
        lines += 1
    assert lines > 20


def source_of(stream: TrainerStream, *items: Any) -> RolloutPeer:
    """A rollout that is here, and of which these items have come."""
    door, source = stream._listener, RolloutPeer(ReceiverSession(bytes(16)), connection=Mock())
    source.lanes, source.life, source.session.taken = {0}, PeerLife.HERE, 9
    door.sources[bytes(16)] = source
    door.come.add(bytes(16))
    door.arrived += [ArrivedItem(source, number, item, None) for number, item in enumerate(items, 1)]
    return source


def _is_interrupted(rounds: Rounds, lines: int) -> bool:
    """Take items, and have an interrupt come before a line; False: there are fewer."""
    stream = trainer()
    source, door = source_of(stream, *[{}] * 4), stream._listener
    stream._rounds = rounds
    left, taken = lines, list[int]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("trainer/stream.py", "trainer/rounds.py")):
            return None
        left -= event == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        stream._try_take(WaitReminder(None))
    sys.settrace(None)
    door.arrived += [ArrivedItem(source, number, {}, None) for number in range(5, 7)]
    while items := stream._try_take(WaitReminder(None)):
        taken += [item.number for item in items]
        rounds.taken.clear()
    assert taken == [1, 2, 3, 4, 5, 6]
    door.close(None)
    return left <= 0


def test_what_is_left_out_before_a_batch_that_fails_is_done_with_together_with_the_next() -> None:
    with trainer() as stream:
        source = source_of(stream, *(Mock(spec=RolloutFragment, lane=0, is_empty=each) for each in (True, False)))
        stream._item_maker = Mock(**{"item_of.side_effect": RunError("none")})
        stream._rounds = rounds_of(2)
        for _ in range(2):
            with pytest.raises(RunError, match="none"):
                stream._try_next(WaitReminder(None))
            stream.refuse("was never handed over")
            source.connection.refuse.assert_not_called()
            stream.put_back()
            stream._move_on()
            assert (source.session.done, source.session.kept) == (0, 0)
            assert stream.state_dict()["sources"][bytes(16).hex()]["done"] == 0
        stream._item_maker.item_of.side_effect = [None]  # a batch without steps
        stream._try_next(WaitReminder(None))
        assert (source.session.done, source.session.kept) == (2, 2)
        stream._listener.sources.clear()


FRAGMENT = 600  # bytes, about, of eight steps


@settings(max_examples=examples(10), phases=[Phase.explicit, Phase.generate])
@given(
    agents=st.sampled_from([0, 2]),
    transport=st.sampled_from(["unix", "shm"]),
    max_bytes=st.sampled_from([1, FRAGMENT, 3 * FRAGMENT, 20 * FRAGMENT]),
    rollouts=st.integers(1, 2),
    ack=st.sampled_from(["auto", "manual"]),
    stream=st.one_of(
        st.fixed_dictionaries(
            {
                "prefetch": st.integers(0, 1),
                "yields": st.sampled_from(["fragments", *(Batches(fragments=each) for each in (None, 1, 3, 8))]),
            }
        ),
        st.fixed_dictionaries({"max_lag": st.integers(0, 2), "on_excess": st.just("pace")}),
    ),
)
@example(0, "unix", 1, 1, "auto", {})
@example(0, "unix", 1, 2, "manual", {"yields": Batches(fragments=8)})
@example(0, "shm", 1, 2, "auto", {"yields": Batches(fragments=8), "prefetch": 0})
@example(0, "shm", 1, 1, "manual", {"max_lag": 1, "on_excess": "pace"})
@example(2, "shm", 1, 2, "auto", {"yields": Batches(fragments=8), "prefetch": 0})
@example(2, "unix", 1, 1, "manual", {"max_lag": 1, "on_excess": "pace"})
def test_every_fragment_comes_once_whatever_may_be_kept(
    agents: int, transport: str, max_bytes: int, rollouts: int, ack: Any, stream: dict[str, Any]
) -> None:
    came: Counter[tuple[str, int, int]] = Counter()
    with shared_address() as shared, ExitStack() as feeds:
        address = f"{transport}:{shared.removeprefix('shm:')}"
        with trainer(address, sources=rollouts, ack=ack, **stream) as batches:
            for each in range(rollouts):
                more = {"agents": agents, "sink": {"name": f"feed {each}", "max_bytes": max_bytes}}
                feeds.enter_context(feeding(address, lanes=4, num_fragments=4, **more))
            for _ in batches:
                came.update((handed.source, handed.lane, handed.sequence) for handed in batches.handed)
                if ack == "manual":
                    batches.ack()
    lanes = [(f"feed {rollout}", lane) for rollout in range(rollouts) for lane in range(4)]
    assert came == Counter((*lane, sequence) for lane in lanes for sequence in range(4))
    assert batches.lost == {}


def test_what_is_too_old_makes_room_for_what_is_not(address: str) -> None:
    with trainer(address, max_lag=0) as stream:
        stream.publish({"weight": torch.tensor(1.0)})
        with feeding(address, lanes=4, num_fragments=6, sink={"max_bytes": 1}) as feed:
            steps = 0
            for _ in stream:
                steps += sum(handed.num_steps for handed in stream.handed)
                stream.publish({"weight": torch.tensor(stream.version + 1.0)})
    assert steps
    assert steps + stream.lost.get("max_lag", 0) == feed.rollout.num_steps


def test_a_batch_that_is_more_than_may_be_kept_is_told_of_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), trainer(address) as stream:
        with feeding(address, lanes=4, num_fragments=4, sink={"max_bytes": 1}):
            assert len(list(stream)) == 4
    [told] = [record.getMessage() for record in caplog.records if "at a time" in record.getMessage()]
    assert told.startswith("the trainer needs 4 fragments at a time, of about ")
    assert told.endswith(" bytes, more than max_bytes=1: as many are kept")


def message(number: int, size: int = 10) -> Fragment:
    return Fragment(number % 2, number, {"obs": np.arange(size) + number}, {"number": number})


@given(st.lists(st.tuples(st.sampled_from(["add", "forget"]), st.integers(0, 12)), max_size=40))
def test_what_is_kept_is_what_was_added_and_not_forgotten(operations: list[tuple[str, int]]) -> None:
    kept = ResendBuffer(200)
    there: dict[int, Fragment] = {}
    last = 0
    for what, number in operations:
        if what == "add":
            last += 1
            there[last] = message(last)
            kept.add(there[last], 80, steps=last)
        else:
            kept.take(Done(min(number, last), min(number, last)))
            there = {each: added for each, added in there.items() if each > number}
        assert kept.given == last
        assert len(kept) == len(there)
        for each, added in there.items():
            assert same(kept.get(each).columns, added.columns)
            assert (kept.get(each).number, kept.get(each).rest) == (each, {"number": each})
        assert [message.number for message, *_ in kept.later_than(number)] == [each for each in there if each > number]
        assert kept.nbytes == 80 * len(there)


def test_a_trainer_that_acknowledges_seldom_gets_again_what_it_wants_again(tmp_path: Path) -> None:
    address, options = f"unix:{tmp_path}/trainer", {"yields": "fragments", "ack": "manual"}
    with feeding(address, num_fragments=12, lanes=1) as feed:
        with failing(address, **options) as stream:
            first = list(islice(stream, 9))
            await_that(lambda: feed.sink._session.given >= 10)
        with trainer(address, **options) as stream:
            second = list(stream)
            stream.ack()
    assert sequences_of(first) == {0: list(range(9))}
    assert sequences_of(second) == {0: list(range(12))}  # nothing was acknowledged
    for one, other in zip(first, second, strict=False):
        np.testing.assert_array_equal(one.column("obs"), other.column("obs"))
    assert list(tmp_path.glob("*")) == []


def test_a_rollout_whose_trainer_never_acknowledges_stands_still_at_the_bound() -> None:
    with trainer(yields="fragments", ack="manual", prefetch=3) as stream:
        with feeding(stream.address, lanes=1, sink={"max_bytes": 6_000}) as feed:
            fragments = iter(stream)
            held = 0
            while not feed.sink._session.is_full:
                next(fragments)
                held += 1
            await_that(lambda: feed.sink._session.given - feed.sink._session.kept == len(feed.sink._session))
            given = feed.sink._session.given
            stream.ack()
            await_that(lambda: feed.sink._session.given > given)
    assert held  # how many, is the rollout's to say: it may have sent as many as fill it before the first was taken


MAX_BYTES = 16 << 20  # of the sink


LARGE = (9 + 8) * 4 * (32 << 10)  # bytes: rows of 4 slots' observations, and of what a module repeats of them


ROLLOUT = MAX_BYTES + 2 * LARGE  # what is kept or lent, what is in the making, and the one before it


TRAINER = 6 * LARGE  # what the loop has and had before, and twice the window of two


class Watched:
    """Resident memory of a process, shared memory among it, looked at again and again.

    growth    bytes at most since it was first looked at
    """

    def __init__(self, pid: int | None) -> None:
        self._memory = psutil.Process(pid)
        self.growth = 0
        self._first = self._memory.memory_info().rss

    def look(self) -> None:
        """Look at it."""
        self.growth = max(self.growth, self._memory.memory_info().rss - self._first)


@pytest.mark.slow
def test_memory_stays_within_its_bound_over_all_faults(address: str, tmp_path: Path) -> None:
    drawn = random.Random(7)
    feed = FeedChild(address, [0, 1, 2, 3], env=WideEnv, sink={"max_bytes": MAX_BYTES, "limits": HASTY})
    rollout: Watched | None = None
    for life in range(6):
        child = TrainerChild(address, tmp_path, ack="manual", limits=Limits(heartbeat_s=0.3))
        begun = len(records_of(tmp_path))
        await_that(lambda begun=begun: len(records_of(tmp_path)) > begun + 2)
        rollout = rollout or Watched(feed.process.pid)
        trainer = Watched(child.process.pid)
        goal = len(records_of(tmp_path)) + drawn.randrange(10, 60)
        while len(records_of(tmp_path)) < goal:
            rollout.look()
            trainer.look()
            threading.Event().wait(2e-3)
        if life % 3 == 0:
            frozen(child, rollout)
        child.kill()
        rollout.look()
        assert trainer.growth <= TRAINER
    feed.kill()
    assert rollout is not None
    assert rollout.growth <= ROLLOUT
    assert len(records_of(tmp_path)) * LARGE > 10 * (ROLLOUT + TRAINER)


def frozen(child: TrainerChild, rollout: Watched) -> None:
    """The trainer stands still for longer than it may be silent."""
    assert child.process.pid is not None
    os.kill(child.process.pid, signal.SIGSTOP)
    for _ in range(40):
        threading.Event().wait(0.05)
        rollout.look()
    os.kill(child.process.pid, signal.SIGCONT)
