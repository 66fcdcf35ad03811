"""Traces of rollouts: in a loop, in every place that environments may have, in a graph, and of a killed program."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES, rollout_at
from serial_module import SerialModule
from traces import Event, assert_nested, busy_s, events_of, flows, repaired, tracks

from rollflow import Fragment, Graph, MultiAgentRollout, Rollout, Watch
from rollflow.stream import Inlet
from rollflow.stream.data.errors import GraphError

ENVS = [partial(NumberedEnv, number) for number in range(4)]
AGENTS = [partial(NumberedAgents, number, nested=0) for number in range(2)]
KILLED = """
import sys
from rollflow import Rollout, Watch
with Rollout("CartPole-v1", num_envs=4, fragment_length=8, seed=0, watch=Watch(trace=sys.argv[1])) as rollout:
    for number, batch in enumerate(rollout.batches()):
        if number % 100 == 0:
            print(number, flush=True)
"""


Traced = Callable[[str], tuple[list[Event], dict[str, Any]]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Of a place: the events of one run with three updates, and the nodes of its report."""

    @cache
    def run(place: str) -> tuple[list[Event], dict[str, Any]]:
        path = tmp_path_factory.mktemp("trace") / "run.trace"
        options: dict[str, Any] = {"fragment_length": 8, "num_fragments": 3, "seed": 0, "watch": Watch(trace=str(path))}
        several, place = place.startswith("agents "), place.removeprefix("agents ")
        options |= {"kind": MultiAgentRollout if several else Rollout, "envs": {"lanes": 2}}
        acts = {"module": SerialModule() if several else NumberedModule()}
        with rollout_at(place, AGENTS if several else ENVS, acts=acts, **options) as rollout, rollout:
            assert len(list(rollout.batches())) == 3
            nodes = rollout.report().as_dict()["nodes"]
        return events_of(path), nodes

    return run


@pytest.mark.parametrize("place", [*PLACES, "hosts", "hosted rollouts", "agents inline", "agents threads"])
def test_spans_nest_and_arrows_lead_to_the_update_that_used_a_fragment(traced: Traced, place: str) -> None:
    events, _ = traced(place)
    assert_nested(events)
    assert flows(events) == {
        (f"lane {lane}", f"fragment {number}"): [("caller", f"update {number}")]
        for lane in range(2)
        for number in range(3)
    }
    updates = [event for _, _, event in tracks(events)["caller"]]
    assert [event["name"] for event in updates] == ["update 0", "update 1", "update 2"]
    used = [sorted(event["args"]["fragments"]) for event in updates]
    assert used == [[f"lane 0: {number}", f"lane 1: {number}"] for number in range(3)]


@pytest.mark.parametrize("place", ["inline", "ahead", "threads", "processes"])
def test_spans_add_up_to_the_times_of_the_report(traced: Traced, place: str) -> None:
    events, nodes = traced(place)
    found = busy_s(events)
    for name in ("env", "env_to_module", "module", "module_to_env", "learner_pipeline"):
        assert found[name] == pytest.approx(nodes[name]["busy_s"], abs=1e-5), name
    assert 0 < found["caller"] <= nodes["caller"]["busy_s"]


@pytest.mark.parametrize(
    ("place", "does"),
    [
        *((place, "step") for place in ("threads", "processes", "hosts")),
        *((place, "rollout") for place in ("rollouts", "hosted rollouts")),
    ],
)
def test_a_lane_has_what_was_done_for_it_elsewhere(traced: Traced, place: str, does: str) -> None:
    spans = tracks(traced(place)[0])
    for lane in range(2):
        named = [event["name"] for _, _, event in spans[f"lane {lane}"]]
        assert named.count(does) == (24 if does == "step" else 3)
        assert named.count("reset") == (does == "step")


class Sink:
    """Node that takes its time for each fragment."""

    async def run(self, fragments: Inlet[Fragment]) -> None:
        async for _ in fragments:
            await anyio.sleep(0.01)


