"""Whole rollouts done elsewhere, in worker processes or on other hosts: their nodes and their ring."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import uuid4

from rollflow.nodes.env.environments import OneAgent, SeveralAgents
from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.lane_status import RaisedError
from rollflow.nodes.modules.policy_weights import Weights
from rollflow.nodes.offloaded.fragment_message import (
    agents_of_message,
    check_form,
    form_of,
    fragment_of,
    share_layouts,
    spaces_seen,
)
from rollflow.nodes.offloaded.lane_rollout import Published
from rollflow.nodes.offloaded.lane_state import KINDS
from rollflow.nodes.stages.env_to_module import CuttingStage
from rollflow.nodes.stages.rounds import LaneGates
from rollflow.stream import wire
from rollflow.stream.data.cached_property import cached_property
from rollflow.stream.data.loss_ledger import Ledger
from rollflow.stream.fragments.fragment import Fragment, FragmentLayout, NoFragment
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.meter import CallStats
from rollflow.stream.graph.node import Gate
from rollflow.stream.graph.report import NodeReport
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

_OF_TOKEN = "sequence", "step", "name", "elsewhere"


class TurnToken:
    """Token that goes round in place of a lane that is somewhere else: each turn of it is a fragment.

    fragment    that it came back with; None if it has none
    steps_under_way    transitions of a vector step, at most
    step        the run's vector step at which its next fragment begins, by which schedules go
    layout, observation_spaces    of its fragments, as a lane has them
    layouts     of its newest fragment, part by part
    name        that the pieces of its rollout count under, in every process that does it
    elsewhere   state of its rollout, and of what is known of it here, for `get_state` or from `set_state`
    """

    at_start = True

    def __init__(self, index: int, steps_under_way: int, step: int) -> None:
        self.index = index
        self.steps_under_way = steps_under_way
        self.step = step
        self.sequence = 0  # of the next fragment
        self.fragment: Fragment | MultiAgentFragment | None = None
        self.is_set_aside = False
        self.layout: FragmentLayout
        self.layouts: list[FragmentLayout] = []
        self.observation_spaces: Sequence[Any] = ()
        self.name = uuid4().hex
        self.elsewhere: dict[str, Any] = {}

    def get_state(self) -> dict[str, Any]:
        """The state of the lane, once its node has asked for that of its rollout."""
        return {name: getattr(self, name) for name in _OF_TOKEN}

    def set_state(self, state: Mapping[str, Any], acting: Any = None) -> None:
        """Go on from what `get_state` gave."""
        for name in _OF_TOKEN:
            setattr(self, name, state[name])

    def begin_anew(self, reason: str) -> None:
        """Do nothing: its rollout has ended the open episodes."""

    def release(self) -> None:
        """Let go of the fragment: no more turns are taken."""
        self.fragment = None

    def lose(self, reason: str, *, is_under_way: bool) -> int:
        """Lose nothing: if a lane is lost between two turns, its rollout has told of all that it made."""
        return 0

    def cut(self) -> Fragment | MultiAgentFragment:
        """The fragment that it came back with."""
        assert self.fragment is not None
        return self.fragment

    def take(self, fragment: Fragment | MultiAgentFragment) -> None:
        """Come back with a fragment."""
        self.fragment, self.sequence = fragment, fragment.sequence + 1
        self.step += fragment.num_rows

    @property
    def vector_steps(self) -> str:
        """Place of the lane, for messages."""
        return f"of fragment {self.sequence}"


class OffloadedRollouts(LaneSource):
    """A node that has each lane's rollout done somewhere else: takes turns, gives fragments.

    acting    what acts, from `act_with` on: it is copied for lanes that begin
    how       passes are done: what `ModuleForward` takes beside module and weights
    states    of connectors, for lanes to take over; None: there are none
    remotes   lanes as they are elsewhere, each with transitions in its fragments (`steps`), those of them since its
              environments began (`reported`), others (`unreported`), what its stages have counted (`stages`), the seed
              of its environments (`seed`), and why they were lost before its next fragment (`lost`; None: not)
    """

    acting: Any
    how: Mapping[str, Any]
    remotes: Sequence[Any]
    does = "rollout"
    _form: Any = None  # of a row of the columns

    def __init__(self, env: Any, **options: Any) -> None:
        self.states: Any = None
        self._newest: Mapping[Any, tuple[int, Any]] = {}  # by the ids of their modules, packed
        self._publishing = threading.Lock()
        self._states_of: dict[int, Sequence[Any]] = {}  # of the connectors of each lane, one for each pipeline
        self._reports: list[tuple[int, int, Sequence[Any]]] = []  # (fragments before, lane, states) to be merged
        self._relay: LaneGates
        super().__init__(env, **options)

    def act_with(self, acting: Any, how: Mapping[str, Any], metrics: Any, relay: LaneGates) -> None:
        """Take what acts, which is made for the spaces found here, and how, before it runs.

        metrics    what pieces log into
        relay      the gates of the turns
        """
        self.acting, self.how, self._metrics, self._relay = acting, how, metrics, relay
        for pipeline in acting.pipelines:
            pipeline.refuse_edits_while_run_by(self, has_states=True)

    @property
    def is_running(self) -> bool:
        """True if connectors elsewhere have states of their own."""
        return self.is_started and not self.is_closed

    def make_lanes(self, lookback: int, *of_lanes: Any) -> None:
        """Have lanes look back so many steps (H); they are where the environments are."""
        self._refuse_if_started("their lookback")
        self.lookback, self.lanes = lookback, []

    def __call__(self, turns: TurnToken) -> TurnToken | None:  # type: ignore[override]  # in place of lanes
        """Have the lane's next fragment made where its rollout is.

        If lanes keep their order, it begins with the weights and the connectors' states of a certain round.
        """
        turns.fragment = None
        if self.keeps_order:
            last = turns.sequence + 1 - self.listener.limit
            over = [report for report in self._reports if report[0] <= last]
            self._reports = [report for report in self._reports if report[0] > last]
            self._merge(over)
            self._keep(
                {
                    each: (weights.load_into(module), module.state_dict())
                    for each, (module, weights) in self.acting.by_id.items()
                }
            )
        lane: Any = super().__call__(turns)  # type: ignore[arg-type]
        return lane  # type: ignore[no-any-return]

    @property
    def num_steps(self) -> int:
        """Transitions that the environments have made, but for those that were lost."""
        return sum(remote.steps + remote.unreported for remote in list(self.remotes))

    def describe(self) -> str:
        """Lanes, slots and what each lane has, for `explain()`."""
        return f"{super().describe()}, each with connectors and a copy of the module"

    def close(self) -> None:
        """Close what was made here, and let go of what lanes were to be told."""
        try:
            super().close()
        finally:
            with self._publishing:
                self._newest, self.states = {}, None

    def _release(self) -> None:
        super()._release()
        vars(self).pop("_relay", None)  # which holds this node

    def broadcast(self, published: Published) -> None:
        """Have every lane use these weights, which are copied, from its next forward pass on.

        From any thread; waits for nobody: one that is slower than they are published is given the newest whenever it
        is done with those before.
        """
        if not self.keeps_order:
            self._keep(published)
            self._announce()

    def lacking(self, versions: Mapping[Any, int]) -> Iterator[tuple[Any, int, Any]]:
        """Module, version and packed weights of what was published after these versions, by the ids of modules."""
        for module_id, (version, packed) in self._newest.items():
            if version > versions.get(module_id, -1):
                yield module_id, version, packed

    def _keep(self, published: Published) -> None:
        """Keep those weights that are newer than what there is."""
        packed = {
            module_id: (version, self._packed(module_id, version, weights))
            for module_id, (version, weights) in published.items()
            if version > self._newest.get(module_id, (-1,))[0]
        }
        with self._publishing:
            if not self.is_closed:
                newest = self._newest
                newer = {each: made for each, made in packed.items() if each not in newest or made[0] > newest[each][0]}
                self._newest = {**newest, **newer}

    def _packed(self, module_id: Any, version: int, weights: Weights) -> Any:
        """Weights as they go to the lanes; a copy."""
        raise NotImplementedError

    def _announce(self) -> None:
        """Have the thread that the graph runs in look for new weights. From any thread."""
        raise NotImplementedError

    def take_message(self, lane: int, message: Mapping[str, Any]) -> None:
        """Take in what a lane's connectors have learnt and logged; every lane goes on from the merged states."""
        if "anew" in message:
            self.begin_anew(self.remotes[lane].lane, message["anew"])
        if "states" in message:
            report = self.remotes[lane].lane.sequence, lane, message["states"]
            if self.keeps_order:
                self._reports.append(report)
            else:
                self._merge([report])
        if "metrics" in message:
            self._metrics.merge([message["metrics"]])

    def _merge(self, reports: Iterable[tuple[int, int, Sequence[Any]]]) -> None:
        """Merge what the connectors of lanes have come to with the others' states, and hand it on."""
        newer = {lane: states for _, lane, states in sorted(reports, key=itemgetter(0))}
        if not newer:
            return
        states, pipelines = self._states_of | newer, self.acting.pipelines
        each_pipeline = zip(*(states[lane] for lane in sorted(states)), strict=True)
        merged = [pipeline.merge_states(list(each)) for pipeline, each in zip(pipelines, each_pipeline, strict=True)]
        for pipeline, state in zip(pipelines, merged, strict=True):
            pipeline.take_over_state(state)
        self._states_of = states  # not before: another host may have sent what can't be merged
        self.hand_on([pipeline.get_state() for pipeline in pipelines])

    def hand_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Have the connectors of every lane take over states before its next turn: one for each pipeline."""
        raise NotImplementedError

    def take_turn(self, remote: Any, message: wire.Fragment, report: Mapping[str, Any], *, is_checked: bool) -> bool:
        """Take the fragment of a lane's turn, and how far the lane is by the report; True if there is a fragment.

        is_checked    whether the fragment comes from another host

        Raises WireError if it is no fragment, or its columns have other forms than in the fragments before.
        """
        fragment = self._fragment_in(message, remote.seed, remote.lost, is_checked=is_checked)
        remote.steps += report["steps"] - remote.reported
        remote.reported, remote.stages = report["steps"], report["nodes"]
        if "failure" in report and not fragment.num_rows:  # there is none: the next one says what was lost
            remote.lost = RaisedError(**report["failure"]).line
            return False
        remote.lost = None
        share_layouts(fragment, remote.lane.layouts)
        remote.lane.take(fragment)
        return True

    def _fragment_in(self, message: wire.Fragment, seed: int, lost: str | None, *, is_checked: bool) -> Any:
        """The fragment in a message of environments with this seed, which were lost before it, or not (None)."""
        if isinstance(self.kind, SeveralAgents):
            return agents_of_message(message, self._spaces, lost)
        layout = self.kind.layout(self, message.lane, self.envs[message.lane], seed)
        fragment = fragment_of(message, layout, self._spaces, lost, is_checked=is_checked)
        if is_checked and fragment.num_rows:
            form = form_of(fragment.columns)
            self._form = self._form or form
            check_form(form, self._form)
        return fragment

    @cached_property
    def _spaces(self) -> list[Any]:
        """Spaces that connectors may leave observations in; of several agents part by part."""
        before = self.acting.env_to_module
        if self.kind.has_several:
            return spaces_seen(self.parts, before)
        return [self.observation_space, *before.observation_spaces]

    def _lane(self, index: int, envs: Any, first_slot: int) -> TurnToken:
        """The token of a lane that begins: at the step that the run has come to."""
        return TurnToken(index, envs.num_envs * self.acting.most_agents, max(self.vector_steps, self._first_step))

    def begin_at(self, vector_steps: int) -> None:
        super().begin_at(vector_steps)
        self.lanes = self._tokens()

    def _tokens(self) -> list[TurnToken]:
        return [self._lane(index, envs, 0) for index, envs in enumerate(self.envs)]

    def note_states(self) -> None:
        """Have the lanes' tokens have the states of what is known of them here."""
        for remote in self.remotes:
            remote.lane.observation_spaces = self._spaces
            remote.lane.elsewhere = remote.get_state() | {
                "states": self._states_of.get(remote.index),
                "reports": [[sequence, states] for sequence, lane, states in self._reports if lane == remote.index],
            }

    def go_on_from(self, states: Sequence[Any], order: Sequence[int] | None) -> None:
        super().go_on_from(states, order)
        for lane, envs in zip(self.lanes, self.envs, strict=True):
            before, lane.observation_spaces = lane.elsewhere, self._spaces
            if isinstance(self.kind, OneAgent):
                lane.layout = self.kind.layout(self, lane.index, envs, self.seed)
            if before["states"] is not None:
                self._states_of[lane.index] = before["states"]
            self._reports += [(sequence, lane.index, each) for sequence, each in before["reports"]]
        if self._states_of:
            self.hand_on([pipeline.get_state() for pipeline in self.acting.pipelines])
        if not self.keeps_order:
            self._merge(self._reports)
            self._reports = []

    def stages(self, elapsed_s: float) -> list[NodeReport]:
        """Counts of the stages: items of all lanes, times of the average lane's place, calls of the slowest lane."""
        found: dict[str, list[Sequence[Any]]] = {}
        remotes = list(self.remotes)
        for remote in remotes:
            for name, *counts in remote.counted():
                found.setdefault(name, []).append(counts)
        reports = []
        for name, counted in found.items():
            busy = min(elapsed_s, sum(busy for _, busy, *_ in counted) / len(remotes))
            timed = [(CallStats(*times), piece) for _, _, *calls in counted if calls for *times, piece in [calls]]
            calls, piece = max(timed, default=(None, ""))
            items = sum(items for items, *_ in counted)
            reports.append(NodeReport(name, items, busy, elapsed_s - busy, 0.0, calls, piece))
        return reports


