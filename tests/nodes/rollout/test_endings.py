"""However a rollout ends, nothing of it goes on: no thread, no task, no descriptor; and every environment is closed."""

import re
from typing import Any

import anyio
import pytest
from drawn_agents import Drawn, made
from leftovers import join_loop_workers, nothing_left
from numbered_module import NumberedModule, numbered_envs
from piece_forms import Breaks
from serial_module import BreakingModule

from rollflow import Forward, Graph, Rollout
from rollflow.sinks import LearnerPipeline, MultiAgentLearnerPipeline
from rollflow.stream import Inlet

DRAWN = Drawn(3, 2, 4, 1, 9, False, 4, 1, True, 11)
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 2},
    "gathering": {"lanes": 3, "forward": Forward(max_batch=12)},
    "forward in a thread": {"lanes": 2, "forward": Forward(in_thread=True)},
}
FAILING = {
    "env": r"(environment 1, env step|lane 0, vector step)",
    "module": r"lanes? [0-2].*, batch: ",
    "env_to_module": r"lane [0-2], vector step \d+",
    "module_to_env": r"lane [0-2], vector step \d+",
}
ENDINGS = ["left", "drained", "ended", *FAILING]
SEVERAL = {"one agent": False, "several agents": True}
# Each way with each ending, in turn with one agent and with several.
LOOPS = [(way, end, bool((w + e) % 2)) for w, way in enumerate(WAYS) for e, end in enumerate(ENDINGS)]


def breaking(function: Any, calls: int = 9) -> Any:
    """A function that raises at its tenth call."""
    count = iter(range(10_000))

    def breaks(*args: Any, **kwargs: Any) -> Any:
        if next(count) == calls:
            raise ZeroDivisionError("no more")
        return function(*args, **kwargs)

    return breaks


class NumberedBreaks(NumberedModule):
    def setup(self) -> None:
        self._forward = breaking(self._forward)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def ending_in(ending: str, *, several: bool, **options: Any) -> tuple[list[Any], Any]:
    """The environments, and a rollout over them that fails as the ending says."""
    if ending in ("env_to_module", "module_to_env"):
        options[f"{ending}_connector"] = lambda part: Breaks()
    options["num_fragments"] = 3 if ending == "ended" else None
    if several:
        if ending == "module":
            options["module"] = {
                f"{kind} {place}": BreakingModule(9) for kind in ("nested", "plain") for place in (0, 1)
            }
        envs, rollout = made(DRAWN, **options)
    else:
        envs, makers = numbered_envs(6)
        module = NumberedBreaks() if ending == "module" else NumberedModule()
        rollout = Rollout(makers, module=module, fragment_length=5, seed=0, **options)
    if ending == "env":
        envs[1].step = breaking(envs[1].step)
    return envs, rollout


def read(rollout: Any, ending: str) -> None:
    with rollout:
        for number, _ in enumerate(rollout.batches()):
            if number == 2 and ending == "left":
                return
            if number == 2 and ending == "drained":
                rollout.drain()


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ending", "several"), LOOPS)
def test_after_a_loop_nothing_is_left_and_every_environment_is_closed(way: str, ending: str, several: bool) -> None:
    with nothing_left():
        envs, rollout = ending_in(ending, several=several, **WAYS[way])
        if ending in FAILING:
            with pytest.raises(ZeroDivisionError, match="no more") as caught:
                read(rollout, ending)
            told = "\n".join(caught.value.__notes__)
            assert re.search(FAILING[ending], told), told
            del caught
        else:
            read(rollout, ending)
        join_loop_workers()
    assert all(env.closed for env in envs)


async def read_async(rollout: Any, ending: str, scope: anyio.CancelScope) -> None:
    async with rollout:
        number = 0
        if ending == "left":  # trio warns of a generator that is left
            return
        async for _ in rollout.batches():
            number += 1
            if number == 3 and ending == "cancelled":
                scope.cancel()
            if number == 3 and ending == "drained":
                rollout.drain()


async def read_in_graph(rollout: Any, ending: str, scope: anyio.CancelScope) -> None:
    graph = Graph("endings")
    learner: Any = (
        LearnerPipeline(rollout.learner_pipeline, rollout.module)
        if isinstance(rollout, Rollout)
        else MultiAgentLearnerPipeline(rollout.learner)
    )
    graph.add(rollout=rollout, learner=learner)
    graph.connect("rollout.fragments", "learner", capacity=2)
    graph.output("batches", "learner")
    async with graph.run() as run:
        number = 0
        async for _ in run["batches"]:
            number += 1
            if number == 3 and ending == "left":
                return
            if number == 3 and ending == "cancelled":
                scope.cancel()
            if number == 3 and ending == "drained":
                run.stop()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("anyio_backend", "way", "several"),
    [
        ("asyncio", "inline", False),
        ("trio", "inline", True),
        ("trio", "forward in a thread", False),
        ("asyncio", "forward in a thread", True),
    ],
)
@pytest.mark.parametrize("reading", [read_async, read_in_graph], ids=lambda each: each.__name__)
@pytest.mark.parametrize("ending", [*ENDINGS, "cancelled"])
async def test_no_task_is_left_and_every_environment_is_closed(
    ending: str, reading: Any, way: str, several: bool
) -> None:
    envs, rollout = ending_in(ending, several=several, **WAYS[way])
    before = {task.id for task in anyio.get_running_tasks()}
    with anyio.CancelScope() as scope:
        if ending in FAILING:
            with pytest.raises(ZeroDivisionError, match="no more"):
                await reading(rollout, ending, scope)
        else:
            await reading(rollout, ending, scope)
    assert scope.cancelled_caught == (ending == "cancelled")
    assert {task.id for task in anyio.get_running_tasks()} == before
    assert all(env.closed for env in envs)


@pytest.mark.anyio
@pytest.mark.parametrize("several", SEVERAL.values(), ids=SEVERAL)
async def test_a_stalled_sink_stops_the_environments(several: bool) -> None:
    _, rollout = ending_in("", several=several, lanes=2)
    stalled = anyio.Event()

    class Stalled:
        async def run(self, fragments: Inlet[Any]) -> None:
            await fragments.receive()
            await stalled.wait()

    graph = Graph("stalled")
    graph.add(rollout=rollout, sink=Stalled())
    graph.connect("rollout.fragments", "sink", capacity=3)
    async with graph.run():
        await anyio.wait_all_tasks_blocked()
        steps = rollout.num_steps
        # One with the sink, three in the channel, and one that waits; the lanes fill theirs in turn.
        cut = sum(lane.sequence for lane in rollout.environments.lanes)
        assert cut <= 1 + 3 + 2 * 2 if several else cut == 5
        await anyio.wait_all_tasks_blocked()
        assert rollout.num_steps == steps
        stalled.set()


@pytest.mark.parametrize("several", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("way", [{"lanes": 1}, {"lanes": 2, "forward": Forward(max_batch=12)}])
def test_without_prefetch_the_environments_stand_still_while_the_caller_works(
    way: dict[str, Any], several: bool
) -> None:
    _, rollout = ending_in("", several=several, **way)
    length = rollout.environments.fragment_length
    with rollout:
        for number, _ in enumerate(rollout.batches(), start=1):
            made_steps = [lane.vector_steps for lane in rollout.environments.lanes]
            assert made_steps == [length * number] * way["lanes"]
            if number == 4:
                break
