"""Report of a run: the counts of its nodes and edges, and the stage that holds the others back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollflow.stream.graph.meter import CallStats, EdgeMeter, NodeMeter, clock
from rollflow.stream.observe.svg import preformatted
from rollflow.stream.observe.waits import CALLER

LEARNER = "learner_pipeline"
_NO_PIECES: Mapping[str, str] = {}
MOSTLY_IDLE = 0.1  # share of the time, of all stages together, below which none is what the others wait for


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node's counts; busy, idle and blocked seconds add up to the elapsed time.

    calls            how long its calls took; None: there was none, or it is not known
    slowest_piece    name of the connector piece that took most of the time; "": it runs none
    """

    name: str
    items: int
    busy_s: float
    idle_s: float
    blocked_s: float
    calls: CallStats | None = None
    slowest_piece: str = ""


@dataclass(frozen=True, slots=True)
class EdgeReport:
    """One channel's counts; `mean_held` is over time, `full` a share of the elapsed time."""

    name: str
    capacity: int
    items: int
    held: int
    mean_held: float
    peak: int
    dropped: int
    blocked_count: int
    full: float


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of all nodes and edges over `elapsed_s` seconds. `str(report)` is a table.

    `bottleneck` names the busiest stage: with bounded channels it is the one that all others wait for. Nodes in
    `harmless` are no candidates: items that come too fast for them are dropped, and nobody waits. The reader of the
    outputs is a stage named `caller`, busy between two items. The `holders` are stages too, such as a trainer: their
    items are waits, at a gate or in a sink, and they are busy while nodes can only wait for them. `notes` are sentences
    of nodes on what they do without, such as lanes that were set aside.
    """

    elapsed_s: float
    nodes: tuple[NodeReport, ...]
    edges: tuple[EdgeReport, ...]
    harmless: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def bottleneck(self) -> str | None:
        """The name of the stage that holds the others back; None: all stages wait."""
        at_work = sum(node.busy_s + node.blocked_s for node in self.nodes if node.name not in self.harmless)
        return None if at_work < MOSTLY_IDLE * self.elapsed_s else self._busiest.name

    @property
    def _busiest(self) -> NodeReport:
        """The busiest node of those that can hold others back."""
        return max(self.nodes, key=lambda node: (node.name not in self.harmless, node.busy_s))

    def moved(self, name: str, part: NodeReport, calls: CallStats | None) -> "Report":
        """This report with `part`, a part of node `name`'s work, as a node before it; unchanged if `part` was idle.

        calls    of node `name`, without that part
        """
        [node] = [each for each in self.nodes if each.name == name]
        left = max(node.busy_s - part.busy_s, 0.0)
        rest = replace(node, busy_s=left, idle_s=self.elapsed_s - left - node.blocked_s, calls=calls)
        return self.with_parts(name, [part, rest] if part.items or part.busy_s else [rest])

    def with_parts(self, name: str, parts: Sequence[NodeReport]) -> "Report":
        """This report with `parts` in the place of node `name`; unchanged if there are none."""
        if not parts:
            return self
        nodes = [each for node in self.nodes for each in (parts if node.name == name else [node])]
        return replace(self, nodes=tuple(nodes))

    def as_dict(self) -> dict[str, Any]:
        """The figures of the table as plain numbers and text, for a log or for `json`.

        elapsed_s     float: seconds counted
        bottleneck    text: name of the stage that holds the others back; None: all of them wait
        conclusion    text: the sentence under the table
        notes         sentences of nodes; left out if there are none
        nodes         name -> `items`, an int; `busy_s`, `idle_s`, `blocked_s`, seconds; `busy`, `idle`, `blocked`,
                      the same as shares of the elapsed time, from 0 to 1; `p50_s`, `p99_s`, `longest_s`, seconds of
                      its calls, and `slowest_piece`, each left out if there is none
        edges         name -> `capacity`, `items`, `held`, `peak`, `dropped`, `blocked_count`, ints; `mean_held`, a
                      float; `full`, the share of the time in which the edge was full
        """
        total = max(self.elapsed_s, 1e-9)
        nodes = {node.name: asdict(node) for node in self.nodes}
        for node in self.nodes:
            figures = nodes[node.name]
            figures |= {part: figures[f"{part}_s"] / total for part in ("busy", "idle", "blocked")}
            del figures["calls"]
            figures |= {} if node.calls is None else node.calls._asdict()
            if not node.slowest_piece:
                del figures["slowest_piece"]
        edges = {edge.name: asdict(edge) for edge in self.edges}
        for figures in (*nodes.values(), *edges.values()):
            del figures["name"]
        return {
            "elapsed_s": self.elapsed_s,
            "bottleneck": self.bottleneck,
            "conclusion": self._conclusion(),
            "nodes": nodes,
            "edges": edges,
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    def __str__(self) -> str:
        total = max(self.elapsed_s, 1e-9)
        width = max(map(len, (*(node.name for node in self.nodes), *(edge.name for edge in self.edges))))
        line = f"{{:<{width}}} {{:>10}} {{:>7}} {{:>7}} {{:>8}} {{:>7}} {{:>8}} {{:>8}}  {{}}".format
        lines = [line("node", "items", "busy", "idle", "blocked", "p50", "p99", "longest", "slowest piece")]
        for node in self.nodes:
            shares = (f"{part / total:.1%}" for part in (node.busy_s, node.idle_s, node.blocked_s))
            calls = map(duration_text, node.calls or ("", "", ""))
            lines.append(line(node.name, f"{node.items:,}", *shares, *calls, node.slowest_piece))
        if self.edges:
            lines.append(line("edge", "items", "held", "mean", "peak", "full", "dropped", "", ""))
        for edge in self.edges:
            held, rest = f"{edge.held}/{edge.capacity}", (f"{edge.full:.1%}", f"{edge.dropped:,}", "", "")
            lines.append(line(edge.name, f"{edge.items:,}", held, f"{edge.mean_held:.2f}", edge.peak, *rest))
        return "\n".join([*(each.rstrip() for each in lines), *self.notes, self._conclusion()])

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def _conclusion(self) -> str:
        busiest = self._busiest
        share = f"{busiest.busy_s / max(self.elapsed_s, 1e-9):.0%} of {self.elapsed_s:.1f} s"
        if self.bottleneck is None:
            return f"all of them wait: none is busy for long ({busiest.name}, the busiest, for {share})"
        if busiest.name in self.holders:
            return f"held back by {busiest.name} (waited for {share})"
        who = f"{CALLER}, the code that reads the outputs" if busiest.name == CALLER else busiest.name
        return f"held back by {who} (busy {share})"


def duration_text(seconds: float | str) -> str:
    """A duration with three digits and its unit; a text as it is."""
    if isinstance(seconds, str):
        return seconds
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "µs"))
    return f"{seconds / size:.3g} {unit}"


def node_report(
    elapsed_ns: int, node: NodeMeter, counts: tuple[int, int], under_way: int = 0, slowest_piece: str = ""
) -> NodeReport:
    """A report of a meter.

    counts       busy and blocked time in ns, as `NodeMeter.read` gave them
    under_way    nanoseconds since its current call began
    """
    busy = min(counts[0] + under_way, elapsed_ns)
    blocked = min(counts[1], elapsed_ns - busy)
    stats = node.calls.read()
    if stats is not None and under_way / 1e9 > stats.longest_s:
        stats = stats._replace(longest_s=under_way / 1e9)
    idle_s = (elapsed_ns - busy - blocked) / 1e9
    return NodeReport(node.name, node.items, busy / 1e9, idle_s, blocked / 1e9, stats, slowest_piece)


def report_of(
    began_ns: int,
    ended_ns: int | None,
    nodes: Iterable[NodeMeter],
    edges: Iterable[EdgeMeter],
    under_way: Callable[[], Mapping[str, int]] = dict,
    pieces: Mapping[str, str] = _NO_PIECES,
    **more: Any,
) -> Report:
    """Make a report of the meters' current values.

    ended_ns     None: the run goes on
    under_way    gives node -> nanoseconds since its current call began
    pieces       node -> its slowest connector piece
    more         further fields of the report
    """
    read = [(node, node.read()) for node in nodes]
    edges_read = [(edge, edge.read()) for edge in edges]
    # In this order, calls that end meanwhile are not counted twice, and no time is counted that has not elapsed.
    current = under_way()
    elapsed_ns = max((clock() if ended_ns is None else ended_ns) - began_ns, 1)
    node_reports = [
        node_report(elapsed_ns, node, counts, current.get(node.name, 0), pieces.get(node.name, ""))
        for node, counts in read
    ]
    edge_reports = []
    for edge, (item_ns, full_ns) in edges_read:
        mean_held, full = item_ns / elapsed_ns, min(1.0, full_ns / elapsed_ns)
        counts = edge.name, edge.capacity, edge.items, edge.held, mean_held, edge.peak, edge.dropped, edge.blocked_count
        edge_reports.append(EdgeReport(*counts, full))
    return Report(elapsed_ns / 1e9, tuple(node_reports), tuple(edge_reports), **more)
