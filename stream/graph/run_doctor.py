"""RunDoctor: the stall doctor of a run on an event loop; and looks at what every chain, node and reader does.

A look is read from counters and marks that tasks write for themselves, from another thread, without locks.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from rollflow.stream.data.errors import StallError
from rollflow.stream.graph.chain import Chain
from rollflow.stream.graph.drawing import run_snapshot
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.graph.node import Background, NodeMethods, ending_quietly
from rollflow.stream.graph.tracing import Traceable, Tracing
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.diagnosis import Diagnosis
from rollflow.stream.observe.run_socket import RunSocket
from rollflow.stream.observe.stacks import is_debugged_now, stack_lines, stack_of_coroutine, stack_of_thread
from rollflow.stream.observe.waits import CALLER, Exit, Kind, Limit, Look, Sign, Wait, by_name
from rollflow.stream.observe.watch import StallRules, StallThread

if TYPE_CHECKING:
    from rollflow.stream.graph.channel import Channel
    from rollflow.stream.graph.inline_run import InlineRun
    from rollflow.stream.graph.port import NodeSpec
    from rollflow.stream.graph.run import Run


_LOOKS = 3  # that find no sign of life: one alone may come late itself
_REMEDY = "all its tasks stand still; await there, or do it in a thread, by anyio.to_thread.run_sync"
_BRIEF_S = 0.1  # that a call between two waits for background nodes lasts at most


class RunDoctor:
    """Watches a run from a thread, ends it where it is stalled and the rules say so, and shows it to who asks.

    run        that is watched
    rules      when and how it speaks
    trace_to   file for a trace, to be set before the start; None: there is one only when it is asked for
    """

    def __init__(self, run: "Run", rules: StallRules) -> None:
        self._run: Run = weakref.proxy(run)  # it holds its doctor
        self._rules = rules
        self._watcher = StallThread(self, rules, self.end_stalled)
        self.trace_to: str | PathLike[str] | None = None
        self._tracing = Tracing(self._with_reader)
        self._socket = RunSocket(self.snapshot, self._tracing.serve)
        self._bell: Wakeup | None = None
        self._error: StallError | None = None
        self._asked, self._answered = 1, 0  # signs of life of the event loop; the first is that it begins
        self._asked_at, self._looks = 0, 0  # when it was asked for the last one, in ns, and looks since then
        self._looked_at = 0  # when the last of these was, in ns
        self._holders: list[str] = []  # asynchronous nodes that ran at that look

    def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin, with the run's tasks. In the event loop."""
        if self._rules.after is not None:
            self._bell = Wakeup()
            tasks.start_soon(ending_quietly, partial(self._answer, self._bell))
        self._tracing.begin(self.trace_to)
        self._watcher.start()
        self._socket.start()

    def stop(self) -> None:
        """End the thread. Once the tasks have ended."""
        self._socket.stop()
        self._watcher.stop()
        self._tracing.end()
        if self._bell is not None:
            self._bell.close()
        self._error = None  # whose traceback refers to this

    def look(self) -> Look | None:
        """What every task does right now; None: the run has ended."""
        if self._run.has_ended:
            return None
        self._listen()
        look = look_of_run(self._run)
        return self._behind_loop(look) if self._looks > 1 else look

    def signs(self) -> Sequence[Sign]:
        """Silent faults of composite nodes, and of the event loop."""
        wholes = self._run.graph.methods_of_wholes.items()
        found = [(prefix[:-1], each) for prefix, whole in wholes if whole.signs is not None for each in whole.signs()]
        of_nodes = [Sign(f"{prefix} {sign.kind}", f"{prefix}: {sign.text}") for prefix, sign in found]
        return *of_nodes, *self._signs_of_loop()

    def diagnose(self) -> Diagnosis:
        """What the run waits for right now."""
        return self._watcher.diagnose()

    def snapshot(self) -> dict[str, Any]:
        """What there is to see of the run, with a part for each composite node that shows itself."""
        graph = self._run.graph
        return {
            "kind": "graph",
            "name": graph.name,
            **run_snapshot(graph, self._run.report(), self.look(), self.diagnose()),
            "parts": {
                prefix[:-1]: whole.snapshot()
                for prefix, whole in graph.methods_of_wholes.items()
                if whole.snapshot is not None
            },
        }

    def end_stalled(self, error: StallError) -> None:
        """Have the run end with this error, as soon as its event loop comes to it. From any thread."""
        if self._bell is not None:
            self._error = error
            self._bell.ring()

    @property
    def traceable(self) -> Traceable:
        """Graph, meters of its nodes and chains, for a trace."""
        return Traceable(self._run.graph, self._run.meters.values(), self._run.chains)

    def _with_reader(self) -> Traceable:
        found = self.traceable
        return found._replace(meters=[*found.meters, self._run.caller])

    def _listen(self) -> None:
        """Count a look at which the event loop has given no sign of life; ask it for the next one where it has.

        Nodes that are functions, and a reader that works, may hold it up: those who wait for them are watched for
        stalls.
        """
        now, run = clock(), self._run
        if self._bell is None or now - self._looked_at < self._rules.look_s * 5e8:  # another thread's diagnosis
            return
        self._looked_at = now
        self._holders = [name for name, at in run.at.copy().items() if getattr(at, "cr_running", False)]
        may_hold = any(chain.mark[1] >= 0 for chain in run.chains) or (
            bool(run.graph.outputs) and not self._holders and not run.caller.is_waiting
        )
        if not may_hold and self._answered not in (0, self._asked):
            self._looks += 1
            return
        self._asked_at, self._looks = now, 0
        if self._answered == self._asked:
            self._asked += 1
            self._bell.ring()

    @property
    def _holder(self) -> str:
        """What holds up the event loop, in words."""
        return ", ".join(self._holders) or "a task or a callback"

    def _behind_loop(self, look: Look) -> Look:
        """The look of a run whose event loop is held up: whoever waits at an exit waits for that."""
        held = loop_held_up(self._holder, self._asked_at, self._answered, self._run.thread)
        behind = {
            each.party: replace(look.waits[each.party], on=(held.name,))
            for each in look.exits
            if each.waits and look.waits[each.party].kind == "waits"
        }
        return replace(look, waits={**look.waits, **behind, held.name: held})

    def _signs_of_loop(self) -> Iterator[Sign]:
        """Code that holds up the event loop."""
        held_s = (clock() - self._asked_at) / 1e9
        if self._looks >= _LOOKS and self._rules.after is not None and held_s >= self._rules.after / 2:
            stack = stack_of_thread(self._run.thread)
            if not is_debugged_now():
                text = f"{self._holder} holds up the event loop since {held_s:.1f} s"
                yield Sign("event loop", "\n".join([f"{text}: {_REMEDY}", *stack_lines(stack)]))

    async def _answer(self, bell: Wakeup) -> None:
        """Give signs of life, until a stall is to end the run."""
        while self._error is None:
            self._answered = self._asked
            await anyio.wait_readable(bell.fileno())
            bell.silence()
        self._run.fail(self._error)
        raise self._error


