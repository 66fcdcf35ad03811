"""Who holds a rollout back that feeds a trainer, by its report, and what the stall doctor says of faults."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import feeding_rollouts
import pytest
import stalled_runs
from doctor_clock import Looking
from feeding_rollouts import HASTY, SHORT, Feed, feeding, graph_over, rollout_of, running, trainer, weights
from held_envs import Held, await_that, let_go
from killable_trainer import trainer_process
from numbered_module import NumberedEnv, NumberedModule
from stalled_rollouts import in_thread, line_of

from rollflow import Fragment, Graph, Rollout, TrainerStream, Watch, feed
from rollflow.nodes.env.stepping import nothing
from rollflow.nodes.stages.rounds import LaneGates
from rollflow.sinks import TrainerSink
from rollflow.stream import RunError, StallError
from rollflow.stream.graph.report import Report
from rollflow.stream.net.backoff import WaitReminder
from rollflow.stream.wire import Limits


def fed(address: Any, env: Any = None, limits: Limits = HASTY) -> Graph:
    """A graph in which a rollout feeds the trainer at an address."""
    rollout = Rollout(env or partial(NumberedEnv, 0), module=NumberedModule(), fragment_length=8, seed=0)
    return graph_over(rollout, address, limits=limits)[0]


@contextmanager
def failed(folder: Path) -> Iterator[Any]:
    stream = trainer(limits=HASTY, yields="fragments")
    stream.__enter__()

    def fail() -> None:
        next(iter(stream))
        stream.__exit__(ValueError, ValueError("out of memory"), None)

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(fail)
        yield fed(stream.address), f"the trainer at {stream.address}", nothing
        failing.result()


@contextmanager
def killed(folder: Path) -> Iterator[Any]:
    address = f"unix:{folder}/trainer"
    with trainer_process(address, halt_at=0) as (process, told), ThreadPoolExecutor(1) as pool:

        def kill() -> None:
            told.recv()
            process.kill()

        killing = pool.submit(kill)
        yield fed(address), f"the trainer at {address}", nothing
        killing.result()


@contextmanager
def env_hangs(folder: Path) -> Iterator[Any]:
    with (
        trainer(limits=HASTY, yields="fragments") as stream,
        in_thread(lambda: sum(1 for _ in stream), stream.expect_no_more),
    ):
        yield (
            fed(stream.address, env=partial(Held, 0, folder, lengths=(50, 50), steps=[3])),
            "rollout/env",
            partial(let_go, folder, 0),
        )


IN_STEP = partial(line_of, Held.step, "self._wait()")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (failed, "away", r"is gone: .*ValueError: out of memory"),
        (killed, "away", r"is gone: .*"),
        (env_hangs, "call", r"is in step\(\)"),
    ],
    ids=["it has failed", "it was killed", "an environment hangs"],
)
def test_a_fault_is_named_with_its_cause(fault: Callable[[Path], Any], kind: str, text: str, tmp_path: Path) -> None:
    with fault(tmp_path) as (graph, party, end_fault), stalled_runs.running(graph, party, kind, text, end_fault) as run:
        line = IN_STEP() if kind == "call" else ""
        # Calls before the one that hangs are awaited as well, for a moment.
        await_that(lambda: line in str(run.diagnose()), run.diagnose)
        told = Looking(run.doctor).until_told(600.0)  # a first call has 30 s, once the stages before it rest
    assert re.match(rf"no item for \d+\.\d s: {re.escape(party)}( \(.*?\))? {text}", told), told
    assert line in told, told


def looked_at(graph: Graph, party: str, kind: str, seconds: float) -> list[str]:
    """Texts of so many seconds of looks, once a party is what the run waits for, and is of that kind."""
    with stalled_runs.running(graph, party, kind) as run:
        return Looking(run.doctor).for_s(seconds)


def test_a_trainer_that_does_not_come_is_named() -> None:
    address = "tcp://127.0.0.1:9"
    texts = looked_at(fed(address), f"the trainer at {address}", "away", 6.0)
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
            texts = looked_at(fed(address, limits=SHORT), f"the trainer at {address}", "holds back", 600.0)
            assert first.result().num_steps == 8
    assert texts == []


def test_a_feed_follows_the_rollouts_own_rules() -> None:
    rollout = rollout_of([0], watch=Watch(stall_after=0.2, on_stall="raise"))
    with pytest.raises(StallError, match=r"the trainer at tcp://127\.0\.0\.1:9 has not come"):
        feed(rollout, "tcp://127.0.0.1:9", limits=SHORT)


@pytest.mark.parametrize("where", ["inline", "processes"])
def test_a_trainer_that_takes_its_time_is_named(where: Any) -> None:
    options: dict[str, Any] = {"where": where, "num_fragments": 3, "lanes": 1}
    with trainer(max_lag=0, on_excess="pace") as stream, feeding(stream.address, (0, 1), **options) as fed:
        for number, _ in enumerate(stream):
            if number < 2:  # behind the last one nobody is held back any more
                await_longer(fed, stream)
                await_that(lambda: fed.held_back_by() == f"the trainer at {stream.address}")
            stream.publish(weights(stream.version + 1.0))


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
                await_longer(fed, stream)


def waited_for(fed: Feed, stream: TrainerStream) -> float:
    """Seconds that the trainer was waited for."""
    report = fed.report()
    assert report is not None
    return sum(node.busy_s for node in report.nodes if node.name == f"the trainer at {stream.address}")


def await_longer(fed: Feed, stream: TrainerStream) -> None:
    """Wait until the trainer has been waited for longer than now."""
    before = waited_for(fed, stream)
    await_that(lambda: waited_for(fed, stream) > before)


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
        rollout, graph = rollout_of([0], num_fragments=2), Graph("feed")
        sink = TrainerSink(stream.address, limits=SHORT)
        graph.add_node("slow", slow, where="thread")
        graph.connect(rollout.fragments, "slow")
        graph.connect("slow", sink)
        with running(graph, rollout, sink) as fed:
            stream._begin_next()
            await_that(lambda: stream._try_take(WaitReminder(None)) or came.is_set())
            waited = waited_for(fed, stream)
            await_that(lambda: fed.held_back_by() == "slow")
            assert waited_for(fed, stream) == waited
            go_on.set()
            for _ in stream:
                pass


def test_of_several_gates_the_first_that_refuses_is_what_holds_a_lane() -> None:
    lane: Any = SimpleNamespace(index=0, at_start=True, sequence=0)
    is_open, gate = {"first": True, "one": False, "other": False}, LaneGates(None)  # type: ignore[arg-type]

    def gate_of(name: str) -> Any:
        return SimpleNamespace(admits=lambda lane: is_open[name], watch=lambda changed: None, holder=name)

    gate.take([gate_of(name) for name in is_open])
    assert gate.holder is None
    assert not gate.admits(lane)
    assert gate.holder == "one"
    is_open["one"] = True
    assert not gate.admits(lane)
    assert gate.holder == "other"
    is_open["other"] = True
    assert gate.admits(lane)


def test_what_is_fed_without_a_graph_of_ones_own_has_a_report_at_its_end() -> None:
    reports: list[Report] = []
    with feeding_rollouts.fed(trainer(), rollout_of([0], num_fragments=2), on_end=reports.append) as (stream, _):
        for _ in stream:
            assert not reports
    [report] = reports
    assert {node.name: node.items for node in report.nodes}["trainer"] == 2


def test_where_feeding_raises_there_is_no_report() -> None:
    async def fail() -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        feed(rollout_of([0]), "unix:/nowhere", watch=fail, on_end=pytest.fail)


def test_a_rollout_in_a_graph_says_who_has_the_report() -> None:
    with trainer() as stream, feeding(stream.address, num_fragments=2) as fed:
        for _ in stream:
            with pytest.raises(RunError, match=r"in a graph, whose run has the report: expected run\.report\(\)"):
                fed.rollout.report()
