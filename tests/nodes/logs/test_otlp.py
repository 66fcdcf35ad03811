"""A log to a collector of OpenTelemetry: what comes there, and what is said where nothing is taken."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

import pytest
from extras import needs

from rollflow.nodes.logs.destinations import Otlp
from rollflow.nodes.logs.figures import Row, RowLost
from rollflow.nodes.logs.run_log import RowWriter

ExportMetricsServiceRequest = needs(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", "opentelemetry.sdk"
).ExportMetricsServiceRequest
HTTPAdapter = needs("requests.adapters").HTTPAdapter


class Collector:
    """What a collector was sent: paths, headers, and requests; it answers with a status."""

    def __init__(self) -> None:
        self.status = 200
        self.paths: list[str] = []
        self.headers: list[Any] = []
        self.requests: list[ExportMetricsServiceRequest] = []
        self.address = ""

    def values(self, place: int = -1) -> dict[tuple[str, str], float]:
        """Name and label -> value, of one request."""
        (of_resource,) = self.requests[place].resource_metrics
        (scope,) = of_resource.scope_metrics
        found = {}
        for metric in scope.metrics:
            for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
                label = ",".join(f"{each.key}={each.value.string_value}" for each in point.attributes)
                found[metric.name, label] = point.as_int if point.HasField("as_int") else point.as_double
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of this machine."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            collector.headers.append(self.headers)
            collector.requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a test has no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("path", "sent_to"), [("", "/v1/metrics"), ("/mine/metrics", "/mine/metrics")])
def test_a_row_comes_with_its_names_labels_and_times(path: str, sent_to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=mine")
    names = {"time/fps": 7.0, "time/total_timesteps": 20, "busy/env": 0.5, "busy/module": 0.25, "train/loss": 0.125}
    with collecting() as collector:
        sender = Otlp(f"{collector.address}{path}")
        sender.open()
        sender.write(Row(20, 2, 1000.5, 3.0, names))
        sender.write(Row(40, 4, 1001.5, 4.0, {"time/total_timesteps": 40}))
        sender.close()
    assert collector.paths == [sent_to] * 2
    assert collector.headers[0]["authorization"] == "mine"
    assert collector.values(0) == {
        ("rollflow_fps", ""): 7.0,
        ("rollflow_timesteps", ""): 20,
        ("rollflow_busy_ratio", "stage=env"): 0.5,
        ("rollflow_busy_ratio", "stage=module"): 0.25,
        ("rollflow_logged", "name=train/loss"): 0.125,
    }
    (of_resource,) = collector.requests[1].resource_metrics
    assert {each.key: each.value.string_value for each in of_resource.resource.attributes}["service.name"] == "rollflow"
    (metric,) = of_resource.scope_metrics[0].metrics
    (point,) = metric.sum.data_points
    assert metric.sum.is_monotonic
    assert (point.start_time_unix_nano, point.time_unix_nano) == (997_500_000_000, 1_001_500_000_000)


def test_a_collector_that_is_away_is_told_once_and_gets_the_next_row(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rollflow")
    with collecting() as collector:
        sender = Otlp(collector.address)
        sender.open()
        for status in (400, 503, 200, 200):
            collector.status = status
            with nullcontext() if status == 200 else pytest.raises(RowLost):
                sender.write(Row(20, 2, 1000.5, 3.0, {"time/fps": 7.0}))
        sender.close()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rollflow")]
    where = f"log='otlp:{collector.address}': the collector"
    assert said == [f"{where} does not take a row; the next ones are sent all the same", f"{where} takes rows again"]
    assert len(collector.requests) == 4


def test_while_a_collector_is_away_each_row_is_tried_once_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Any] = []
    send = HTTPAdapter.send

    def counted(adapter: HTTPAdapter, request: Any, **options: Any) -> Any:
        tries.append(options["timeout"])
        return send(adapter, request, **options)

    monkeypatch.setattr(HTTPAdapter, "send", counted)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    writer = RowWriter(f"otlp:http://127.0.0.1:{port}")
    writer.destination.open()
    writer.start()
    for _ in range(4):
        writer.put(Row(20, 2, 1000.5, 3.0, {"time/fps": 7.0}))
    writer.stop()
    writer.wait(monotonic() + 60.0)
    assert tries == [5.0, 0.5, 0.5, 0.5]
    assert writer.dropped == 4
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"log='otlp:http://127.0.0.1:{port}': the collector does not take a row; the next ones are sent all the same",
        f"the log otlp:http://127.0.0.1:{port} was too slow, or had failed: 4 rows are lost",
    ]
