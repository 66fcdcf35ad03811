"""Link to one replay host: its queries, its answers, and what is known of it."""

import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from time import monotonic
from typing import Any, NamedTuple

from rollflow.nodes.env.remote.remote_envs import Secret, check_tls, secret_bytes
from rollflow.nodes.env.remote.software import software
from rollflow.sinks.replay.rate import ReplayReport, StepCounts
from rollflow.stream import wire
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.net.request_link import LinkLostError, LinkTarget, RequestLink


class HostOptions(NamedTuple):
    """Options of a client, the same for all of its hosts: see `ReplayClient`."""

    secret: Secret
    tls: ssl.SSLContext | None
    timeout: float
    name: str | None
    limits: wire.Limits

    def target_at(self, address: str) -> LinkTarget:
        """The host at an address. Raises WireError for an address that is none, or that needs a secret."""
        target, secret = wire.parse_address(address), secret_bytes(self.secret)
        wire.check_secret(target, secret)
        check_tls(target, self.tls)
        name = socket.gethostname() if self.name is None else self.name
        kinds = wire.SamplerConnection, ReplayError, ReplayError
        return LinkTarget(target, secret, self.tls, self.limits, self.timeout, software(), name, *kinds)


class HostLink:
    """Replay host elsewhere, asked from any number of threads.

    address       of the host
    known         module id -> what its last report as a shard said: the fields of `Replay.shard_report`, by name; the
                  module None: of one agent
    known_at      module id -> when it said so, on the clock `monotonic`
    module_ids    modules that have steps there, as far as it has said; None: it has not
    """

    def __init__(self, target: LinkTarget) -> None:
        self.address, self._timeout = target.address, target.timeout
        self.known: dict[Any, Mapping[str, Any]] = {}
        self.known_at: dict[Any, float] = {}
        self.module_ids: Sequence[Any] | None = None
        self._link = RequestLink(target)

    @property
    def is_connected(self) -> bool:
        """True while there is a connection by which the host has taken this client in."""
        return self._link.is_connected

    def lost(self) -> LinkLostError:
        """The error for a host without a connection, with the reason."""
        return self._link.lost()

    def wait_connected(self, until: float) -> None:
        """Wait for a connection. Raises ReplayError, or what ends the link, where none comes by a time."""
        with self._link.changed:
            self._link.wait(until, lambda: self._link.is_connected)

    def connected_within(self, seconds: float) -> bool:
        """Wait for a connection, so many seconds at most."""
        with self._link.changed:
            return self._link.changed.wait_for(lambda: self._link.is_connected, seconds)

    def asked(
        self,
        name: wire.QueryName,
        values: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Any] | None = None,
        *,
        until: float | None = None,
    ) -> wire.Result:
        """The host's answer to a query. Raises ReplayError where it has refused it.

        until    time up to which the answer is waited for, while there is a connection: without one, LinkLostError is
                 raised, and a sample that the rate holds back is an answer with a problem; None: the client's timeout,
                 over several connections
        """
        result = self._link.ask(
            lambda number, done: wire.Query(number, done, name, values or {}, arrays or {}),
            monotonic() + self._timeout if until is None else until,
            is_impatient=until is not None,
        )
        assert isinstance(result, wire.Result)
        if result.problem is not None and (until is None or not result.values.get("is_held_back")):
            raise ReplayError(result.problem if until is None else f"{result.problem}, at {self.address}").see("replay")
        return result

    def report(
        self, elsewhere: StepCounts | None = None, until: float | None = None, module_id: Any = None
    ) -> ReplayReport:
        """The host's report. Raises as `asked`.

        elsewhere    counts of the other hosts, which its rate adds to its own; None: it is asked as the only one
        module_id    of several agents: the module; None: all together, which one of several hosts has not
        """
        values = {"module_id": module_id} | ({} if elsewhere is None else {"elsewhere": asdict(elsewhere)})
        report = self.asked("report", values, until=until).values
        if elsewhere is None:
            self.module_ids = report.get("module_ids", ())
        else:
            self.note(report, module_id)
        return ReplayReport(**{each.name: report[each.name] for each in fields(ReplayReport)})

    def note(self, report: Mapping[str, Any], module_id: Any) -> None:
        """Take a shard's report of a module, which the answer to a sample has as well."""
        self.known_at[module_id] = monotonic()  # first: another thread that finds a report looks for its time
        self.known[module_id] = report
        self.module_ids = report.get("module_ids", ())

    def close(self) -> None:
        """Say goodbye; calls under way raise ReplayError."""
        self._link.close()
