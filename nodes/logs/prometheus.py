"""Server of a run's figures for Prometheus, as a destination of a log."""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

from rollflow.nodes.logs.figures import FIGURES, OWN, Row, figure_of
from rollflow.stream.data.errors import MetricsError

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class Prometheus:
    """Server on a port of this machine that gives the newest row at `/metrics`, in Prometheus' text format.

    target    PORT, for programs on this machine alone, or HOST:PORT; port 0 is any that is free

    address    host and port, once it is open

    Raises MetricsError for what is no port, OSError from `open` where the port is taken.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise MetricsError(f"log='prometheus:{target}': expected PORT or HOST:PORT, a port from 0 to 65535")
        self.address = (host.strip("[]") or _LOOPBACK, int(port))
        self._row: Row | None = None
        self._serving: Any = None

    def open(self) -> None:
        """Begin to serve. Raises OSError where the port is taken."""
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
        self._row = row

    def close(self) -> None:
        """End the server, and its thread."""
        server, thread = self._serving
        server.shutdown()
        server.server_close()
        thread.join()

    def collect(self) -> Iterator[Any]:
        """The families of the newest row, as prometheus_client asks for them."""
        row = self._row
        if row is None:
            return
        core = importlib.import_module("prometheus_client.core")
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        families = {
            figure: kinds[figure.kind](figure.exported, figure.text, labels=[figure.label] if figure.label else [])
            for figure in (*FIGURES, OWN)
        }
        for name, value in row.values.items():
            figure = figure_of(name)
            families[figure].add_metric([name.removeprefix(figure.stem)] if figure.label else [], value)
        yield from (family for family in families.values() if family.samples)
