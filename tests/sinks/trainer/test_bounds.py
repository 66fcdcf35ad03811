"""Whatever a rollout may keep, its trainer gets as much as it needs for a batch."""

import logging
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from feeding_rollouts import SHORT, feeding
from hypothesis import Phase, example, given, settings, strategies as st
from memory_lending import shared_address
from property_examples import examples

from rollflow import TrainerStream

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
                "fragments_per_batch": st.sampled_from([None, 1, 3, 8]),
                "prefetch": st.integers(0, 1),
                "yields": st.sampled_from(["batches", "fragments"]),
            }
        ),
        st.fixed_dictionaries({"max_lag": st.integers(0, 2), "on_excess": st.just("pace")}),
    ),
)
@example(0, "unix", 1, 1, "auto", {})
@example(0, "unix", 1, 2, "manual", {"fragments_per_batch": 8})
@example(0, "shm", 1, 2, "auto", {"fragments_per_batch": 8, "prefetch": 0})
@example(0, "shm", 1, 1, "manual", {"max_lag": 1, "on_excess": "pace"})
@example(2, "shm", 1, 2, "auto", {"fragments_per_batch": 8, "prefetch": 0})
@example(2, "unix", 1, 1, "manual", {"max_lag": 1, "on_excess": "pace"})
def test_every_fragment_comes_once_whatever_may_be_kept(
    agents: int,
    transport: str,
    max_bytes: int,
    rollouts: int,
    ack: Any,
    stream: dict[str, Any],
) -> None:
    came: Counter[tuple[str, int, int]] = Counter()
    with shared_address() as shared, ExitStack() as feeds:
        address = f"{transport}:{shared.removeprefix('shm:')}"
        with TrainerStream(address, sources=rollouts, ack=ack, join_timeout=60.0, limits=SHORT, **stream) as batches:
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
    with TrainerStream(address, max_lag=0, join_timeout=60.0, limits=SHORT) as stream:
        stream.publish({"weight": torch.tensor(1.0)})
        with feeding(address, lanes=4, num_fragments=6, sink={"max_bytes": 1}) as feed:
            steps = 0
            for _ in stream:
                steps += sum(handed.num_steps for handed in stream.handed)
                stream.publish({"weight": torch.tensor(stream.version + 1.0)})
    assert steps
    assert steps + stream.lost.get("max_lag", 0) == feed.rollout.num_steps


def test_a_batch_that_is_more_than_may_be_kept_is_told_of_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), TrainerStream(address, limits=SHORT, join_timeout=60.0) as stream:
        with feeding(address, lanes=4, num_fragments=4, sink={"max_bytes": 1}):
            assert len(list(stream)) == 4
    [told] = [record.getMessage() for record in caplog.records if "at a time" in record.getMessage()]
    assert told.startswith("the trainer needs 4 fragments at a time, of about ")
    assert told.endswith(" bytes, more than max_bytes=1: as many are kept")
