"""Experiment trackers as destinations of a log: TensorBoard, Weights & Biases, MLflow."""

import importlib
from typing import Any

from rollflow.nodes.logs.figures import GLOBAL_STEP, Row
from rollflow.nodes.logs.text_files import checked_path
from rollflow.stream.data.errors import MetricsError

_MLFLOW_MOST = 1000  # metrics in a batch


class TensorBoard:
    """Event files in a folder, written by `torch.utils.tensorboard`.

    Each row has its time beside its place on the x axis. Raises MetricsError where the folder can't be written.
    """

    def __init__(self, target: str) -> None:
        self._folder = checked_path(target, "tensorboard", is_folder=True)
        self._writer: Any = None

    def open(self) -> None:
        """Begin an event file."""
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._folder))

    def write(self, row: Row) -> None:
        """Write a scalar for each figure."""
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.x, walltime=row.time)
        self._writer.flush()

    def close(self) -> None:
        """End the event file."""
        self._writer.close()


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
