"""Replay client: samples from a replay host in another process or on another host."""

import socket
import ssl
from collections.abc import Mapping
from dataclasses import fields
from math import inf
from time import monotonic
from typing import Any, Self

import numpy as np

from rollflow.nodes.argument_checks import checked_count, checked_number
from rollflow.nodes.connectors.common.tensors import as_array
from rollflow.nodes.env.remote.remote_envs import Secret, check_tls, secret_bytes
from rollflow.sinks.replay.rate import ReplayReport
from rollflow.sinks.replay.replay import Batch
from rollflow.sinks.replay.sampled_steps import detached
from rollflow.sinks.trainer.messages import is_by_module, joined_weights, tensors_of
from rollflow.sinks.trainer.newest_weights import PublishedWeights
from rollflow.stream import wire
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.tree import with_tuples
from rollflow.stream.net.request_link import RequestLink

_HOSTS_SHARE = 0.9  # of the time that an answer is waited for, so that a reason not to sample comes in time


class ReplayClient:
    """Samples from a `ReplayHost`, or `rollflow replay-host`, elsewhere.

        address    where the host listens for trainers: 'tcp://host:port' or 'unix:/path'
        secret     the host's; None: it has none
        tls        a client's context; None: nothing is encrypted
        timeout    seconds that an answer is waited for, over as many connections as it takes
        name       what the host calls this client; None: the machine's name
        limits     of frames, times and bytes under way

    Any number of threads may call it. A connection that breaks is dialled again. The host does each call once; one
    that has been started anew meanwhile does what was not answered.

    Raises WireError for an address that is none, and where the host refuses this client or has another secret;
    ReplayError for what the host says of a call, and where no answer comes in time.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        name: str | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        checked_number("timeout", timeout, above=0, most=inf, noun="seconds")
        target, known_secret = wire.parse_address(address), secret_bytes(secret)
        wire.check_secret(target, known_secret)
        check_tls(target, tls)
        self.address, self.timeout = str(target), timeout
        self._link = RequestLink(
            target,
            secret=known_secret,
            tls=tls,
            limits=limits or wire.Limits(),
            timeout_s=timeout,
            name=socket.gethostname() if name is None else name,
        )

    def sample(self, count: int | None = None, *, wait_s: float | None = None) -> Batch:
        """A batch of `count` rows, as `Replay.sample` gives it; None: as many as the host's `batch_size`.

        wait_s    seconds that the host may wait for inserts, where the rate holds the sample back; None: nearly
                  `timeout`

        Raises ReplayError where nothing can be sampled in time; the text says what is waited for.
        """
        count = None if count is None else checked_count("count", count, 1)
        wait_s = _HOSTS_SHARE * self.timeout if wait_s is None else float(wait_s)
        columns = self._ask("sample", {"count": count, "wait_s": wait_s}).columns
        return tensors_of({name: with_tuples(tree) for name, tree in columns.items()})

    def update_priorities(self, ids: Any, values: Any, module_id: str | None = None) -> None:
        """Set the priorities of steps, as `Replay.update_priorities` does.

        ids          i64[B]  of batches of the host as it runs now: those from before a restart are passed over
        values       f[B]    such as TD errors
        module_id    of several agents: the module whose batch it was
        """
        arrays = {"ids": as_array(ids).astype(np.int64), "values": detached(values)}
        self._ask("update_priorities", {"module_id": module_id}, arrays)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Have all rollouts act with a module's `state_dict()`; returns its policy version.

        weights    where rollouts have several modules: module id -> `state_dict()` of all that are trained

        Raises ModuleError for weights that can't be sent.
        """
        weights = joined_weights(weights) if is_by_module(weights) else weights
        sent = PublishedWeights.of(weights).message
        values = {"dtypes": sent.dtypes, "others": sent.others}
        version: int = self._ask("publish", values, sent.tensors).values["version"]
        return version

    def report(self, module_id: str | None = None) -> ReplayReport:
        """The host's counts, the ratio reached, and which side waits.

        module_id    of several agents: the module; None: all together
        """
        report = self._ask("report", {"module_id": module_id}).values
        return ReplayReport(**{each.name: report[each.name] for each in fields(ReplayReport)})

    def close(self) -> None:
        """Say goodbye; calls under way raise ReplayError."""
        self._link.close()

    def _ask(
        self, name: wire.QueryName, values: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> wire.Result:
        """The host's answer to a query. Raises ReplayError if the host has refused it, or does not answer in time."""
        result = self._link.ask(
            lambda number, done: wire.Query(number, done, name, values, arrays or {}), monotonic() + self.timeout
        )
        assert isinstance(result, wire.Result)
        if result.problem is not None:
            raise ReplayError(result.problem).see("replay")
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
