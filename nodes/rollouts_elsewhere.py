"""What all have in common that have whole rollouts done somewhere else: in worker processes, on other hosts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollflow.nodes.environments import Environments
from rollflow.nodes.pace import nobody_knows, nobody_waits
from rollflow.stream.fragment import Fragment
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.report import NodeReport


class Turns:
    """What goes round in place of a lane that is somewhere else: each turn of it is a fragment.

    fragment    that it came back with; None where it has none
    """

    at_start = True

    def __init__(self, index: int, num_slots: int) -> None:
        self.index = index
        self.num_slots = num_slots
        self.sequence = 0  # of the next fragment
        self.fragment: Fragment | None = None
        self.is_set_aside = False

    @property
    def vector_steps(self) -> str:
        """Where it is, for messages."""
        return f"of fragment {self.sequence}"


class RolloutsElsewhere(Environments):
    """A node that has each lane's rollout done somewhere else: takes turns, gives fragments.

    acting     how forward passes are done there: what `ModuleForward` takes beside module and weights
    replica    what is needed there beside environments and that: asked for whenever a lane is begun
    heard      told of what connectors have learnt and logged, and of what has been loaded: (lane, message)
    digests    whether weights are digested there when they have been loaded

    wants_newest    whether a turn is to begin with the newest weights there are, however many others are on their way
    """

    def __init__(self, env: Any, **options: Any) -> None:
        self.acting: Mapping[str, Any] = {}
        self.replica: Callable[[], dict[str, Any]] = dict
        self.heard: Callable[[int, Mapping[str, Any]], None] = lambda lane, told: None
        self.digests = False
        self.wants_newest: Callable[[], bool] = lambda: False
        super().__init__(env, **options)

    def broadcast(self, version: int, weights: Mapping[str, Any]) -> None:
        """Have every lane use these weights, which are copied, from its next forward pass on.

        From any thread; waits for nobody: one that is slower than they are published is given the newest whenever it
        is done with those before.
        """
        raise NotImplementedError

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have the connectors of every lane take over states before its next turn: one for each pipeline."""
        raise NotImplementedError

    def counted(self) -> Iterable[Sequence[Sequence[Any]]]:
        """What each lane's stages have counted: [name, items, busy seconds]."""
        raise NotImplementedError

    def stages(self, elapsed_s: float) -> list[NodeReport]:
        """What the stages have counted: items of all, times of the average lane's place."""
        found: dict[str, list[tuple[int, float]]] = {}
        lanes = 0
        for stages in self.counted():
            lanes += 1
            for name, items, busy in stages:
                if name != "caller":
                    found.setdefault(name, []).append((items, busy))
        reports = []
        for name, counted in found.items():
            busy = min(elapsed_s, sum(busy for _, busy in counted) / lanes)
            reports.append(NodeReport(name, sum(items for items, _ in counted), busy, elapsed_s - busy, 0.0))
        return reports

    def _make_lanes(self) -> None:
        """Lanes are where the environments are."""


class Dealt(NamedTuple):
    """What one lane's turn gives."""

    turns: Turns | None
    fragments: Fragment | None


class Deal:
    """A node that parts the fragments from the turns, which go round.

    num_lanes        lanes that come by
    num_fragments    after so many fragments a lane stops; None: it never does

    leave            called with a lane whose turn has given no fragment, and never will
    gone, ended      called with a lane that has been set aside, or has given all its fragments, and how many it gives
                     in all
    """

    def __init__(self, num_lanes: int, num_fragments: int | None) -> None:
        self.leave: Callable[[int], None] = nobody_waits
        self.gone: Callable[[int, int], None] = nobody_knows
        self.ended: Callable[[int, int], None] = nobody_knows
        self._going = num_lanes
        self._num_fragments = num_fragments

    def __call__(self, turns: Turns) -> Dealt:
        """Take a lane that has done its turn, or takes its first."""
        lane, fragment = turns, turns.fragment
        is_last = fragment is not None and fragment.sequence + 1 == self._num_fragments
        if lane.is_set_aside and fragment is None:
            self.leave(lane.index)
        if lane.is_set_aside:
            self.gone(lane.index, lane.sequence)
        elif is_last:
            self.ended(lane.index, lane.sequence)
        if lane.is_set_aside or is_last:
            self._going -= 1
            return Dealt(None, fragment)
        return Dealt(lane, fragment)

    def expect(self, lanes: int) -> None:
        """Say that so many more lanes come by than was said at first."""
        self._going += lanes

    @property
    def done(self) -> bool:
        """Whether every lane has stopped."""
        return self._going == 0


def ring_of_turns(rollouts: RolloutsElsewhere, deal: Deal, gate: Gate | None) -> Graph:
    """The ring of turns, with the output `fragments`; the gate lets a lane take its next one."""
    graph = Graph("rollout")
    graph.add(rollouts=rollouts, deal=deal, pace=_passed_on)
    graph.output("fragments", "deal.fragments", capacity=rollouts.most_lanes)
    graph.connect("rollouts", "deal")
    graph.connect("deal.turns", "pace", gate=gate)
    graph.connect("pace", "rollouts", feedback=True)
    return graph


def _passed_on(turns: Turns) -> Turns:
    return turns
