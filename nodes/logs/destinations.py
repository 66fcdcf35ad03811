"""Destinations of a log: their interface, their kinds, and how a text names one."""

import importlib
import importlib.util
import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TextIO, get_args

from rollflow.nodes.logs.figures import GLOBAL_STEP, Axis, Figure, Row, busiest_stage, figure_of
from rollflow.stream.data.errors import MetricsError
from rollflow.stream.data.system import require_packages
from rollflow.stream.graph.report import duration_text
from rollflow.stream.net import backoff
from rollflow.stream.observe.trace import check_trace

logger = logging.getLogger(__name__)

_LINE_S = 60.0  # between two lines, where none can be written over
_LOOPBACK = "127.0.0.1"
_MLFLOW_MOST = 1000  # metrics in a batch
_IN_FILES = ("jsonl", "tensorboard")  # kinds whose targets are paths


class Progress:
    """Line with steps per second, mean return, policy version and the stage that holds the others back.

    target    "": there is nothing to name

    It goes to the standard error stream, by the package rich: to a file, or a pipe, as one line a minute. Raises
    MetricsError for a target.
    """

    def __init__(self, target: str) -> None:
        if target:
            raise MetricsError(f"log='progress:{target}' names a target, expected 'progress:'")
        self._console: Any = None
        self._bar: Any = None  # None: lines are written below each other
        self._task: Any = None
        self._stop: Callable[[], object] = bool
        self._next = 0.0  # time for the next line
        self._last: Row | None = None  # that is shown, or was not written

    def open(self, last: Row | None = None) -> None:
        """Begin the line."""
        self._console = importlib.import_module("rich.console").Console(stderr=True, highlight=False)
        is_notebook = self._console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if not is_notebook and (not self._console.is_terminal or self._console.is_dumb_terminal):
            return
        rich = importlib.import_module("rich.progress")
        whole = importlib.import_module("rich.table").Column(no_wrap=True, min_width=4)
        self._bar = rich.Progress(
            rich.MofNCompleteColumn(table_column=whole),
            rich.TimeElapsedColumn(table_column=whole),
            rich.TimeRemainingColumn(compact=True, table_column=whole),
            rich.TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("no step yet", total=None)
        self._bar.start()
        self._stop = weakref.finalize(self, self._bar.stop)  # shows the cursor again, also where nobody closes it

    def write(self, row: Row) -> None:
        """Show a row: at once, or, if lines can't be written over, after a minute."""
        self._last = row
        if self._bar is not None or backoff.times.clock() >= self._next:
            self._show(row, text_of(row))

    def close(self) -> None:
        """End with the last row, and the steps per second of the whole run."""
        try:
            if self._last is not None:
                self._show(self._last, text_of(self._last, "time/fps"))
        finally:
            self._stop()

    def _show(self, row: Row, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=row.updates, total=row.of_updates, description=text, refresh=True)
            return
        self._last = None
        of = "" if row.of_updates is None else f" of {row.of_updates:,}"
        self._console.print(f"{row.updates:,}{of} updates in {row.elapsed_s:,.0f} s: {text}", soft_wrap=True)
        self._next = backoff.times.clock() + _LINE_S


def text_of(row: Row, rate: str = "time/fps_now") -> str:
    """What is worth a person's look in a row, in words.

    rate    figure of steps per second; if it is 0, that of the whole run stands for it
    """
    values = row.values
    parts = [f"{values.get(rate) or values.get('time/fps', 0.0):,.0f} steps/s"]
    if "rollout/ep_rew_mean" in values:
        parts.append(f"return {values['rollout/ep_rew_mean']:,.4g}")
    versions = sorted({int(value) for name, value in values.items() if name.startswith("policy/version")})
    if versions:
        parts.append(f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}")
    stage = busiest_stage(values)
    if stage is not None:
        piece = row.pieces.get(stage[0])
        parts.append(f"{stage[0]} {stage[1]:.0%} busy" + ("" if piece is None else f" (most in {piece})"))
        if (p99 := values.get(f"calls/p99/{stage[0]}")) is not None:
            parts.append(f"99 of 100 calls below {duration_text(p99)}")
    return ", ".join(parts)


class Prometheus:
    """Server on a port of this machine that gives the newest row at `/metrics`, in Prometheus' text format.

    target    PORT, for programs on this machine alone, or HOST:PORT; port 0 is any that is free

    address    host and port, once it is open

    Raises MetricsError for what is no port, OSError from `open` if the port is taken.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise MetricsError(f"log='prometheus:{target}': expected PORT or HOST:PORT, a port from 0 to 65535")
        self.address = (host.strip("[]") or _LOOPBACK, int(port))
        self._values: Mapping[str, float] = {}
        self._serving: Any = None

    def open(self, last: Row | None = None) -> None:
        """Begin to serve. Raises OSError if the port is taken."""
        client = importlib.import_module("prometheus_client")
        registry = client.CollectorRegistry()
        registry.register(self)
        host, port = self.address
        try:
            self._serving = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise OSError(
                error.errno, f"log='prometheus:{host}:{port}': {error.strerror}, expected a free port"
            ) from None
        self.address = host, self._serving[0].server_port
        logger.info("the log is served at http://%s:%d/metrics", *self.address)

    def write(self, row: Row) -> None:
        """Have this row served from now on."""
        self._values = row.values

    def close(self) -> None:
        """End the server, and its thread."""
        server, thread = self._serving
        server.shutdown()
        server.server_close()
        thread.join()

    def collect(self) -> Iterator[Any]:
        """The families of the newest row, as prometheus_client asks for them."""
        core = importlib.import_module("prometheus_client.core")
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        families: dict[Figure, Any] = {}
        for name, value in self._values.items():
            figure = figure_of(name)
            labels = [figure.label] if figure.label else []
            if figure not in families:
                families[figure] = kinds[figure.kind](figure.exported, figure.text, labels=labels)
            families[figure].add_metric([name.removeprefix(figure.stem) for _ in labels], value)
        yield from families.values()


class Tracker:
    """Destination that another package writes.

    opens    begins, where `open` says, and gives what writes a row, and what ends
    """

    write: Callable[[Row], None]
    close: Callable[[], None]

    def __init__(self, opens: Callable[[Row | None], tuple[Callable[[Row], None], Callable[[], None]]]) -> None:
        self._opens = opens

    def open(self, last: Row | None = None) -> None:
        """Begin."""
        self.write, self.close = self._opens(last)


def jsonl_of(target: str) -> Tracker:
    """File with an object a line: `steps`, `updates`, `time` in seconds since 1970, and every figure by its name.

    A file that is there is added to; a run that goes on from a checkpoint takes away the rows behind it. JSON knows no
    NaN and no infinity: they are null. Raises MetricsError if the file can't be written.
    """
    path = checked_path(target, "jsonl")

    def opens(last: Row | None) -> Any:
        file = _appended(path, last)

        def write(row: Row) -> None:
            values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
            file.write(json.dumps({**row.place, **values}) + "\n")
            file.flush()

        return write, file.close

    return Tracker(opens)


def tensorboard_of(target: str) -> Tracker:
    """Event files in a folder, written by `torch.utils.tensorboard`.

    Each row has its time beside its place on the x axis. Raises MetricsError if the folder can't be written.
    """
    folder = checked_path(target, "tensorboard", is_folder=True)

    def opens(last: Row | None) -> Any:
        purged = None if last is None or last.axis == "time" else last.x + 1
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=purged)

        def write(row: Row) -> None:
            for name, value in row.values.items():
                writer.add_scalar(name, value, row.x, walltime=row.time)
            writer.flush()

        return write, writer.close

    return Tracker(opens)


def wandb_of(target: str) -> Tracker:
    """A run of Weights & Biases, by its own settings: WANDB_MODE=offline, WANDB_DIR, a login.

    target    PROJECT or PROJECT/NAME of a new run; "": the run that the program has begun by `wandb.init`, which is not
              finished here, or else a new one

    The x axis is `global_step`.
    """
    project, _, name = target.partition("/")

    def opens(_: Row | None) -> Any:
        wandb = importlib.import_module("wandb")
        run: Any = None if project else wandb.run
        is_own = run is None
        if is_own:
            run = wandb.init(project=project or None, name=name or None, reinit="create_new")
        run.define_metric("*", step_metric=GLOBAL_STEP)
        return lambda row: run.log({**row.values, GLOBAL_STEP: row.x}), run.finish if is_own else bool

    return Tracker(opens)


def mlflow_of(target: str) -> Tracker:
    """A run of MLflow, by its own settings: MLFLOW_TRACKING_URI says where.

    target    EXPERIMENT or EXPERIMENT/NAME of a new run; the experiment is made if it is missing

    A run whose last row was written is FINISHED, also after an error of the program.
    """
    name, _, run_name = target.partition("/")
    if not name:
        raise MetricsError(f"log='mlflow:{target}' names no experiment, expected 'mlflow:EXPERIMENT'")

    def opens(_: Row | None) -> Any:
        client = importlib.import_module("mlflow").MlflowClient()
        metric = importlib.import_module("mlflow.entities").Metric
        there = client.get_experiment_by_name(name)
        experiment = there.experiment_id if there else client.create_experiment(name)
        run_id = client.create_run(experiment, run_name=run_name or None).info.run_id

        def write(row: Row) -> None:
            when, step = int(row.time * 1000), row.x
            metrics = [metric(name, value, when, step) for name, value in row.values.items()]
            for first in range(0, len(metrics), _MLFLOW_MOST):  # at most as many as MLflow takes at a time
                client.log_batch(run_id, metrics=metrics[first : first + _MLFLOW_MOST])

        return write, partial(client.set_terminated, run_id)

    return Tracker(opens)


def checked_path(target: str, kind: str, *, is_folder: bool = False) -> Path:
    """The path of a file or folder that can be written. Raises MetricsError if it can't be; nothing is made yet."""
    noun = "folder" if is_folder else "file"
    path = Path(target).expanduser()
    expected = f"expected a {noun} that can be written, or a new one"
    if not target:
        raise MetricsError(f"log='{kind}:' names no {noun}, expected '{kind}:PATH'")
    if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
        raise MetricsError(f"log='{kind}:{target}' is no {noun}, {expected}")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() and there != path:
        raise MetricsError(f"log='{kind}:{target}': {there} is a file, {expected}")
    if not os.access(there, os.W_OK):
        raise MetricsError(f"log='{kind}:{target}': {there} may not be written, {expected}")
    return path.absolute()


def _appended(path: Path, last: Row | None) -> TextIO:
    """The file, opened to add lines; what a kill has left of a last line is ended, and rows behind `last` go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    if last is not None and file.tell():
        lines = path.read_bytes().splitlines(keepends=True)
        while lines and _is_behind(lines[-1], last.updates):
            lines.pop()
        file.truncate(sum(map(len, lines)))
        file.seek(0, os.SEEK_END)
    if file.tell():
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read() != b"\n":
                file.write("\n")
    return file


def _is_behind(line: bytes, updates: int) -> bool:
    """True for a row of more updates, and for a part of a row."""
    try:
        return bool(json.loads(line)["updates"] > updates)
    except (ValueError, KeyError, TypeError):
        return not line.endswith(b"\n")


class Destination(Protocol):
    """Where rows go. It is made in the program's thread, and written and closed in a thread of its own."""

    def open(self, last: Row | None = None) -> None:
        """Make ready to be written, in the thread that begins the run. Raises if that can't be done.

        last    where a checkpoint was that the run goes on from: rows behind it are of what is done again; None: no one
        """
        ...

    def write(self, row: Row) -> None:
        """Write one row, to the end: what was written is there when the program is killed. After an error, none."""
        ...

    def close(self) -> None:
        """End."""
        ...


KINDS: Mapping[str, tuple[Callable[[str], Destination], str, str]] = {
    "jsonl": (jsonl_of, "", ""),
    "mlflow": (mlflow_of, "mlflow", "mlflow"),
    "progress": (Progress, "rich", "view"),
    "prometheus": (Prometheus, "prometheus_client", "serve"),
    "tensorboard": (tensorboard_of, "tensorboard", "tensorboard"),
    "wandb": (wandb_of, "wandb", "wandb"),
}
"""Kind -> maker of a destination from its target, the package that it takes, and the extra that has it."""


def place_of(text: str) -> tuple[str, str]:
    """Kind and target of a destination; the same for two spellings of one path."""
    kind, _, target = text.partition(":")
    return kind, str(Path(target).expanduser().resolve()) if kind in _IN_FILES else target


def destination_of(text: str) -> Destination:
    """The destination that a text names as KIND:TARGET, not opened yet.

    Raises MetricsError for an unknown kind, a target that can't be worked with and a missing package.
    """
    kind, colon, target = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon or kind not in KINDS:
        raise MetricsError(
            f"log is {text!r}, expected KIND:TARGET, such as 'tensorboard:runs/1'; kinds: {', '.join(KINDS)}"
        )
    make, package, extra = KINDS[kind]
    destination = make(target)
    if package:
        require_packages(f"log={text!r}", extra, package, error=MetricsError)
    return destination


Log = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of a run's log, and of its trace; see `Rollout`, whose keywords they are.

    log           one destination as KIND:TARGET, or several; None: none
    every         `log_every`: seconds between two rows, at least
    axis          `log_x`: "steps", "updates" or "time", in whole seconds
    of_updates    updates after which the run ends; None: nobody knows
    trace         file for a trace; None: none is written

    Raises MetricsError, a ValueError, for what can't be logged to: an unknown kind, a package that is missing, or a
    path that can't be written.
    """

    log: Log = None
    every: float = 1.0
    axis: Axis = "steps"
    of_updates: int | None = None
    trace: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        every = self.every
        if isinstance(every, bool) or not isinstance(every, int | float) or not 0 < every < math.inf:
            raise MetricsError(f"log_every is {every!r}, expected a number of seconds above 0")
        if self.axis not in get_args(Axis):
            raise MetricsError(f"log_x is {self.axis!r}, expected {', '.join(map(repr, get_args(Axis)))}")
        if self.log is not None and not isinstance(self.log, str | list | tuple):
            raise MetricsError(f"log is {self.log!r}, expected a text such as 'jsonl:run.jsonl', or a list of them")
        check_trace(self.trace)
        for text in self.texts:
            destination_of(text)
        places = [place_of(text) for text in self.texts]
        if twice := [text for text, place in zip(self.texts, places, strict=True) if places.count(place) > 1]:
            raise MetricsError(f"log has {twice[0]!r} and {twice[1]!r}, expected each place once")

    @property
    def texts(self) -> list[str]:
        """The destinations, as they were given."""
        return [] if self.log is None else [self.log] if isinstance(self.log, str) else list(self.log)
