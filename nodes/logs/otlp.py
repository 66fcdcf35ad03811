"""Sender of a run's figures to a collector of OpenTelemetry, as a destination of a log."""

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any
from urllib.parse import urlsplit

from rollflow.nodes.logs.figures import FIGURES, OWN, Figure, Row, RowLost, figure_of
from rollflow.stream.data.errors import MetricsError

logger = logging.getLogger(__name__)

_PATH = "/v1/metrics"  # of a collector's metrics, where an address names none
_TIMEOUT_S, _AWAY_S = 5.0, 0.5  # for a row; for one while the collector is away
_SERVICE = "OTEL_SERVICE_NAME"  # variable that names the run; it is rollflow where there is none


class Otlp:
    """Sends every row to a collector by OTLP over HTTP, with the names that Prometheus gets, and labels as attributes.

    target    http://HOST:PORT of the collector, or https://, maybe with the path of its metrics

    Headers, certificates and attributes of the run are those of the variables `OTEL_…`, as everywhere. A row is sent
    once. One that the collector does not take is lost, which is logged, and those after it are sent all the same.

    Raises MetricsError for what is no such address.
    """

    def __init__(self, target: str) -> None:
        try:
            parts = urlsplit(target)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number
            is_right = False
        if not is_right:
            raise MetricsError(f"log='otlp:{target}': expected the address of a collector, such as http://host:4318")
        self._target = target
        self._endpoint = target if parts.path.strip("/") else f"{target.rstrip('/')}{_PATH}"
        self._exporter: Any = None
        self._began_ns = 0
        self._thread = 0  # that sends the rows
        self._is_away = False  # whether the last row was not taken

    def open(self) -> None:
        """Make the exporter, which connects with the first row."""
        exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        session = importlib.import_module("requests").Session()
        session.send = partial(self._send_once, session.send)
        self._exporter = exporters.OTLPMetricExporter(endpoint=self._endpoint, timeout=_TIMEOUT_S, session=session)
        self._its_logger = logging.getLogger(exporters.__name__)
        self._its_logger.addFilter(self._is_of_others)
        self._resource = resources.Resource.create({} if _SERVICE in os.environ else {"service.name": "rollflow"})

    def write(self, row: Row) -> None:
        """Send this row. Raises RowLost where it is not taken."""
        sdk = importlib.import_module("opentelemetry.sdk.metrics.export")
        scopes = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        now_ns = int(row.time * 1e9)
        self._began_ns = self._began_ns or now_ns - int(row.elapsed_s * 1e9)
        points: dict[Figure, list[Any]] = {}
        for name, value in row.values.items():
            figure = figure_of(name)
            label = {figure.label: name.removeprefix(figure.stem)} if figure.label else {}
            point = sdk.NumberDataPoint(label, self._began_ns, now_ns, value)
            points.setdefault(figure, []).append(point)
        metrics = [self._metric(sdk, figure, points[figure]) for figure in (*FIGURES, OWN) if figure in points]
        scope = sdk.ScopeMetrics(scopes.InstrumentationScope("rollflow"), metrics, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])
        self._thread = get_ident()
        is_taken = False
        with suppress(RowLost):  # which some of its versions catch
            result = self._exporter.export(data, timeout_millis=_TIMEOUT_S * 1e3)
            is_taken = result is sdk.MetricExportResult.SUCCESS
        if self._is_away == is_taken:
            self._is_away = not is_taken
            how = "takes rows again" if is_taken else "does not take a row; the next ones are sent all the same"
            logger.warning("log='otlp:%s': the collector %s", self._target, how)
        if not is_taken:
            raise RowLost(f"{self._endpoint} has not taken a row")

    def close(self) -> None:
        """End the exporter."""
        self._exporter.shutdown()
        self._its_logger.removeFilter(self._is_of_others)

    def _send_once(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request; what fails is no error of the kinds for which the exporter would try again, and wait."""
        options["timeout"] = _AWAY_S if self._is_away else _TIMEOUT_S
        try:
            response = send(request, **options)
        except OSError as error:  # of any kind that the package has
            raise RowLost(str(error)) from error
        if not response.ok:
            raise RowLost(f"{response.status_code} {response.reason}")
        return response

    def _is_of_others(self, record: logging.LogRecord) -> bool:
        """Whether another exporter of this process says it: of this one's rows it is said here, and once."""
        return record.thread != self._thread

    def _metric(self, sdk: Any, figure: Figure, points: Sequence[Any]) -> Any:
        """A figure with the values of all of its labels."""
        data = sdk.Gauge(points)
        if figure.kind == "counter":
            data = sdk.Sum(points, sdk.AggregationTemporality.CUMULATIVE, is_monotonic=True)
        return sdk.Metric(figure.exported, figure.text, "", data)
