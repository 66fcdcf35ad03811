"""The base of nodes that step environments, of one agent each or of several."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from threading import get_ident
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.env.env_source import Autoreset
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import seeds_for, takes_one_seed
from rollflow.stream.data.closing import close_all, closing_on_error
from rollflow.stream.data.errors import EnvError, RunError, noted
from rollflow.stream.fragments.lane import Lane, LaneBlocks
from rollflow.stream.graph.meter import CallTimes
from rollflow.stream.graph.report import NodeReport
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.observe.stacks import stack_of_thread
from rollflow.stream.observe.trace import FragmentTrace
from rollflow.stream.observe.waits import Wait

if TYPE_CHECKING:
    from rollflow.nodes.env.environments import EnvKind

logger = logging.getLogger(__name__)
_MOST_LANES = 1 << 16  # where others may come


class LaneGate:
    """A gate that is asked once for each fragment that a lane begins; this one lets all of them begin.

    Beside what every gate has, it takes note of fragments and lanes that never come. Gates of other classes are told of
    them too, by the methods that they have of it. As a listener it hears of lanes lost, come and gone; this one does
    nothing. All in the thread that the graph runs in.
    """

    def __init__(self) -> None:
        self._begun_by: dict[int, int] = {}  # lane -> its last fragment: a step that was lost is begun again
        self._changed: Callable[[], None] = nobody
        self.is_shut = False  # to all lanes
        self.stopped: set[int] = set()  # numbers of lanes that have come while it was shut last

    @property
    def limit(self) -> int:
        """Fragments that a lane may have begun and whose reader is not done with them."""
        return 1

    @property
    def wants_newest(self) -> bool:
        """True if fragments are to begin with the newest weights."""
        return False

    def admits(self, lane: Any) -> bool:
        """True if the lane may take its next step.

        lane    here or in another process: has `index`, `at_start`, True before the first step of a fragment, and
                `sequence`, the number of that fragment
        """
        if self.is_shut:
            self.stopped.add(lane.index)
            return False
        if not lane.at_start or self._begun_by.get(lane.index) == lane.sequence:
            return True
        if not self._lets_begin(lane):
            return False
        self._begun_by[lane.index] = lane.sequence
        return True

    def _lets_begin(self, lane: Any) -> bool:
        """True if the lane may begin its next fragment, which is counted then."""
        return True

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Block in which no lane goes on; `stopped` has those that have come. In the thread that the graph runs in."""
        self.stopped, self.is_shut = set(), True
        self._changed()
        try:
            yield
        finally:
            self.is_shut = False
            self._changed()

    def watch(self, changed: Callable[[], None]) -> None:
        """Take the function to be called when a lane that was refused might be admitted."""
        self._changed = changed

    def leave(self, lane: int) -> None:
        """Take note that the fragment which a lane began last never comes."""

    def gone(self, lane: int, fragments: int) -> None:
        """Take note that a lane gives no more than so many fragments in all."""

    # As a listener, which environments tell of lanes

    def lane_acts(self, lane: Any) -> None:
        """Take note that a lane has its actions, and is to be stepped, if lanes keep their order."""

    def lane_lost(self, lane: int) -> None:
        """Take note that the lane of this number is lost; it may begin anew."""

    def lane_joined(self, lane: Any, fills_a_vacancy: bool) -> None:
        """Take note of a lane that came after the beginning, maybe as the first after the last has left."""

    def lane_left(self, lane: Any, was_the_last: bool) -> None:
        """Take note of a lane that has left, before it circulates for the last time."""

    def lane_absent(self, lane: Any) -> None:
        """Take note of a lane whose host is away, for as long as others are there."""

    def lane_back(self, lane: Any) -> None:
        """Take note of a lane that is absent no more: its host is back, or has left, or there are no others."""


def nobody() -> None:
    """Do nothing: nobody watches."""


