"""Report of a run: the counts of its nodes and edges, and the stage that holds the others back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollflow.stream.graph.meter import EdgeMeter, NodeMeter
from rollflow.stream.pictures.html import preformatted, table

CALLER = "caller"
NOTHING_UNDER_WAY: Mapping[str, int] = {}
MOSTLY_IDLE = 0.1  # share of the time, of all stages together, below which none is what the others wait for


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node's counts; busy, idle and blocked seconds add up to the elapsed time."""

    name: str
    items: int
    busy_s: float
    idle_s: float
    blocked_s: float


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

    def moved(self, name: str, part: NodeMeter) -> "Report":
        """This report with `part`, a part of node `name`'s work, as a node before it; unchanged if `part` was idle."""
        busy = part.read()[0] / 1e9
        if not part.items and not busy:
            return self
        nodes: list[NodeReport] = []
        for node in self.nodes:
            if node.name == name:
                nodes.append(NodeReport(part.name, part.items, busy, max(self.elapsed_s - busy, 0.0), 0.0))
                left = max(node.busy_s - busy, 0.0)
                node = replace(node, busy_s=left, idle_s=self.elapsed_s - left - node.blocked_s)
            nodes.append(node)
        return replace(self, nodes=tuple(nodes))

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
        notes         sentences of nodes; left out where there are none
        nodes         name -> `items`, an int; `busy_s`, `idle_s`, `blocked_s`, seconds; `busy`, `idle`, `blocked`,
                      the same as shares of the elapsed time, from 0 to 1
        edges         name -> `capacity`, `items`, `held`, `peak`, `dropped`, `blocked_count`, ints; `mean_held`, a
                      float; `full`, the share of the time in which the edge was full
        """
        total = max(self.elapsed_s, 1e-9)
        nodes = {node.name: asdict(node) for node in self.nodes}
        for figures in nodes.values():
            figures |= {part: figures[f"{part}_s"] / total for part in ("busy", "idle", "blocked")}
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
        width = max(map(len, (*(node.name for node in self.nodes), *(edge.name for edge in self.edges))))
        total = max(self.elapsed_s, 1e-9)
        lines = [f"{'node':<{width}} {'items':>10} {'busy':>7} {'idle':>7} {'blocked':>8}"]
        lines += [
            f"{node.name:<{width}} {node.items:>10,} {node.busy_s / total:>7.1%} {node.idle_s / total:>7.1%} "
            f"{node.blocked_s / total:>8.1%}"
            for node in self.nodes
        ]
        if self.edges:
            lines.append(
                f"{'edge':<{width}} {'items':>10} {'held':>7} {'mean':>7} {'peak':>8} {'full':>7} {'dropped':>8}"
            )
            lines += [
                f"{edge.name:<{width}} {edge.items:>10,} {f'{edge.held}/{edge.capacity}':>7} {edge.mean_held:>7.2f} "
                f"{edge.peak:>8} {edge.full:>7.1%} {edge.dropped:>8,}"
                for edge in self.edges
            ]
        return "\n".join([*lines, *self.notes, self._conclusion()])

    def _repr_html_(self) -> str:
        total = max(self.elapsed_s, 1e-9)
        nodes = [
            (
                node.name,
                f"{node.items:,}",
                *(f"{part / total:.1%}" for part in (node.busy_s, node.idle_s, node.blocked_s)),
            )
            for node in self.nodes
        ]
        edges = [
            (
                edge.name,
                f"{edge.items:,}",
                f"{edge.held}/{edge.capacity}",
                f"{edge.mean_held:.2f}",
                edge.peak,
                f"{edge.full:.1%}",
                f"{edge.dropped:,}",
            )
            for edge in self.edges
        ]
        parts = [table(("node", "items", "busy", "idle", "blocked"), nodes)]
        if edges:
            parts.append(table(("edge", "items", "held", "mean", "peak", "full", "dropped"), edges))
        return "".join([*parts, preformatted("\n".join([*self.notes, self._conclusion()]))])

    def _conclusion(self) -> str:
        busiest = self._busiest
        share = f"{busiest.busy_s / max(self.elapsed_s, 1e-9):.0%} of {self.elapsed_s:.1f} s"
        if self.bottleneck is None:
            return f"all of them wait: none is busy for long ({busiest.name}, the busiest, for {share})"
        if busiest.name in self.holders:
            return f"held back by {busiest.name} (waited for {share})"
        who = f"{CALLER}, the code that reads the outputs" if busiest.name == CALLER else busiest.name
        return f"held back by {who} (busy {share})"


def report_of(
    elapsed_ns: int,
    nodes: Iterable[NodeMeter],
    edges: Iterable[EdgeMeter],
    harmless: frozenset[str] = frozenset(),
    holders: frozenset[str] = frozenset(),
    under_way: Mapping[str, int] = NOTHING_UNDER_WAY,
) -> Report:
    """Make a report of the meters' current values.

    under_way    node -> nanoseconds since its current call began
    """
    elapsed_ns = max(elapsed_ns, 1)
    node_reports = []
    for node in nodes:
        busy, blocked = node.read()
        busy += under_way.get(node.name, 0)
        busy = min(busy, elapsed_ns)
        blocked = min(blocked, elapsed_ns - busy)
        node_reports.append(
            NodeReport(node.name, node.items, busy / 1e9, (elapsed_ns - busy - blocked) / 1e9, blocked / 1e9)
        )
    edge_reports = []
    for edge in edges:
        item_ns, full_ns = edge.read()
        edge_reports.append(
            EdgeReport(
                name=edge.name,
                capacity=edge.capacity,
                items=edge.items,
                held=edge.held,
                mean_held=item_ns / elapsed_ns,
                peak=edge.peak,
                dropped=edge.dropped,
                blocked_count=edge.blocked_count,
                full=min(1.0, full_ns / elapsed_ns),
            )
        )
    return Report(elapsed_ns / 1e9, tuple(node_reports), tuple(edge_reports), harmless, holders)
