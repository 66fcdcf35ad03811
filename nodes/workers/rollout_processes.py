"""Whole rollouts in worker processes: environments, connectors and a copy of the module in each."""

import selectors
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from rollflow.nodes.env_source import EnvSource
from rollflow.nodes.lane_rollout import LanePlan
from rollflow.nodes.rollouts_elsewhere import RolloutsElsewhere, Turns
from rollflow.nodes.weights_codec import pack_weights
from rollflow.nodes.workers.frames import Frame, Kind, frame
from rollflow.nodes.workers.lane_link import LaneLink, State
from rollflow.nodes.workers.process_environments import ProcessEnvironments
from rollflow.nodes.workers.rollout_link import News, RolloutLink
from rollflow.stream.bell import Bell
from rollflow.stream.blocks import SharedBlock
from rollflow.stream.errors import EnvError
from rollflow.stream.packing import pack
from rollflow.stream.seeding import seed_for


class RolloutProcesses(RolloutsElsewhere, ProcessEnvironments):
    """A node that has each lane's rollout done in a worker process: takes turns, gives fragments.

    What `replica` gives is pickled. What a lost worker had made of its fragment lies in shared memory, and is given:
    only the step under way is missing. It takes with it what its connectors had learnt and logged since the last one.
    """

    program = "rollflow.nodes.workers.rollout_worker"
    link_class = RolloutLink

    def __init__(self, env: EnvSource, **options: Any) -> None:
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
            link.remote = Turns(link.index, env.num_envs)
            yield link.remote

    def __call__(self, turns: Turns) -> Turns | None:  # type: ignore[override]
        """Have the lane's worker make its next fragment."""
        link = self._links[turns.index]
        turns.fragment = None
        self._await(link)
        if link.state is State.ASIDE or self.is_draining:
            self._came_aside.append(link)
        elif link.state in (State.MADE, State.READY):
            self._go_on(link)
        return None

    def broadcast(self, version: int, weights: Mapping[str, Any]) -> None:
        """Have every worker use these weights from its next forward pass on."""
        data = pack_weights(version, weights)
        block = SharedBlock(len(data))
        block.write(data)
        with self._publishing:
            if not self.is_closed and (self._news is None or version > self._news.version):
                self._news = News(version, block)
                self._bell.ring()

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have every worker's connectors take over states before its next turn."""
        data = pack(list(states), "the connectors' state")
        self._states = SharedBlock(len(data))
        self._states.write(data)

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

    def counted(self) -> Iterable[list[list[Any]]]:
        """What each worker's stages have counted."""
        return [link.stages for link in self._rollout_links]

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

    @property
    def _rollout_links(self) -> list[RolloutLink]:
        return [link for link in self._links if isinstance(link, RolloutLink)]

    def _go_on(self, link: LaneLink) -> None:
        assert isinstance(link, RolloutLink)
        if link.state is State.MADE:
            seed = seed_for(self.seed, "restart", link.starts) if link.starts else self.seed
            replica = self._replica_for(link, seed)
            layout = self._layout(link.index, self.envs[link.index], seed)
            link.set_up(_pickled(replica), replica["version"], layout, hands_on=self.is_shared)
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
        elif answer.kind is Kind.FILLING:
            link.fill(answer)
        elif answer.kind is Kind.BEGUN:
            link.begin()
            self._watch.begin(link.index)
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
        link.has_told = told.get("is_told", False)  # by a fragment that says itself what was lost
        if not link.has_told:
            link.lost = f"{told['type']}: {told['text']}"
        yield from super()._failed(link, told)

    def _lane_lost(self, link: LaneLink, reason: str, told: str = "") -> Iterator[Any]:
        assert isinstance(link, RolloutLink)
        assert link.remote is not None
        if link.state is State.READY and not link.has_told:  # between two turns: no fragment could say what ends
            link.lost = reason
        link.has_told = False
        yield from super()._lane_lost(link, reason, told)
        if link.is_waited and link.remote.fragment is not None:  # which has been rescued
            yield self._come_back(link)

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
            digests=self.digests,
        )
        return self.replica() | {"plan": plan}


def _pickled(replica: dict[str, Any]) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(replica)
    except Exception as error:
        raise EnvError(
            f"the module and the connectors can't be handed to a worker process: {error}; expected them to hold "
            "nothing that can't be pickled"
        ) from error
    return pickled