class LaneSource:
    """Node that steps the environments of some lanes, once: in this process, if a subclass does not do otherwise.

        env                what environments are made of, or they themselves: see `EnvKind`
        kind               of environments: with one agent each, or several
        num_envs, lanes    environments in all, and groups of them that step on their own; None: as many as there are
        fragment_length    vector steps in a fragment (T)
        lookback           steps of the fragment before that each fragment begins with (H), unless `make_lanes` says it
        seed               of every environment
        slot_seeds         one seed for each environment, in the slots' order; None: they follow from `seed`
        first_lane,        numbers of the first lane and environment, if other lanes of the rollout are elsewhere
        first_slot
        autoreset_mode     of environments with one agent, as gymnasium takes it; None: SAME_STEP for those that are
                           made here of plain environments, and their own for all others

    envs                     the environments of every lane
    num_envs                 environments in all
    parts                    agents by their spaces; of environments with one agent a single part
    observation_space,       of environments with one agent, and the space of the module's choices, which are recorded
    action_space,
    chosen_space
    lanes                    as they circulate, from `make_lanes` or the beginning on
    is_shared                whether other processes may look at what lanes record
    is_started, is_closed    True once it is
    unrecorded_steps         transitions of vector steps that raised: some of them may not have been made
    lost_steps               transitions that were under way if environments were lost: only workers and hosts are
    has_fixed_lanes          True if no lane is added, and none but those that are set aside leaves
    listener                 is told of lanes that are lost, come and go: see `report_lanes_to`
    deviations               of what environments give: the first of each kind is logged
    is_draining              True if lanes come back without a step, since no more are asked for
    call_times               of its calls, or of what lanes come back from
    may_wait                 whether steps may be waited for in the graph's thread: nothing else is to be done there
    has_own_thread           whether the graph runs in a thread that does nothing else
    records_actions          whether steps of environments whose state can't be read are recorded
    states_before                   of every lane's environments, from which those of lanes that are restored go on
    keeps_order              whether lanes come back in the order of their numbers, wherever they step
    order                    their numbers, that of the lane that comes next at first; empty before they begin
    trace                    records lanes and their steps; None: nothing is traced

    Raises EnvError when environments can't be made, or differ, and ValueError for `slot_seeds` that are not one for
    each environment, or if a vector environment takes one seed for all of its slots.
    """

    has_fixed_lanes = True
    may_wait = True
    has_own_thread = is_draining = False
    lost_steps = 0
    keeps_order = records_actions = False
    may_be_async = False  # whether environments may answer for some of a lane's slots at a time
    does = "step"  # what a lane comes back from, in a trace

    def __init__(
        self,
        env: Any,
        *,
        kind: "EnvKind",
        num_envs: int | None = None,
        lanes: int | None = None,
        fragment_length: int = 128,
        lookback: int = 1,
        seed: int = 0,
        slot_seeds: Sequence[int] | None = None,
        first_lane: int = 0,
        first_slot: int = 0,
        autoreset_mode: Autoreset = None,
    ) -> None:
        self.kind, self._autoreset_mode = kind, autoreset_mode
        self.seed, self.slot_seeds = checked_count("seed", seed, 0), slot_seeds
        self.fragment_length = checked_count("fragment_length", fragment_length, 1)
        self.lookback = checked_count("lookback", lookback, 0)
        self._first_lane = checked_count("first_lane", first_lane, 0)
        self._first_slot = checked_count("first_slot", first_slot, 0)
        self._first_step = 0  # of every lane
        self.is_started = self.is_closed = self.is_shared = False
        self.unrecorded_steps = 0
        self.deviations = Deviations()
        self._steps_lane = -1  # number of the lane whose environments are being stepped here
        self._thread = 0  # of the first resets here
        self._resets_lane = -1  # number of the lane whose first reset is under way here
        self._here: Sequence[Any] = ()  # what steps the lanes, where that is in this process
        self._opened: list[tuple[str, Any]] = []  # names and environments: made here, and to be closed here
        self.listener = LaneGate()
        self.call_times = CallTimes()
        self.trace: FragmentTrace | None = None
        self.states_before: Sequence[Any] = ()
        self.order: deque[int] = deque()
        self.lanes: Sequence[Any] = []
        self._lanes_fit = False  # those that stand, but for their lookback
        self._of_lanes: tuple[Any, ...] = ()
        with closing_on_error(self._close_opened):
            self.envs: Sequence[Any] = self._made(env, num_envs, lanes)
            self.num_envs = sum(each.num_envs for each in self.envs)
            self.parts: tuple[AgentPart, ...] = kind.parts_of(self.envs, self.first_slots(), num_envs, lanes)
            self.observation_space, self.action_space = self.parts[0][1:3]
            self.chosen_space = self.action_space
            self._check_slot_seeds()

    def share(self) -> None:
        """Have lanes write if other processes on this host may look. Before the first step only."""
        if not self.is_shared:
            self._refuse_if_started("their memory")
            self.is_shared, self._lanes_fit = True, False

    def set_chosen_spaces(self, chosen: Sequence[gym.Space[Any] | None]) -> None:
        """Have `actions` recorded in the space of what modules choose, part by part; None: in the environments' own.

        Before the lanes are made.
        """
        parts = zip(self.parts, chosen, strict=True)
        self.parts = tuple(part._replace(chosen_space=space) for part, space in parts)
        self.chosen_space = self.parts[0].recorded_space
        self._lanes_fit = False

    def make_lanes(self, lookback: int, *of_lanes: Any) -> None:
        """Make lanes that look back so many steps (H). Before the first step only; others are made anew.

        of_lanes    for `SeveralAgents.lane`: the mapping, and data of modules
        """
        self._refuse_if_started("their lookback")
        self._of_lanes = of_lanes
        if self._lanes_fit and lookback == self.lookback:
            return
        self._release_lanes()
        self.lookback, self._lanes_fit = lookback, True
        each = zip(self.envs, self.first_slots(), strict=True)
        self.lanes = [self._lane(index, envs, first) for index, (envs, first) in enumerate(each, self._first_lane)]

    def memory(self, index: int) -> LaneBlocks | None:
        """The memory of a lane's columns if its environments write to it themselves, else None."""
        return None

    def choose_memory(self, pipelines: Sequence[Any], device: Any) -> None:
        """Choose the memory of the lanes that are made next: here that of arrays.

        pipelines, device    by which the module acts, and where it is; None: anywhere
        """

    def report_lanes_to(self, listener: LaneGate) -> None:
        """Tell a listener of lanes from now on: it counts them, and may hold this node, so it comes with the run."""
        self.listener = listener

    def broadcast(self, published: Mapping[Any, tuple[int, Any]]) -> None:
        """Send weights, module id -> version and weights, to the forward passes that are done elsewhere: none are."""

    def stages(self, elapsed_s: float) -> list[NodeReport]:
        """Reports of the stages that are elsewhere: there are none."""
        return []

    @property
    def report_notes(self) -> Sequence[str]:
        """Sentences for a report: about lanes that give no more, which only workers and hosts have."""
        return ()

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.envs)

    @property
    def lanes_at_work(self) -> set[int]:
        """Numbers of the lanes that make steps, or should. From any thread."""
        return {lane.index for lane in list(self.lanes)}

    @property
    def most_lanes(self) -> int:
        """Largest number of lanes that there may come to be."""
        return self.num_lanes if self.has_fixed_lanes else _MOST_LANES

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made."""
        return sum(lane.num_steps for lane in self.lanes)

    @property
    def vector_steps(self) -> int:
        """Vector steps of the run so far, by which schedules go: those of the lane that has made most."""
        return max((lane.step for lane in list(self.lanes)), default=0) if self.is_started else self._first_step

    def begin_at(self, vector_steps: int) -> None:
        """Have lanes count on from so many vector steps, of a run that this one goes on with.

        Raises ValueError for what is no whole number, 0 or more, and RunError if it runs already.
        """
        if self.is_started:
            raise RunError(f"the run was to begin at step {vector_steps!r}, but it runs already; expected that before")
        self._first_step = checked_count("vector_steps", vector_steps, 0)

    def take_trace(self, name: str, trace: FragmentTrace | None) -> None:
        """Have the steps of every lane be traced; None: no more."""
        self.trace = trace

    def describe(self) -> str:
        """Lanes, and slots or environments and agents, for `explain()`."""
        count, sizes = len(self.envs), sorted({envs.num_envs for envs in self.envs})
        size, noun = " or ".join(map(str, sizes)), self.kind.noun + ("s" if sizes != [1] else "")
        agents = f" × {sum(len(part.agents) for part in self.parts)} agents" if self.kind.has_several else ""
        return f"{count} lane{'s' if count > 1 else ''} × {size} {noun}{agents}"

    # Steps

    def __call__(self, actions: Lane | MultiAgentLane) -> Lane | MultiAgentLane | None:
        """Step the lane's environments with the actions that it brings."""
        if self.keeps_order:
            self.listener.lane_acts(actions)
        lane: Lane | MultiAgentLane | None = self.hand_over(actions)
        return lane

    def start(self) -> Iterator[Any]:
        """Reset every environment; each lane sets out with its first observations. Raises RunError a second time."""
        for lane in self.begin_lanes():
            self._resets_lane, self._thread = lane.index, get_ident()
            self.reset_lane(lane)
            self._resets_lane = -1
            yield lane

    def begin_lanes(self) -> Sequence[Any]:
        """Begin: the lanes, each of which is to be reset by `reset_lane`. Raises RunError a second time."""
        if self.is_started:
            raise RunError("these environments have been run before: a rollout runs once, make another one")
        if self.is_closed:
            raise RunError("these environments have been closed: make another rollout")
        if not self.lanes:
            self.make_lanes(self.lookback)
        self.is_started = True
        for lane in self.lanes:
            lane.first_step = self._first_step
        return self.lanes

    def reset_lane(self, lane: Any) -> None:
        """Reset a lane's environments for the first time. In whichever thread."""
        place = lane.index - self._first_lane
        if self.states_before and self._goes_on(lane, place):
            return
        # The first episodes of the run that this one goes on with are not played again.
        seeds = self.seeds_of_lane(place, lane.vector_steps if self.states_before else 0)
        with noted(f"lane {lane.index}, the first reset"):
            lane.reset(*self._here[place].reset(seeds))

    def _goes_on(self, lane: Any, place: int) -> bool:
        """True if a lane's environments go on from their states; else its open episodes end."""
        try:
            seeds, ended = self.seeds_of_lane(place, lane.vector_steps), np.flatnonzero(lane.dead).tolist()
            with noted(f"lane {lane.index}, which goes on from a checkpoint"):
                self._here[place].set_state(self.states_before[place], seeds, ended)
        except EnvError as error:
            self.begin_anew(lane, str(error))
        return bool(lane.is_restored)

    def begin_anew(self, lane: Any, reason: str) -> None:
        """End the open episodes of a lane whose environments can't go on from their states."""
        logger.warning("lane %d: its environments begin anew, and its open episodes end: %s", lane.index, reason)
        lane.begin_anew(f"the run was resumed: {reason}")

    def record_actions(self) -> None:
        """Record the steps of environments whose state can't be read, for `get_state`. Before the first reset."""
        self.records_actions = True
        for each in self._here:
            each.record_actions()

    def get_state(self) -> list[Any]:
        """The states of every lane's environments. While none steps."""
        states = []
        for lane, each in enumerate(self._here, self._first_lane):
            with noted(f"lane {lane}, of which a checkpoint was to be saved"):
                states.append(each.get_state())
        return states

    def go_on_from(self, states: Sequence[Any], order: Sequence[int] | None) -> None:
        """Have the environments of lanes that are restored go on from these states, of every lane, when they begin.

        order    of the lanes' numbers, if they keep it: the first one steps next
        """
        self.states_before = states
        if order is not None:
            self.order = deque(order)

    def step_lane(self, lane: Any) -> None:
        """Step a lane's environments, and record what they give. In any thread."""
        try:
            self.kind.record(lane, self._here[lane.index - self._first_lane].step(lane.actions))
        except BaseException as error:
            error.add_note(lane.where)
            raise

    def hand_over(self, lane: Any) -> Any:
        """Step a lane's environments in the graph's own thread, and record what they give: the lane."""
        self._steps_lane = lane.index
        trace = self.trace
        if trace is not None:
            trace.begins(lane.index)
        try:
            stepped = self._here[lane.index - self._first_lane].step(lane.actions)
            self._steps_lane = -1
            self.kind.record(lane, stepped)
        except BaseException as error:
            self.unrecorded_steps += lane.steps_under_way
            error.add_note(lane.where)
            raise
        return lane

    def at_work(self, name: str) -> Iterable[Wait]:
        """What the environments are at right now, if this node steps them in the graph's own thread."""
        lane, resets = self._steps_lane, self._resets_lane
        remedy = "have it return, or end it by where='processes' or 'threads' with Timeouts(step=…)"
        if lane >= 0 and any(frame.name.rpartition(".")[2] == "reset" for frame in stack_of_thread(self._thread)):
            resets = lane
        elif lane >= 0:
            yield Wait(name, "call", "is in step()", where=f"lane {lane}", remedy=remedy)
        if resets >= 0:
            calls = int(lane >= 0 and self.lanes[lane - self._first_lane].has_begun_again)
            yield Wait(name, "call", "is in reset()", where=f"lane {resets}", limit="reset", remedy=remedy, calls=calls)

    def close(self) -> None:
        """Close all environments that this node made itself, also if one raises."""
        self.is_closed = True
        self._release()
        self._close_opened()

    def _release(self) -> None:
        """Release the memory of all lanes, and the listener: it may hold this node."""
        self.listener = LaneGate()
        self._release_lanes()

    def _release_lanes(self) -> None:
        for lane in self.lanes:
            lane.release()

    # Inside

    def _made(self, env: Any, num_envs: int | None, lanes: int | None) -> Sequence[Any]:
        """The environments of every lane."""
        made: list[Any] = []
        for lane, maker in enumerate(self.kind.makers(env, num_envs, lanes, self._autoreset_mode)):
            placed = replace(maker, first_slot=sum(each.num_envs for each in made))
            where = f"lane {self._first_lane + lane}, "
            made.append(placed.lane_env(self.deviations, where, may_be_async=self.may_be_async))
            if maker.can_travel:
                self._opened.append((f"the environments of lane {lane}", made[-1]))
        self._here = made
        return self.kind.envs_of(made)

    def _lane(self, index: int, envs: Any, first_slot: int) -> Any:
        """The lane of this number, of some environments, the first of which has the number `first_slot`."""
        return self.kind.lane(self, index, envs, first_slot, *self._of_lanes)

    # Seeds

    def first_slots(self) -> list[int]:
        """The number of every lane's first environment."""
        return list(accumulate((envs.num_envs for envs in self.envs[:-1]), initial=self._first_slot))

    def seeds_of_slots(self, first_slot: int, num_envs: int, starts: int = 0) -> list[int]:
        """Seeds of the first reset of `num_envs` environments, from slot `first_slot` on.

        starts    number of starts before. Another start goes on with other episodes than the first: the same ones might
                  fail in the same way
        """
        if starts:
            return seeds_for(seed_for(self.seed, "restart", starts), first_slot, num_envs)
        if self.slot_seeds is None:
            return seeds_for(self.seed, first_slot, num_envs)
        begin = first_slot - self.first_slots()[0]
        return list(self.slot_seeds[begin : begin + num_envs])

    def seeds_of_lane(self, place: int, starts: int) -> list[int]:
        """The seeds that the environments of a lane are first reset with, after so many starts."""
        return self.seeds_of_slots(self.first_slots()[place], self.envs[place].num_envs, starts)

    def _check_slot_seeds(self) -> None:
        """Raise ValueError unless the list of seeds has one for each environment, and each takes its own."""
        if self.slot_seeds is None:
            return
        if len(self.slot_seeds) != self.num_envs:
            raise ValueError(
                f"seed is a list of {len(self.slot_seeds)}, expected one whole number, or a list of {self.num_envs}: "
                "one for each environment"
            )
        for lane, env in enumerate(self.envs):
            if env.num_envs > 1 and not self.kind.has_several and takes_one_seed(env):
                raise ValueError(
                    f"seed is a list, but the vector environment of lane {lane} takes one seed for its {env.num_envs} "
                    "slots; expected one whole number, one slot in each lane (lanes=num_envs), or environments that "
                    "step one by one (env=lambda: gymnasium.make(…))"
                )

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, []
        close_all((name, env.close) for name, env in opened)

    def _refuse_if_started(self, what: str) -> None:
        if self.is_started:
            raise RunError(f"these environments have been started: {what} stays as it is")


def check_apart(places: str, envs: Iterable[Any]) -> None:
    """Raise EnvError if an environment stands in two places: each steps it, and lanes may do so at the same time."""
    first: dict[int, int] = {}
    for place, env in enumerate(envs):
        other = first.setdefault(id(env), place)
        if other != place:
            raise EnvError(f"{places} {other} and {place} were given the same environment, expected one for each")
