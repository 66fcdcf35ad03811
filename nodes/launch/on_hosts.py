"""Places for whole rollouts on hosts that a rollout starts itself: what `Rollout` takes as `where`."""

import logging
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, get_args

from rollflow.nodes.argument_checks import check_numbers, checked_count
from rollflow.nodes.env.remote.remote_envs import RemoteRollouts
from rollflow.nodes.env.workers.worker_process import pickled, refuse_in_worker
from rollflow.nodes.launch.process_launcher import ProcessLauncher, ProgramProcess
from rollflow.nodes.launch.program import serve_rollouts
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import SEE, EnvError, shown
from rollflow.stream.data.system import require_packages
from rollflow.stream.net.backoff import WaitReminder, pause_s
from rollflow.stream.wire import TcpAddress, parse_address

if TYPE_CHECKING:
    from rollflow.nodes.launch.ray_launcher import RayLauncher, RayProgram

logger = logging.getLogger(__name__)

_PRELOAD = "rollflow.nodes.offloaded.rollout_host"  # imports nearly all that a host needs
_LONGEST_PAUSE_S = 30.0
_MOST_FAILURES = 5  # in a row, as a lane may be lost
_MOST_AT_FIRST = 1  # while no rollout has begun: all hosts run the same program, so that a second one is no accident


@dataclass(slots=True, eq=False)
class KeptHost:
    """A host that is kept alive.

    program     that runs, or ran last
    since       when it was started last, on the clock `monotonic`
    failures    in a row
    due         when it is to be started again; None: it runs
    reason      how it failed last, in one line; "": it never did
    """

    program: "ProgramProcess | RayProgram"
    since: float = field(default_factory=monotonic)
    failures: int = 0
    due: float | None = None
    reason: str = ""


