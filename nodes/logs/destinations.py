"""Destinations of a log: their interface, their kinds, and how a text names one."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from rollflow.nodes.logs.figures import Row
from rollflow.nodes.logs.otlp import Otlp
from rollflow.nodes.logs.progress import Progress
from rollflow.nodes.logs.prometheus import Prometheus
from rollflow.nodes.logs.text_files import CsvFile, JsonLines
from rollflow.nodes.logs.trackers import Mlflow, TensorBoard, Wandb
from rollflow.stream.data.errors import MetricsError


class Destination(Protocol):
    """Where rows go. It is made in the program's thread, and written and closed in a thread of its own."""

    def open(self) -> Mapping[str, int] | None:
        """Make ready to be written, in the thread that begins the run. Raises where that can't be done.

        Returns the steps and updates of the last row that is there, by these names, as far as that is known.
        """
        ...

    def write(self, row: Row) -> None:
        """Write one row, to the end: what was written is there when the program is killed.

        Raises RowLost where the next row is to come all the same, and anything else where none is.
        """
        ...

    def close(self) -> None:
        """End."""
        ...


KINDS: Mapping[str, Callable[[str], Destination]] = {
    "csv": CsvFile,
    "jsonl": JsonLines,
    "mlflow": Mlflow,
    "otlp": Otlp,
    "progress": Progress,
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}
"""Kind -> maker of a destination from its target."""

_PACKAGES = {  # kind -> package, and the extra that has it
    "mlflow": ("mlflow", "mlflow"),
    "otlp": ("opentelemetry.exporter.otlp.proto.http", "otel"),
    "progress": ("rich", "view"),
    "prometheus": ("prometheus_client", "serve"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
}


_IN_FILES = ("csv", "jsonl", "tensorboard")  # kinds whose targets are paths


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
    destination = KINDS[kind](target)
    package, extra = _PACKAGES.get(kind, ("", ""))
    if package and not _is_there(package):
        raise MetricsError(f"log={text!r} takes the package {package}: pip install 'rollflow[{extra}]'")
    return destination


def _is_there(package: str) -> bool:
    """Whether a package can be imported; of one within others, also whether those are there."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
