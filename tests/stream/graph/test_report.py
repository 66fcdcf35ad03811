import json

import pytest

from rollflow.stream.graph.meter import EdgeMeter, NodeMeter, WaitAttribution
from rollflow.stream.graph.report import node_report, report_of


def meter(name: str, busy_ms: int, blocked_ms: int = 0, items: int = 1) -> NodeMeter:
    made = NodeMeter(name)
    made.items, made.busy_ns, made.blocked_ns = items, busy_ms * 10**6, blocked_ms * 10**6
    return made


def test_a_report_is_a_table_that_ends_in_a_sentence() -> None:
    edge = EdgeMeter("a.out → b.items", 4)
    edge.items, edge.dropped, edge.peak = 1234, 5, 4
    stage = meter("a", 100, 250, 2000)
    for took in (4, *[1, 2, 3] * 40):
        stage.calls.add(took * 10**6)
    report = report_of(10**9, [stage, meter("b", 900)], [edge], pieces={"a": "NumpyToTensor"})
    lines = str(report).splitlines()
    assert lines[0].split() == "node items busy idle blocked p50 p99 longest slowest piece".split()
    assert lines[1].split() == "a 2,000 10.0% 65.0% 25.0% 2 ms 3 ms 4 ms NumpyToTensor".split()
    assert lines[2].split() == ["b", "1", "90.0%", "10.0%", "0.0%"]
    assert lines[4].split()[:5] == ["a.out", "→", "b.items", "1,234", "0/4"]
    assert lines[-1] == "held back by b (busy 90% of 1.0 s)"


def test_a_report_as_a_dict_has_every_figure_of_the_table_as_plain_numbers() -> None:
    edge = EdgeMeter("a.out → b.items", 4)
    edge.items, edge.dropped, edge.peak, edge.blocked_count = 1234, 5, 4, 7
    report = report_of(2 * 10**9, [meter("a", 200, 500, 2000), meter("b", 1800)], [edge])
    figures = json.loads(json.dumps(report.as_dict()))
    assert figures["elapsed_s"] == 2.0
    assert figures["bottleneck"] == "b"
    assert figures["conclusion"] == str(report).splitlines()[-1]
    assert figures["nodes"]["a"] == {
        "items": 2000,
        "busy_s": 0.2,
        "idle_s": 1.3,
        "blocked_s": 0.5,
        "busy": 0.1,
        "idle": 0.65,
        "blocked": 0.25,
    }
    assert list(figures["nodes"]) == ["a", "b"]
    [(name, counts)] = figures["edges"].items()
    assert name == "a.out → b.items"
    assert {key: counts[key] for key in ("capacity", "items", "held", "peak", "dropped", "blocked_count")} == {
        "capacity": 4,
        "items": 1234,
        "held": 0,
        "peak": 4,
        "dropped": 5,
        "blocked_count": 7,
    }
    assert counts.keys() >= {"mean_held", "full"}


def test_where_none_is_at_work_none_holds_the_others_back() -> None:
    waiting = [meter("a", 20), meter("b", 50)]
    report = report_of(10**9, waiting, [])
    assert report.bottleneck is None
    assert str(report).splitlines()[-1] == "all of them wait: none is busy for long (b, the busiest, for 5% of 1.0 s)"
    assert report_of(10**9, [*waiting, meter("c", 0, 200)], []).bottleneck == "b"
    assert report_of(10**9, [meter(name, 30) for name in "abcd"], []).bottleneck == "a"  # that have no time left over
    harmless = report_of(10**9, [*waiting, meter("log", 900)], [], frozenset({"log"}))
    assert harmless.bottleneck is None


def test_of_those_who_hold_gates_it_is_said_how_long_they_were_waited_for() -> None:
    report = report_of(10**9, [meter("a", 20), meter("the trainer", 900)], [], holders=frozenset({"the trainer"}))
    assert report.bottleneck == "the trainer"
    assert str(report).splitlines()[-1] == "held back by the trainer (waited for 90% of 1.0 s)"


def test_chains_that_wait_for_one_holder_at_once_are_one_wait() -> None:
    holders = WaitAttribution()
    with holders.awaited("the trainer"):
        with holders.awaited("the trainer"), holders.awaited(None):
            pass
        first, _ = holders.meters["the trainer"].read()
        while holders.meters["the trainer"].read()[0] == first:
            pass
    busy = holders.meters["the trainer"].read()
    assert busy == holders.meters["the trainer"].read()
    assert holders.meters["the trainer"].items == 2
    assert list(holders.meters) == ["the trainer"]


def test_a_part_of_a_stage_may_be_shown_by_itself() -> None:
    report = report_of(10**9, [meter("env", 200), meter("caller", 700)], [])
    part = node_report(10**9, meter("learner_pipeline", 500))
    shown = {node.name: (node.busy_s, node.idle_s) for node in report.moved("caller", part, None).nodes}
    assert shown == {
        "env": (0.2, 0.8),
        "learner_pipeline": (0.5, 0.5),
        "caller": (pytest.approx(0.2), pytest.approx(0.8)),
    }
    assert report.moved("caller", part, None).bottleneck == "learner_pipeline"
    idle = node_report(10**9, meter("learner_pipeline", 0, items=0))
    assert [node.name for node in report.moved("caller", idle, None).nodes] == ["env", "caller"]
