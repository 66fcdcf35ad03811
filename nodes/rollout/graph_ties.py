"""GraphTies: what a rollout is tied to as a node of a graph."""

from collections.abc import Callable
from typing import Any

from rollflow.nodes.stages.credits import AllGates, LaneGate
from rollflow.stream.data.errors import GraphError
from rollflow.stream.graph.gate import Gate
from rollflow.stream.graph.graph import Graph


class GraphTies:
    """Gates that hold a rollout back in a graph, and nodes that see its fragments there.

    is_in_graph    True once a graph has taken the rollout apart; no tie may be added then
    """

    def __init__(self) -> None:
        self.is_in_graph = False
        self._gates: list[Gate] = []
        self._watching: list[Callable[[Any], None]] = []

    def add_gate(self, gate: Gate) -> None:
        """Have a gate hold the rollout back. Raises GraphError where it is in a graph already."""
        self._check("holds it back")
        self._gates.append(gate)

    def add_node(self, node: Callable[[Any], None]) -> None:
        """Have a node see the fragments. Raises GraphError where the rollout is in a graph already."""
        self._check("watches it")
        self._watching.append(node)

    def be_drawn_anew(self, *, has_run: bool) -> None:
        """Allow ties again. Raises GraphError where the rollout runs, or has run."""
        if has_run:
            raise GraphError(
                "the rollout runs already; expected a sink that holds it back, such as TrainerSink, to be connected "
                "before `with rollout:` and before the graph is run"
            )
        self.is_in_graph = False

    def let_go(self) -> None:
        """Let go of gates and nodes, which may refer to the rollout: the graph's run is over."""
        self._gates, self._watching = [], []

    def gate(self) -> LaneGate | None:
        """All gates as one; None: nothing holds the rollout back."""
        return AllGates(self._gates) if self._gates else None

    def state_of(self, state: str, *, is_closed: bool) -> str:
        """The state of the rollout in words: in a graph, that of the graph's run."""
        return state if not self.is_in_graph or state != "new" else "ended" if is_closed else "in a graph"

    def watch(self, ring: Graph, figures: Callable[[Any], None]) -> Graph:
        """The ring, in which the nodes, and `figures` as the last one, see every fragment before it leaves."""
        nodes = {f"seen_{number}": node for number, node in enumerate(self._watching)}
        for name, node in {**nodes, "figures": figures}.items():
            ring.add_node(name, node)
            ring.connect(".".join(ring.outputs["fragments"].source), name)
        return ring

    def _check(self, does: str) -> None:
        if self.is_in_graph:
            raise GraphError(f"the rollout is in a graph already, expected what {does} to come before that")
