"""RunCounters: what a run counts and what its tasks are at; its report and the doctor's looks are functions of these.

They are read from other threads, without locks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rollflow.stream.graph.chain import Chain
from rollflow.stream.graph.meter import CallTimes, NodeMeter, clock
from rollflow.stream.graph.node import Background, wait_at
from rollflow.stream.graph.report import Report, report_of
from rollflow.stream.observe.stacks import StackFrame, stack_of_coroutine, stack_of_thread
from rollflow.stream.observe.waits import CALLER, Exit, Limit, Look, Wait, by_name

if TYPE_CHECKING:
    from rollflow.stream.graph.channel import Channel, Output
    from rollflow.stream.graph.graph import Graph
    from rollflow.stream.graph.port import Edge, NodeSpec

_KEPT = 101  # times of the reader, of which the median is told
_BRIEF_S = 0.1  # that a call between two waits for background nodes lasts at most


class RunCounters:
    """Meters of a graph that runs, and marks of what its tasks are at.

    graph       that runs
    channels    of its edges

    nodes       node -> its meter
    caller      meter of the code that reads the outputs
    learner     meter of the learner pipeline in the caller's thread, of a rollout's; None: there is none
    reader      the caller's thread; 0: not known
    given       time in ns at which the caller got what it works on; None: it asks for the next, or that is not known
    reader_times    how long the caller had each, without the time of the learner pipeline
    outputs     by name; none if the caller takes the items of all of them together
    holders     name -> meter of those outside of the graph whom nodes wait for
    chains      chains that have begun
    live        first nodes of the tasks that have begun, and have not ended
    at          node -> its coroutine, or the thread of its last call
    thread      of the event loop
    began       time in ns; `ended_at`, too, which is None before
    """

    def __init__(self, graph: "Graph", channels: "Mapping[Edge, Channel[Any]]" = MappingProxyType({})) -> None:
        self.graph, self._channels = graph, channels
        calls = {
            name: getattr(spec.node, "call_times", None) for name, spec in graph.nodes.items()
        }  # of calls elsewhere
        self.nodes = {name: NodeMeter(name, calls=times or CallTimes()) for name, times in calls.items()}
        self.caller = NodeMeter(CALLER)
        self.holders: dict[str, NodeMeter] = {}
        self.learner: NodeMeter | None = None
        self.reader = 0
        self.given: int | None = None
        self.reader_times = CallTimes()
        self.outputs: Mapping[str, Output[Any]] = {}
        self.chains: list[Chain] = []
        self.live: set[str] = set()
        self.at: dict[str, Any] = {}
        self.thread = 0
        self.began = clock()
        self.ended_at: int | None = None

    def end(self) -> None:
        """Count no more; what the caller does from now on is none of this run's. Again does nothing."""
        if self.ended_at is None:
            self.ended_at = clock()
            self.caller.end_life()

    def report(self) -> Report:
        """A report of the counts so far."""
        graph, holders = self.graph, self.holders.copy()
        nodes = [*self.nodes.values(), *holders.values(), *([self.caller] if graph.outputs else [])]
        return report_of(
            self.began,
            self.ended_at,
            nodes,
            [channel.meter for channel in self._channels.values()],
            lambda: self.under_way,
            graph.slowest_pieces(),
            harmless=graph.harmless(),
            holders=frozenset(holders),
            notes=tuple(note for spec in graph.nodes.values() for note in getattr(spec.node, "report_notes", ())),
        )

    @property
    def meters(self) -> list[NodeMeter]:
        """Those that a trace has: of the nodes and the caller, or the learner pipeline between the caller's updates."""
        return [*self.nodes.values(), self.caller if self.learner is None else self.learner]

    @property
    def under_way(self) -> dict[str, int]:
        """Node -> nanoseconds since its call began, for those of chains that are being called."""
        return dict(chain.under_way for chain in self.chains)

    def look(self) -> Look:
        """Every task, and the reader of the outputs."""
        graph = self.graph
        waits: list[Wait] = []
        exits: list[Exit] = []
        for chain in self.chains:
            if chain.names[0] in self.live:
                waits += self._chain_waits(chain)
                sinks = [name for name in chain.names if not graph.nodes[name].outlets]
                exits += [Exit(_name_of(chain), self.nodes[name].items, waits=True) for name in sinks]
        for name, spec in graph.nodes.items():
            if name in self.live and not any(name in chain.names for chain in self.chains):
                found = self._node_waits(spec)
                waits += found
                if not spec.outlets:
                    exits.append(Exit(found[0].name, self.nodes[name].items, waits=True))
        if graph.outputs:
            reader, *learner = self._reader()
            waits = [*waits, reader] if self.outputs else [reader, *waits, *learner]
            exits.append(Exit(CALLER, self.caller.items, reader.kind == "waits"))
        if self.learner is None:
            return Look(tuple(exits), by_name(waits))
        times = tuple(took / 1e9 for took in list(self.reader_times.recent)[-_KEPT:])
        return Look(tuple(exits), by_name(waits), "fragment", times)

    def _reader(self) -> Iterator[Wait]:
        """The reader of the outputs, and the learner pipeline if that makes a batch."""
        caller, graph, learner, given = self.caller, self.graph, self.learner, self.given
        since, stack = None if learner is None else learner.works_since, partial(stack_of_thread, self.reader)
        if learner is not None and since is not None:
            yield Wait(CALLER, "waits", "waits", on=(learner.name,), mark=since, calls=caller.items)
            yield Wait(
                learner.name,
                "call",
                "makes a batch",
                mark=since,
                age_s=(clock() - since) / 1e9,
                calls=learner.items,
                remedy="look at the learner connectors: rollout.learner_pipeline.timers() has the time of each piece",
                stack=stack,
            )
            return
        mark = caller.items, caller.is_waiting
        if not caller.is_waiting:
            doing = "works on what it was given" if caller.items else "has not asked for an item yet"
            age_s = 0.0 if given is None else (clock() - given) / 1e9
            yield Wait(CALLER, "works", doing, mark=mark, age_s=age_s, calls=caller.items, stack=stack)
            return
        awaited = {
            name: edge for name, edge in graph.outputs.items() if not self.outputs or self.outputs[name].is_awaited
        }
        names = ", ".join(f"{graph.name}.{name}" for name in awaited)
        doing = f"waits for an item of {names}" if self.outputs else "waits"
        on = tuple(self._task(edge.source[0]) for edge in awaited.values())
        yield Wait(CALLER, "waits", doing, on=on, mark=mark, calls=caller.items, stack=stack)

    def _chain_waits(self, chain: Chain) -> Iterator[Wait]:
        """The chain as a task, and what it is at."""
        number, since = chain.mark[1], chain.mark[0]
        name, age_s = _name_of(chain), max(clock() - since, 0) / 1e9
        items = sum(self.nodes[each].items for each in chain.names)
        working = [wait for node, meter in chain.background for wait in self._background(node, meter)]
        if number >= 0 and not (working and age_s < _BRIEF_S):
            call = list(self.nodes)[number]
            waits = getattr(self.graph.nodes[call].node, "waits_in_call", False) and list(self._asked(call))
            calls = waits or [self._call(chain, call, (number, since), age_s)]
            yield Wait(name, "waits", "waits", on=tuple(wait.name for wait in calls), mark=items, is_part=True)
            yield from (wait for wait in calls if wait.name != name)
            return
        if chain.pending and (full := self._full(chain.names)):
            yield _without_room(name, full, items)
            return
        if working:
            yield Wait(name, "waits", "waits", on=tuple(wait.name for wait in working), mark=items, is_part=True)
            yield from working
            return
        gates = list({id(gate): gate for gate, _, _ in list(chain.parked)}.values())
        holders = [wait for gate in gates if (wait := wait_at(gate)) is not None]
        if gates:
            on = tuple(wait.name for wait in holders)
            yield Wait(name, "waits", "waits at a gate", on=on, mark=(items, len(chain.parked)))
            yield from holders
            return
        upstream = [task for task in self._sources(chain.names).values() if task != name]
        yield Wait(name, "waits", "waits for an item", on=tuple(dict.fromkeys(upstream)), mark=items)

    def _call(self, chain: Chain, name: str, mark: Any, age_s: float) -> Wait:
        """The call that a chain is in, as its node describes it."""
        calls, stack = self.nodes[name].items, partial(stack_of_thread, chain.thread)
        is_background = any(meter.name == name for _, meter in chain.background)  # what it works on is not this call
        for wait in () if is_background else self._asked(name):
            done = wait.calls if wait.limit == "reset" else calls  # resets are not what the meter counts
            return Wait(name, "call", wait.doing, (), mark, age_s, done, wait.where, wait.limit, wait.remedy, stack)
        limit: Limit | None = None if self.graph.nodes[name].outlets else "sink"
        return Wait(name, "call", "is in its call", (), mark, age_s, calls, limit=limit, stack=stack)

    def _background(self, node: Background, meter: NodeMeter) -> Iterable[Wait]:
        """What a background node works on; nothing if it has no items."""
        if not node.in_flight:
            return []
        doing = f"has {node.in_flight} items in work"
        usual = Wait(meter.name, "call", doing, mark=(meter.items, node.in_flight), calls=meter.items)
        return list(self._asked(meter.name)) or [usual]

    def _node_waits(self, spec: "NodeSpec") -> list[Wait]:
        """An asynchronous node, or one that is called in a thread; first of all what it waits for itself."""
        name, meter = spec.name, self.nodes[spec.name]
        mark = meter.items, meter.busy_ns, meter.blocked_ns
        full = self._full([name]) if meter.is_blocked else []
        asked = list(self._asked(name))
        if full or (meter.is_blocked and not asked):
            return [_without_room(name, full, mark)]
        if meter.is_waiting and spec.inlets:
            sources = self._sources([name])
            doing, on = f"waits for an item of {', '.join(sources)}", tuple(dict.fromkeys(sources.values()))
            return [Wait(name, "waits", doing, on=on, mark=mark)]
        if any(wait.name == name for wait in asked):
            return asked
        if asked:
            return [Wait(name, "waits", "waits", on=tuple(wait.name for wait in asked), mark=mark), *asked]
        limit: Limit | None = None if spec.outlets else "sink"
        is_in_thread = self.graph.place_of(name) == "thread"
        doing = "is in its call" if is_in_thread else "is at work, and neither sends nor receives"
        stack = partial(_stack_at, self.at.get(name), self.thread)
        return [Wait(name, "call", doing, mark=mark, calls=meter.items, limit=limit, stack=stack)]

    def _asked(self, name: str) -> Iterable[Wait]:
        """What a node says itself that it is at."""
        return [wait for _, at_work in self.graph.having("at_work", [name]) for wait in at_work(name)]

    def _sources(self, names: Sequence[str]) -> dict[str, str]:
        """Nodes that some nodes get items from -> their tasks."""
        return {edge.source[0]: self._task(edge.source[0]) for edge in self.graph.edges if edge.target[0] in names}

    def _full(self, names: Sequence[str]) -> "list[tuple[str, Edge]]":
        """(task behind it, edge) of the edges from some nodes that have no room."""
        return [
            (CALLER if edge.is_output else self._task(edge.target[0]), edge)
            for edge, channel in self._channels.items()
            if edge.source[0] in names and channel.has_no_room
        ]

    def _task(self, name: str) -> str:
        """The task of a node, as a party: by the node, or as its chain."""
        return next((_name_of(chain) for chain in self.chains if name in chain.names), name)


