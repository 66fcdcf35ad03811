"""One lane of a host that runs whole rollouts: makes a fragment, in a thread, whenever a turn comes."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollflow.nodes.env.env_source import LaneMaker
from rollflow.nodes.env.multi_agent.lane_envs import AgentLaneMaker
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.host_lane import agents_described
from rollflow.nodes.env.stepping import close_failed, described
from rollflow.nodes.modules.policy_weights import Weights
from rollflow.nodes.offloaded.agent_fragment_codec import spaces_of
from rollflow.nodes.offloaded.agent_fragment_message import message_of_agents
from rollflow.nodes.offloaded.fragment_message import message_of
from rollflow.nodes.offloaded.lane_rollout import Drained, LaneRollout, is_of_environment
from rollflow.nodes.offloaded.replica import LanePlan, LaneSite, Replica
from rollflow.nodes.offloaded.rollout_report import LaneProgress
from rollflow.nodes.offloaded.rollout_settings import RolloutSettings
from rollflow.stream.data.errors import WireError, shown
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire import Failed, Fragment, LaneGrant, Turn

logger = logging.getLogger(__name__)

Act = Callable[[Any, RolloutSettings], tuple[Replica, Mapping[str, Any]]]


class _Outdated(BaseException):
    """Raised in the middle of a fragment that nobody wants any more."""


@dataclass(slots=True, eq=False)
class LaneSession:
    """Session of a lane with a rollout, from its welcome on; None as the grant: there is no rollout.

    published      module id -> version and weights
    awaited        ids of modules whose weights are yet to come; None: nobody knows of which modules
    states         of connectors by pipeline, to be taken over before the next turn
    known_states   taken over last
    replica        where published weights go to, once it acts
    cut            number of the last turn that is to end
    progress       how far the lane is
    turn           number of the last turn
    is_beginning   whether environments are being made or reset
    rollout        None: it has not begun, or its environments have raised
    starts         how often it began
    sequence       of the next fragment
    seed           since the last start
    """

    grant: LaneGrant | None
    settings: RolloutSettings | None = None
    published: dict[Any, tuple[int, Weights]] = field(default_factory=dict)
    awaited: set[Any] | None = None
    states: Mapping[str, Any] | None = None
    known_states: Mapping[str, Any] | None = None
    replica: Replica | None = None
    cut: int = 0
    progress: LaneProgress = LaneProgress()  # noqa: RUF009  # it can't be changed
    turn: int = 0
    is_beginning: bool = False
    rollout: LaneRollout | None = None
    starts: int = -1
    sequence: int = 0
    seed: int = 0

    @property
    def is_equipped(self) -> bool:
        """True with settings, states and weights, which come in this order."""
        return self.awaited == set()

    def await_all(self) -> None:
        """Have the next turn wait for weights of every module, whichever version."""
        self.awaited = None if self.settings is None else set(self.settings.modules)

    def new_states(self) -> Mapping[str, Any] | None:
        """States that connectors are to take over, once."""
        states, self.states = self.states, None
        self.known_states = states or self.known_states
        return states


class RolloutLane:
    """Environments, connectors and a module of one lane. Raises EnvError where environments can't be made.

    maker    of the environments
    act      gives what is to act in them, and how, by the rollout's settings; raises where the two don't fit

    env        as they are now: made again when a rollout begins after they have raised
    session    with the rollout that there is
    """

    def __init__(self, maker: LaneMaker | AgentLaneMaker, act: Act) -> None:
        self._maker, self._act = maker, act
        self._deviations = Deviations(is_logged=False)
        self._changed = threading.Condition()  # of the session
        self.session = LaneSession(None)
        self._has_failed = False
        self._make()

    # Called where the socket is

    def begin(self, grant: LaneGrant | None) -> None:
        """Begin anew, for a rollout that calls this lane so, or for none; what is done for another ends unsaid."""
        with self._changed:
            self.session = LaneSession(grant)
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on through another connection: the next turn waits for the weights that come through it.

        Those that came through the last one may not have been the newest, nor the connectors' states.
        """
        with self._changed:
            self.session.await_all()

    def configure(self, settings: RolloutSettings) -> None:
        """Take the rollout's settings."""
        with self._changed:
            self.session.settings = settings
            if self.session.awaited is None:
                self.session.await_all()

    def publish(self, version: int, weights: dict[str, Any], module_id: str | None = None) -> None:
        """Use these weights from the next forward pass on; the id is None where there is one module.

        Raises ModuleError where they are not the module's, and WireError where they come before the settings.
        """
        with self._changed:
            session = self.session
            if session.settings is None or session.awaited is None:
                raise WireError("weights before settings, expected them after", "order")
            module = DEFAULT_MODULE_ID if isinstance(session.settings.module, str) else module_id
            if module not in session.settings.modules:
                expected = sorted(session.settings.modules)
                raise WireError(f"weights of module {shown(module_id)}, expected one of {expected}", "weights")
            session.published[module] = version, weights
            session.awaited.discard(module)
            if session.replica is not None:
                session.replica.put({module: (version, weights)})
            self._changed.notify_all()

    def take_states(self, states: Mapping[str, Any]) -> None:
        """Have the connectors go on from these states, by pipeline, from the next turn on."""
        with self._changed:
            settings = self.session.settings
            for name in () if settings is None else settings.pieces:
                if not isinstance(states.get(name), dict):
                    raise WireError(f"states: {name} is {shown(states.get(name))}, expected a map of states")
            self.session.states = states

    def cut(self, number: int) -> None:
        """Have the turn of this number end now."""
        self.session.cut = number

    @property
    def progress(self) -> LaneProgress:
        """Progress of the lane."""
        session = self.session
        return session.progress._replace(is_in_vain=session.is_beginning and session.cut >= session.turn)

    # Called where the environments are

    def answer(self, turn: Turn, session: LaneSession) -> Fragment | Failed | None:
        """Make a fragment; None where the session is over. Raises what the module or a connector raises."""
        with self._changed:
            self._changed.wait_for(lambda: self.session is not session or session.is_equipped)
        try:
            self._check(session)
            return self._fragment(turn, session)
        except _Outdated:
            return None

    def _fragment(self, turn: Turn, session: LaneSession) -> Fragment | Failed:
        session.turn = turn.number
        try:
            rollout = session.rollout or self._started(session, turn.step)
        except Exception as error:
            if not (self._has_failed or is_of_environment(error)):  # it was not made, or not reset
                raise
            logger.warning("lane %d: %r", turn.lane, error, exc_info=error)
            self._has_failed = True
            return Failed.of(turn, error)
        with self._changed:
            states = session.new_states()
        if states is not None:
            rollout.take_states(states.values())
        turned = rollout.turn()
        # What was made in vain takes no number: there is no fragment then.
        session.sequence = turned.fragment.sequence + (turned.error is None or turned.fragment.num_rows > 0)
        more = rollout.report() | {"start": session.starts, "seed": session.seed, "lost_steps": turned.lost_steps}
        more["failure"] = None if turned.error is None else _described(turned.error)
        if turned.error is not None:
            logger.warning("lane %d: %r", turn.lane, turned.error, exc_info=turned.error)
            session.rollout, self._has_failed = None, True
        if isinstance(rollout.lane, MultiAgentLane):
            return message_of_agents(turn.number, turned.fragment, spaces_of(rollout.lane), more)
        return message_of(turn.lane, turn.number, turned.fragment, more, rollout.lane.observation_spaces)

    def _started(self, session: LaneSession, first_step: int) -> LaneRollout:
        """Another start. It is told of from now on, when whoever asks has the answer of the one before."""
        session.is_beginning = True
        try:
            session.starts += 1
            session.progress = LaneProgress(session.starts, 0, session.progress.pulse)
            if self._has_failed and (not isinstance(self._maker, LaneMaker) or self._maker.can_travel):
                close_failed(self.env)
                self._make()
            self._has_failed = False
            session.rollout = rollout = self._made(session, first_step)
            return rollout
        finally:
            session.is_beginning = False

    def _made(self, session: LaneSession, first_step: int) -> LaneRollout:
        settings, grant = session.settings, session.grant
        assert settings is not None
        assert grant is not None
        # Another start goes on with other episodes than the first: the same might fail in the same way.
        session.seed = seed_for(settings.seed, "restart", session.starts) if session.starts else settings.seed
        replica, how = self._act(self.env, settings)
        with self._changed:
            states = session.new_states() or session.known_states
        if states is not None:  # before the first observations go through
            for name, pipeline in replica.named_pipelines:
                pipeline.set_state(states[name])
        plan = LanePlan(
            lane=grant.lane,
            first_slot=grant.first_slot,
            sequence=session.sequence,
            first_step=first_step,
            fragment_length=settings.fragment_length,
            lookback=settings.lookback,
            seed=session.seed,
            acting=how,
            digests=settings.digests,
        )
        replica.begin(settings.digests)
        site = LaneSite(self.env, deviations=self._deviations)
        rollout = LaneRollout(site, plan, replica, between=partial(self._between, session))
        with self._changed:
            self._check(session)
            replica.put(session.published)
            session.replica = replica  # for what is published from now on
        return rollout

    def _between(self, session: LaneSession) -> None:
        """Between two forward passes: see whether the fragment is still wanted, and all of it."""
        self._check(session)
        assert session.rollout is not None
        session.progress = LaneProgress(session.starts, session.rollout.lane.num_steps, session.progress.pulse + 1)
        if session.cut >= session.turn:
            raise Drained

    def _check(self, session: LaneSession) -> None:
        if self.session is not session:
            raise _Outdated

    def describe(self) -> dict[str, Any]:
        """Fields of a Hello."""
        return described(self.env) if isinstance(self._maker, LaneMaker) else agents_described(self.env)

    def _make(self) -> None:
        maker = self._maker
        self.env: Any = maker.make() if isinstance(maker, LaneMaker) else maker.lane_env(self._deviations)


def _described(error: Exception) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