def loop_held_up(holder: str, since: int, calls: int, thread: int) -> Wait:
    """The wait for an event loop that something holds up.

    holder    what does, in words
    since     time of the event that it has not come to, in ns
    calls     events that it has come to
    thread    that it runs in
    """
    doing, age_s = f"is held up by {holder}", (clock() - since) / 1e9
    stack = partial(stack_of_thread, thread)
    return Wait("the event loop", "call", doing, mark=since, age_s=age_s, calls=calls, remedy=_REMEDY, stack=stack)


def look_of_inline_run(run: "InlineRun") -> Look:
    """The chain of the run, and its reader."""
    caller, chain = run.caller, run.chain
    is_waiting = caller.is_waiting or run.is_starting
    reader = _reader(caller, is_waiting, [_name_of(chain)])
    return Look((Exit(CALLER, caller.items, is_waiting),), by_name([reader, *chain_waits(chain, run.meters_by_name)]))


def look_of_run(run: "Run") -> Look:
    """Every task of the run, and the reader of its outputs."""
    tasks = {name: _name_of(chain) for chain in run.chains for name in chain.names}
    waits: list[Wait] = []
    exits: list[Exit] = []
    for chain in run.chains:
        if run.is_live(chain.names[0]):
            waits += chain_waits(chain, run.meters, _into(run, chain, tasks), _full(run, chain, tasks))
            sinks = [name for name in chain.names if not run.graph.nodes[name].outlets]
            exits += [Exit(_name_of(chain), run.meters[name].items, waits=True) for name in sinks]
    for name, spec in run.graph.nodes.items():
        if name not in tasks and run.is_live(name):
            found = _node_waits(run, spec, tasks)
            waits += found
            if not spec.outlets:
                exits.append(Exit(found[0].name, run.meters[name].items, waits=True))
    if run.graph.outputs:
        awaited = {name: edge for name, edge in run.graph.outputs.items() if run[name].is_awaited}
        doing = f"waits for an item of {', '.join(f'{run.graph.name}.{name}' for name in awaited)}"
        on = [_task(edge.source[0], tasks) for edge in awaited.values()]
        waits.append(_reader(run.caller, run.caller.is_waiting, on, doing))
        exits.append(Exit(CALLER, run.caller.items, run.caller.is_waiting))
    return Look(tuple(exits), by_name(waits))


