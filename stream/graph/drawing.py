"""Drawings of a graph: an explanation of how it will run, and its shape as plain values."""

from inspect import getattr_static
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rollflow.stream.graph.report import LEARNER, Report
from rollflow.stream.observe.waits import CALLER, Diagnosis, LastError

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph
    from rollflow.stream.graph.port import Edge


def explain(graph: "Graph") -> str:
    """One line for each task, then one for each edge that is a channel."""
    lines = [_task_line(graph, group) for group in graph.groups()]
    shown = [edge for edge in (*graph.edges, *graph.outputs.values()) if not graph.is_chained(edge)]
    lines += [_edge_line(graph, edge) for edge in shown]
    lines += [f"{edge.name}   passes a gate" for edge in graph.edges if edge.gate is not None]
    return "\n".join(lines)


def shape(graph: "Graph") -> dict[str, Any]:
    """What a picture of the graph shows.

    tasks    names of nodes, task by task, in the order of the flow
    edges    of each `source`, `target`, `port`, `feedback` and `is_output`; of a channel `capacity` and `overflow`, too
    """
    edges = []
    for edge in (*graph.edges, *graph.outputs.values()):
        bound = {} if graph.is_chained(edge) else {"capacity": edge.capacity or 1, "overflow": edge.overflow}
        target = edge.target[1] if edge.is_output else edge.target[0]
        named = {"source": edge.source[0], "target": target, "port": edge.source[1]}
        edges.append({**named, "feedback": edge.feedback, "is_output": edge.is_output, **bound})
    return {"tasks": graph.groups(), "edges": edges}


def _task_line(graph: "Graph", group: list[str]) -> str:
    members, within = set(group), [edge for edge in graph.edges if graph.is_chained(edge)]
    loops = any(edge.feedback for edge in within if edge.source[0] in members)
    prefix = _common_prefix(group)
    names = " → ".join(name.removeprefix(prefix) for name in group)
    shown = f"[{names}{' ↺' if loops else ''}]" if len(group) > 1 or loops else names
    where = "worker thread" if graph.place_of(group[0]) == "thread" else "inline"
    details = [text for _, describe in graph.having("describe", group) if (text := describe())]
    return f"{prefix.rstrip('/') + '   ' if prefix else ''}{shown}   {', '.join(['one task', *details, where])}"


def _edge_line(graph: "Graph", edge: "Edge") -> str:
    target = edge.target[0]
    if edge.is_output:
        return f"{'.'.join(edge.source)} ──({_bound(edge)})──▶ output '{edge.target[1]}'"
    thread = "   worker thread" if graph.place_of(target) == "thread" else ""
    feedback = "   feedback" if edge.feedback else ""
    return f"{'.'.join(edge.source)} ──({_bound(edge)})──▶ {'.'.join(edge.target)}{thread}{feedback}"


def _bound(edge: "Edge") -> str:
    return f"capacity {edge.capacity or 1}, {edge.overflow}"


def _common_prefix(group: list[str]) -> str:
    """`rollout/` if every name of the group begins so."""
    prefix = group[0].rpartition("/")[0] + "/"
    return prefix if prefix != "/" and all(name.startswith(prefix) for name in group) else ""


def run_snapshot(graph: "Graph", report: Report, diagnosis: Diagnosis) -> dict[str, Any]:
    """What there is to see of a run.

    elapsed_s, bottleneck, conclusion, nodes    as in `Report.as_dict`; a node in which something went wrong also has
                 its `last_error`: `text` and `age_s`, which is None if it is so still
    tasks, edges    as `drawing.shape` has them, with the learner pipeline and the caller behind the outputs; an edge
                 that is measured also has the figures of `Report.as_dict`
    parties      `name`, as in the report, `kind`, `doing`, `on` (names), `age_s`
    diagnosis    `state`, `text`, `waited_s`
    """
    found, drawn = report.as_dict(), shape(graph)
    for name, spec in graph.nodes.items():
        error = _last_error(spec.node)
        if error is not None and name in found["nodes"]:
            found["nodes"][name]["last_error"] = error._asdict()
    names = [edge.name for edge in (*graph.edges, *graph.outputs.values())]
    edges = [edge | found["edges"].get(name, {}) for name, edge in zip(names, drawn["edges"], strict=True)]
    readers = [name for name in (LEARNER, CALLER) if name in found["nodes"] and name not in graph.nodes]
    if readers:
        edges = [edge | ({"target": readers[0]} if edge["is_output"] else {}) for edge in edges]
        chained = {"port": "out", "feedback": False, "is_output": False}
        edges += [{"source": source, "target": target, **chained} for source, target in pairwise(readers)]
    parties = [
        {**{key: getattr(wait, key) for key in ("name", "kind", "doing", "age_s")}, "on": list(wait.on)}
        for wait in diagnosis.parties
        if not wait.is_part
    ]
    return {
        **found,
        "tasks": [*drawn["tasks"], *([name] for name in readers)],
        "edges": edges,
        "parties": parties,
        "diagnosis": {"state": diagnosis.state, "text": str(diagnosis), "waited_s": diagnosis.waited_s},
    }


def _last_error(node: Any) -> LastError | None:
    """What went wrong last in one of rollflow's own nodes. A user's node may mean something else by the name."""
    declared = getattr_static(type(node), "last_error", None)
    is_ours = isinstance(declared, property) and str(getattr(declared.fget, "__module__", "")).startswith("rollflow.")
    error = node.last_error if is_ours else None
    return error if isinstance(error, LastError) else None
