"""The table of the figures that a run logs, and the row that is made of what it has counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan
from statistics import fmean
from typing import Any, Literal

from rollflow.nodes.metrics.episode_returns import EpisodeWindow
from rollflow.nodes.metrics.metrics_logger import MetricsLogger
from rollflow.stream.data.errors import MetricsError
from rollflow.stream.graph.report import MOSTLY_IDLE, Report

Axis = Literal["steps", "updates", "time"]
PLACE = ("steps", "updates", "time")
"""Columns of a file that say where a row stands."""
GLOBAL_STEP = "global_step"
"""The x axis, where it is a figure by itself."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table of names.

    name        as it is logged; `{label}` stands for one name of many: a stage, a cause, a module
    exported    as Prometheus has it, if the label is a label, and a counter's name ends in `_total`
    kind        "counter": it only grows; "gauge": it goes up and down
    text        the meaning, with its unit
    """

    name: str
    exported: str
    kind: Literal["counter", "gauge"]
    text: str

    @property
    def stem(self) -> str:
        """The name up to its label."""
        return self.name.partition("{")[0]

    @property
    def label(self) -> str:
        """The name of the label; "" if there is none."""
        return self.name.partition("{")[2].rstrip("}")


FIGURES = (
    Figure("rollout/ep_rew_mean", "rollflow_ep_rew_mean", "gauge", "mean return of the last 100 finished episodes"),
    Figure("rollout/ep_len_mean", "rollflow_ep_len_mean", "gauge", "mean length of the last 100 finished episodes"),
    Figure("rollout/episodes", "rollflow_episodes", "counter", "episodes finished so far"),
    Figure(
        "rollout/ep_rew_mean/{module}",
        "rollflow_module_ep_rew_mean",
        "gauge",
        "with several agents: mean return of the last 100 episodes of the agents that a module served",
    ),
    Figure("time/total_timesteps", "rollflow_timesteps", "counter", "environment steps so far"),
    Figure("time/iterations", "rollflow_iterations", "counter", "rounds of fragments, or batches, handed out so far"),
    Figure("time/time_elapsed", "rollflow_elapsed_seconds", "gauge", "seconds since the run began"),
    Figure("time/fps", "rollflow_fps", "gauge", "environment steps per second, since the run began"),
    Figure("time/fps_now", "rollflow_fps_now", "gauge", "environment steps per second, since the row before"),
    Figure("policy/version", "rollflow_policy_version", "gauge", "policy version published last"),
    Figure(
        "policy/version/{module}",
        "rollflow_module_policy_version",
        "gauge",
        "with several agents: policy version of a module published last",
    ),
    Figure("policy/lag", "rollflow_policy_lag", "gauge", "policy versions that what was handed out last was old"),
    Figure("lost/{cause}", "rollflow_lost_timesteps", "counter", "environment steps lost so far, by cause"),
    Figure(
        "busy/{stage}", "rollflow_busy_ratio", "gauge", "share of the time since the row before that a stage worked"
    ),
    Figure("calls/p50/{stage}", "rollflow_call_p50_seconds", "gauge", "median seconds of a stage's recent calls"),
    Figure("calls/p99/{stage}", "rollflow_call_p99_seconds", "gauge", "seconds that 99 of 100 recent calls stay below"),
    Figure("calls/longest/{stage}", "rollflow_call_longest_seconds", "gauge", "seconds of a stage's longest call"),
    Figure("log/dropped_rows", "rollflow_log_dropped_rows", "counter", "rows that a slow or failed log was not given"),
    Figure("metrics/{name}", "rollflow_metric", "gauge", "value that a connector piece has logged to a MetricsLogger"),
)
"""Every figure that rollflow itself logs."""

OWN = Figure("{name}", "rollflow_logged", "gauge", "mean of the values logged under a name since the row before")
"""What a program logs by names of its own."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run has counted at one moment.

    elapsed_s    seconds since its log began
    steps        environment steps
    updates      batches or rounds handed out
    first_steps  those of `steps` that an earlier run made, which this one goes on with
    versions     module -> policy version; "" stands for the only module
    lag          policy versions that what was handed out last was old; None: nobody knows
    lost         cause -> environment steps
    returns      of the finished episodes
    metrics      what connector pieces log into
    report       of the stages; None: there is none
    """

    elapsed_s: float = 0.0
    steps: int = 0
    updates: int = 0
    first_steps: int = 0
    versions: Mapping[Any, int] = field(default_factory=dict)
    lag: int | None = None
    lost: Mapping[str, int] = field(default_factory=dict)
    returns: EpisodeWindow = field(default_factory=EpisodeWindow)
    metrics: Any = None
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one moment, by name.

    time          seconds since 1970
    elapsed_s     seconds since the log began
    of_updates    updates after which the run ends; None: nobody knows
    axis          the x axis
    pieces        stage -> name of the connector piece that takes most of its time
    """

    steps: int
    updates: int
    time: float
    elapsed_s: float
    values: Mapping[str, float]
    of_updates: int | None = None
    axis: Axis = "steps"
    pieces: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> dict[str, float]:
        """Where it stands, by the names of `PLACE`."""
        return dict(zip(PLACE, (self.steps, self.updates, self.time), strict=True))

    @property
    def x(self) -> int:
        """The place on the x axis: a number of steps, of updates, or of whole seconds."""
        return {"steps": self.steps, "updates": self.updates, "time": int(self.elapsed_s)}[self.axis]


