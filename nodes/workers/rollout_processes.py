"""Whole rollouts in worker processes: environments, connectors and a copy of the module in each."""

import selectors
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import cloudpickle

from rollflow.nodes.env_source import EnvSource
from rollflow.nodes.lane_rollout import LanePlan
from rollflow.nodes.weights_codec import pack_weights
from rollflow.nodes.workers.frames import Frame, Kind, frame
from rollflow.nodes.workers.lane_link import LaneLink, State
from rollflow.nodes.workers.process_environments import ProcessEnvironments
from rollflow.nodes.workers.rollout_link import News, RemoteLane, RolloutLink
from rollflow.stream.bell import Bell
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.errors import EnvError, RunError
from rollflow.stream.fragment import Fragment
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.report import NodeReport
from rollflow.stream.seeding import seed_for


class Dealt(NamedTuple):
    """What one lane's turn gives."""

    turns: RemoteLane | None
    fragments: Fragment | None


class RolloutProcesses(ProcessEnvironments):
    """A node that has each lane's rollout done in a worker process: takes turns, gives fragments.

        acting      how forward passes are done: what `ModuleForward` takes beside module and weights
        replica     what a worker needs beside its environments, to be pickled: asked for whenever one is started
        heard       told of what connectors have learnt and logged: (lane, message)

    A worker that is killed takes the fragment with it that it was making: its transitions are in `lost_steps`. One
    whose environment raises gives what it has.
    """

    program = "rollflow.nodes.workers.rollout_worker"
    link_class = RolloutLink

    def __init__(self, env: EnvSource, **options: Any) -> None:
        self.acting: Mapping[str, Any] = {}
        self.replica: Callable[[], dict[str, Any]] = dict
        self.heard: Callable[[int, Mapping[str, Any]], None] = lambda lane, told: None
        self._states: SharedBlock | None = None  # of connectors, for workers to take over
        self._states_of: dict[int, SharedBlock | None] = {}
        self._news: News | None = None
        self._publishing = threading.Lock()
        self._bell = Bell()  # rung when there are new weights
        super().__init__(env, **options)
        self._selector.register(self._bell, selectors.EVENT_READ, RolloutProcesses._spread)

    def start(self) -> Iterator[Any]:
        """The lanes, each of which may take its first turn."""
        self._begin()
        for link, env in zip(self._links, self.envs, strict=True):
            assert isinstance(link, RolloutLink)
            link.remote = RemoteLane(link.index, env.num_envs)
            yield link.remote

    def __call__(self, turns: RemoteLane) -> RemoteLane | None:  # type: ignore[override]
        """Have the lane's worker make its next fragment."""
        link = self._links[turns.index]
        turns.fragment = None
        self._await(link)
        if link.state is State.ASIDE or self._is_draining:
            self._came_aside.append(link)
        elif link.state in (State.MADE, State.READY):
            self._go_on(link)
        return None

    def broadcast(self, version: int, weights: Mapping[str, Any]) -> None:
        """Have every worker use these weights from its next forward pass on. From any thread; waits for no worker.

        One that is slower than they are published is given the newest whenever it is done with those before.
        """
        data = pack_weights(version, weights)
        block = SharedBlock(len(data))
        block.write(data)
        with self._publishing:
            if not self.is_closed and (self._news is None or version > self._news.version):
                self._news = News(version, block)
                self._bell.ring()

    def hand_on(self, states: bytes) -> None:
        """Have every worker's connectors take over packed states before its next turn."""
        self._states = SharedBlock(len(states))
        self._states.write(states)

    def hasten(self) -> None:
        """Have every worker give what there is of the fragment that it is making; from now on none is made again."""
        for link in self._links:
            if link.state in (State.RESETTING, State.STEPPING):
                link.send(frame(Kind.DRAIN))
        super().hasten()

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made, but for those that were lost."""
        return sum(link.steps + link.unreported for link in self._rollout_links)

    @property
    def uncut_steps(self) -> int:
        """Those of them that are in no fragment yet."""
        return sum(link.unreported for link in self._rollout_links)

    def stages(self, elapsed_s: float) -> list[NodeReport]:
        """What the workers' stages have counted: items of all, times of the average worker."""
        found: dict[str, list[tuple[int, float]]] = {}
        for link in self._rollout_links:
            for name, items, busy in link.stages:
                if name != "caller":
                    found.setdefault(name, []).append((items, busy))
        reports = []
        for name, counted in found.items():
            busy = min(elapsed_s, sum(busy for _, busy in counted) / len(self._links))
            reports.append(NodeReport(name, sum(items for items, _ in counted), busy, elapsed_s - busy, 0.0))
        return reports

    def describe(self) -> str:
        """Lanes, slots and processes, for `explain()`."""
        return f"{super().describe()}, each with connectors and a copy of the module"

    def close(self) -> None:
        """End the worker processes and give back the shared memory."""
        with self._publishing:
            super().close()
            self._news = self._states = None
            self._states_of.clear()
            self._bell.close()

    # What ProcessEnvironments does otherwise

    def set_lookback(self, lookback: int) -> None:
        """Have every fragment begin with so many steps of the one before (H). Before the first step only."""
        if self.is_started and lookback != self.lookback:
            raise RunError("these environments have been started: their lookback stays as it is")
        self.lookback = lookback

    @property
    def _rollout_links(self) -> list[RolloutLink]:
        return [link for link in self._links if isinstance(link, RolloutLink)]

    def _go_on(self, link: LaneLink) -> None:
        assert isinstance(link, RolloutLink)
        if link.state is State.MADE:
            seed = seed_for(self.seed, "restart", link.starts) if link.starts else self.seed
            replica = self._replica_for(link, seed)
            layout = self._layout(link.index, self.envs[link.index], seed)
            link.set_up(_pickled(replica), replica["version"], layout)
        if link.state in (State.MADE, State.READY):
            link.turn(self._news, self._states if self._states_of.get(link.index) is not self._states else None)
            self._states_of[link.index] = self._states

    def _spread(self, events: int) -> Iterator[Any]:
        """Offer every worker the newest weights."""
        self._bell.silence()
        for link in self._rollout_links:
            link.offer(self._news)
        return iter(())

    def _answered(self, link: LaneLink, answer: Frame) -> Iterator[Any]:
        assert isinstance(link, RolloutLink)
        if answer.kind is Kind.NEW_BLOCK:
            link.map(answer)
        elif answer.kind is Kind.TAKEN:
            link.untaken -= 1
            link.offer(self._news)
        elif answer.kind is Kind.BEGUN:
            link.begin()
            self._patience.begin(link.index)
        elif answer.kind is Kind.FRAGMENT:
            told = link.read(answer)
            self.heard(link.index, told)
            yield self._come_back(link)
            if "failure" in told:
                yield from self._failed(link, told["failure"] | {"lost_steps": told["lost_steps"], "is_told": True})
        else:
            yield from super()._answered(link, answer)

    def _failed(self, link: LaneLink, told: Mapping[str, Any]) -> Iterator[Any]:
        assert isinstance(link, RolloutLink)
        self.lost_steps += told.get("lost_steps", 0)
        link.forget_progress()
        if not told.get("is_told"):  # by a fragment that says itself what was lost
            link.lost = f"{told['type']}: {told['text']}"
        yield from super()._failed(link, told)

    def _lane_of(self, link: LaneLink) -> Any:
        assert isinstance(link, RolloutLink)
        return link.remote

    def _lost_with(self, link: LaneLink, reason: str, was: State) -> int:
        assert isinstance(link, RolloutLink)
        return link.give_up(reason)  # nothing where it has said itself what is lost

    def _has_no_step(self, link: LaneLink) -> bool:
        assert isinstance(link, RolloutLink)
        # A worker says that it gets on with something before it looks for what it has been told: one that has not said
        # so by now will find that it is to end, and make no step.
        return super()._has_no_step(link) and not (link.state is State.RESETTING and link.pulse)

    def _is_late(self, link: LaneLink) -> bool:
        assert isinstance(link, RolloutLink)
        return not link.has_moved()

    def _replica_for(self, link: RolloutLink, seed: int) -> dict[str, Any]:
        assert link.remote is not None
        plan = LanePlan(
            lane=link.index,
            first_slot=self.first_slots()[link.index],
            sequence=link.remote.sequence,
            fragment_length=self.fragment_length,
            lookback=self.lookback,
            seed=seed,
            acting=self.acting,
        )
        return self.replica() | {"plan": plan}


