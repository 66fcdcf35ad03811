"""Every transition reaches its sink or is counted as lost, wherever and whenever a run ends."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from itertools import count, pairwise
from threading import Event
from typing import Any, NamedTuple

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
from drawn_agents import Drawn, made as made_agents
from feeding_rollouts import SHORT, AnyRollout, learner_of, trainer
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule, numbered_envs
from property_examples import examples, strategies

from rollflow import Fragment, Graph, Rollout, TrainerStream, feed
from rollflow.nodes import LambdaConnector
from rollflow.sinks import TrainerSink
from rollflow.sinks.trainer.messages import batches_in, num_steps
from rollflow.stream import Inlet, MultiAgentFragment, Outlet, RunError
from rollflow.stream.graph.run import Run
from rollflow.stream.wire import Limits

BACKENDS = ["asyncio", "trio"]
IMPATIENT = Limits(heartbeat_s=5.0, grace_s=0.2)


class Broken(Exception):
    """Error that a node, or the block, raises."""


def breaking(call: int) -> LambdaConnector:
    """A piece that raises at one of its calls; 0: never."""
    calls = count(1)

    def check() -> None:
        if next(calls) == call:
            raise Broken

    return LambdaConnector(check)


class Setting(NamedTuple):
    """Random settings of a run, and where and when it ends.

    several        whether there are several agents
    learns         whether train batches are made
    sink           "output", "call", "thread", "node" or "trainer"
    hop            whether an asynchronous node stands before the sink
    capacity       of the edges
    ending         "left", "cancelled", "block", "sink", "piece", "learner" or "drained"
    items          that reach the sink before the run ends
    """

    several: bool
    learns: bool
    sink: str
    hop: bool
    capacity: int
    ending: str
    items: int
    lanes: int
    fragment_length: int
    per_batch: int
    call: int
    seed: int


parts_drawn = strategies(
    several=bool, learns=bool, sink=["output", "call", "thread", "node"], hop=bool, capacity=(1, 3)
)
parts_drawn |= strategies(ending=["left", "cancelled", "block", "sink", "piece", "learner", "drained"], items=(1, 5))
parts_drawn |= strategies(lanes=(1, 2), fragment_length=(1, 6), per_batch=(1, 3), call=(1, 30), seed=(0, 2**32 - 1))
drawn_settings = st.builds(Setting, **parts_drawn)


AGENTS = Drawn(2, 1, 2, 1, 9, False, 8, 1, False, 0)


def rollout_of(drawn: Setting, **options: Any) -> tuple[list[Any], AnyRollout]:
    """The environments, and a rollout over them; its pieces raise if that is how it ends."""
    piece, learns = drawn.ending == "piece", drawn.ending == "learner"
    options |= {
        "env_to_module_connector": lambda part: breaking(drawn.call if piece else 0),
        "learner_connector": lambda obs, act: breaking(drawn.items if learns else 0),
    }
    if drawn.several:
        agents = AGENTS._replace(lanes=drawn.lanes, fragment_length=drawn.fragment_length, seed=drawn.seed)
        return made_agents(agents, **options)
    envs, makers = numbered_envs(3, lengths=(1, 9))
    shape = {"lanes": drawn.lanes, "fragment_length": drawn.fragment_length, "seed": drawn.seed}
    return envs, Rollout(makers, module=NumberedModule(), **shape, **options)


def steps_of(item: Any) -> int:
    """Transitions in a fragment or a train batch."""
    if isinstance(item, Fragment | MultiAgentFragment):
        return item.num_steps
    return num_steps(batches_in(item, is_by_module="obs" not in item))


class Taker:
    """Counts the transitions that reach a sink.

    last         items after which `has_come` is set
    raises       whether the item after these is refused
    is_reader    whether it reads an output: what it was given is handed out, whatever becomes of it there
    """

    def __init__(self, last: int, *, raises: bool = False, is_reader: bool = False) -> None:
        self.items = self.steps = 0
        self.has_come = anyio.Event()
        self._last, self._raises, self._is_reader = last, raises, is_reader

    def take(self, item: Any) -> None:
        if self._raises and self.items == self._last:
            self.steps += steps_of(item) if self._is_reader else 0
            raise Broken
        self.items += 1
        self.steps += steps_of(item)
        if self.items == self._last:
            self.has_come.set()


def sink_of(taker: Taker, kind: str) -> Any:
    """A node without outlets that takes what comes."""

    def call(item: Any) -> None:
        taker.take(item)

    def call_in_thread(item: Any) -> None:
        anyio.from_thread.run_sync(taker.take, item)

    async def run(items: Inlet[Any]) -> None:
        async for item in items:
            await anyio.lowlevel.checkpoint()
            taker.take(item)

    return {"call": call, "thread": call_in_thread, "node": run}[kind]


async def passing_on(items: Inlet[Any], out: Outlet[Any]) -> None:
    async for item in items:
        await out.send(item)


def graph_of(drawn: Setting, rollout: AnyRollout, sink: Any) -> Graph:
    """The rollout, the learner pipeline and the sink, each joined to the next; without a sink there is an output."""
    graph = Graph("losses")
    graph.add(rollout=rollout)
    ends = ["rollout.fragments"]
    if drawn.learns:
        graph.add(learner=learner_of(rollout, fragments_per_batch=drawn.per_batch))
        ends.append("learner")
    if drawn.hop:
        graph.add(hop=passing_on)
        ends.append("hop")
    if sink is not None:
        ends.append("sink")
        graph.add_node("sink", sink, where="thread" if drawn.sink == "thread" else None)
    for before, after in pairwise(ends):
        is_chained = drawn.sink == "call" and after == "sink" and before == "rollout.fragments"
        graph.connect(before, after, capacity=None if is_chained else drawn.capacity)
    if sink is None:
        graph.output("out", ends[-1], capacity=drawn.capacity)
    return graph


async def act(drawn: Setting, run: Run, scope: anyio.CancelScope) -> bool:
    """End the run from its block, if that is how it ends; whether the block is to go on."""
    match drawn.ending:
        case "cancelled":
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        case "block":
            raise Broken
        case "drained":
            run.stop()
    return drawn.ending != "left"


async def run_through(drawn: Setting, rollout: AnyRollout, taker: Taker) -> None:
    """Run it to its end."""
    sink = None if drawn.sink == "output" else sink_of(taker, drawn.sink)
    graph = graph_of(drawn, rollout, sink)
    with anyio.CancelScope() as scope:
        async with graph.run() as run:
            if sink is None:
                async for item in run["out"]:
                    taker.take(item)
                    if taker.items == drawn.items and not await act(drawn, run, scope):
                        break
            else:
                await taker.has_come.wait()
                if await act(drawn, run, scope):
                    await run.wait()


def is_broken(error: BaseException) -> bool:
    """Return True for the error that was raised, alone or in groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_broken, error.exceptions))
    return isinstance(error, Broken)


