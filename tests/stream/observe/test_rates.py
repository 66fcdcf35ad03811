"""Rates between two snapshots, by hand-worked numbers."""

from typing import Any

from rollflow.stream.observe.snapshot import shown, with_rates


def snapshot(elapsed_s: float, items: int, busy_s: float, steps: int = 0) -> dict[str, Any]:
    node = {"items": items, "busy_s": busy_s, "idle_s": elapsed_s - busy_s - 0.5, "blocked_s": 0.5}
    channel = {"source": "env", "port": "out", "target": "sink", "items": 2 * items}
    call = {"source": "a", "port": "out", "target": "b"}
    figures = {"time/total_timesteps": steps, "time/time_elapsed": elapsed_s}
    return {"elapsed_s": elapsed_s, "nodes": {"env": node}, "edges": [channel, call], "figures": figures}


def test_rates_are_those_since_the_snapshot_before() -> None:
    found = with_rates(snapshot(6.0, 30, 3.5, steps=1000), snapshot(4.0, 20, 2.0, steps=400))
    node = found["nodes"]["env"]
    assert (node["items_per_s"], node["busy"], node["idle"], node["blocked"]) == (5.0, 0.75, 0.25, 0.0)
    assert [edge.get("items_per_s") for edge in found["edges"]] == [10.0, None]
    assert found["steps_per_s"] == 300.0
    assert found["elapsed_s"] == 6.0


def test_without_one_before_or_with_one_of_the_same_moment_they_are_those_since_the_beginning() -> None:
    now = snapshot(4.0, 20, 2.0, steps=400)
    found = with_rates(now, None)
    assert (found["nodes"]["env"]["items_per_s"], found["nodes"]["env"]["busy"]) == (5.0, 0.5)
    assert found["steps_per_s"] == 100.0
    assert with_rates(now, now)["nodes"] == found["nodes"]


def test_a_node_that_comes_up_later_counts_from_nothing() -> None:
    before = {**snapshot(4.0, 20, 2.0), "nodes": {}, "edges": []}
    found = with_rates(snapshot(6.0, 30, 3.0), before)
    assert found["nodes"]["env"]["items_per_s"] == 15.0
    assert found["nodes"]["env"]["busy"] == 1.0  # more than the time there was


def test_a_run_has_a_title_as_far_as_it_says_one_and_is_bad_where_it_stands_still_or_does_not_answer() -> None:
    runs: list[Any] = [{"kind": "graph", "name": "two"}, {"kind": "Rollout"}, {}]
    assert [shown(run)["title"] for run in runs] == ["graph two", "Rollout", "run"]
    stalled, waits = ({"diagnosis": {"state": state, "text": ""}} for state in ("stalled", "waits"))
    assert [shown(run)["is_bad"] for run in (stalled, waits, {"error": "no answer"}, {})] == [True, False, True, False]


def test_parts_are_added_up() -> None:
    def run(elapsed_s: float, left: int, right: int) -> dict[str, Any]:
        parts = {name: snapshot(elapsed_s, 0, 0.0, steps) for name, steps in (("left", left), ("right", right))}
        return {"elapsed_s": elapsed_s, "nodes": {}, "edges": [], "parts": parts}

    assert with_rates(run(6.0, 400, 100), run(4.0, 200, 50))["steps_per_s"] == 125.0
    told = {"pid": 7, "error": "no answer"}
    assert with_rates(told, None) == {**told, "nodes": {}, "edges": [], "steps_per_s": None}