def figures_of(now: Counts, before: Counts) -> dict[str, float]:
    """The figures of the table, by name; one that is not known yet is left out.

    before    counts of the row before
    """
    past_s = max(now.elapsed_s - before.elapsed_s, 1e-9)
    values: dict[str, float] = dict(_returns(now.returns))
    values |= {
        "time/total_timesteps": now.steps,
        "time/iterations": now.updates,
        "time/time_elapsed": now.elapsed_s,
        "time/fps": (now.steps - now.first_steps) / max(now.elapsed_s, 1e-9),
        "time/fps_now": (now.steps - before.steps) / past_s,
    }
    values |= {f"policy/version/{name}".removesuffix("/"): version for name, version in now.versions.items()}
    if now.lag is not None:
        values["policy/lag"] = now.lag
    values |= {f"lost/{cause}": steps for cause, steps in now.lost.items()}
    values |= _busy(now.report, before.report)
    if now.report is not None:
        for node in now.report.nodes:
            for part, seconds in () if node.calls is None else node.calls._asdict().items():
                values[f"calls/{part.removesuffix('_s')}/{node.name}"] = seconds
    if isinstance(now.metrics, MetricsLogger):
        values |= _flat("metrics", now.metrics.peek((), {}))
    return values


def busiest_stage(values: Mapping[str, float]) -> tuple[str, float] | None:
    """The stage that holds the others back, and its busy share, by the figures of a row; None: all of them wait."""
    shares = [(name.removeprefix("busy/"), share) for name, share in values.items() if name.startswith("busy/")]
    busiest = max(shares, key=lambda stage: stage[1], default=("", 0.0))
    return busiest if busiest[1] >= MOSTLY_IDLE else None


def check_own_name(name: object) -> None:
    """Raise MetricsError for a name that is none, that has more than one line, or that the table has."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise MetricsError(f"the name {name!r} was to be logged, expected a text such as 'train/loss'")
    if figure_of(name) is not OWN or name in (*PLACE, GLOBAL_STEP):
        raise MetricsError(f"'{name}' was to be logged, which rollflow logs itself; expected another name")


def figure_of(name: str) -> Figure:
    """The line of the table for a name; `OWN` if it is a program's."""
    for figure in FIGURES:
        if name == figure.name or (figure.label and name.startswith(figure.stem)):
            return figure
    return OWN


def _returns(returns: EpisodeWindow) -> Iterator[tuple[str, float]]:
    last, lengths = list(returns.returns), list(returns.lengths)
    if last:
        yield "rollout/ep_rew_mean", fmean(last)
        yield "rollout/ep_len_mean", fmean(lengths)
    yield "rollout/episodes", returns.count
    for module, own in getattr(returns, "by_module", {}).copy().items():
        if last := list(own.returns):
            yield f"rollout/ep_rew_mean/{module}", fmean(last)


def _busy(now: Report | None, before: Report | None) -> Iterator[tuple[str, float]]:
    if now is None:
        return
    then = {} if before is None else {node.name: node.busy_s for node in before.nodes}
    past_s = now.elapsed_s - (0.0 if before is None else before.elapsed_s)
    if past_s <= 0.0:
        return
    for node in now.nodes:
        share = (node.busy_s - then.get(node.name, 0.0)) / past_s
        yield f"busy/{node.name}", min(max(share, 0.0), 1.0)


def _flat(stem: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Nested values as names with slashes; a list has its mean, and what has no value yet is left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{stem}/{name}", value)
            continue
        number = (fmean(value) if value else float("nan")) if isinstance(value, list) else value
        if not isnan(number):
            yield f"{stem}/{name}", number