def _stack_at(where: Any, loop: int) -> tuple[StackFrame, ...]:
    """The stack of a node's thread or coroutine; of the event loop's thread while the coroutine runs."""
    if isinstance(where, int):
        return stack_of_thread(where)
    return stack_of_coroutine(where) or stack_of_thread(loop)


def _without_room(name: str, full: "Sequence[tuple[str, Edge]]", mark: Any) -> Wait:
    """A task that waits for room in edges; for an output that its reader does not read with a remedy of its own."""
    doing = f"waits for room in {', '.join(edge.name for _, edge in full) or 'an edge'}"
    outputs = [edge for _, edge in full if edge.is_output]
    remedy = ""
    if outputs:
        outlet, output = ".".join(outputs[0].source), outputs[0].target[1]
        remedy = (
            f"read output '{output}' as well, in a task of its own: async for item in run['{output}']; or connect "
            f"'{outlet}' to a sink instead of graph.output('{output}', …)"
        )
    return Wait(name, "waits", doing, on=tuple(task for task, _ in full), mark=mark, remedy=remedy)


def _name_of(chain: Chain) -> str:
    """The chain as a party: by its node, or by the first and the last one."""
    names = chain.names
    return f"the task of {names[0]}" if len(names) == 1 else f"{names[0]} … {names[-1]}"
