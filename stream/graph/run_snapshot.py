"""Snapshot of a running graph, as plain values: nodes, edges, what every party does, and the diagnosis."""

from inspect import getattr_static
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rollflow.stream.graph.drawing import shape
from rollflow.stream.graph.report import CALLER, LEARNER, Report
from rollflow.stream.observe.diagnosis import Diagnosis
from rollflow.stream.observe.waits import READER, LastError, Look

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph


def run_snapshot(graph: "Graph", report: Report, look: Look | None, diagnosis: Diagnosis) -> dict[str, Any]:
    """What there is to see of a run.

    elapsed_s, bottleneck, conclusion, nodes    as in `Report.as_dict`; a node in which something went wrong also has
                 its `last_error`: `text` and `age_s`, which is None where it is so still
    tasks, edges    as `drawing.shape` has them, with the learner pipeline and the caller behind the outputs; an edge
                 that is measured also has the figures of `Report.as_dict`
    parties      of a look: `name`, as in the report, `kind`, `doing`, `on` (names), `age_s`
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
        edges += [_chained(source, target) for source, target in pairwise(readers)]
    parties = [
        {
            "name": _as_reported(wait.name),
            "kind": wait.kind,
            "doing": wait.doing,
            "on": [_as_reported(name) for name in wait.on],
            "age_s": wait.age_s,
        }
        for wait in (() if look is None else look.waits.values())
        if not wait.is_part
    ]
    return {
        **found,
        "tasks": [*drawn["tasks"], *([name] for name in readers)],
        "edges": edges,
        "parties": parties,
        "diagnosis": {"state": diagnosis.state, "text": str(diagnosis), "waited_s": diagnosis.waited_s},
    }


def _chained(source: str, target: str) -> dict[str, Any]:
    return {"source": source, "target": target, "port": "out", "feedback": False, "is_output": False}


def _as_reported(party: str) -> str:
    """The name of a party, as the report has it."""
    return CALLER if party == READER else party


def _last_error(node: Any) -> LastError | None:
    """What went wrong last in one of rollflow's own nodes; in a user's, the name may mean something else."""
    declared = getattr_static(type(node), "last_error", None)
    is_ours = isinstance(declared, property) and str(getattr(declared.fget, "__module__", "")).startswith("rollflow.")
    error = node.last_error if is_ours else None
    return error if isinstance(error, LastError) else None
