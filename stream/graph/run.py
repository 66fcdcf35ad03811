"""Run: a graph that runs as tasks of an event loop.

`Run` opens one task group. Every chain, every asynchronous node and every node in a thread is one of its tasks.
Nothing outlives the group. A task closes its channels only if its node ends without an error; otherwise its neighbours
are cancelled.
"""

import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from os import PathLike
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, Self

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from rollflow.stream.data.closing import noting_in
from rollflow.stream.data.errors import GraphError, RunError
from rollflow.stream.data.loss_ledger import DROPPED, cause_of, lose
from rollflow.stream.graph.background import AtWork, ChainWakeup, least_patience, wake_chain
from rollflow.stream.graph.chain import Chain, Deliver
from rollflow.stream.graph.channel import CHECKPOINT_NS, Channel, Inlet, Outlet, Output, SourceStop
from rollflow.stream.graph.counters import RunCounters
from rollflow.stream.graph.meter import clock, waiting_for
from rollflow.stream.graph.node import close_nodes, ending_quietly, note_node, out_of_group
from rollflow.stream.graph.port import Edge, NodeSpec, Port
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.run_doctor import RunDoctor
from rollflow.stream.observe.trace import check_trace
from rollflow.stream.observe.waits import Diagnosis
from rollflow.stream.observe.watch import StallRules

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph


_Entry = tuple[Channel[Any], Deliver]  # a channel into a chain, and the function that takes its items


