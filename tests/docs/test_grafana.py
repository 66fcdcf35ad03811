"""The dashboard and the alert rules ask for what rollflow exports, and for nothing else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollflow.nodes.logs.figures import FIGURES, OWN

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
EXPORTED = {figure.exported + ("_total" if figure.kind == "counter" else ""): figure for figure in (*FIGURES, OWN)}


def queries(name: str) -> list[dict[str, Any]]:
    """All objects of a file that have an `expr`."""
    return list(_with_expr(yaml.safe_load((FOLDER / name).read_text())))  # JSON is YAML, too


def _with_expr(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "expr" in node:
            yield node
        node = list(node.values())
    for each in node if isinstance(node, list) else []:
        yield from _with_expr(each)


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yaml"])
def test_every_name_is_exported(name: str) -> None:
    names = [found for query in queries(name) for found in re.findall(r"rollflow_\w+", query["expr"])]
    assert len(names) > 5
    assert set(names) <= EXPORTED.keys()


def test_the_dashboard_shows_every_figure_but_three_and_labels_lines_by_what_there_is() -> None:
    shown = set()
    for query in queries("dashboard.json"):
        [name] = re.findall(r"rollflow_\w+", query["expr"])
        labels = re.findall(r"\{\{(\w+)\}\}", query["legendFormat"])
        assert labels == ["instance", *filter(None, [EXPORTED[name].label])]
        shown.add(name)
    # A rate over a minute says more than the first two, and there is an alert for the last.
    assert EXPORTED.keys() - shown == {"rollflow_fps", "rollflow_fps_now", "rollflow_log_dropped_rows_total"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= dashboard.keys()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    placed = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(placed) == len(set(placed))  # no panel lies on another
    assert max(x for x, _ in placed) < 24


def test_every_alert_has_what_prometheus_wants() -> None:
    rules = queries("alerts.yaml")
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)