def chain_waits(
    chain: Chain, meters: dict[str, NodeMeter], upstream: Sequence[str] = (), full: Sequence[tuple[str, str]] = ()
) -> Iterator[Wait]:
    """The chain as a task, and what it is at.

    upstream   tasks that its items come from
    full       (task, edge) of what it is to deliver and finds no room for
    """
    number, since = chain.mark[1], chain.mark[0]
    name, age_s = _name_of(chain), max(clock() - since, 0) / 1e9
    items = sum(meters[each].items for each in chain.names)
    working = [wait for node, meter in chain.background for wait in _background(chain, node, meter)]
    if number >= 0 and not (working and age_s < _BRIEF_S):
        called = list(meters)[number]
        call = _call(chain, called, meters[called].items, (number, since), age_s)
        yield Wait(name, "waits", "waits", on=(call.name,), mark=items, is_part=True)
        if call.name != name:
            yield call
        return
    if full:
        doing = f"waits for room in {', '.join(edge for _, edge in full)}"
        yield Wait(name, "waits", doing, on=tuple(task for task, _ in full), mark=items, remedy=_to_read(full))
        return
    if working:
        yield Wait(name, "waits", "waits", on=tuple(wait.name for wait in working), mark=items, is_part=True)
        yield from working
        return
    gates = list({id(gate): gate for gate, _, _ in list(chain.parked)}.values())
    holders = [wait for gate in gates if (wait := gate.waits_for()) is not None]
    if gates:
        doing = "waits at a gate"
        yield Wait(name, "waits", doing, on=tuple(wait.name for wait in holders), mark=(items, len(chain.parked)))
        yield from holders
        return
    yield Wait(name, "waits", "waits for an item", on=tuple(upstream), mark=items)


def _call(chain: Chain, name: str, calls: int, mark: Any, age_s: float) -> Wait:
    """The call that a chain is in, as its node describes it."""
    stack = partial(stack_of_thread, chain.thread)
    is_background = any(meter.name == name for _, meter in chain.background)  # what it works on is not this call
    for wait in () if is_background else _asked(chain.graph.nodes[name].methods, name):
        done = wait.calls if wait.limit == "reset" else calls  # resets are not what the meter counts
        return Wait(name, "call", wait.doing, (), mark, age_s, done, wait.where, wait.limit, wait.remedy, stack=stack)
    limit: Limit | None = None if chain.graph.nodes[name].outlets else "sink"
    return Wait(name, "call", "is in its call", (), mark, age_s, calls, limit=limit, stack=stack)


def _background(chain: Chain, node: Background, meter: NodeMeter) -> list[Wait]:
    """What a background node works on; nothing where it has no items."""
    if not node.in_flight:
        return []
    asked = list(_asked(chain.graph.nodes[meter.name].methods, meter.name))
    doing = f"has {node.in_flight} items in work"
    return asked or [Wait(meter.name, "call", doing, mark=(meter.items, node.in_flight), calls=meter.items)]