class Run:
    """A run of a graph, until its block is left: `async with graph.run() as run`.

    rules    of the stall doctor
    trace    file for a trace; None: none

    `run["name"]` is an async iterator over an output. Leaving the block cancels the tasks that still run. `drain()`
    stops the sources, and lets all items reach their sinks. A node's error is raised unchanged, with the node's name in
    a note. Warns if it is never entered, since nothing would have run.
    """

    def __init__(self, graph: "Graph", rules: StallRules, trace: str | PathLike[str] | None = None) -> None:
        self._is_entered = True  # a trace that is refused is enough to be told
        check_trace(trace)
        self._is_entered = False
        self.graph = graph
        self._makers = [origins_of for _, origins_of in graph.having("origins_of")]
        self._is_counting = bool(graph.having("take_ending"))
        self.channels: dict[Edge, Channel[Any]] = {
            edge: Channel(edge.name, edge.capacity or 1, edge.overflow, self._lose_at(edge))
            for edge in (*graph.edges, *graph.outputs.values())
            if not graph.is_chained(edge)
        }
        self.counters = counters = RunCounters(graph, self.channels)
        readers: dict[Output[Any], int] = {}
        counters.outputs = {
            name: Output(self.channels[edge], counters.caller, readers) for name, edge in graph.outputs.items()
        }
        self.doctor = RunDoctor(self, rules, trace)
        self._draining = False
        self._stops: list[Callable[[], None]] = []
        # Functions that give the items which parts hold, but for those which might be dropped and also go elsewhere.
        self._holding: list[Callable[[], list[Any]]] = [
            channel.held for edge, channel in self.channels.items() if not self._is_spare(edge)
        ]
        self._ended = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._error: Exception | None = None  # that ended the run early

    async def __aenter__(self) -> Self:
        self._is_entered, self._block = True, self._running()
        await self._block.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._block.__aexit__(*error)

    def __enter__(self) -> NoReturn:
        """Raise GraphError: a graph runs in an event loop."""
        self._is_entered = True  # this error is enough
        raise GraphError(
            f"graph '{self.graph.name}' was entered by 'with', but it runs in an event loop; expected 'async with "
            "graph.run() as run:' in an async function, run by anyio.run(function)"
        ).see("graph")

    def __exit__(self, *error: object) -> None:
        """Never called."""

    def __del__(self) -> None:
        if not self._is_entered:
            text = f"graph '{self.graph.name}' was not run: expected `async with graph.run() as run:`"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        try:
            with out_of_group(_distinct):
                async with anyio.create_task_group() as tasks:
                    self.start(tasks)
                    yield
                    tasks.cancel_scope.cancel()
        except BaseException as error:
            with noting_in(error, f"graph '{self.graph.name}'"):
                self.close(error)
            raise
        self.close()

    def __getitem__(self, output: str) -> Output[Any]:
        """The output of this name. Raises GraphError if there is none."""
        try:
            return self.counters.outputs[output]
        except KeyError:
            there = ", ".join(self.counters.outputs) or "none"
            raise GraphError(f"graph '{self.graph.name}' has no output '{output}'; outputs: {there}") from None

    def report(self) -> Report:
        """A report of the counts so far. May be called at any time, from any thread."""
        return self.counters.report()

    def diagnose(self) -> Diagnosis:
        """What the run waits for right now, and whether it is stalled. From any thread."""
        return self.doctor.diagnose()

    @property
    def has_ended(self) -> bool:
        """True once every task has ended, or the run was left."""
        return self._ended.is_set()

    def end(self, error: Exception | None) -> None:
        """End the run for tasks that wait on it, with an error if there is one. In the event loop."""
        if self._ended.is_set():
            return
        self._error = error
        if error is not None:
            for edge in self.graph.outputs.values():
                self.channels[edge].fail(error)
        self._ended.set()

    async def wait(self) -> None:
        """Wait until every node has ended by itself. Raises a node's error; RunError if the run is left first."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def drain(self) -> None:
        """Stop the sources, and wait until all items have reached the sinks and outputs.

        Another task must read the outputs meanwhile. Items that go round in a cycle are dropped once the cycle's nodes
        have been asked to `finish()`. After a cancelled call the sources have stopped all the same.
        """
        self.stop()
        await self.wait()

    def stop(self) -> None:
        """Stop the sources without waiting: the outputs give the items under way, and then end."""
        self._draining = True
        for stop in self._stops:
            stop()
        for _, take_drain in self.graph.having("take_drain"):
            take_drain()

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start one task for every chain and every other node."""
        self.counters.began = clock()
        work: list[tuple[str, Callable[[], Awaitable[None]]]] = []
        for names in self.graph.groups():
            spec = self.graph.nodes[names[0]]
            if spec.is_async or self.graph.place_of(names[0]) == "thread":
                work.append((names[0], partial(self._run_node, spec)))
            else:
                chain = Chain(self.graph, names, self.counters.nodes)
                self.counters.chains.append(chain)
                work.append((names[0], partial(self._run_chain, chain)))
        self._tasks, self.counters.live, self.counters.thread = tasks, {name for name, _ in work}, get_ident()
        for name, function in work:
            task = partial(self._counted, name, function)
            tasks.start_soon(ending_quietly, task, name=f"{self.graph.name}/{name}")
        for _, take_report in self.graph.having("take_report"):
            take_report(self.report)
        self.doctor.listen(tasks)

    def close(self, error: BaseException | None = None) -> None:
        """End the run for tasks that still wait on it, count held items as lost, and call every node's `close()`.

        error    the error that has ended the run; None: there was none
        """
        self.doctor.stop()
        failure = self._error
        cause = cause_of(error or failure)
        for held in (*self._holding, *(held for _, held in self.graph.having("held"))):
            lose(list(held()), cause, self._makers)
        for _, take_ending in self.graph.having("take_ending"):
            take_ending(cause)
        self._holding.clear()
        self.end(RunError(f"graph '{self.graph.name}' was left before it had ended"))
        self.counters.end()
        if failure is not None:
            for _, take_failure in self.graph.having("take_failure"):
                take_failure(failure)
        try:
            close_nodes(self.graph)
        finally:
            self._let_go(failure)

    def _let_go(self, failure: Exception | None) -> None:
        """Let go of all items, and of what refers to this run: tasks, and a node's error, by its traceback."""
        if failure is not None:
            text = f"graph '{self.graph.name}' has failed with {type(failure).__name__}: {failure}"
            failure = self._error = RunError(text)
        for chain in self.counters.chains:
            chain.close()
        for channel in self.channels.values():
            channel.let_go(failure)
        self._stops.clear()
        self.counters.at.clear()
        self._tasks = None

    async def _counted(self, name: str, function: Callable[[], Awaitable[None]]) -> None:
        try:
            await function()
        except Exception as error:
            # A task that waits on the run may resume before its cancellation: it must see the error, not an end.
            self.end(error)
            raise
        self.counters.live.discard(name)
        if not self.counters.live:
            self.end(None)

    # Tasks

    async def _run_chain(self, chain: Chain) -> None:
        wake, chain.thread = ChainWakeup(), self.counters.thread
        entries = [
            (self.channels[edge], chain.entry(edge.target))
            for edge in self.graph.edges
            if edge.target[0] in chain.names and not self.graph.is_chained(edge)
        ]
        for channel, _ in entries:
            channel.on_item = wake.set
        chain.on_gate = wake.set
        self._holding.append(chain.held)
        watches = [
            (node, wake, ChainWakeup(), anyio.CancelScope()) for node, _ in chain.background if node.fileno() >= 0
        ]
        assert self._tasks is not None
        for watch in watches:
            self._tasks.start_soon(ending_quietly, partial(wake_chain, *watch))
        begins = [begin for _, _, begin, _ in watches]
        if chain.can_start:
            await self._start_chain(chain, wake)
        await self._drive(chain, entries, wake, begins)
        for *_, scope in watches:
            scope.cancel()
        for _ in chain.finish():
            await self._deliver(chain)
            await anyio.lowlevel.checkpoint()
        for channel, _ in entries:
            channel.abandon()
        for name in chain.names:
            self._close_outlets(name)

    async def _start_chain(self, chain: Chain, wake: ChainWakeup) -> None:
        """Carry the outputs of the nodes' `start`, once all gates are ready for them."""
        self._on_stop(partial(self._give_up_cycles, chain.names))
        self._on_stop(chain.hasten)
        self._on_stop(wake.set)
        while not self._draining and chain.awaits_gates():
            with waiting_for(self.counters.holders, chain.holder):
                await wake.wait()
        for _ in chain.start():
            await self._deliver(chain)
            await anyio.lowlevel.checkpoint()
            if self._draining:
                break

    async def _drive(self, chain: Chain, entries: list[_Entry], wake: ChainWakeup, begins: list[ChainWakeup]) -> None:
        """Carry items that arrive, go round, or come from background nodes, until there are no more."""
        is_source, next_checkpoint, turn = chain.can_start, clock() + CHECKPOINT_NS, 0
        while True:
            if chain.pending:
                await self._deliver(chain)
            if self._draining and is_source:
                chain.give_up()
            if chain.reopened:
                chain.unpark()
            # Entries and items that go round take turns, so that none of them piles up.
            turn += 1
            ready = (
                next((index for index, (channel, _) in enumerate(entries) if len(channel)), None) if entries else None
            )
            if ready is not None and (turn % 2 or not chain.runnable):
                entry = entries.pop(ready)
                entries.append(entry)
                chain.carry(entry[1], entry[0].take())
            elif chain.runnable:
                chain.carry(*chain.runnable.popleft())
            elif chain.background and chain.collect():
                continue
            elif chain.parked and chain.unpark():
                continue
            elif not chain.in_flight and (
                (is_source and chain.is_done) or (not chain.parked and all(channel.closed for channel, _ in entries))
            ):
                break
            else:
                await self._idle(chain, wake, begins)
                next_checkpoint = clock() + CHECKPOINT_NS
            if clock() >= next_checkpoint:
                await anyio.lowlevel.checkpoint()
                next_checkpoint = clock() + CHECKPOINT_NS

    async def _idle(self, chain: Chain, wake: ChainWakeup, begins: list[ChainWakeup]) -> None:
        if not chain.in_flight:
            if chain.parked:
                with waiting_for(self.counters.holders, chain.holder):
                    await wake.wait()
            else:
                await wake.wait()
            return
        for begin in begins:  # every node wakes the chain once
            begin.set()
        awaited = [(node, meter) for node, meter in chain.background if node.in_flight]
        with AtWork([meter for _, meter in awaited]), anyio.move_on_after(least_patience(awaited)):
            await wake.wait()

    async def _deliver(self, chain: Chain) -> None:
        """Deliver all that has left a chain, as soon as there is room."""
        while chain.pending:
            edge, item, meter = chain.pending[0]
            channel = self.channels[edge]
            if not channel.offer(item):
                with meter.blocks():
                    await channel.send(item)
            chain.pending.popleft()

    async def _run_node(self, spec: NodeSpec) -> None:
        """Run an asynchronous node, or one that is called in a thread."""
        meter = self.counters.nodes[spec.name]
        holders = self.counters.holders
        inlets = [Inlet(self._channels_into((spec.name, port)), meter, holders) for port in spec.inlets]
        self._hold(spec.name, *(inlet.held for inlet in inlets))
        with anyio.CancelScope() as scope:
            stop = None if spec.inlets else SourceStop(scope)
            outlets = [Outlet(self._channels_from((spec.name, port)), meter, stop) for port in spec.outlets]
            if stop is not None:
                self._on_stop(stop.request)
                await anyio.lowlevel.checkpoint_if_cancelled()
            if spec.is_async:
                meter.begin_life()
            try:
                if spec.run is None:
                    running: Any = self._run_with_items(spec, inlets[0], outlets)
                else:
                    self._holding += [outlet.held for outlet in outlets]
                    ends = dict(zip([*spec.inlets, *spec.outlets], [*inlets, *outlets], strict=True))
                    running = spec.run(**ends)
                self.counters.at[spec.name] = running
                await running
            except Exception as error:
                note_node(error, spec.name)
                raise
            finally:
                meter.end_life()
        self._close_ends(spec)

    async def _run_with_items(self, spec: NodeSpec, inlet: Inlet[Any], outlets: Sequence[Outlet[Any]]) -> None:
        """Call a node with one item after the other. Its outputs count as held until they are sent."""
        unsent: deque[tuple[Outlet[Any], Any]] = deque()
        self._hold(spec.name, lambda: [value for _, value in unsent])

        async def send(outputs: Iterable[Any]) -> None:
            for output in outputs:
                values = output if spec.has_fields and output is not None else (output,)
                unsent.extend(pair for pair in zip(outlets, values, strict=False) if pair[1] is not None)
            while unsent:
                outlet, value = unsent[0]
                await outlet.send(value)
                unsent.popleft()

        in_thread = partial(self._call_in_thread, spec, anyio.CapacityLimiter(1))
        call = spec.node if spec.is_async else partial(in_thread, spec.node)
        start, finish = spec.methods.get("start"), spec.methods.get("finish")
        if start is not None:
            await send(await in_thread(lambda: list(start() or ())))
            self._on_stop(partial(self._give_up_cycles, [spec.name]))
        async for item in inlet:
            await send([await call(item)])
        if finish is not None:
            await send(await in_thread(lambda: list(finish() or ())))

    async def _call_in_thread(
        self, spec: NodeSpec, limiter: anyio.CapacityLimiter, function: Callable[..., Any], *args: Any
    ) -> Any:
        def here() -> tuple[Any, Exception | None]:
            self.counters.at[spec.name] = get_ident()
            return next(_outcome(function, *args))

        meter = self.counters.nodes[spec.name]
        meter.begin_life()
        try:
            output, error = await anyio.to_thread.run_sync(here, limiter=limiter)
        finally:
            meter.end_life()
        try:
            if error is not None:
                note_node(error, spec.name)
                raise error
        finally:
            del error  # whose traceback refers to this frame
        return output

    # Channels

    def _channels_into(self, port: Port) -> list[Channel[Any]]:
        return [channel for edge, channel in self.channels.items() if edge.target == port and not edge.is_output]

    def _channels_from(self, port: Port) -> list[Channel[Any]]:
        return [channel for edge, channel in self.channels.items() if edge.source == port]

    def _lose_at(self, edge: Edge) -> Callable[[Any], None] | None:
        """The function that counts items dropped by an edge; None: no node counts, or the items also go elsewhere."""
        is_counted = self._is_counting and self.graph.is_only_way(edge)
        return partial(lose, cause=DROPPED, makers=self._makers) if is_counted else None

    def _is_spare(self, edge: Edge) -> bool:
        """True if the items of an edge may be dropped, and also go elsewhere."""
        return edge.overflow != "block" and not self.graph.is_only_way(edge)

    def _hold(self, name: str, *held: Callable[[], list[Any]]) -> None:
        """Have the items that parts of a node hold be counted, unless all that come to it are spare."""
        into = [edge for edge in self.graph.edges if edge.target[0] == name]
        if not into or not all(map(self._is_spare, into)):
            self._holding += held

    def _on_stop(self, stop: Callable[[], None]) -> None:
        self._stops.append(stop)
        if self._draining:
            stop()

    def _give_up_cycles(self, names: Sequence[str]) -> None:
        """End the channels into the nodes `names` that close a cycle; the items in them are dropped."""
        after = self.graph.reached_from(names)
        for edge, channel in self.channels.items():
            if edge.target[0] in names and edge.source[0] in after and not edge.is_output and not channel.abandoned:
                channel.abandon()
                channel.close()

    def _close_ends(self, spec: NodeSpec) -> None:
        for port in spec.inlets:
            for channel in self._channels_into((spec.name, port)):
                channel.abandon()
        self._close_outlets(spec.name)

    def _close_outlets(self, name: str) -> None:
        for port in self.graph.nodes[name].outlets:
            for channel in self._channels_from((name, port)):
                channel.close()


def _outcome(function: Callable[..., Any], *args: Any) -> Iterator[tuple[Any, Exception | None]]:
    """What a call returns, and what it raises, once.

    An error's traceback refers to its frames, and each of these to its caller. A generator's frame refers to none: the
    worker thread, which would keep the error in a cycle, is not among them.
    """
    try:
        yield function(*args), None
    except Exception as error:
        yield None, error


def _distinct(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that has only one; else the group with each error once.

    A node's error is also raised in tasks that wait on the run, so the group may have it several times.
    """
    errors = list({_leaves(error): error for error in group.exceptions}.values())
    return errors[0] if len(errors) == 1 else group.derive(errors)


def _leaves(error: BaseException) -> tuple[int, ...]:
    """Identities of the errors in an error group: an event loop may copy a group, but not the errors in it."""
    if isinstance(error, BaseExceptionGroup):
        return tuple(leaf for each in error.exceptions for leaf in _leaves(each))
    return (id(error),)
