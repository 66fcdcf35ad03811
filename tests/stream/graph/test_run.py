"""Runs of graphs: what flows, how they end, and the errors that reach their callers."""

import itertools
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from graph_rows import Collect, Gate, Round, double, drawn, ended, once_and_never_again, row, three
from hypothesis import given, settings, strategies as st
from property_examples import examples

from rollflow import Graph
from rollflow.stream import GraphError, Inlet, Outlet, RunError
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.report import Report

pytestmark = pytest.mark.anyio


class Numbers:
    """0, 1, 2, … and how far it has come."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count
        self.sent = 0

    async def run(self, out: Outlet[int]) -> None:
        while self.count is None or self.sent < self.count:
            await out.send(self.sent)
            self.sent += 1


async def test_a_run_that_is_not_entered_says_so() -> None:
    graph = row("forgotten", numbers=Numbers(), collect=Collect())
    with pytest.warns(RuntimeWarning, match="graph 'forgotten' was not run: expected `async with graph.run"):
        graph.run()


class Ring:
    """Counts an item up at each turn; every third turn lets something out; holds the last turn until `finish`."""

    def __init__(self, turns: int | None = None) -> None:
        self.turns = turns
        self.last = 0
        self.closed = 0

    def start(self) -> Iterable[Round]:
        yield Round(0, None)

    def __call__(self, number: int) -> Round:
        self.last = number + 1
        on = self.last if self.turns is None or self.last < self.turns else None
        return Round(on, self.last if self.last % 3 == 0 else None)

    def finish(self) -> Iterable[Round]:
        yield Round(None, -self.last)

    def close(self) -> None:
        self.closed += 1


def ring_graph(ring: Ring, gate: Any = None) -> Graph:
    way = f"ring.on >{'' if gate is None else 'gate'} same >> ring"
    nodes = {"ring": ring, "same": lambda number: number}
    return drawn(way, name="ring", gate=gate, outputs={"thirds": "ring.out"}, **nodes)


async def test_a_stalled_reader_stops_the_source() -> None:
    source = Numbers()
    graph = row(capacity=4, source=source, double=double)
    graph.output("doubled", "double", capacity=2)
    async with graph.run() as run:
        await anyio.wait_all_tasks_blocked()
        assert source.sent == 2 + 1 + 4  # what the output holds, what waits before it, what the channel holds
        assert await run["doubled"].receive() == 0
        await anyio.wait_all_tasks_blocked()
        assert source.sent == 8


@pytest.mark.parametrize("capacity", [3, 1])
async def test_a_slow_sink_may_drop_and_every_drop_is_counted(capacity: int) -> None:
    complete, released = Collect(), anyio.Event()
    kept: list[int] = []

    async def slow(items: Inlet[int]) -> None:
        kept.append(await items.receive())
        await released.wait()
        kept.extend([item async for item in items])

    ways = "source >1 complete", f"source >drop_oldest{capacity} slow"
    graph = drawn(*ways, source=Numbers(50), slow=slow, complete=complete)
    async with graph.run() as run:
        await anyio.wait_all_tasks_blocked()
        released.set()
        await run.wait()
        dropped = {edge.name: edge.dropped for edge in run.report().edges}
    assert complete.items == list(range(50))
    assert kept[-capacity:] == list(range(50 - capacity, 50))
    assert dropped == {"source.out → complete.item": 0, "source.out → slow.items": 50 - len(kept)}


async def test_a_fan_out_passes_the_object_itself() -> None:
    first, second, item = Collect(), Collect(), object()

    async def source(out: Outlet[object]) -> None:
        await out.send(item)

    graph = drawn("source >1 first", "source >1 second", source=source, first=first, second=second)
    await ended(graph)
    assert first.items[0] is second.items[0] is item


async def test_a_node_in_a_thread_works_off_the_event_loops_thread_and_in_order() -> None:
    threads: set[int] = set()

    def work(number: int) -> int:
        threads.add(threading.get_ident())
        return number

    sink = Collect()
    graph = drawn("source >2 work > sink", thread="work", source=Numbers(20), sink=sink, work=work)
    await ended(graph)
    assert sink.items == list(range(20))
    assert threading.get_ident() not in threads


def fails_at(limit: int) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == limit:
            raise ValueError(f"{number} is too much")
        return number

    return work


@pytest.mark.parametrize("thread", ["", "work"], ids=["inline", "thread"])
async def test_an_error_names_its_node_and_ends_the_run(thread: str) -> None:
    sink = Collect()
    graph = drawn("source >2 work >1 sink", thread=thread, source=Numbers(), work=fails_at(7), sink=sink)
    with pytest.raises(ValueError, match="7 is too much") as raised:
        await ended(graph)
    assert raised.value.__notes__ == ["in node 'work'"]
    assert sink.closed == 1
    assert sink.items == list(range(len(sink.items)))


async def test_two_errors_at_once_are_told_both() -> None:
    ready = anyio.Event()

    async def fails(out: Outlet[int]) -> None:
        await ready.wait()
        raise ValueError("one of two")

    graph = drawn("a >1 sink", "b >1 sink", a=fails, b=fails, sink=Collect())
    with pytest.raises(ExceptionGroup) as raised:
        async with graph.run() as run:
            await anyio.wait_all_tasks_blocked()
            ready.set()
            await run.wait()
    assert len(raised.value.exceptions) == 2


async def test_a_node_that_asks_for_it_has_the_report_before_its_first_item() -> None:
    class Reported(Collect):
        def take_report(self, report: Callable[[], Report]) -> None:
            assert not self.items
            self.report = report

    reported = Reported()
    graph = row(numbers=Numbers(3), reported=reported)
    await ended(graph)
    assert {node.name: node.items for node in reported.report().nodes} == {"numbers": 3, "reported": 3}


class Bad(Collect):
    def close(self) -> None:
        super().close()
        raise OSError("won't close")


async def test_every_node_is_closed_even_when_one_close_raises() -> None:
    bad, good = Bad(), Collect()
    graph = drawn("source >1 bad", "source >1 good", source=Numbers(1), bad=bad, good=good)
    with pytest.raises(OSError, match="won't close") as raised:
        await ended(graph)
    assert raised.value.__notes__ == ["in node 'bad'"]
    assert (bad.closed, good.closed) == (1, 1)


async def test_errors_of_several_nodes_in_closing_are_a_group() -> None:
    graph = drawn("source >1 bad", "source >1 worse", source=Numbers(1), bad=Bad(), worse=Bad())
    with pytest.raises(ExceptionGroup, match=f"closing graph '{graph.name}'") as raised:
        await ended(graph)
    assert [error.__notes__ for error in raised.value.exceptions] == [["in node 'bad'"], ["in node 'worse'"]]
    assert all(error.__traceback__ is not None for error in raised.value.exceptions)


async def test_each_error_in_closing_is_told_of_with_the_one_before() -> None:
    graph = drawn("source >1 work > bad", "work > worse", source=Numbers(), work=fails_at(3), bad=Bad(), worse=Bad())
    with pytest.raises(ValueError, match="3 is too much") as raised:
        await ended(graph)
    at, note = raised.value.__notes__
    assert at == "in node 'work'"
    assert note.startswith(f"closing graph '{graph.name}' raised as well: ")
    for node in ("bad", "worse"):
        assert f"OSError: won't close; in node '{node}'" in note


async def test_an_error_in_closing_is_raised_where_the_run_is_cancelled() -> None:
    graph = drawn("source >1 bad", source=Numbers(), bad=Bad())
    with pytest.raises(OSError, match="won't close"):
        with anyio.CancelScope() as scope:
            async with graph.run():
                scope.cancel()
                await anyio.sleep_forever()


async def test_a_call_that_still_runs_in_a_thread_counts_as_busy() -> None:
    began, go_on = threading.Event(), threading.Event()

    def work(number: int) -> None:
        began.set()
        go_on.wait()

    graph = row(capacity=1, thread="work", source=Numbers(1), work=work)
    async with graph.run() as run:
        await anyio.to_thread.run_sync(began.wait)
        first = {node.name: node.busy_s for node in run.report().nodes}["work"]
        later = {node.name: node.busy_s for node in run.report().nodes}["work"]
        go_on.set()
        await run.wait()
    assert 0 < first < later


async def test_leaving_the_block_cancels_what_still_runs() -> None:
    ring, sink = Ring(), Collect()
    rings: Any = {"outputs": {"thirds": "rings.thirds"}, "rings": ring_graph(ring)}
    graph = drawn("source >1 sink", source=Numbers(), sink=sink, **rings)
    async with graph.run() as run:
        assert await run["thirds"].receive() == 3
    assert (ring.closed, sink.closed) == (1, 1)


SPINNING_RING = "spin.on > same >> spin", "spin.out > sink"


@pytest.mark.parametrize("ways", [SPINNING_RING, ("spin >1000 sink",)], ids=["ring", "source"])
async def test_what_never_waits_can_still_be_cancelled(ways: Sequence[str]) -> None:
    nodes = {"spin": Ring(), "same": lambda number: number} if ways is SPINNING_RING else {"spin": Numbers()}
    with anyio.move_on_after(0.05) as scope:
        await ended(drawn(*ways, **nodes, sink=Collect()))
    assert scope.cancelled_caught


async def test_drain_delivers_all_that_is_under_way() -> None:
    source, sink = Numbers(), Collect()
    graph = row(capacity=8, thread="slow", source=source, double=double, slow=lambda number: number, sink=sink)
    async with graph.run() as run:
        while len(sink.items) < 5:
            await checkpoint()
        await run.drain()
        assert sink.items == [2 * number for number in range(source.sent + 1)][: len(sink.items)]
        assert len(sink.items) >= source.sent


async def test_drain_flushes_a_ring() -> None:
    ring = Ring()
    async with ring_graph(ring).run() as run:
        assert [await run["thirds"].receive() for _ in range(2)] == [3, 6]
        run.stop()
        rest = [item async for item in run["thirds"]]
    assert rest[-1] == -ring.last
    assert rest[:-1] == list(range(9, ring.last + 1, 3))


async def test_a_gate_holds_items_until_it_lets_them_pass() -> None:
    ring, gate = Ring(), Gate()
    async with ring_graph(ring, gate).run() as run:
        await anyio.wait_all_tasks_blocked()
        assert ring.last == 0
        gate.let(4)
        await anyio.wait_all_tasks_blocked()
        assert ring.last == 4
        assert await run["thirds"].receive() == 3


class Kept(Gate):
    """A gate that somebody holds."""

    holder: str | None = "the keeper"


async def until(is_so: Callable[[], Any]) -> None:
    with anyio.fail_after(20):
        while not is_so():
            await checkpoint()


async def test_whoever_holds_a_gate_is_a_stage_while_items_are_parked_there() -> None:
    ring, gate = Ring(), Kept()
    async with ring_graph(ring, gate).run() as run:
        await until(lambda: run.report().bottleneck == "the keeper")
        assert " (waited for " in str(run.report())
        gate.holder = None  # for whom the gate waits from now on is not known
        gate.let(2)
        await anyio.wait_all_tasks_blocked()
        [waited] = [node for node in run.report().nodes if node.name == "the keeper"]
        assert waited.items == 1
        await until(lambda: run.report().bottleneck is None)
        assert [node.name for node in run.report().nodes] == [*run.graph.nodes, "the keeper", "caller"]
        assert [node.busy_s for node in run.report().nodes if node.name == "the keeper"] == [waited.busy_s]
    assert ring.last == 2


def test_inline_and_asynchronous_runs_give_the_same_items(anyio_backend: Any) -> None:
    async def asynchronous() -> list[int]:
        async with ring_graph(Ring(turns=20)).run() as run:
            return [item async for item in run["thirds"]]

    inline: list[int] = []
    with InlineRun(ring_graph(Ring(turns=20))) as run:
        while outputs := run.next_outputs():
            inline += [item for _, item in outputs]
    name, options = anyio_backend
    expected = [3, 6, 9, 12, 15, 18, -20]  # it ends when nothing goes round any more
    assert inline == anyio.run(asynchronous, backend=name, backend_options=options) == expected


def test_an_inline_run_gives_nothing_while_all_is_parked() -> None:
    gate, ring = Gate(), Ring()
    with InlineRun(ring_graph(ring, gate)) as run:
        assert run.next_outputs() == []
        gate.let(3)
        assert run.next_outputs() == [("thirds", 3)]
        run.finish()
        assert run.next_outputs() == [("thirds", -3)]
        assert run.next_outputs() == []
    assert ring.closed == 1


def test_an_inline_run_raises_the_error_itself() -> None:
    graph = drawn("ring.on > work >> ring", name="inline", outputs={"out": "ring.out"}, ring=Ring(), work=fails_at(2))
    with InlineRun(graph) as run, pytest.raises(ValueError, match="2 is too much") as raised:
        run.next_outputs()
    assert raised.value.__notes__ == ["in node 'work'"]


def test_an_inline_run_is_for_once_and_for_synchronous_nodes() -> None:
    run = InlineRun(ring_graph(Ring()))
    with run:
        pass
    with pytest.raises(RunError, match="has been run before"):
        run.__enter__()
    with pytest.raises(RunError, match="is not running: it is closed"):
        run.next_outputs()
    graph = row("threads", source=Numbers(), sink=Collect())
    with pytest.raises(GraphError, match="graph 'threads' needs an event loop"):
        InlineRun(graph)


async def test_an_unknown_output_is_named() -> None:
    async with ring_graph(Ring(turns=3)).run() as run:
        with pytest.raises(GraphError, match="graph 'ring' has no output 'halves'; outputs: thirds"):
            run["halves"]


async def test_drain_delivers_a_send_that_is_under_way_on_any_outlet_of_a_source() -> None:
    given: list[int] = []

    async def source(first: Outlet[int], second: Outlet[int]) -> None:
        for number in itertools.count(1):
            given.append(number)
            await first.send(number)
            await second.send(number)

    graph = drawn(outputs={"first": "source.first"}, source=source)
    graph.output("second", "source.second", capacity=9)
    async with graph.run() as run:
        await anyio.wait_all_tasks_blocked()
        assert given == [1, 2]
        run.stop()
        assert [item async for item in run["first"]] == [1, 2]
        assert [item async for item in run["second"]] == [1]


async def test_drain_delivers_what_several_tasks_of_a_source_are_sending() -> None:
    async def source(out: Outlet[int]) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(out.send, number)

    graph = row(output="numbers", source=source)
    async with graph.run() as run:
        await anyio.wait_all_tasks_blocked()
        run.stop()
        assert sorted([item async for item in run["numbers"]]) == list(range(5))


async def test_a_run_that_is_drained_before_its_source_has_begun_gives_nothing() -> None:
    source, first, second = Numbers(), Collect(), Collect()
    graph = drawn("source >8 first", "source >3 second", source=source, first=first, second=second)
    with anyio.fail_after(10):
        async with graph.run() as run:
            await run.drain()
    assert (source.sent, first.items, second.items) == (0, [], [])


class Sorter:
    """Sends numbers round, and lets anything else out."""

    def start(self) -> Iterable[Round]:
        yield Round(0, None)

    def __call__(self, item: Any) -> Round:
        return Round(item + 1, None) if isinstance(item, int) else Round(None, item)


async def test_drain_delivers_what_comes_into_a_ring_from_elsewhere() -> None:
    sent = anyio.Event()

    async def letters(out: Outlet[str]) -> None:
        for letter in "abcdefgh":
            await out.send(letter)
        sent.set()

    sink, gate = Collect(), Gate()
    ways = "letters >8 ring", "ring.on >gate same >> ring", "ring.out >1 sink"
    graph = drawn(*ways, gate=gate, letters=letters, ring=Sorter(), same=lambda number: number, sink=sink)
    with anyio.fail_after(10):
        async with graph.run() as run:
            await sent.wait()
            await run.drain()
    assert "".join(sink.items) == "abcdefgh"


@pytest.mark.parametrize("thread", ["same", "same ring"])
async def test_drain_ends_a_ring_of_channels_wherever_its_nodes_stand(thread: str) -> None:
    ring, sink = Ring(), Collect()
    nodes = {"ring": ring, "same": lambda number: number, "sink": sink}
    graph = drawn("ring.on > same >> ring", "ring.out >1 sink", thread=thread, **nodes)
    with anyio.fail_after(10):
        async with graph.run() as run:
            while ring.last < 5:
                await checkpoint()
            await run.drain()
    assert sink.items == [*range(3, ring.last + 1, 3), -ring.last]


async def test_a_gate_that_opens_lets_the_oldest_pass_first() -> None:
    go = anyio.Event()

    async def source(out: Outlet[int]) -> None:
        for number in range(3):
            await out.send(number)
        await go.wait()
        for number in range(3, 6):
            await out.send(number)

    sink, gate = Collect(), Gate()
    graph = drawn("source >8 same >gate sink", gate=gate, source=source, same=lambda number: number, sink=sink)
    async with graph.run() as run:
        await anyio.wait_all_tasks_blocked()
        go.set()
        gate.let(3)
        await anyio.wait_all_tasks_blocked()
        assert sink.items == [0, 1, 2]
        gate.let(3)
        await run.wait()
    assert sink.items == list(range(6))


async def test_the_end_of_an_output_is_an_error_of_the_reader_where_no_node_has_raised() -> None:
    graph = row(output="numbers", source=Numbers(1))
    with pytest.raises(anyio.EndOfStream):
        async with graph.run() as run:
            for _ in range(2):
                await run["numbers"].receive()


async def test_an_error_of_the_reader_is_raised_as_it_is_and_closes_every_node() -> None:
    sink = Collect()
    graph = row(capacity=1, source=Numbers(), sink=sink)
    with pytest.raises(LookupError, match="reader"):
        async with graph.run():
            raise LookupError("reader")
    assert sink.closed == 1


async def test_an_output_is_no_inlet_though_the_graph_bears_a_nodes_name() -> None:
    seen: list[int] = []

    async def reader(items: Inlet[int]) -> None:
        seen.extend([item async for item in items])

    graph = row("reader", capacity=2, source=Numbers(6), reader=reader)
    graph.output("items", "source", capacity=2)
    with anyio.fail_after(10):
        async with graph.run() as run:
            assert [item async for item in run["items"]] == list(range(6))
            await run.wait()
    assert seen == list(range(6))


@settings(max_examples=examples(60))
@given(st.data(), st.integers(1, 6), st.integers(0, 25), st.sampled_from(["asyncio", "trio"]))
def test_a_graph_without_cycles_delivers_every_item_along_every_way_in_order(
    data: st.DataObject, nodes: int, count: int, backend: str
) -> None:
    async def passes(items: Inlet[int], out: Outlet[int]) -> None:
        async for item in items:
            await out.send(item)

    graph, sink = Graph(), Collect()
    graph.add(n0=Numbers(count))
    ways = [1]  # to each node, from the source
    for number in range(1, nodes + 1):
        name = f"n{number}"
        kind = data.draw(st.sampled_from(["chain", "thread", "async"]))
        node: Any = passes if kind == "async" else lambda item: item
        graph.add_node(name, node, where="thread" if kind == "thread" else None)
        before = data.draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=3))
        for each in sorted(before):
            graph.connect(f"n{each}", name, capacity=data.draw(st.sampled_from([None, None, 1, 3])))
        ways.append(sum(ways[each] for each in before))
    graph.add(sink=sink)
    ends = {edge.source[0] for edge in graph.edges}
    leaves = [number for number in range(nodes + 1) if f"n{number}" not in ends]
    for number in leaves:
        graph.connect(f"n{number}", "sink", capacity=data.draw(st.sampled_from([None, 1])))

    async def main() -> None:
        with anyio.fail_after(20):
            report = (await ended(graph)).report()
        assert all(edge.dropped == edge.held == 0 for edge in report.edges)

    anyio.run(main, backend=backend)
    assert sorted(sink.items) == sorted([*range(count)] * sum(ways[number] for number in leaves))
    if len(sink.items) == count:  # there is one way
        assert sink.items == [*range(count)]


def graph_of(work: Callable[[int], Any], thread: str = "") -> Graph:
    return drawn("source >1 work", name="failing", thread=thread, outputs={"out": "work"}, source=three, work=work)


async def test_a_reader_does_not_take_a_failure_for_the_end_of_an_output() -> None:
    seen: list[int] = []
    ended = False
    with pytest.raises(ValueError, match="2 is too much"):
        async with graph_of(fails_at(2)).run() as run:
            async for number in run["out"]:
                seen.append(number)  # noqa: PERF401  (the error comes in the middle)
            ended = True
    assert seen == [0, 1][: len(seen)]
    assert not ended


async def test_one_who_waits_does_not_take_a_failure_for_the_end_of_the_run() -> None:
    ended = False
    with pytest.raises(ValueError, match="2 is too much"):
        async with graph_of(fails_at(2)).run() as run, anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(run["out"].receive)
            try:
                await run.wait()
                ended = True
            except ValueError as error:
                assert error.__notes__ == ["in node 'work'"]
    assert not ended


@pytest.mark.parametrize("use", ["receive", "wait", "drain"])
async def test_one_outside_the_block_is_told_that_the_run_was_left(use: str) -> None:
    def of(run: Any) -> Awaitable[object]:
        waits: dict[str, Any] = {"receive": run["out"].receive, "wait": run.wait, "drain": run.drain}
        return waits[use]()

    told: list[str] = []

    async def outside(run: Any) -> None:
        try:
            while True:
                await of(run)
        except RunError as error:
            told.append(str(error))

    graph = row("left", output="out", source=once_and_never_again, same=lambda number: number)
    async with anyio.create_task_group() as tasks:
        async with graph.run() as run:
            if use != "drain":
                tasks.start_soon(outside, run)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(RunError, match="graph 'left' was left before it had ended"):
            while True:
                await of(run)
    assert told == ([] if use == "drain" else ["graph 'left' was left before it had ended"])


async def test_a_run_that_has_ended_may_be_waited_for_and_read_afterwards() -> None:
    async with graph_of(lambda number: number).run() as run:
        assert [item async for item in run["out"]] == [0, 1, 2]
        await run.wait()
    await run.wait()
    with pytest.raises(anyio.EndOfStream):
        await run["out"].receive()


async def test_a_group_of_errors_from_a_node_is_raised_whole_and_names_the_node() -> None:
    async def fails(out: Outlet[int]) -> None:
        async def inner() -> None:
            raise ValueError("inside")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inner)

    graph = row(output="out", source=fails)
    with pytest.raises(ExceptionGroup) as raised:
        await ended(graph)
    assert raised.value.__notes__ == ["in node 'source'"]
    assert [str(error) for error in raised.value.exceptions] == ["inside"]


async def test_an_error_keeps_what_it_came_from() -> None:
    def work(number: int) -> int:
        try:
            return dict[int, int]()[number]
        except KeyError:
            raise ValueError("no such number")  # noqa: B904  (its context is what is looked at)

    with pytest.raises(ValueError, match="no such number") as raised:
        await ended(graph_of(work))
    assert isinstance(raised.value.__context__, KeyError)
    assert not raised.value.__suppress_context__


@pytest.mark.parametrize("thread", ["", "work"], ids=["inline", "thread"])
async def test_a_node_that_raises_stop_iteration_is_named(thread: str) -> None:
    numbers = iter([7])
    with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
        await ended(graph_of(lambda number: next(numbers), thread))
    assert raised.value.__notes__ == ["in node 'work'"]


class Echo:
    """A ring of one node that lets every item out, and nothing round."""

    def __init__(self, count: int) -> None:
        self.asked = 0
        self.count = count

    def start(self) -> Iterator[int]:
        while self.asked < self.count:
            self.asked += 1
            yield self.asked

    def finish(self) -> Iterator[int]:
        while self.asked > 0:
            self.asked -= 1
            yield -self.asked

    def __call__(self, number: int) -> int | None:
        return None


def echo_graph(echo: Echo) -> Graph:
    return drawn("echo >> echo", name="echo", outputs={"out": "echo"}, echo=echo)


async def test_a_node_that_sets_out_many_items_is_held_back_by_their_reader() -> None:
    echo = Echo(1000)
    async with echo_graph(echo).run() as run:
        await anyio.wait_all_tasks_blocked()
        assert echo.asked == 2  # one in the output, one before it
        assert await run["out"].receive() == 1
        await anyio.wait_all_tasks_blocked()
        assert echo.asked == 3


async def test_a_node_that_sets_out_items_without_end_can_be_drained() -> None:
    echo = Echo(1_000_000)
    async with echo_graph(echo).run() as run:
        assert await run["out"].receive() == 1
        run.stop()
        seen = [item async for item in run["out"]]
    assert seen[-1] == 0
    assert len(seen) < 20


def test_an_inline_run_takes_what_start_and_finish_give_one_by_one() -> None:
    echo = Echo(5)
    with InlineRun(echo_graph(echo)) as run:
        assert echo.asked == 1
        assert [run.next_outputs() for _ in range(2)] == [[("out", 1)], [("out", 2)]]
        run.finish()
        assert echo.asked == 2
        assert [run.next_outputs() for _ in range(3)] == [[("out", -1)], [("out", 0)], []]


class WithText(Collect):
    last_error = "none of ours"


class WithProperty(Collect):
    @property
    def last_error(self) -> str:
        raise OSError("not read yet")


class WithAnyName(Collect):
    def __getattr__(self, name: str) -> Any:
        if name == "last_error":
            raise OSError("no such name")
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [WithText, WithProperty, WithAnyName])
async def test_a_last_error_of_a_user_s_node_is_not_taken_for_one_of_ours(kind: type[Collect]) -> None:
    async with row(numbers=Numbers(1), own=kind()).run() as run:
        assert "last_error" not in run.doctor.snapshot()["nodes"]["own"]
