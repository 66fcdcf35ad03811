"""Places for whole rollouts on hosts that a rollout starts itself: what `Rollout` takes as `where`."""

import importlib.util
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rollflow.nodes.argument_checks import check_numbers, checked_count
from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.remote.remote_envs import RemoteRollouts
from rollflow.nodes.env.workers.worker_process import refuse_in_worker
from rollflow.nodes.launch.host_keeper import HostKeeper
from rollflow.nodes.launch.launcher import NAME, SECRET_VARIABLE, Launcher
from rollflow.nodes.launch.process_launcher import ProcessLauncher
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.wire import TcpAddress, parse_address

_Strategy = Literal["spread", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnProcesses:
    """Whole rollouts on hosts that are processes of this machine; the rollout starts them, and they dial it.

        num_hosts       number of hosts; each has as many environments as the rollout's `num_envs` says
        join_timeout    seconds in which all must come, and, when all have left, another; None: for ever

    The environment, module and connectors of the rollout must be what hosts can import: an id, or classes and functions
    at the top of a file. A host that dies is started again. All end with the rollout, also where its process is killed.

    Raises ValueError for numbers that are none, or too small.
    """

    num_hosts: int = 1
    join_timeout: float | None = 120.0

    def __post_init__(self) -> None:
        checked_count("num_hosts", self.num_hosts, 1)
        check_numbers(join_timeout=(self.join_timeout, 0))

    def start(self, command: Sequence[str]) -> RemoteRollouts:
        """Start the hosts, with a command that ends before their address."""
        return _started(self, command, ProcessLauncher(), "tcp://127.0.0.1:0", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay:
    """Whole rollouts on hosts that Ray places: actors, which it starts again elsewhere when they or their nodes die.

        num_hosts       as for `OnProcesses`
        num_cpus        CPUs of each host
        num_gpus        GPUs of each host; the rollout's `device="cuda"` has policies use them
        resources       other resources of each host: name -> amount
        runtime_env     Ray's runtime environment of the hosts: their packages, and your code
        strategy        "spread" over the nodes, or "pack" onto few of them
        address         'tcp://host:port' that the rollout listens on and the hosts dial; None: the address that Ray
                        has for this node, and any free port
        join_timeout    seconds in which all must come, and, when all have left, another; None: for ever

    The rest is as for `OnProcesses`. Ray is used as the program has initialized it, or initializes itself. It carries
    commands and addresses: fragments and weights go through a connection to the rollout, none through Ray's store.

    Raises EnvError where Ray is not installed, WireError for an address that is none, and ValueError for numbers that
    are none, or too small, for another strategy, and for an address that can't be dialled.
    """

    num_hosts: int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] | None = None
    runtime_env: Mapping[str, Any] | None = None
    strategy: _Strategy = "spread"
    address: str | None = None
    join_timeout: float | None = 120.0

    def __post_init__(self) -> None:
        checked_count("num_hosts", self.num_hosts, 1)
        check_numbers(join_timeout=(self.join_timeout, 0))
        if self.strategy not in get_args(_Strategy):
            raise ValueError(f"strategy is {self.strategy!r}, expected 'spread' or 'pack'")
        if not isinstance(self.resources, Mapping | None):
            raise ValueError(f"resources is {shown(self.resources)}, expected a dict: name -> amount")
        amounts = self._amounts()
        if not all(isinstance(each, int | float) and each >= 0 for each in amounts.values()) or not any(
            amounts.values()
        ):
            raise ValueError(f"a host's resources are {amounts}, expected numbers from 0 on, and one above 0")
        dialled = None if self.address is None else parse_address(self.address)
        if dialled is not None and (not isinstance(dialled, TcpAddress) or dialled.host in ("0.0.0.0", "::")):
            raise ValueError(f"address is {self.address!r}, expected a 'tcp://host:port' that hosts can dial")
        if importlib.util.find_spec("ray") is None:
            raise EnvError("OnRay takes the package ray: pip install rollflow[ray]").see("started hosts")

    def start(self, command: Sequence[str]) -> RemoteRollouts:
        """Have Ray start the hosts, with a command that ends before their address."""
        from rollflow.nodes.launch.ray_launcher import RayLauncher

        launcher = RayLauncher(self.strategy, dict(self.runtime_env or {}))
        address = self.address or f"tcp://{launcher.node_address()}:0"
        amounts = {name: amount for name, amount in self._amounts().items() if amount}
        return _started(self, command, launcher, address, amounts)

    def _amounts(self) -> dict[str, float]:
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}


OnHosts = OnProcesses | OnRay


def _started(
    place: OnHosts,
    command: Sequence[str],
    launcher: Launcher,
    address: str,
    resources: Mapping[str, float],
) -> RemoteRollouts:
    """Rollouts on the hosts that a launcher starts, with a secret of their own; closing them ends the hosts."""
    refuse_in_worker()
    secret = secrets.token_hex(32)
    hosts = RemoteRollouts.listen(address, secret=secret, hosts=place.num_hosts, join_timeout=place.join_timeout)
    with closing_on_error(hosts.close):
        dials = ["--connect", str(hosts.addresses[0]), "--secret-env", SECRET_VARIABLE, "--name", NAME]
        handles = launcher.start(place.num_hosts, [*command, *dials], secret, resources)
        hosts.supply = HostKeeper(launcher, handles)
    return hosts
