"""The report of a graph that feeds a trainer says whether it is the trainer that holds the rollout back."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from feeding_rollouts import SHORT, Feed, feeding, running, trainer
from numbered_module import NumberedEnv, NumberedModule
from remote_rollouts import await_that

from rollflow import Fragment, Graph, Rollout, TrainerStream, feed
from rollflow.nodes.stages.credits import AllGates, FragmentCredits
from rollflow.sinks import TrainerSink
from rollflow.stream import RunError
from rollflow.stream.graph.report import Report
from rollflow.stream.net.backoff import WaitReminder


@pytest.mark.parametrize("sends", ["fragments", "batches"])
@pytest.mark.parametrize("where", ["inline", "processes"])
def test_a_trainer_that_takes_its_time_is_named(sends: Any, where: Any) -> None:
    with trainer(max_lag=0, on_excess="pace") as stream:
        options: dict[str, Any] = {"where": where, "sink": {"sends": sends}}
        with feeding(stream.address, (0, 1), lanes=1, num_fragments=3, **options) as fed:
            for number, _ in enumerate(stream):
                if number < 2:  # behind the last one nobody is held back any more
                    before = waited_for(fed, stream)
                    await_that(partial(is_waited_longer, fed, stream, before))
                    await_that(lambda: fed.held_back_by() == f"the trainer at {stream.address}")
                stream.publish({"weight": torch.tensor(stream.version + 1.0)})


@pytest.mark.parametrize("sends", ["fragments", "batches"])
def test_a_sink_whose_trainer_has_no_room_is_blocked_by_it_and_not_busy(sends: Any) -> None:
    def is_blocked_for_long() -> bool:
        report = fed.report()
        assert report is not None
        [sink] = [node for node in report.nodes if node.name == "trainer"]
        return sink.blocked_s > 3 * sink.busy_s

    with trainer() as stream, feeding(stream.address, num_fragments=20, sink={"sends": sends}) as fed:
        for number, _ in enumerate(stream):
            if number == 0:  # the window fills up meanwhile
                await_that(is_blocked_for_long)
                await_that(lambda: fed.held_back_by() == f"the trainer at {stream.address}")
                before = waited_for(fed, stream)
                await_that(partial(is_waited_longer, fed, stream, before))


def waited_for(fed: Feed, stream: TrainerStream) -> float:
    """Seconds that the trainer was waited for."""
    report = fed.report()
    assert report is not None
    return sum(node.busy_s for node in report.nodes if node.name == f"the trainer at {stream.address}")


def is_waited_longer(fed: Feed, stream: TrainerStream, seconds: float) -> bool:
    return waited_for(fed, stream) > seconds


def test_a_trainer_that_has_not_come_is_named() -> None:
    stream = trainer(max_lag=0, on_excess="pace")  # takes nobody in before it is asked for something
    with stream, feeding(stream.address, num_fragments=1) as fed:
        await_that(lambda: fed.held_back_by() == f"the trainer at {stream.address}")
        for _ in stream:
            pass


def test_a_trainer_that_waits_for_a_stage_as_well_is_not_what_holds_the_rollout_back() -> None:
    """A fragment is on its way to the trainer, which has nothing to do, and the rollout may not begin another one."""
    came, go_on = threading.Event(), threading.Event()

    def slow(fragment: Fragment) -> Fragment:
        came.set()
        assert go_on.wait(60)
        return fragment

    with trainer(max_lag=0, on_excess="pace") as stream:
        rollout = Rollout(
            [partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, num_fragments=2, seed=0
        )
        sink = TrainerSink(str(stream.address), limits=SHORT)
        graph = Graph("feed")
        graph.add(rollout=rollout, trainer=sink)
        graph.add_node("slow", slow, where="thread")
        graph.connect("rollout.fragments", "slow")
        graph.connect("slow", "trainer")
        with running(graph, rollout, sink) as fed:
            stream._begin_next()
            await_that(lambda: stream._intake.try_take(WaitReminder(None)) or came.is_set())
            waited = waited_for(fed, stream)
            await_that(lambda: fed.held_back_by() == "slow")
            assert waited_for(fed, stream) == waited
            go_on.set()
            for _ in stream:
                pass


def test_of_several_gates_the_first_that_refuses_is_what_holds_a_lane() -> None:
    class Lane:
        index, at_start, sequence = 0, True, 0

    class Held(FragmentCredits):
        def __init__(self, limit: int, holder: str) -> None:
            super().__init__(limit)
            self.holder = holder

    gates = [FragmentCredits(1), Held(0, "one"), Held(0, "other")]
    gate = AllGates(gates)
    assert gate.holder is None
    assert not gate.admits(Lane())
    assert gate.holder == "one"
    gates[1].add(1)
    assert not gate.admits(Lane())
    assert gate.holder == "other"
    gates[2].add(1)
    assert gate.admits(Lane())


def test_what_is_fed_without_a_graph_of_ones_own_has_a_report_at_its_end() -> None:
    reports: list[Report] = []
    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8, num_fragments=2)
    with trainer() as stream, ThreadPoolExecutor() as threads:
        ended = threads.submit(feed, rollout, str(stream.address), limits=SHORT, on_end=reports.append)
        for _ in stream:
            assert not reports
        ended.result(60)
    [report] = reports
    assert {node.name: node.items for node in report.nodes}["trainer"] == 2


def test_where_feeding_raises_there_is_no_report() -> None:
    rollout = Rollout([partial(NumberedEnv, 0)], module=NumberedModule(), fragment_length=8)

    async def fail() -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        feed(rollout, "unix:/nowhere", watch=fail, on_end=pytest.fail)


def test_a_rollout_in_a_graph_says_who_has_the_report() -> None:
    with trainer() as stream, feeding(stream.address, num_fragments=2) as fed:
        for _ in stream:
            with pytest.raises(RunError, match=r"in a graph, whose run has the report: expected run\.report\(\)"):
                fed.rollout.report()