class HostKeeper:
    """Starts the hosts of a rollout, and keeps them alive, in a thread of its own, until it is closed.

        launcher      runs them
        num_hosts     number of hosts
        call          pickled, that each makes
        look_s        seconds between two looks at them
        forgiven_s    seconds: a host that has run for so long may fail as often as one that never did

    A host that ends with an error, or is killed, is started again, after a pause that doubles with each failure in a
    row; one that has failed too often is given up. While hosts wait for something, the log says so.
    """

    def __init__(
        self,
        launcher: "ProcessLauncher | RayLauncher",
        num_hosts: int,
        call: bytes,
        *,
        look_s: float = 0.25,
        forgiven_s: float = 60.0,
    ) -> None:
        self._look_s, self._forgiven_s = look_s, forgiven_s
        self._launcher: Any = launcher  # of programs of its own kind
        self._call = call
        self._hosts: list[KeptHost] = []
        self._waits = ""  # what hosts wait for
        self._waiting: WaitReminder | None = None  # while any does
        self._broken: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="rollflow hosts", daemon=True)
        with closing_on_error(self._stop):
            for number in range(num_hosts):
                self._hosts.append(KeptHost(self._launcher.run(number, call)))
        self._thread.start()

    @property
    def problems(self) -> list[str]:
        """Why hosts are not there, a line each. From any thread."""
        reasons = [self._waits, *(host.reason for host in self._hosts)]
        return [reason for reason in dict.fromkeys(reasons) if reason]

    def check(self, *, is_first: bool) -> None:
        """Raise EnvError if hosts can't be kept alive. From any thread.

        is_first    whether no rollout has begun: then one host that fails again says that all will
        """
        if self._broken is not None:
            raise EnvError(f"hosts can't be looked after: {self._broken}") from self._broken
        most = _MOST_AT_FIRST if is_first else _MOST_FAILURES
        failed = [host for host in self._hosts if host.failures > most]
        if failed and (is_first or len(failed) == len(self._hosts)):
            raise EnvError(f"hosts fail again and again: {'; '.join(self.problems)}").see("started hosts")

    def close(self) -> None:
        """End all hosts."""
        self._closing.set()
        self._thread.join()
        self._stop()

    def _stop(self) -> None:
        self._launcher.stop([host.program for host in self._hosts])

    def _keep(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self._look()
            except Exception as error:  # of an engine, which may have gone: the rollout's thread raises it
                self._broken = error
                logger.warning("hosts can't be looked after any more: %s", error)
                return

    def _look(self) -> None:
        """Take note of every host, and start those again whose pause is over."""
        running = []
        for number, host in enumerate(self._hosts):
            if (end := host.program.end) is None:
                running.append(number)
            elif not end:
                continue  # it has been told goodbye
            elif host.due is None:
                self._note_end(host, end)
            elif host.due <= monotonic() and host.failures <= _MOST_FAILURES:
                host.program.kill()
                host.program = self._launcher.run(number, self._call)
                host.since, host.due = monotonic(), None
        self._remind(self._launcher.waits(running))

    def _remind(self, waits: str) -> None:
        """Log what hosts wait for, if that takes long."""
        self._waits = waits
        if not waits:
            self._waiting = None
            return
        self._waiting = self._waiting or WaitReminder()
        if self._waiting.is_long:
            logger.warning("hosts are not there: %s", waits)

    def _note_end(self, host: KeptHost, end: str) -> None:
        now, log = monotonic(), host.program.log.strip()
        host.failures = 1 if now - host.since >= self._forgiven_s else host.failures + 1
        host.due = now + pause_s(host.failures, _LONGEST_PAUSE_S)
        name, lines = host.program.name, [line for line in log.splitlines() if not line.startswith(SEE)]
        host.reason = f"host {name} {end}" + (f": {lines[-1]}" if lines else "")
        given_up = ", and is given up" if host.failures > _MOST_FAILURES else ""
        logger.warning("host %s %s%s; it wrote:\n%s", name, end, given_up, log)


_Strategy = Literal["spread", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnProcesses:
    """Whole rollouts on hosts that are processes of this machine; the rollout starts them, and they dial it.

        num_hosts       number of hosts; each has as many environments as the rollout's `num_envs` says
        join_timeout    seconds in which all must come, and, when all have left, another; None: for ever

    The environment, module and connectors of the rollout must be what can be pickled: an id, or classes and functions
    that hold nothing that can't be. A host that dies is started again. All end with the rollout, also if its process
    is killed.

    Raises ValueError for numbers that are none, or too small.
    """

    num_hosts: int = 1
    join_timeout: float | None = 120.0

    def __post_init__(self) -> None:
        checked_count("num_hosts", self.num_hosts, 1)
        check_numbers(join_timeout=(self.join_timeout, 0))

    def start(self, options: Mapping[str, Any]) -> RemoteRollouts:
        """Start the hosts, with these keywords of `RolloutHost`."""
        return _started(self, options, ProcessLauncher(_PRELOAD), "tcp://127.0.0.1:0")


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
    the call of a host, with the environment, the module and the rollout's secret in it, by its store if that is
    large: whoever can read what Ray holds can dial the rollout. Fragments and weights go through a connection to it.

    Raises EnvError if Ray is not installed, WireError for an address that is none, and ValueError for numbers that
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
        require_packages("OnRay", "ray", "ray", error=lambda text: EnvError(text).see("started hosts"))

    def start(self, options: Mapping[str, Any]) -> RemoteRollouts:
        """Have Ray start the hosts, with these keywords of `RolloutHost`."""
        from rollflow.nodes.launch.ray_launcher import RayLauncher

        amounts = {name: amount for name, amount in self._amounts().items() if amount}
        launcher = RayLauncher(self.num_hosts, self.strategy, amounts, self.runtime_env or {})
        return _started(self, options, launcher, self.address or f"tcp://{launcher.node_address()}:0")

    def _amounts(self) -> dict[str, float]:
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}


OnHosts = OnProcesses | OnRay


def _started(
    place: OnHosts,
    options: Mapping[str, Any],
    launcher: "ProcessLauncher | RayLauncher",
    address: str,
) -> RemoteRollouts:
    """Rollouts on the hosts that a launcher starts, with a secret of their own; closing them ends the hosts."""
    refuse_in_worker()
    secret = secrets.token_hex(32)
    hosts = RemoteRollouts.listen(address, secret=secret, hosts=place.num_hosts, join_timeout=place.join_timeout)
    with closing_on_error(hosts.close):
        call = pickled(partial(serve_rollouts, options, str(hosts.addresses[0]), secret), options.items(), "hosts")
        hosts.supply = HostKeeper(launcher, place.num_hosts, call)
    return hosts
