"""Replay client: samples from a replay host in another process or on another host, or from several as from one."""

import ssl
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Self

import numpy as np

from rollflow.nodes.argument_checks import checked_count, checked_number
from rollflow.nodes.connectors.common.tensors import as_array
from rollflow.nodes.env.remote.remote_envs import Secret
from rollflow.sinks.replay.host_link import HostLink, HostOptions
from rollflow.sinks.replay.rate import ReplayReport
from rollflow.sinks.replay.replay import Batch
from rollflow.sinks.replay.sampled_steps import detached
from rollflow.sinks.replay.shards import ReplayShards
from rollflow.sinks.trainer.messages.by_module import is_by_module, joined_weights
from rollflow.sinks.trainer.messages.item_message import tensors_of
from rollflow.sinks.trainer.trainer_side.newest_weights import PublishedWeights
from rollflow.stream import wire
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.tree import Tree

_HOSTS_SHARE = 0.9  # of the time that an answer is waited for, so that a reason not to sample comes in time


class ReplayClient:
    """Samples from a `ReplayHost`, or `rollflow replay-host`, elsewhere; or from several, which are shards of one.

        address    where the host listens for trainers: 'tcp://host:port' or 'unix:/path'; or a list of these
        secret     the host's; None: it has none
        tls        a client's context; None: nothing is encrypted
        timeout    seconds that an answer is waited for, over as many connections as it takes
        name       what the host calls this client; None: the machine's name
        limits     of frames, times and bytes under way

    Any number of threads may call it. A connection that breaks is dialled again. The host does each call once; one
    that has been started anew meanwhile does what was not answered.

    Of several hosts, with the same arguments for their replays, each rollout feeds one. Rows are drawn in proportion to
    the steps that each host has, or to its sum of priorities, with importance weights over all of them; of several
    agents, those of each module. The client tells each host the counts of the others, so that the rate holds over all.
    The first call waits for every host; later on, one that is lost is logged and left out until it is there again.

    Raises WireError for an address that is none, and where the host refuses this client or has another secret;
    ReplayError for what the host says of a call, and where no answer comes in time.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 60.0,
        name: str | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses or len(set(addresses)) < len(addresses):
            raise ReplayError(f"addresses are {addresses}, expected one or more, each once").see("replay")
        checked_number("timeout", timeout, above=0, most=inf, noun="seconds")
        options = HostOptions(secret, tls, timeout, name, limits or wire.Limits())
        targets = [options.target_at(each) for each in addresses]  # all of them are checked before one is dialled
        self.timeout = timeout
        self._hosts = [HostLink(each) for each in targets]
        self.address = ", ".join(str(each.address) for each in self._hosts)
        self._shards = ReplayShards(self._hosts, timeout) if len(self._hosts) > 1 else None

    @property
    def missing(self) -> list[str]:
        """Addresses of the hosts that are not there now."""
        return [str(each.address) for each in self._hosts if not each.is_connected]

    def sample(self, count: int | None = None, *, wait_s: float | None = None) -> Batch:
        """A batch of `count` rows, as `Replay.sample` gives it; None: as many as the host's `batch_size`.

        wait_s    seconds that the host may wait for inserts, where the rate holds the sample back; None: nearly
                  `timeout`

        Raises ReplayError where nothing can be sampled in time; the text says what is waited for. Of several hosts,
        what some have drawn already counts as sampled then.
        """
        count = None if count is None else checked_count("count", count, 1)
        wait_s = _HOSTS_SHARE * self.timeout if wait_s is None else float(wait_s)
        columns: Mapping[str, Tree]
        if self._shards is not None:
            columns = self._shards.sample(count, wait_s)
        else:
            columns = self._hosts[0].asked("sample", {"count": count, "wait_s": wait_s}).columns
        return tensors_of({name: _with_tuples(tree) for name, tree in columns.items()})

    def update_priorities(self, ids: Any, values: Any, module_id: str | None = None) -> None:
        """Set the priorities of steps, as `Replay.update_priorities` does.

        ids          i64[B]  of batches of the hosts as they run now: those from before a restart, and of a host that
                     is away, are passed over
        values       f[B]    such as TD errors
        module_id    of several agents: the module whose batch it was
        """
        arrays = {"ids": as_array(ids).astype(np.int64), "values": detached(values)}
        if self._shards is not None:
            self._shards.update_priorities(arrays["ids"], arrays["values"], module_id)
        else:
            self._hosts[0].asked("update_priorities", {"module_id": module_id}, arrays)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Have all rollouts act with a module's `state_dict()`; returns its policy version.

        weights    where rollouts have several modules: module id -> `state_dict()` of all that are trained

        Each of several hosts counts versions by itself; the largest is returned. Raises ModuleError for weights that
        can't be sent.
        """
        weights = joined_weights(weights) if is_by_module(weights) else weights
        sent = PublishedWeights.of(weights).message
        values = {"dtypes": sent.dtypes, "others": sent.others}
        if self._shards is not None:
            return self._shards.publish(values, sent.tensors)
        version: int = self._hosts[0].asked("publish", values, sent.tensors).values["version"]
        return version

    def report(self, module_id: str | None = None) -> ReplayReport:
        """The host's counts, the ratio reached, and which side waits; of several hosts, over all that are there.

        module_id    of several agents: the module; None: all together
        """
        if self._shards is not None:
            return self._shards.report(module_id)
        return self._hosts[0].report(module_id=module_id)

    def close(self) -> None:
        """Say goodbye; calls under way raise ReplayError."""
        (self._shards or self._hosts[0]).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_tuples(tree: Tree) -> Tree:
    """A tree of arrays with tuples in the place of lists, which a message has for them."""
    if isinstance(tree, dict):
        return {name: _with_tuples(part) for name, part in tree.items()}
    return tuple(map(_with_tuples, tree)) if isinstance(tree, list | tuple) else tree