FAILING = "block", "sink", "piece", "learner"


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(60))
@given(drawn=drawn_settings)
def test_what_reaches_no_sink_is_lost_by_the_way_in_which_the_run_ends(backend: str, drawn: Setting) -> None:
    drawn = drawn._replace(learns=drawn.learns or drawn.ending == "learner")
    envs, rollout = rollout_of(drawn)

    async def main() -> int:
        taker = Taker(drawn.items, raises=drawn.ending == "sink", is_reader=drawn.sink == "output")
        try:
            await run_through(drawn, rollout, taker)
        except Exception as error:
            assert drawn.ending in FAILING
            assert is_broken(error)
        else:
            assert drawn.ending not in FAILING
        return taker.steps

    reached = anyio.run(main, backend=backend)
    made = rollout.num_steps if drawn.several else sum(len(env.log) for env in envs)
    lost = made - reached
    cause = {"left": "closed", "cancelled": "closed"}.get(drawn.ending, "failed")
    assert rollout.lost == ({cause: lost} if lost else {})
    assert drawn.ending != "drained" or not lost


@pytest.mark.parametrize("where", ["threads", "processes", pytest.param("rollouts", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ending", ["left", "block", "drained"])
def test_the_same_holds_wherever_the_environments_step(where: Any, ending: str) -> None:
    rollout = Rollout("CartPole-v1", num_envs=4, lanes=2, fragment_length=4, seed=0, where=where)
    drawn = Setting(False, True, "output", True, 1, ending, 3, 2, 4, 2, 0, 0)
    taker = Taker(drawn.items)
    try:
        anyio.run(run_through, drawn, rollout, taker)
    except Broken:
        assert ending == "block"
    lost = rollout.num_steps - taker.steps
    assert rollout.lost == ({"failed" if ending == "block" else "closed": lost} if lost else {})
    assert ending != "drained" or not lost


class Stumbles(NumberedEnv):
    """Raises at its fifth step."""

    def step(self, action: Any) -> Any:
        if len(self.log) == 4:
            raise Broken
        return super().step(action)


@pytest.mark.parametrize("where", ["inline", "threads"])
@pytest.mark.parametrize("is_in_graph", [False, True])
def test_a_vector_step_that_raises_is_lost_with_what_its_environments_made(where: Any, is_in_graph: bool) -> None:
    envs = [NumberedEnv(0), Stumbles(1)]
    makers = [lambda: envs[0], lambda: envs[1]]
    rollout = Rollout(makers, module=NumberedModule(), lanes=1, fragment_length=3, where=where)
    drawn = Setting(False, False, "output", False, 1, "env", 99, 1, 3, 1, 0, 0)
    taker = Taker(drawn.items)
    with pytest.raises(Broken):
        if is_in_graph:
            anyio.run(run_through, drawn, rollout, taker)
        else:
            with rollout:
                for fragment in rollout.fragments():
                    taker.take(fragment)
    assert sum(len(env.log) for env in envs) == 5 + 4
    assert rollout.lost == {"failed": 2 * 5 - taker.steps}  # the one that raised had made its step, or had not


def two_envs(**options: Any) -> Rollout:
    return Rollout(numbered_envs(2)[1], module=NumberedModule(), fragment_length=3, seed=0, **options)


def test_what_an_edge_drops_is_lost_where_it_goes_nowhere_else() -> None:
    for branches in (1, 2):
        rollout = two_envs(num_fragments=9)
        graph, taker, other = Graph("drops"), Taker(1), Taker(1)

        async def main(graph: Graph = graph) -> Any:
            async with graph.run() as run:
                await run.wait()
            return run.report()

        async def slow(items: Inlet[Any], taker: Taker = taker, other: Taker = other) -> None:
            await other.has_come.wait() if other.items else await anyio.wait_all_tasks_blocked()
            async for item in items:
                taker.take(item)

        graph.add(rollout=rollout, slow=slow)
        graph.connect("rollout.fragments", "slow", capacity=2, overflow="drop_oldest")
        if branches == 2:
            graph.add(other=sink_of(other, "call"))
            graph.connect("rollout.fragments", "other")
        dropped = sum(edge.dropped for edge in anyio.run(main).edges)
        assert dropped
        assert taker.steps == rollout.num_steps - dropped * 3 * 2
        assert rollout.lost == ({"dropped": dropped * 3 * 2} if branches == 1 else {})


@pytest.mark.anyio
async def test_what_comes_for_a_node_that_has_ended_is_dropped() -> None:
    rollout = two_envs(num_fragments=9)
    taker = Taker(2)

    async def takes_two(items: Inlet[Any]) -> None:
        for _ in range(2):
            taker.take(await items.receive())

    graph = Graph("ends early")
    graph.add(rollout=rollout, sink=takes_two)
    graph.connect("rollout.fragments", "sink")
    async with graph.run() as run:
        await run.wait()
    assert taker.steps == 2 * 6
    assert rollout.lost["dropped"] == rollout.num_steps - taker.steps


@pytest.mark.anyio
async def test_of_several_sinks_each_has_what_is_not_counted() -> None:
    """A fragment that one sink has and another has not is lost, once."""
    rollout = two_envs()
    takers = {"first": Taker(1), "second": Taker(3)}
    graph = Graph("several sinks")
    graph.add(rollout=rollout, hop=passing_on)
    graph.add(first=sink_of(takers["first"], "node"), second=sink_of(takers["second"], "call"))
    graph.connect("rollout.fragments", "first", capacity=2)
    graph.connect("rollout.fragments", "hop", capacity=3)
    graph.connect("hop", "second", capacity=1)
    with pytest.raises(Broken):
        async with graph.run():
            await takers["second"].has_come.wait()
            raise Broken
    everywhere = min(taker.steps for taker in takers.values())
    assert rollout.lost["failed"] == rollout.num_steps - everywhere


def hold(stream: TrainerStream, items: int, is_over: Event) -> int:
    """Take so many items and one more, if it comes, and hold that until it is over: the transitions in the former."""
    taken: list[int] = []
    while len(taken) <= items and not is_over.is_set():
        with suppress(RunError):  # there is none yet
            taken.append(steps_of(next(iter(stream))))
    is_over.wait()
    return sum(taken[:items])


async def feed_until(drawn: Setting, moved_on: int, graph: Graph, sink: TrainerSink) -> None:
    """Run it until the trainer has moved on from as many items as it will, and then to its end."""
    with anyio.CancelScope() as scope:
        async with graph.run() as run:
            await sink._wait_until(lambda: sink._session.done == moved_on)
            if await act(drawn, run, scope):
                await run.wait()


DRAWN = strategies(drawn=drawn_settings, ending=["left", "cancelled", "block"], moved_on=(1, 3))
DRAWN |= strategies(max_bytes=[1, 2_000, 1 << 30])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=examples(8))
@given(**DRAWN)
def test_what_a_trainer_is_not_done_with_is_lost(
    backend: str, drawn: Setting, ending: str, moved_on: int, max_bytes: int
) -> None:
    """The trainer holds an item behind those that it has moved on from; with one byte the sink waits for room."""
    learns = drawn.learns or drawn.several
    drawn = drawn._replace(learns=learns, sink="trainer", hop=False, capacity=1, ending=ending, per_batch=1)
    _, rollout = rollout_of(drawn)
    sends = "batches" if drawn.learns else "fragments"
    is_over = Event()
    with ExitStack() as stack:
        stream = stack.enter_context(trainer(yields=sends, join_timeout=0.2, limits=IMPATIENT))
        threads = stack.enter_context(ThreadPoolExecutor())
        stack.callback(is_over.set)
        taken = threads.submit(hold, stream, moved_on, is_over)
        sink = TrainerSink(stream.address, sends=sends, limits=SHORT, max_bytes=max_bytes)
        graph = graph_of(drawn, rollout, sink)
        with pytest.raises(Broken) if ending == "block" else nullcontext():
            anyio.run(feed_until, drawn, moved_on, graph, sink, backend=backend)
        is_over.set()
        steps = taken.result()
    assert sum(rollout.lost.values()) == rollout.num_steps - steps
    cause = {"left": "closed", "cancelled": "closed"}.get(ending, "failed")
    assert rollout.lost.keys() <= {cause, "undelivered"}


def test_a_feed_whose_linger_runs_out_counts_what_is_left() -> None:
    rollout = Rollout("CartPole-v1", num_envs=4, lanes=2, fragment_length=16, seed=0, num_fragments=3)
    is_over = Event()
    with trainer(yields="fragments", prefetch=8) as stream, ThreadPoolExecutor() as threads:
        steps = threads.submit(hold, stream, 2, is_over)
        feed(rollout, stream.address, linger=0.1, limits=SHORT)
        is_over.set()
        assert rollout.lost == {"undelivered": rollout.num_steps - steps.result()}
