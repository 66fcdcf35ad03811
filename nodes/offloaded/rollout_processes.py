"""Whole rollouts in worker processes: environments, connectors and copies of the modules in each."""

import selectors
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.workers.frames import Frame, FrameKind, frame
from rollflow.nodes.env.workers.lane_status import LanePhase, RaisedError
from rollflow.nodes.env.workers.watch import Activity
from rollflow.nodes.env.workers.worker_node import LaneLink, WorkerNode
from rollflow.nodes.env.workers.worker_process import pickled
from rollflow.nodes.modules.policy_weights import Weights, pack_weights
from rollflow.nodes.offloaded.lane_rollout import AnyActing, LanePlan, loaded_versions
from rollflow.nodes.offloaded.lent_fragments import FragmentReader
from rollflow.nodes.offloaded.offloaded import OffloadedRollouts, TurnToken
from rollflow.nodes.stages.ring import STAGES
from rollflow.stream.data.blocks import SharedBlock, written_block
from rollflow.stream.data.packing import pack
from rollflow.stream.graph.meter import clock
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.graph.wakeup import Wakeup
from rollflow.stream.observe.waits import Wait

# Counters of a lane's rollout, i64 each, which its worker writes to:
#   how many transitions it has made
#   how often it has got on with something, which is what tells it from one that hangs
#   two numbers of what is under way, as `CallMark` has them
#   for how long each of its stages has been busy, in ns, when it got on with something last
#   how many transitions the next vector step may end
PROGRESS = slice(4, None)  # behind those of an `ActivityFlag`
MARK, BUSY, UNDER_WAY = slice(2, 4), slice(4, 4 + len(STAGES)), 4 + len(STAGES)
_OF_ROLLOUT = "rollout", "first_step", "reported"
_MOST_FREED = 64  # blocks told of in a turn: a worker that is at another lane reads none, and a socket has room for 278


