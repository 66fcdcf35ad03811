"""Experiment trackers as destinations of a log: TensorBoard, Weights & Biases, MLflow."""

import importlib
import struct
from pathlib import Path
from typing import Any

from rollflow.nodes.logs.figures import GLOBAL_STEP, PLACE, Row
from rollflow.nodes.logs.text_files import checked_path, tail_of
from rollflow.stream.data.errors import MetricsError

_ALWAYS = "time/total_timesteps"  # which every row has
_TAIL_BYTES = 1 << 18  # of an event file, in which the last rows are
_MLFLOW_MOST = 1000  # metrics in a batch


class TensorBoard:
    """Event files in a folder, written by `torch.utils.tensorboard`.

    Each row has its time beside its place on the x axis. Raises MetricsError where the folder can't be written.
    """

    def __init__(self, target: str) -> None:
        self._folder = checked_path(target, "tensorboard", is_folder=True)
        self._writer: Any = None

    def open(self) -> dict[str, int]:
        """Begin an event file; the steps and updates of the last row in the folder's others."""
        last = max(map(_last_x, self._folder.glob("events.out.tfevents.*")), default=0)
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))
        return dict.fromkeys(PLACE[:2], last)  # whichever its x axis is

    def write(self, row: Row) -> None:
        """Write a scalar for each figure."""
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.x, walltime=row.time)
        self._writer.flush()

    def close(self) -> None:
        """End the event file."""
        self._writer.close()


def _last_x(path: Path) -> int:
    """The largest place on the x axis of a row near the end of an event file; 0 if no such log has written it.

    A record is its length, u64, the check sum of that, u32, the event, and the event's check sum, u32.
    """
    check_sum = importlib.import_module("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c
    event_of = importlib.import_module("tensorboard.compat.proto.event_pb2").Event.FromString
    tail, at, last = tail_of(path, _TAIL_BYTES), 0, 0
    while at + 12 <= len(tail):
        length, expected = struct.unpack_from("<QI", tail, at)
        end = at + 12 + length
        if end + 4 > len(tail) or check_sum(tail[at : at + 8]) != expected:
            at += 1  # the tail begins within a record
            continue
        event = event_of(tail[at + 12 : end])
        if any(value.tag == _ALWAYS for value in event.summary.value):
            last = max(last, event.step)
        at = end + 4
    return last


class Wandb:
    """A run of Weights & Biases, by its own settings: WANDB_MODE=offline, WANDB_DIR, a login.

    target    PROJECT or PROJECT/NAME of a new run; "": the run that the program has begun by `wandb.init`, which is not
              finished here, or else a new one

    The x axis is `global_step`.
    """

    def __init__(self, target: str) -> None:
        self._project, _, self._name = target.partition("/")
        self._run: Any = None
        self._is_own = True

    def open(self) -> None:
        """Begin the run."""
        wandb = importlib.import_module("wandb")
        self._is_own = bool(self._project) or wandb.run is None
        self._run = wandb.run
        if self._is_own:
            self._run = wandb.init(project=self._project or None, name=self._name or None, reinit="create_new")
        self._run.define_metric("*", step_metric=GLOBAL_STEP)

    def write(self, row: Row) -> None:
        """Log the figures of the row together."""
        self._run.log({**row.values, GLOBAL_STEP: row.x})

    def close(self) -> None:
        """Finish the run, where it was begun here."""
        if self._is_own:
            self._run.finish()


class Mlflow:
    """A run of MLflow, by its own settings: MLFLOW_TRACKING_URI says where.

    target    EXPERIMENT or EXPERIMENT/NAME of a new run; the experiment is made where it is missing

    A run whose last row was written is FINISHED, also after an error of the program.
    """

    def __init__(self, target: str) -> None:
        self._experiment, _, self._name = target.partition("/")
        if not self._experiment:
            raise MetricsError(f"log='mlflow:{target}' names no experiment, expected 'mlflow:EXPERIMENT'")
        self._client: Any = None
        self._metric: Any = None
        self._run_id = ""

    def open(self) -> None:
        """Begin the run."""
        mlflow = importlib.import_module("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        there = self._client.get_experiment_by_name(self._experiment)
        experiment = there.experiment_id if there else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(experiment, run_name=self._name or None).info.run_id

    def write(self, row: Row) -> None:
        """Log the figures of the row together, at most a thousand at a time, as MLflow takes them."""
        when, step = int(row.time * 1000), row.x
        metrics = [self._metric(name, value, when, step) for name, value in row.values.items()]
        for first in range(0, len(metrics), _MLFLOW_MOST):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MLFLOW_MOST])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)
