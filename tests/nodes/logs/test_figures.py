"""The figures of a row, worked by hand."""

from pathlib import Path

import pytest

from rollflow.nodes import EpisodeReturns, MetricsLogger
from rollflow.nodes.logs.figures import FIGURES, OWN, Counts, Figure, check_own_name, figure_of, figures_of
from rollflow.stream.data.errors import MetricsError
from rollflow.stream.graph.report import NodeReport, Report

ROOT = Path(__file__).parents[3]


def report_of(elapsed_s: float, **busy_s: float) -> Report:
    return Report(elapsed_s, tuple(NodeReport(name, 1, busy, 0.0, 0.0) for name, busy in busy_s.items()), ())


def test_a_row_has_what_was_counted() -> None:
    returns = EpisodeReturns()
    returns.take(3, [10.0, 20.0, 60.0], [1, 2, 6])
    metrics = MetricsLogger()
    metrics.log_value(("filter", "mean"), 2.5, reduce="max")
    metrics.log_value("picks", 1.0, reduce=None)
    metrics.log_value("picks", 4.0, reduce=None)
    before = Counts(elapsed_s=10.0, steps=400, report=report_of(10.0, env=4.0))
    now = Counts(
        elapsed_s=14.0,
        steps=700,
        updates=7,
        versions={"": 5},
        lag=1,
        lost={"max_lag": 12},
        returns=returns,
        metrics=metrics,
        report=report_of(14.0, env=7.0, late=1.0),
    )
    assert figures_of(now, before) == {
        "rollout/ep_rew_mean": 30.0,
        "rollout/ep_len_mean": 3.0,
        "rollout/episodes": 3,
        "time/total_timesteps": 700,
        "time/iterations": 7,
        "time/time_elapsed": 14.0,
        "time/fps": 50.0,
        "time/fps_now": 75.0,
        "policy/version": 5,
        "policy/lag": 1,
        "lost/max_lag": 12,
        "busy/env": 0.75,
        "busy/late": 0.25,
        "metrics/filter/mean": 2.5,
        "metrics/picks": 2.5,
    }


def test_what_is_not_known_yet_is_left_out() -> None:
    metrics = MetricsLogger()
    metrics.log_value("cleared", 1.0, clear_on_reduce=True)
    metrics.reduce()
    assert figures_of(Counts(elapsed_s=1.0, metrics=metrics), Counts()).keys() == {
        "rollout/episodes",
        "time/total_timesteps",
        "time/iterations",
        "time/time_elapsed",
        "time/fps",
        "time/fps_now",
    }


def test_a_report_that_has_not_moved_has_no_shares() -> None:
    counts = Counts(elapsed_s=2.0, report=report_of(1.0, env=1.0))
    assert not any(name.startswith("busy/") for name in figures_of(counts, counts))


@pytest.mark.parametrize(
    "name", ["time/fps", "busy/env", "metrics/x", "policy/version/hunter", "steps", "time", "global_step"]
)
def test_names_of_the_table_are_refused_for_ones_own(name: str) -> None:
    with pytest.raises(MetricsError, match=f"'{name}' was to be logged, which rollflow logs itself"):
        check_own_name(name)


@pytest.mark.parametrize("name", ["", None, ("train", "loss"), "train\nloss"])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(MetricsError, match="expected a text such as 'train/loss'"):
        check_own_name(name)


@pytest.mark.parametrize("name", ["train/loss", "times", "busyness", "rollout/ep_rew_max", "log"])
def test_other_names_are_free(name: str) -> None:
    check_own_name(name)
    assert figure_of(name) is OWN


def test_the_reference_page_has_the_table() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/reference/metrics.md").read_text().splitlines()
        if line.startswith("| `") and line.count("|") == 5
    ]
    assert rows == [[figure.name, *shown(figure), figure.text] for figure in (*FIGURES, OWN)]


def shown(figure: Figure) -> list[str]:
    """Prometheus' name, as a query has it, and its label."""
    return [figure.exported + ("_total" if figure.kind == "counter" else ""), figure.label]
