"""However a rollout of several agents ends, nothing of it goes on, and every environment is closed."""

import re
import threading
from typing import Any

import anyio
import pytest
from drawn_agents import Drawn, made
from numbered_agents import NumberedAgents
from raising_env import Breaks
from serial_module import SerialModule

from rollflow.nodes import MultiAgentRollout
from rollflow.stream import Graph, Inlet
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

DRAWN = Drawn(3, 2, 4, 1, 9, False, 4, 1, True, 11)


class BreakingModule(SerialModule):
    """Raises in its tenth pass."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if len(self.passes.done) == 9:
            raise ZeroDivisionError("no more")
        return super()._forward(batch)


def broken_step(env: NumberedAgents) -> None:
    """Have it raise at its tenth step."""
    step, count = env.step, iter(range(100))

    def breaks(actions: Any) -> Any:
        if next(count) == 9:
            raise ZeroDivisionError("no more")
        return step(actions)

    env.step = breaks  # type: ignore[method-assign]


def ending_in(ending: str, **options: Any) -> tuple[list[NumberedAgents], MultiAgentRollout]:
    if ending == "env_to_module":
        options["env_to_module_connector"] = lambda part: Breaks()
    if ending == "module_to_env":
        options["module_to_env_connector"] = lambda part: Breaks()
    if ending == "module":
        options["module"] = {f"{kind} {place}": BreakingModule() for kind in ("nested", "plain") for place in (0, 1)}
    if ending == "ended":
        options["num_fragments"] = 3
    envs, rollout = made(DRAWN, **options)
    if ending == "env":
        broken_step(envs[1])
    return envs, rollout


FAILING = ["env", "module", "env_to_module", "module_to_env"]
PLACES = {
    "env": r"environment 1, env step",
    "module": r"module '(nested|plain) [01]', lane [01], vector step \d+, batch",
    "env_to_module": r"lane [01], vector step \d+, agents",
    "module_to_env": r"lane [01], vector step \d+, agents",
}


def read(rollout: MultiAgentRollout, ending: str) -> None:
    with rollout:
        for number, _ in enumerate(rollout.fragments()):
            if number == 2 and ending == "left":
                return
            if number == 2 and ending == "drained":
                rollout.drain()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("ending", ["left", "drained", "ended", *FAILING])
def test_no_thread_is_left_and_every_environment_is_closed(ending: str, prefetch: int) -> None:
    before = set(threading.enumerate())
    envs, rollout = ending_in(ending, prefetch=prefetch)
    if ending in FAILING:
        with pytest.raises(ZeroDivisionError, match="no more") as caught:
            read(rollout, ending)
        told = "\n".join(caught.value.__notes__)
        assert re.search(PLACES[ending], told), told
    else:
        read(rollout, ending)
    assert set(threading.enumerate()) <= before
    assert all(env.closed for env in envs)


@pytest.mark.anyio
@pytest.mark.parametrize("ending", ["left", "cancelled", "drained", "ended", *FAILING])
@pytest.mark.parametrize("in_graph", [False, True])
async def test_no_task_is_left_and_every_environment_is_closed(ending: str, in_graph: bool) -> None:
    envs, rollout = ending_in(ending)
    before = {task.id for task in anyio.get_running_tasks()}
    with anyio.CancelScope() as scope:
        reading = read_in_graph if in_graph else read_async
        if ending in FAILING:
            with pytest.raises(ZeroDivisionError, match="no more"):
                await reading(rollout, ending, scope)
        else:
            await reading(rollout, ending, scope)
    assert scope.cancelled_caught == (ending == "cancelled")
    assert {task.id for task in anyio.get_running_tasks()} == before
    assert all(env.closed for env in envs)


async def read_async(rollout: MultiAgentRollout, ending: str, scope: anyio.CancelScope) -> None:
    async with rollout:
        number = 0
        if ending == "left":
            return
        async for _ in rollout.fragments():
            number += 1
            if number == 3 and ending == "cancelled":
                scope.cancel()
            if number == 3 and ending == "drained":
                rollout.drain()


async def read_in_graph(rollout: MultiAgentRollout, ending: str, scope: anyio.CancelScope) -> None:
    graph = Graph("endings")
    graph.add(rollout=rollout)
    graph.output("fragments", "rollout.fragments", capacity=2)
    async with graph.run() as run:
        number = 0
        async for _ in run["fragments"]:
            number += 1
            if number == 3 and ending == "left":
                return
            if number == 3 and ending == "cancelled":
                scope.cancel()
            if number == 3 and ending == "drained":
                run.stop()


@pytest.mark.anyio
async def test_a_stalled_reader_stops_the_environments() -> None:
    envs, rollout = made(DRAWN)
    stalled = anyio.Event()

    class Stalled:
        async def run(self, fragments: Inlet[MultiAgentFragment]) -> None:
            await fragments.receive()
            await stalled.wait()

    graph = Graph("stalled")
    graph.add(rollout=rollout, sink=Stalled())
    graph.connect("rollout.fragments", "sink", capacity=3)
    async with graph.run():
        await anyio.wait_all_tasks_blocked()
        steps = [len(env.log) for env in envs]
        await anyio.wait_all_tasks_blocked()
        assert [len(env.log) for env in envs] == steps
        made_fragments = sum(lane.sequence for lane in rollout.environments.lanes)
        assert made_fragments <= 1 + 3 + 2 * rollout.environments.num_lanes
        stalled.set()


def test_without_prefetch_the_environments_stand_still_while_a_fragment_is_read() -> None:
    envs, rollout = made(DRAWN._replace(lanes=1))
    with rollout:
        for number, fragment in enumerate(rollout.fragments()):
            steps = sum(told.env_step > 0 for env in envs for told in env.log)
            assert steps == (number + 1) * fragment.num_env_steps
            if number == 4:
                break