class RolloutLink(LaneLink):
    """The link to a worker that makes whole fragments.

    lane       token of the lane, which goes round
    steps      transitions in the fragments that have come
    stages     what the worker's stages have counted, as `LaneRollout.report` has it
    versions   module id -> version of the weights that were sent last
    untaken    weights that were sent and that the worker has not taken over yet
    lost       why the worker before was lost, until the first fragment of the one after it; None: it was not
    before     state that its rollout goes on from when it begins; None: it begins anew, or has begun
    """

    before: dict[str, Any] | None = None

    def __init__(self, index: int, maker: Any, node: Any) -> None:
        super().__init__(index, maker, node)
        self.lane: TurnToken
        self.steps = 0
        self.versions: dict[Any, int] = {}
        self.untaken = 0
        self.lost: str | None = None
        self.stages: Sequence[list[Any]] = ()
        self._has_told = False  # whether the last fragment of the worker that is being lost says itself why
        self._states: SharedBlock | None = None  # of connectors, that the worker was told last
        self.reported = 0  # by the worker as it is now
        self._progress: NDArray[np.int64] | None = None
        self._fragments: FragmentReader | None = None
        self.seed = 0  # of the environments since the last start

    # Requests

    def step(self) -> None:
        """Have the next fragment made."""
        self._turn()

    def offer(self) -> None:
        """Have the newest weights used in the fragment that is being made, unless others are under way."""
        is_making = self.phase in (LanePhase.RESETTING, LanePhase.STEPPING) and not self.node.keeps_order
        if is_making and not self.untaken:
            self._send_weights()

    def _reset(self) -> None:
        """Have the rollout built, with the weights of its modules, and its first fragment made."""
        acting, plan = self.node.acting, self.node.plan_for(self.lane, self.starts)
        setup = pickled((acting, plan), _parts_of(acting))
        self._progress = self.activity.memory[PROGRESS]
        self._progress[MARK] = 0, -1
        self.reported = 0 if plan.state is None else plan.state["reported"]
        self._fragments = FragmentReader(self.index, hands_on=self.node.is_shared)
        self.seed = plan.environments["seed"]
        self.versions, self.untaken = dict(plan.versions), 0
        self.send_block(FrameKind.SET_UP, setup)
        self._turn()

    def _turn(self) -> None:
        """Have the next fragment made, with the newest weights, and with what connectors elsewhere have learnt."""
        assert self._fragments is not None
        for _ in range(min(len(self._fragments.freed), _MOST_FREED)):
            self.send(frame(FrameKind.FREE, self._fragments.freed.popleft()))
        states = self.node.states
        if states is not None and states is not self._states:
            self.send(frame(FrameKind.STATES, number=states.size), states.fd)
        self._states = states
        self._send_weights()
        self.send(frame(FrameKind.TURN))

    def _send_weights(self) -> None:
        for module_id, version, block in self.node.lacking(self.versions):
            self.send(frame(FrameKind.WEIGHTS, number=block.size), block.fd)
            self.versions[module_id], self.untaken = version, self.untaken + 1

    # Answers

    def take(self, answer: Frame) -> bool:
        """Take a fragment, or what the worker says beside it."""
        kind, fragments = answer.kind, self._fragments
        assert fragments is not None
        if kind is FrameKind.NEW_BLOCK:
            fragments.map(answer.block, SharedBlock(answer.number, answer.fd))
        elif kind is FrameKind.TAKEN:
            self.untaken -= 1
            self.offer()
        elif kind is FrameKind.FRAGMENT:
            self._take_fragment(fragments, answer)
            return True
        return False

    def states_in(self, fields: Mapping[str, Any]) -> Any:
        """Keep the state of the rollout in the token of the lane."""
        self.lane.elsewhere |= {name: fields[name] for name in _OF_ROLLOUT}
        return fields["environments"]

    def get_state(self) -> dict[str, Any]:
        """What is known of the lane here."""
        return self.before or {"starts": self.starts, "steps": self.steps, "lost": self.lost}

    def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave, with the state of the rollout, if there is one, or another start."""
        self.before = dict(state) if "rollout" in state else None
        self.starts, self.steps, self.lost = state["starts"] - ("rollout" in state), state["steps"], state["lost"]

    def fail(self, failure: Mapping[str, Any]) -> int:
        """Take an error that the worker told of: how many transitions were under way."""
        self.forget_progress()
        self._has_told = failure is self.failure
        if not self._has_told:
            self.lost = RaisedError.in_fields(failure).line
        return int(failure.get("lost_steps", 0))

    def _take_fragment(self, fragments: FragmentReader, answer: Frame) -> None:
        fields = self._fields_of(answer)
        self.node.take_turn(self, fragments.read(fields), fields, is_checked=False)
        self.phase, self.failure = LanePhase.READY, fields.get("failure")
        if self.failure is None:
            self.failures = 0
        else:
            self.failure |= {"lost_steps": fields["lost_steps"]}
        self.node.take_message(self.index, fields)

    # What is seen

    def counted(self) -> Sequence[list[Any]]:
        """Counts of the worker's stages, as `stages`, up to its newest step, and the call under way."""
        progress, stages = self._progress, {name: counts for name, *counts in self.stages}
        if progress is None:
            return self.stages
        at_work, steps = self.under_way, int(progress[1])
        busy = dict(zip(STAGES, (progress[BUSY] / 1e9).tolist(), strict=True))
        if at_work is not None:
            busy[at_work[0]] += at_work[1]
        return [
            [name, max(items, steps), seconds, *calls]
            for name, seconds in busy.items()
            for items, _, *calls in [stages.get(name, (0, 0.0))]
        ]

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The stage whose call is under way in the worker, and for how many seconds; None if there is none."""
        if self._progress is None:
            return None
        since, number = self._progress[MARK].tolist()
        return None if number < 0 else (STAGES[number], max(clock() - since, 0) / 1e9)

    @property
    def unreported(self) -> int:
        """Transitions that the worker has made and that are in no fragment that has come."""
        return 0 if self._progress is None else max(0, int(self._progress[0]) - self.reported)

    def lose(self, reason: str) -> int:
        """Give the worker up: how many transitions are lost with it, the step that was under way among them."""
        progress, lost = self._progress, 0
        is_making = self.is_waited and progress is not None
        if is_making or (self.phase is LanePhase.READY and not self._has_told):
            self.lost = reason
        self._has_told = False
        if self.is_waited and progress is not None:
            lost = self.unreported + int(progress[UNDER_WAY])
        self.has_stepped |= self.has_made_steps
        self.forget_progress()  # also of one that dies between two turns: it has told of all that it made
        return lost

    @property
    def doing(self) -> Wait:
        """What the worker is at right now: a call of one of its stages, or its environments' first reset."""
        at_work = self.under_way
        if at_work is None or self.phase is not LanePhase.STEPPING:
            return super().doing
        stage, seconds = at_work
        doing = super().doing.doing if stage == STAGES[0] else f"is in node '{stage}'"
        return Wait("", "call", doing, mark=(self.pulse, stage), age_s=seconds, calls=self.pulse)

    def late_with(self, text: str) -> str:
        """The words for what the worker is late with, and the stage that it hangs in."""
        at_work = self.under_way
        return text if at_work is None else f"{text}; it has been in node '{at_work[0]}' for {at_work[1]:.1f} s"

    def release(self) -> None:
        """Release the memory that the worker wrote to; its counts stay."""
        self._fragments = self._states = None
        if self._progress is not None:
            self._progress = self._progress.copy()

    def forget_progress(self) -> None:
        """Count no more what the worker has made and not given."""
        self._progress = None

    @property
    def has_made_steps(self) -> bool:
        """True once its environments have made a step."""
        return self.has_stepped or self.steps + self.unreported > 0

    @property
    def has_no_step(self) -> bool:
        """True if the lane would have to be made or reset before it could come back with a step."""
        # A worker says that it gets on with something before it looks for what it has been told: one that has not said
        # so by now will find that it is to end, and make no step.
        return super().has_no_step and not (self.phase is LanePhase.RESETTING and self.pulse)

    @property
    def progress(self) -> tuple[int, Activity]:
        """Count by which the worker shows that it gets on, and its activity."""
        turns, activity = super().progress
        return turns + self.pulse, activity

    @property
    def pulse(self) -> int:
        """Count by which the worker shows that it gets on: first when its environments have been reset."""
        return 0 if self._progress is None else int(self._progress[1])