class Deal:
    """A node that parts the fragments from the turns, which go round.

    num_lanes        lanes that come by
    num_fragments    after so many fragments a lane stops; None: it never does
    give_back        called when a turn has given no fragment, and never will
    """

    def __init__(self, num_lanes: int, num_fragments: int | None, give_back: Callable[[int], None]) -> None:
        self._going = num_lanes
        self._num_fragments = num_fragments
        self._give_back = give_back

    def __call__(self, turns: RemoteLane) -> Dealt:
        """Take a lane that has done its turn."""
        lane, fragment = turns, turns.fragment
        is_last = fragment is not None and fragment.sequence + 1 == self._num_fragments
        if lane.is_set_aside and fragment is None:
            self._give_back(1)
        if lane.is_set_aside or is_last:
            self._going -= 1
            return Dealt(None, fragment)
        return Dealt(lane, fragment)

    @property
    def done(self) -> bool:
        """Whether every lane has stopped."""
        return self._going == 0


def ring_of_turns(rollouts: RolloutProcesses, deal: Deal, gate: Gate | None) -> Graph:
    """The ring of turns, with the output `fragments`; the gate lets a lane take its next one."""
    graph = Graph("rollout")
    graph.add(rollouts=rollouts, deal=deal, pace=_passed_on)
    graph.output("fragments", "deal.fragments", capacity=rollouts.num_lanes)
    graph.connect("rollouts", "deal")
    graph.connect("deal.turns", "pace", gate=gate)
    graph.connect("pace", "rollouts", feedback=True)
    return graph


def _passed_on(turns: RemoteLane) -> RemoteLane:
    return turns


def _pickled(replica: dict[str, Any]) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(replica)
    except Exception as error:
        raise EnvError(
            f"the module and the connectors can't be handed to a worker process: {error}; expected them to hold "
            "nothing that can't be pickled"
        ) from error
    return pickled
