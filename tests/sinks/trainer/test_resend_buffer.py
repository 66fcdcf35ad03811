"""Resend buffer: fragments that a trainer may want again stay within bounds."""

from pathlib import Path

import numpy as np
import pytest
from feeding_rollouts import feeding, graph_of, sequences_of, trainer
from hypothesis import given, strategies as st
from remote_rollouts import await_that
from wire_values import same

from rollflow import TrainerStream
from rollflow.sinks.trainer.resend_buffer import ResendBuffer
from rollflow.stream.wire import Fragment


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
            kept.forget(number)
            there = {each: added for each, added in there.items() if each > number}
        assert kept.last == max(last, 0)
        assert len(kept) == len(there)
        for each, added in there.items():
            assert same(kept.get(each).columns, added.columns)
            assert (kept.get(each).number, kept.get(each).rest) == (each, {"number": each})
        assert kept.steps(number) == sum(each for each in there if each > number)
        assert kept.count(1, number) == sum(each % 2 == 1 for each in there if each > number)
        assert kept.nbytes == 80 * len(there)


def test_a_trainer_that_acknowledges_seldom_gets_again_what_it_wants_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with feeding(address, num_fragments=12, lanes=1) as feed:
        with pytest.raises(KeyError), TrainerStream(address, yields="fragments", ack="manual") as stream:
            fragments = iter(stream)
            first = [next(fragments) for _ in range(9)]
            await_that(lambda: feed.sink.given >= 10)
            raise KeyError
        with TrainerStream(address, yields="fragments", ack="manual") as stream:
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
            while not feed.sink._buffer.is_full:
                next(fragments)
                held += 1
            await_that(lambda: feed.sink._session.given - feed.sink._session.kept == len(feed.sink._buffer))
            given = feed.sink.given
            stream.ack()
            await_that(lambda: feed.sink.given > given)
    assert held  # how many, is the rollout's to say: it may have sent as many as fill it before the first was taken


def test_a_bound_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes is 0, expected a whole number from 1 on"):
        graph_of("tcp://127.0.0.1:1", (0,), sink={"max_bytes": 0})