KINDS[TurnToken] = TurnToken.get_state, TurnToken.set_state


class EmitterOutput(NamedTuple):
    """Outputs of one lane's turn."""

    turns: TurnToken | None
    fragments: Fragment | None


class AgentEmitterOutput(NamedTuple):
    """Outputs of one lane's turn, whose environments have several agents."""

    turns: TurnToken | None
    fragments: MultiAgentFragment | None


class Emitter(CuttingStage[Any, Any]):
    """A node that parts the fragments from the turns, which go round.

    num_lanes        lanes that come by
    num_fragments    after so many fragments a lane stops; None: it never does
    ledger           counts the fragments that have come
    relay            told of fragments and lanes that never come
    """

    _relay: LaneGates

    def __init__(self, num_lanes: int, num_fragments: int | None, ledger: Ledger, relay: LaneGates) -> None:
        super().__init__(EmitterOutput, num_lanes, num_fragments, ledger, relay)

    def __call__(self, turns: TurnToken) -> EmitterOutput:
        """Take a lane that has done its turn, or takes its first."""
        parted: EmitterOutput = self._parted(turns)
        return parted

    def _parted(self, lane: TurnToken | NoFragment) -> Any:
        if isinstance(lane, NoFragment):
            return self._set_aside(lane)
        fragment = lane.fragment
        if not lane.is_set_aside:
            if fragment is not None:
                return self._full(lane)
            if self._num_fragments is not None and lane.sequence >= self._num_fragments:
                return self._finished(lane, None)  # in the run that was saved
            return self._result(lane, None)
        if fragment is None:
            self._relay.fragment_missing(lane.index)
        else:
            self._counted(lane, fragment)
        self.expect(-1)
        return self._result(None, self._relay.lane_set_aside(lane.index, lane.sequence, fragment))


class AgentEmitter(Emitter):
    """An `Emitter` of fragments of several agents: the graph knows them by this annotation."""

    def __call__(self, turns: TurnToken) -> AgentEmitterOutput:  # type: ignore[override]
        """Take a lane that has done its turn, or takes its first."""
        parted: AgentEmitterOutput = self._parted(turns)
        return parted


def ring_of_turns(rollouts: OffloadedRollouts, deal: Emitter, gate: Gate | None) -> Graph:
    """The ring of turns, with the output `fragments`; the gate lets a lane take its next one."""
    graph = Graph("rollout")
    graph.add(rollouts=rollouts, deal=deal, pace=_passed_on)
    graph.output("fragments", "deal.fragments", capacity=rollouts.most_lanes)
    graph.connect("rollouts", "deal")
    graph.connect("deal.turns", "pace", gate=gate)
    graph.connect("pace", "rollouts", feedback=True)
    return graph


def _passed_on(turns: TurnToken) -> TurnToken:
    return turns