@pytest.mark.parametrize("place", ["inline", "threads apart"])
def test_a_loop_in_an_event_loop_is_traced(tmp_path: Path, place: str) -> None:
    async def run() -> None:
        options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 3, **PLACES[place]}
        async with Rollout(ENVS, watch=Watch(trace=str(tmp_path / "run.trace.gz")), **options) as rollout:
            assert len([batch async for batch in rollout.batches()]) == 3

    anyio.run(run)
    events = events_of(tmp_path / "run.trace.gz")
    assert_nested(events)
    assert flows(events) == {("lane 0", f"fragment {number}"): [("caller", f"update {number}")] for number in range(3)}
    assert busy_s(events)["env"] > 0


def test_a_graph_s_run_has_the_trace_of_its_rollouts(tmp_path: Path) -> None:
    graph = Graph()
    options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 3}
    for name in ("left", "right"):
        graph.add_node(name, Rollout(ENVS[:2], **options))
        graph.add_node(f"{name}_sink", Sink())
        graph.connect(f"{name}.fragments", f"{name}_sink")

    async def run() -> Any:
        async with graph.run(trace=str(tmp_path / "run.trace")) as run:
            await run.wait()
            return run.report()

    nodes = anyio.run(run).as_dict()["nodes"]
    events = events_of(tmp_path / "run.trace")
    assert_nested(events)
    assert flows(events) == {
        (f"{name}/lane 0", f"fragment {number}"): [(f"{name}/figures", f"{name}/figures")]
        for name in ("left", "right")
        for number in range(3)
    }
    found, sink = busy_s(events), [event["name"] for _, _, event in tracks(events)["left_sink"]]
    assert sink.count("waits for an item") <= 4
    assert sink.count("left_sink") <= 4
    assert {name: pytest.approx(node["busy_s"], abs=1e-5) for name, node in nodes.items()} == found


@pytest.mark.slow
def test_a_killed_program_leaves_a_trace_that_can_be_repaired(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not path.exists() or path.stat().st_size < 1 << 18:
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(json.JSONDecodeError):
        events_of(path)
    events = repaired(path)
    assert_nested(events)
    assert len([event for event in events if event["name"] == "module"]) > 100


def test_an_error_in_the_loop_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    made = Rollout(ENVS, module=NumberedModule(), fragment_length=8, watch=Watch(trace=str(path)))
    with pytest.raises(ZeroDivisionError), made as rollout:
        for _ in rollout.batches():
            raise ZeroDivisionError
    events = events_of(path)
    assert events[-1]["name"] == "end of the trace"
    assert [event["name"] for _, _, event in tracks(events)["caller"]] == ["update 0"]


@pytest.mark.parametrize("where", ["inline", "threads"])
def test_a_step_that_is_under_way_at_the_end_is_there_as_far_as_it_has_come(tmp_path: Path, where: Any) -> None:
    ends: list[Callable[[], None]] = []

    class Ending(NumberedEnv):
        def step(self, action: Any) -> Any:
            if ends:
                ends.pop()()
            return super().step(action)

    path, options = tmp_path / "run.trace", {"module": NumberedModule(), "fragment_length": 8}
    with Rollout([partial(Ending, 0)], watch=Watch(trace=str(path)), where=where, **options) as rollout:
        batches = rollout.batches()
        next(batches)
        assert rollout._doctor is not None
        ends.append(rollout._doctor.end_trace)
        next(batches)
    events = events_of(path)
    assert_nested(events)
    [*_, (_, last, _)] = tracks(events)["env"]
    assert last == max(end for spans in tracks(events).values() for _, end, _ in spans)


def test_a_file_that_can_not_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"trace is '{tmp_path}', expected a file")):
        Rollout(ENVS, watch=Watch(trace=str(tmp_path)))
    graph = Graph()
    with pytest.raises(GraphError, match=r"trace is for a loop over the rollout, expected graph\.run\(trace=…\)"):
        graph.add(rollout=Rollout(ENVS, module=NumberedModule(), watch=Watch(trace=str(tmp_path / "run.trace"))))
