"""Launcher of programs as actors of Ray: Ray says where, and starts them again elsewhere."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollflow.nodes.launch.process_launcher import Handle, ProgramProcess
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import RunError

_ENDING_S = 1.0  # for programs that are ending by themselves
_LOOK_S = 3600.0  # that a program is waited for at a time
_ANSWER_S = 5.0  # of an actor that is asked for its log


class RayHost:
    """Actor without arguments, and without a state that a restart could lose: Ray calls `serve` again then."""

    def __init__(self) -> None:
        self._program: ProgramProcess | None = None
        self._is_to_end = False

    def serve(self, call: bytes, name: str) -> tuple[str, str]:
        """Run a program that makes a call until it ends: how it ended, "" as it should, and what it wrote last.

        It runs in a process of its own, which ends with the actor: what an environment does to its process, such as
        a segmentation fault, is said then.
        """
        self._program = program = ProgramProcess(call, name)
        if self._is_to_end:  # since before it had begun
            program.terminate()
        while (end := program.wait(_LOOK_S)) is None:
            pass
        return end, program.log

    def terminate(self) -> None:
        """Tell the program to end, by SIGTERM."""
        self._is_to_end = True
        if self._program is not None:
            self._program.terminate()

    def log(self) -> str:
        """Lines that the program has written last."""
        return "" if self._program is None else self._program.log


@dataclass(slots=True, eq=False)
class _Placed:
    """Actor in the placement group.

    bundle     number of its place there
    serving    reference to what `RayHost.serve` gives at its end
    log        what it had written then; None: it runs
    """

    bundle: int
    actor: Any
    serving: Any
    log: str | None = None


class RayLauncher:
    """Starts programs as actors in one placement group, as `ProcessLauncher` does.

    Ray restarts them for as long as this process lives.

        strategy       "spread" over the nodes, or "pack" onto few of them
        resources      of each program: name -> amount
        runtime_env    of the actors

    Nothing but calls and logs goes through Ray. A call is as large as what it holds, such as the rollout's environment
    and secret: Ray puts a large one into its store, so whoever may read that can read the secret.
    """

    def __init__(self, strategy: str, resources: Mapping[str, float], runtime_env: Mapping[str, Any]) -> None:
        self._strategy, self._resources, self._runtime_env = strategy.upper(), dict(resources), dict(runtime_env)
        self._placed: dict[Handle, _Placed] = {}
        self._group: Any = None
        self._call = b""
        if not ray.is_initialized():
            ray.init()

    def node_address(self) -> str:
        """Address of this node, as Ray has it."""
        return str(ray.util.get_node_ip_address())

    def start(self, n: int, call: bytes) -> list[Handle]:
        """Have Ray start so many programs as soon as it has room for all: see `ProcessLauncher`."""
        self._call = call
        with closing_on_error(self.stop):
            self._group = placement_group([self._resources] * n, strategy=self._strategy)
            for bundle in range(n):
                handle = Handle(f"ray-{bundle}")
                self._placed[handle] = self._run(handle, bundle)
        return list(self._placed)

    def alive(self) -> list[Handle]:
        """The programs that run, that wait for room, or whose actors Ray is restarting.

        Raises RunError where Ray was shut down.
        """
        if not ray.is_initialized():
            raise RunError("Ray was shut down, expected it to last as long as the rollout")
        if not self._placed:
            return []
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        running = {handle: each.serving for handle, each in self._placed.items() if each.log is None}
        ended = _ended(running.values())
        for handle, serving in running.items():
            placed = self._placed[handle]
            handle.waits = "" if serving in ended or nodes.get(placed.bundle) else self._waits()
            if serving in ended:
                handle.end, placed.log = _end_of(serving)
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
        self._placed[handle], handle.end = self._run(handle, placed.bundle), ""

    def stop(self) -> None:
        """End all programs: those that are ending by themselves first, the others with their actors."""
        if not ray.is_initialized():  # they have ended with it
            return
        _ended((placed.serving for placed in self._placed.values()), _ENDING_S)
        for placed in self._placed.values():
            ray.kill(placed.actor)
        self._placed.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _run(self, handle: Handle, bundle: int) -> _Placed:
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle)
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
        serving = started.serve.remote(self._call, handle.name)
        return _Placed(bundle, started, serving)

    def _waits(self) -> str:
        """What a program that has no place waits for, in words."""
        free = {name: amount for name, amount in ray.available_resources().items() if name in self._resources}
        return (
            f"waits for room in Ray's cluster: {self._group.bundle_count} hosts take {self._resources} each, "
            f"{self._strategy.lower()}; free are {free or 'none of these'}"
        )


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