def _node_waits(run: "Run", spec: "NodeSpec", tasks: dict[str, str]) -> list[Wait]:
    """An asynchronous node, or one that is called in a thread; first of all what it waits for itself."""
    name, meter = spec.name, run.meters[spec.name]
    mark = meter.items, meter.busy_ns, meter.blocked_ns
    full = _full_from(run, [name], tasks) if meter.is_blocked else []
    asked = list(_asked(spec.methods, name))
    if full or (meter.is_blocked and not asked):
        doing = f"waits for room in {', '.join(edge for _, edge in full) or 'an edge'}"
        return [Wait(name, "waits", doing, on=tuple(task for task, _ in full), mark=mark, remedy=_to_read(full))]
    if meter.is_waiting and spec.inlets:
        sources = dict.fromkeys(edge.source[0] for edge in run.graph.edges if edge.target[0] == name)
        on = tuple(dict.fromkeys(_task(source, tasks) for source in sources))
        return [Wait(name, "waits", f"waits for an item of {', '.join(sources)}", on=on, mark=mark)]
    if any(wait.name == name for wait in asked):
        return asked
    if asked:
        return [Wait(name, "waits", "waits", on=tuple(wait.name for wait in asked), mark=mark), *asked]
    limit: Limit | None = "sink" if not spec.outlets else None
    kind: Kind = "call"
    doing = "is in its call" if run.graph.place_of(name) == "thread" else "is at work, and neither sends nor receives"
    return [Wait(name, kind, doing, mark=mark, calls=meter.items, limit=limit, stack=partial(_stack, run, name))]


def _stack(run: "Run", name: str) -> Any:
    """The stack of a node's thread or coroutine; of the event loop's thread while the coroutine runs."""
    where = run.at.get(name)
    if isinstance(where, int):
        return stack_of_thread(where)
    return stack_of_coroutine(where) or stack_of_thread(run.thread)


def _asked(methods: NodeMethods, name: str) -> Iterable[Wait]:
    """What a node says itself that it is at."""
    return () if methods.at_work is None else methods.at_work(name)


def _into(run: "Run", chain: Chain, tasks: dict[str, str]) -> list[str]:
    own = _name_of(chain)
    sources = [edge.source[0] for edge in run.graph.edges if edge.target[0] in chain.names]
    return list(dict.fromkeys(task for source in sources if (task := _task(source, tasks)) != own))


def _full(run: "Run", chain: Chain, tasks: dict[str, str]) -> list[tuple[str, str]]:
    """Tasks and edges that the chain's next item waits for."""
    return _full_from(run, chain.names, tasks) if chain.pending else []


def _full_from(run: "Run", names: Sequence[str], tasks: dict[str, str]) -> list[tuple[str, str]]:
    """(task, name) of the edges from some nodes that have no room."""
    found = []
    for edge, channel in run.channels.items():
        if edge.source[0] in names and _has_no_room(channel):
            found.append((CALLER if edge.is_output else _task(edge.target[0], tasks), edge.name))
    return found


def _to_read(full: Sequence[tuple[str, str]]) -> str:
    """The remedy if an output of the graph is full, which its reader does not read; "" if none is.

    full    (task, edge) of the edges that have no room
    """
    for task, edge in full:
        if task == CALLER:
            outlet, _, output = edge.partition(" → ")
            name = output.rpartition(".")[2]
            return (
                f"read output '{name}' as well, in a task of its own: async for item in run['{name}']; or connect "
                f"'{outlet}' to a sink instead of graph.output('{name}', …)"
            )
    return ""


def _has_no_room(channel: "Channel[Any]") -> bool:
    return len(channel) >= channel.capacity and channel.overflow == "block" and not channel.abandoned


def _reader(caller: NodeMeter, is_waiting: bool, on: Sequence[str], doing: str = "waits") -> Wait:
    mark = caller.items, caller.is_waiting
    if is_waiting:
        return Wait(CALLER, "waits", doing, on=tuple(on), mark=mark, calls=caller.items)
    doing = "works on what it was given" if caller.items else "has not asked for an item yet"
    return Wait(CALLER, "works", doing, mark=mark, calls=caller.items)


def _task(name: str, tasks: dict[str, str]) -> str:
    return tasks.get(name, name)


def _name_of(chain: Chain) -> str:
    """The chain as a party: by its node, or by the first and the last one."""
    names = chain.names
    return f"the task of {names[0]}" if len(names) == 1 else f"{names[0]} … {names[-1]}"
