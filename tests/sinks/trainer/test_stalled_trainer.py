"""The stall doctor names a trainer that does not come, and says nothing of one that is there and takes its time."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from doctor_clock import Looking
from feeding_rollouts import SHORT, trainer
from numbered_module import NumberedEnv, NumberedModule
from stalled_runs import running

from rollflow import Graph, Rollout, Watch, feed
from rollflow.sinks import TrainerSink
from rollflow.stream import StallError


def numbered(**options: Any) -> Rollout:
    return Rollout(lambda: NumberedEnv(0), module=NumberedModule(), fragment_length=8, seed=0, **options)


def graph_to(address: str) -> Graph:
    graph = Graph("feed")
    graph.connect(numbered().fragments, TrainerSink(address, limits=SHORT))
    return graph


def looked_at(graph: Graph, party: str, kind: str, seconds: float) -> list[str]:
    """Texts of so many seconds of looks, once a party is what the run waits for, and is of that kind."""
    with running(graph, party, kind) as run:
        return Looking(run.doctor).for_s(seconds)


def test_a_trainer_that_does_not_come_is_named() -> None:
    address = "tcp://127.0.0.1:9"
    texts = looked_at(graph_to(address), f"the trainer at {address}", "away", 6.0)
    assert len(texts) == 1
    lines = texts[0].splitlines()
    assert re.match(rf"no item for 5\.\d s: the trainer at {address} has not come.* since 5\.\d s; ", lines[0]), lines
    assert lines[-1].startswith("do: start the trainer, or look at its address and its log; see docs/")


@pytest.mark.slow
def test_a_trainer_that_takes_its_time_is_no_stall() -> None:
    with trainer(yields="fragments", prefetch=1) as stream:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(next, iter(stream))
            address = str(stream.address)
            texts = looked_at(graph_to(address), f"the trainer at {address}", "holds back", 600.0)
            assert first.result().num_steps == 8
    assert texts == []


def test_a_feed_follows_the_rollouts_own_rules() -> None:
    rollout = numbered(watch=Watch(stall_after=0.2, on_stall="raise"))
    with pytest.raises(StallError, match=r"the trainer at tcp://127\.0\.0\.1:9 has not come"):
        feed(rollout, "tcp://127.0.0.1:9", limits=SHORT)
