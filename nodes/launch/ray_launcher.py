"""Launcher of programs as actors of Ray: Ray says where, and starts them again elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollflow.nodes.launch.process_launcher import ProgramProcess, await_ends
from rollflow.stream.data.errors import RunError

_ENDING_S = 1.0  # for programs that are ending by themselves
_LOOK_S = 3600.0  # that a program is waited for at a time
_ANSWER_S = 5.0  # of an actor that is asked for its log


class RayHost:
    """Actor without arguments, and without a state that a restart could lose: Ray calls `serve` again then."""

    def __init__(self) -> None:
        self._program: ProgramProcess | None = None

    def serve(self, call: bytes, name: str) -> tuple[str, str]:
        """Run a program that makes a call until it ends: how it ended, "" as it should, and what it wrote last.

        It runs in a process of its own, which ends with the actor: what an environment does to its process, such as
        a segmentation fault, is said then.
        """
        self._program = program = ProgramProcess(call, name)
        while (end := program.wait(_LOOK_S)) is None:
            pass
        return end, program.log

    def log(self) -> str:
        """Lines that the program has written last."""
        return "" if self._program is None else self._program.log


class RayProgram:
    """Runs a program in an actor, as `ProgramProcess` does in a process.

    actor    made of `RayHost`
    call     pickled function of a name, which gives the exit status
    name     that it is called with
    """

    def __init__(self, actor: Any, call: bytes, name: str) -> None:
        self.name, self._actor = name, actor
        self._serving = actor.serve.remote(call, name)
        self._ended: tuple[str, str] | None = None  # how, and what it had written then

    @property
    def end(self) -> str | None:
        """How it, or its actor, has ended, in words, "" if it did as it should; None: it runs, or will."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> str | None:
        """Wait until it has ended, for so many seconds at most: its `end`. Raises RunError if Ray was shut down."""
        if not ray.is_initialized():
            raise RunError("Ray was shut down, expected it to last as long as the rollout")
        if self._ended is None and ray.wait([self._serving], timeout=timeout)[0]:
            try:
                self._ended = ray.get(self._serving)
            except RayError as error:
                self._ended = f"was lost: {type(error).__name__}", str(error)
        return None if self._ended is None else self._ended[0]

    @property
    def log(self) -> str:
        """Lines that it has written last; "" if its actor is not there."""
        if self._ended is not None:
            return self._ended[1]
        try:
            return str(ray.get(self._actor.log.remote(), timeout=_ANSWER_S))
        except (RayError, GetTimeoutError):
            return ""

    def kill(self) -> None:
        """End it now, with its actor."""
        ray.kill(self._actor)


class RayLauncher:
    """Runs programs as actors in one placement group, as `ProcessLauncher` does in processes.

    Ray restarts them for as long as this process lives.

        num_programs   number of programs, which Ray runs as soon as it has room for all
        strategy       "spread" over the nodes, or "pack" onto few of them
        resources      of each program: name -> amount
        runtime_env    of the actors

    Nothing but calls and logs goes through Ray. A call is as large as what it holds, such as the rollout's environment
    and secret: Ray puts a large one into its store, so whoever may read that can read the secret.
    """

    def __init__(
        self, num_programs: int, strategy: str, resources: Mapping[str, float], runtime_env: Mapping[str, Any]
    ) -> None:
        self._num_programs, self._strategy = num_programs, strategy.upper()
        self._resources, self._runtime_env = dict(resources), dict(runtime_env)
        self._group: Any = None
        if not ray.is_initialized():
            ray.init()

    def node_address(self) -> str:
        """Address of this node, as Ray has it."""
        return str(ray.util.get_node_ip_address())

    def run(self, number: int, call: bytes) -> RayProgram:
        """Have Ray run the program of a number: see `ProcessLauncher`."""
        if self._group is None:
            self._group = placement_group([self._resources] * self._num_programs, strategy=self._strategy)
        strategy = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=number)
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
        return RayProgram(actor.remote(), call, f"ray-{number}")

    def waits(self, running: Sequence[int]) -> str:
        """What those of these programs that have no place wait for, in words; "": all have one."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        if all(nodes.get(number) for number in running):
            return ""
        free = {name: amount for name, amount in ray.available_resources().items() if name in self._resources}
        return (
            f"waits for room in Ray's cluster: {self._group.bundle_count} hosts take {self._resources} each, "
            f"{self._strategy.lower()}; free are {free or 'none of these'}"
        )

    def stop(self, programs: Sequence[RayProgram]) -> None:
        """End all programs: those that are ending by themselves first, the others with their actors."""
        if not ray.is_initialized():  # they have ended with it
            return
        await_ends(programs, _ENDING_S)
        for program in programs:
            program.kill()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
