"""Snapshot of a running graph, as plain values: nodes, edges, what every party does, and the diagnosis."""

from typing import TYPE_CHECKING, Any

from rollflow.stream.doctor.diagnosis import Diagnosis
from rollflow.stream.doctor.waits import LastError, Look
from rollflow.stream.graph.drawing import shape
from rollflow.stream.graph.report import Report

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph


def run_snapshot(graph: "Graph", report: Report, look: Look | None, diagnosis: Diagnosis) -> dict[str, Any]:
    """What there is to see of a run.

    elapsed_s, bottleneck, conclusion, nodes    as in `Report.as_dict`; a node in which something went wrong also has
                 its `last_error`: `text` and `age_s`, which is None where it is so still
    tasks, edges    as `drawing.shape` has them; an edge that is measured also has the figures of `Report.as_dict`
    parties      of a look: `name`, `kind`, `doing`, `on` (names), `age_s`
    diagnosis    `state`, `text`, `waited_s`
    """
    found, drawn = report.as_dict(), shape(graph)
    for name, spec in graph.nodes.items():
        error = getattr(spec.node, "last_error", None)
        if isinstance(error, LastError) and name in found["nodes"]:  # a node of the user's may have one of its own
            found["nodes"][name]["last_error"] = error._asdict()
    names = [edge.name for edge in (*graph.edges, *graph.outputs.values())]
    edges = [edge | found["edges"].get(name, {}) for name, edge in zip(names, drawn["edges"], strict=True)]
    parties = [
        {"name": wait.name, "kind": wait.kind, "doing": wait.doing, "on": list(wait.on), "age_s": wait.age_s}
        for wait in (() if look is None else look.waits.values())
        if not wait.is_part
    ]
    return {
        **found,
        "tasks": drawn["tasks"],
        "edges": edges,
        "parties": parties,
        "diagnosis": {"state": diagnosis.state, "text": str(diagnosis), "waited_s": diagnosis.waited_s},
    }