def _parts_of(acting: AnyActing) -> Iterator[tuple[str, Any]]:
    """Parts of a rollout that may not be picklable, and their names."""
    for module, _ in acting.by_id.values():
        yield f"module '{type(module).__name__}'", module
    for name, pipeline in acting.named_pipelines:
        for piece in pipeline.connectors:
            yield f"{name}, piece '{piece.name}'", piece


class RolloutProcesses(WorkerNode, OffloadedRollouts):
    """A node that has each lane's rollout done in a worker process: takes turns, gives fragments.

    What acts is pickled. A lost worker takes with it what it had made of its fragment, counted in
    `lost_steps`, and what its connectors had learnt and logged since the one before.
    """

    program, link_of = "rollflow.nodes.offloaded.rollout_worker", RolloutLink
    steps_while_draining = False
    remotes: list[RolloutLink]  # type: ignore[assignment]  # as `link_of` makes them

    def __init__(self, env: Any, **options: Any) -> None:
        self._bell = Wakeup()  # rung when there are new weights
        super().__init__(env, **options)
        self._selector.register(self._bell, selectors.EVENT_READ, RolloutProcesses._spread)

    def start(self) -> Iterator[Any]:
        """The lanes, each of which may take its first turn."""
        self.lanes = self.lanes or self._tokens()
        for link, lane in zip(self.remotes, self.begin_lanes(), strict=True):
            link.lane = lane
            yield lane

    def get_state(self) -> list[Any]:
        self.note_states()
        states = super().get_state()
        return [
            self.states_before[link.index] if link.before is not None else each
            for link, each in zip(self.remotes, states, strict=True)
        ]

    def go_on_from(self, states: Sequence[Any], order: Sequence[int] | None) -> None:
        super().go_on_from(states, order)
        for link, lane in zip(self.remotes, self.lanes, strict=True):
            link.go_on_from(lane.elsewhere)

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have every worker's connectors take over states before its next turn."""
        data = pack(list(states), "the connectors' state")
        self.states = written_block(data)

    def hasten(self) -> None:
        """Have every worker give what there is of the fragment that it is making; from now on none is made again."""
        for link in self.remotes:
            if link.phase in (LanePhase.RESETTING, LanePhase.STEPPING):
                link.send(frame(FrameKind.DRAIN))
        super().hasten()

    def plan_for(self, token: TurnToken, starts: int) -> LanePlan:
        """The plan of a lane's rollout that begins with its next fragment."""
        lane, is_listed = token.index, self.slot_seeds is not None and not starts
        environments = {
            "first_lane": lane,
            "first_slot": self.first_slots()[lane],
            "fragment_length": self.fragment_length,
            "seed": seed_for(self.seed, "restart", starts) if starts else self.seed,
            "slot_seeds": tuple(self.seeds_of_lane(lane, 0)) if is_listed else None,
        }
        link = self.remotes[lane]
        before, link.before = link.before, None
        return LanePlan(
            environments,
            token.sequence,
            token.step,
            self.lookback,
            self.how,
            loaded_versions(self.acting),
            is_shared=not self.kind.has_several,
            name=token.name,
            state=None if before is None else {**before, "environments": self.states_before[lane]},
            records=self.records_actions,
        )

    # Inside

    def _end(self) -> None:
        super()._end()
        self._bell.close()

    def _packed(self, module_id: Any, version: int, weights: Weights) -> SharedBlock:
        return written_block(pack_weights(version, weights, module_id))

    def _announce(self) -> None:
        self._bell.ring()

    def _spread(self) -> Iterator[Any]:
        """Offer every worker the newest weights."""
        self._bell.silence()
        for link in self.remotes:
            link.offer()
        return iter(())
