"""However a rollout ends, nothing of it goes on: no thread, no task, no descriptor; and every environment is closed."""

import re
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from drawn_agents import Drawn, made
from graph_rows import row
from leftovers import join_loop_workers, nothing_left
from numbered_module import NumberedModule, numbered_envs
from piece_forms import Breaks
from serial_module import BreakingModule
from ways import end, end_async, end_in_graph, graph_with

from rollflow import Forward, Rollout
from rollflow.stream import Inlet

DRAWN = Drawn(3, 2, 4, 1, 9, False, 4, 1, True, 11)
WAYS: dict[str, dict[str, Any]] = {
    "inline": {},
    "ahead": {"prefetch": 2},
    "gathering": {"lanes": 3, "forward": Forward(max_batch=12)},
    "apart": {"where": "threads", "forward": Forward(max_batch=12)},
}
FAILING = {
    "env": r"(environment 1, env step|lane 0, vector step|slot 1, step)",
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
            names = ("nested 0", "nested 1", "plain 0", "plain 1")
            options["module"] = {name: BreakingModule(9) for name in names}
        envs, rollout = made(DRAWN, **options)
        if ending == "env":
            envs[1].step = breaking(envs[1].step)
    else:
        envs, makers = numbered_envs(6)
        if ending == "env":  # lanes look its method up when they are made
            envs[1].step = breaking(envs[1].step)
        module = NumberedBreaks() if ending == "module" else NumberedModule()
        rollout = Rollout(makers, module=module, fragment_length=5, seed=0, **options)
    return envs, rollout


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ending", "several"), LOOPS)
def test_after_a_loop_nothing_is_left_and_every_environment_is_closed(way: str, ending: str, several: bool) -> None:
    with nothing_left():
        envs, rollout = ending_in(ending, several=several, **WAYS[way])
        if ending in FAILING:
            with pytest.raises(ZeroDivisionError, match="no more") as caught:
                end(rollout, ending)
            told = "\n".join(caught.value.__notes__)
            assert re.search(FAILING[ending], told), told
            del caught
        else:
            end(rollout, ending)
        join_loop_workers()
    assert all(env.closed for env in envs)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("anyio_backend", "way", "several"),
    [
        ("asyncio", "inline", False),
        ("trio", "inline", True),
        ("trio", "ahead", False),
        ("asyncio", "ahead", True),
    ],
)
@pytest.mark.parametrize("reading", ["loop", "graph"])
@pytest.mark.parametrize("ending", [*ENDINGS, "cancelled"])
async def test_no_task_is_left_and_every_env_is_closed(ending: str, reading: str, way: str, several: bool) -> None:
    envs, rollout = ending_in(ending, several=several, **WAYS[way])
    before = {task.id for task in anyio.get_running_tasks()}
    is_cancelled = False
    with pytest.raises(ZeroDivisionError, match="no more") if ending in FAILING else nullcontext():
        if reading == "graph":
            is_cancelled = await end_in_graph(graph_with(rollout), ending)
        else:
            is_cancelled = await end_async(rollout, ending)
    assert is_cancelled == (ending == "cancelled")
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

    async with row(rollout=rollout, sink=Stalled(), capacity=3).run():
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
def test_without_prefetch_environments_stand_still_while_the_caller_works(way: dict[str, Any], several: bool) -> None:
    _, rollout = ending_in("", several=several, **way)
    length = rollout.environments.fragment_length
    with rollout:
        for number, _ in enumerate(rollout.batches(), start=1):
            made_steps = [lane.vector_steps for lane in rollout.environments.lanes]
            assert made_steps == [length * number] * way["lanes"]
            if number == 4:
                break
