"""Looks at running graphs for the stall doctor: what every chain, node and reader is doing right now.

Everything here is read from counters and marks that tasks write for themselves, from another thread, without locks.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollflow.stream.graph.chain import Chain
from rollflow.stream.graph.meter import NodeMeter, clock
from rollflow.stream.observe.stacks import stack_of_coroutine, stack_of_thread
from rollflow.stream.observe.waits import READER, Exit, Kind, Limit, Look, Wait, by_name

if TYPE_CHECKING:
    from rollflow.stream.graph.channel import Channel
    from rollflow.stream.graph.inline_run import InlineRun
    from rollflow.stream.graph.port import NodeSpec
    from rollflow.stream.graph.run import Run


_BRIEF_S = 0.1  # that a call between two waits for background nodes lasts at most


def look_of_inline_run(run: "InlineRun") -> Look:
    """The chain of the run, and its reader."""
    caller, chain = run.caller, run.chain
    is_waiting = caller.is_waiting or run.is_starting
    reader = _reader(caller, is_waiting, [_name_of(chain)])
    return Look((Exit(READER, caller.items, is_waiting),), by_name([reader, *chain_waits(chain, run.meters_by_name)]))


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
        exits.append(Exit(READER, run.caller.items, run.caller.is_waiting))
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
    working = [wait for node, meter in chain.background for wait in _background(node, meter)]
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
    refusing = [gate.waits_for() for gate in gates if hasattr(gate, "waits_for")]
    holders = [wait for wait in refusing if wait is not None]
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
    for wait in () if is_background else _asked(chain.node_of(name), name):
        done = wait.calls if wait.limit == "reset" else calls  # resets are not what the meter counts
        return Wait(name, "call", wait.doing, (), mark, age_s, done, wait.where, wait.limit, wait.remedy, stack=stack)
    limit: Limit | None = "sink" if chain.is_sink(name) else None
    return Wait(name, "call", "is in its call", (), mark, age_s, calls, limit=limit, stack=stack)


def _background(node: Any, meter: NodeMeter) -> list[Wait]:
    """What a background node works on; nothing where it has no items."""
    if not node.in_flight:
        return []
    asked = list(_asked(node, meter.name))
    doing = f"has {node.in_flight} items in work"
    return asked or [Wait(meter.name, "call", doing, mark=(meter.items, node.in_flight), calls=meter.items)]


def _node_waits(run: "Run", spec: "NodeSpec", tasks: dict[str, str]) -> list[Wait]:
    """An asynchronous node, or one that is called in a thread; first of all what it waits for itself."""
    name, meter = spec.name, run.meters[spec.name]
    mark = meter.items, meter.busy_ns, meter.blocked_ns
    full = _full_from(run, [name], tasks) if meter.is_blocked else []
    asked = list(_asked(spec, name))
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


def _asked(node: Any, name: str) -> Iterator[Wait]:
    """What a node says itself that it is at."""
    node = getattr(node, "node", node)
    at_work = getattr(node, "at_work", None)
    if at_work is not None:
        yield from at_work(name)


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
            found.append((READER if edge.is_output else _task(edge.target[0], tasks), edge.name))
    return found


def _to_read(full: Sequence[tuple[str, str]]) -> str:
    """The remedy if an output of the graph is full, which its reader does not read; "" if none is.

    full    (task, edge) of the edges that have no room
    """
    for task, edge in full:
        if task == READER:
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
        return Wait(READER, "waits", doing, on=tuple(on), mark=mark, calls=caller.items)
    doing = "works on what it was given" if caller.items else "has not asked for an item yet"
    return Wait(READER, "works", doing, mark=mark, calls=caller.items)


def _task(name: str, tasks: dict[str, str]) -> str:
    return tasks.get(name, name)


def _name_of(chain: Chain) -> str:
    """The chain as a party: by its node, or by the first and the last one."""
    names = chain.names
    return f"the task of {names[0]}" if len(names) == 1 else f"{names[0]} … {names[-1]}"
