"""Launcher of programs as actors of Ray: Ray says where, and starts them again elsewhere."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import monotonic, time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.launch.launcher import DRAINING_S, SECRET_VARIABLE, Handle, named
from rollflow.nodes.launch.ray_host import RayHost
from rollflow.stream.data.errors import RunError

logger = logging.getLogger(__name__)

_ENDING_S = 1.0  # for programs that are ending by themselves
_ANSWER_S = 5.0  # of an actor that is asked for its log


@dataclass(slots=True, eq=False)
class _Placed:
    """Actor in a placement group.

    group, bundle    its place
    serving          reference to what `RayHost.serve` gives at its end
    log              what it had written then; None: it runs
    before           where it was before it left a node, while it waits for its place
    """

    group: Any
    bundle: int
    actor: Any
    serving: Any
    log: str | None = None
    before: "_Placed | None" = None


class RayLauncher:
    """A `Launcher` of actors in placement groups, which Ray restarts for as long as this process lives.

        strategy       "spread" over the nodes, or "pack" onto few of them
        runtime_env    of the actors

    Programs that are started together have a placement group. The room of those that `scale` ends is given back to
    the cluster once all of their group have ended. Where Ray says that it will take a node away, the programs there are
    told to end, and others are started elsewhere at once, each in a group of its own. Nothing but commands and logs
    goes through Ray: all of it is small, and none goes through its store.
    """

    def __init__(self, strategy: str, runtime_env: Mapping[str, Any]) -> None:
        self._strategy, self._runtime_env = strategy.upper(), dict(runtime_env)
        self._placed: dict[Handle, _Placed] = {}
        self._leaving: dict[_Placed, float] = {}  # to end -> when their actors are killed
        self._groups: set[Any] = set()
        self._started = 0
        self._command: tuple[str, ...] = ()
        self._secret = ""
        self._resources: dict[str, float] = {}
        if not ray.is_initialized():
            ray.init()

    def node_address(self) -> str:
        """Address of this node, as Ray has it."""
        return str(ray.util.get_node_ip_address())

    def start(self, n: int, command: Sequence[str], secret: str, resources: Mapping[str, float]) -> list[Handle]:
        """Have Ray start so many programs as soon as it has room for all: see `Launcher`."""
        self._command, self._secret, self._resources = tuple(command), secret, dict(resources)
        with closing_on_error(self.stop):
            return self.scale(n)

    def alive(self) -> list[Handle]:
        """The programs that run, that wait for room, or whose actors Ray is restarting.

        Those that were told to end are killed where their time is over, and give their room back.

        Raises RunError where Ray was shut down.
        """
        if not ray.is_initialized():
            raise RunError("Ray was shut down, expected it to last as long as the rollout")
        self._reap(monotonic())
        nodes = self._nodes()
        self._leave_nodes(nodes)
        running = {handle: each.serving for handle, each in self._placed.items() if each.log is None}
        ended = _ended(running.values())
        for handle, serving in running.items():
            placed = self._placed[handle]
            handle.waits = "" if nodes.get(placed) else self._waits(placed)
            if serving in ended:
                handle.waits = ""
                handle.end, self._placed[handle].log = _end_of(serving)
        return [handle for handle, each in self._placed.items() if each.log is None]

    def logs(self, handle: Handle) -> str:
        """Lines that a program has written last; "" where its actor is not there."""
        placed = self._placed[handle]
        if placed.log is None:
            try:
                return str(ray.get(placed.actor.log.remote(), timeout=_ANSWER_S))
            except (RayError, GetTimeoutError):
                return ""
        return placed.log

    def restart(self, handle: Handle) -> None:
        """Start a program again, in an actor of its own; one that runs is killed first."""
        placed = self._placed[handle]
        ray.kill(placed.actor)
        self._placed[handle], handle.end = self._run(handle, placed.group, placed.bundle), ""

    def scale(self, n: int) -> list[Handle]:
        """Have so many programs that run: see `Launcher`. Those that are started have a group of their own."""
        for handle in [handle for handle, placed in self._placed.items() if placed.log is not None]:
            self._leaving[self._placed.pop(handle)] = 0.0
        nodes = self._nodes()
        for handle in list(self._placed)[n:]:
            self._dismiss(placed := self._placed.pop(handle), has_begun=bool(nodes[placed]))
        self._reap(monotonic())
        missing = n - len(self._placed)
        if missing > 0:
            group = self._new_group(missing)
            for bundle in range(missing):
                handle = Handle(f"ray-{self._started}")
                self._started += 1
                self._placed[handle] = self._run(handle, group, bundle)
        return list(self._placed)

    def stop(self) -> None:
        """End all programs: those that are ending by themselves first, the others with their actors."""
        if not ray.is_initialized():  # they have ended with it
            return
        self._leaving |= dict.fromkeys(self._placed.values(), 0.0)
        self._placed.clear()
        _ended((placed.serving for placed in self._leaving), _ENDING_S)
        self._reap(math.inf)

    def _places(self) -> list[_Placed]:
        """Places of all programs, and those before them that they may have again."""
        places = list(self._placed.values())
        return places + [each.before for each in places if each.before is not None]

    def _nodes(self) -> dict[_Placed, str]:
        """The node that each place is on; "": on none yet, or not any more."""
        places = self._places()
        nodes = {group: placement_group_table(group)["bundles_to_node_id"] for group in {each.group for each in places}}
        return {each: nodes[each.group].get(each.bundle, "") for each in places}

    def _leave_nodes(self, nodes: Mapping[_Placed, str]) -> None:
        """Have the programs end that are on nodes which Ray is about to take away, and start others elsewhere.

        Those wait for room of their own. Where Ray gives their former places to another node first, which it does once
        the node is gone, they take these.
        """
        going = _draining_nodes()
        for handle, placed in self._placed.items():
            node, before = nodes[placed], placed.before
            if node in going and placed.log is None:
                left_s = going[node]
                when = "" if math.isinf(left_s) else f" in {left_s:.0f} s"
                logger.warning("host %s leaves node %s, which Ray will take away%s", handle.name, node, when)
                self._dismiss(placed, left_s, has_begun=True)
                self._placed[handle] = self._run(handle, self._new_group(1), 0)
                self._placed[handle].before = placed
            elif before is not None and node:
                placed.before = None
            elif before is not None and before not in self._leaving and nodes[before] not in (*going, ""):
                self._leaving[placed] = 0.0
                self._placed[handle] = self._run(handle, before.group, before.bundle)

    def _dismiss(self, placed: _Placed, left_s: float = math.inf, *, has_begun: bool) -> None:
        """Tell a program to end within so many seconds, or end what has not begun."""
        if has_begun:
            placed.actor.terminate.remote()
        self._leaving[placed] = monotonic() + min(DRAINING_S, left_s) if has_begun else 0.0

    def _new_group(self, n: int) -> Any:
        """A placement group for so many programs."""
        group = placement_group([self._resources] * n, strategy=self._strategy)
        self._groups.add(group)
        return group

    def _reap(self, now: float) -> None:
        """Kill the actors of programs that were told to end, and have, or had the time; groups give their room back."""
        ended = _ended(placed.serving for placed in self._leaving)
        over = [placed for placed, until in self._leaving.items() if placed.serving in ended or until <= now]
        for placed in over:
            ray.kill(placed.actor)
            del self._leaving[placed]
        in_use = {placed.group for placed in (*self._places(), *self._leaving)}
        for group in self._groups - in_use:
            remove_placement_group(group)
        self._groups &= in_use

    def _run(self, handle: Handle, group: Any, bundle: int) -> _Placed:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        amounts = dict(self._resources)
        more = {"runtime_env": self._runtime_env} if self._runtime_env else {}
        actor = ray.remote(RayHost).options(
            num_cpus=amounts.pop("CPU", 0),
            num_gpus=amounts.pop("GPU", 0),
            resources=amounts,
            scheduling_strategy=strategy,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,  # its log can be asked for while it serves
            **more,
        )
        started = actor.remote()
        serving = started.serve.remote(named(self._command, handle), {SECRET_VARIABLE: self._secret})
        return _Placed(group, bundle, started, serving)

    def _waits(self, placed: _Placed) -> str:
        """What a program that has no place waits for, in words."""
        free = {name: amount for name, amount in ray.available_resources().items() if name in self._resources}
        return (
            f"waits for room in Ray's cluster: {placed.group.bundle_count} hosts take {self._resources} each, "
            f"{self._strategy.lower()}; free are {free or 'none of these'}"
        )


def _draining_nodes() -> dict[str, float]:
    """Nodes that Ray is about to take away, and the seconds that are left of each, inf where Ray does not say.

    Ray's public interface does not tell of them, so this asks where Ray's own libraries do. Where that fails, as
    through Ray's client, there are none: hosts are lost then with their nodes.
    """
    try:
        ends: dict[str, int] = ray._private.state.state.get_draining_nodes()
    except Exception as error:  # of another release of Ray
        _log_unknown(f"{type(error).__name__}: {error}")
        return {}
    return {node: max(0.0, until / 1000 - time()) if until else math.inf for node, until in ends.items()}


@cache
def _log_unknown(reason: str) -> None:
    """Log, once, why it is not known which nodes Ray is about to take away."""
    logger.info("it is not known which nodes Ray will take away: %s", reason)


def _ended(serving: Iterable[Any], timeout: float = 0.0) -> set[Any]:
    """Those of these references whose programs end within so many seconds."""
    waited = list(serving)
    return set(ray.wait(waited, num_returns=len(waited), timeout=timeout)[0]) if waited else set()


def _end_of(serving: Any) -> tuple[str, str]:
    """How a program, or its actor, has ended, in words, and what it had written."""
    try:
        end, log = ray.get(serving)
    except RayError as error:
        return f"was lost: {type(error).__name__}", str(error)
    return end, log
