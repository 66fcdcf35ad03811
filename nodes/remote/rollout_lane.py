"""One lane of a host that runs whole rollouts: makes a fragment, in a thread, whenever a turn comes."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymnasium.vector import VectorEnv

from rollflow.nodes.acting import Acting
from rollflow.nodes.env_source import LaneMaker
from rollflow.nodes.lane_rollout import Drained, LanePlan, LaneRollout, WeightsFrom, is_of_environment
from rollflow.nodes.remote.account import Progress
from rollflow.nodes.remote.fragment_message import message_of
from rollflow.nodes.remote.lane_threads import described
from rollflow.nodes.remote.rollout_settings import RolloutSettings
from rollflow.nodes.stepping import close_failed
from rollflow.stream.errors import WireError
from rollflow.stream.seeding import seed_for
from rollflow.stream.wire import Failed, Fragment, LaneGrant, Turn

logger = logging.getLogger(__name__)

Act = Callable[[Any, RolloutSettings], tuple[Acting, Mapping[str, Any]]]


class _Outdated(BaseException):
    """Raised in the middle of a fragment that nobody wants any more."""


@dataclass(slots=True, eq=False)
class LaneSession:
    """What a rollout has told of a lane, from its welcome on; None as the grant: there is no rollout.

    published      version and weights
    states         of connectors, to be taken over before the next turn
    known_states   taken over last
    weights        where published ones go to, once there is a module
    cut            number of the last turn that is to end
    is_equipped    with settings, states and weights, which come in this order
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
    published: tuple[int, dict[str, Any]] | None = None
    states: list[Any] | None = None
    known_states: list[Any] | None = None
    weights: WeightsFrom | None = None
    cut: int = 0
    is_equipped: bool = False
    progress: Progress = Progress()  # noqa: RUF009  # it can't be changed
    turn: int = 0
    is_beginning: bool = False
    rollout: LaneRollout | None = None
    starts: int = -1
    sequence: int = 0
    seed: int = 0

    def new_states(self) -> list[Any] | None:
        """What connectors are to take over, once."""
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

    def __init__(
        self, maker: LaneMaker, act: Callable[[Any, RolloutSettings], tuple[Acting, Mapping[str, Any]]]
    ) -> None:
        self._maker, self._act = maker, act
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
            self.session.is_equipped = False

    def configure(self, settings: RolloutSettings) -> None:
        """Take the rollout's settings."""
        with self._changed:
            self.session.settings = settings

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        """Use these weights from the next forward pass on.

        Raises ModuleError where they are not the module's, and WireError where they come before the settings.
        """
        with self._changed:
            session = self.session
            if session.settings is None:
                raise WireError("weights before settings, expected them after", "order")
            session.published, session.is_equipped = (version, weights), True
            if session.weights is not None:
                session.weights.put(version, weights)
            self._changed.notify_all()

    def take_states(self, states: list[Any]) -> None:
        """Have the connectors go on from these states from the next turn on."""
        with self._changed:
            self.session.states = states

    def cut(self, number: int) -> None:
        """Have the turn of this number end now."""
        self.session.cut = number

    @property
    def progress(self) -> Progress:
        """How far it is."""
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
            rollout = session.rollout or self._started(session)
        except Exception as error:
            if not (self._has_failed or is_of_environment(error)):  # it was not made, or not reset
                raise
            logger.warning("lane %d: %r", turn.lane, error, exc_info=error)
            self._has_failed = True
            return Failed.of(turn, error)
        with self._changed:
            states = session.new_states()
        if states is not None:
            rollout.take_states(states)
        turned = rollout.turn()
        # What was made in vain takes no number: there is no fragment then.
        session.sequence = turned.fragment.sequence + (turned.error is None or turned.fragment.num_rows > 0)
        more = rollout.told() | {"start": session.starts, "seed": session.seed, "lost_steps": turned.lost_steps}
        more["failure"] = None if turned.error is None else _described(turned.error)
        if turned.error is not None:
            logger.warning("lane %d: %r", turn.lane, turned.error, exc_info=turned.error)
            session.rollout, self._has_failed = None, True
        return message_of(turn.lane, turn.number, turned.fragment, more, rollout.lane.observation_spaces)

    def _started(self, session: LaneSession) -> LaneRollout:
        """Another start. It is told of from now on, when whoever asks has the answer of the one before."""
        session.is_beginning = True
        try:
            session.starts += 1
            session.progress = Progress(session.starts, 0, session.progress.pulse)
            if self._has_failed and self._maker.can_travel:
                close_failed(self.env)
                self._make()
            self._has_failed = False
            session.rollout = rollout = self._made(session)
            return rollout
        finally:
            session.is_beginning = False

    def _made(self, session: LaneSession) -> LaneRollout:
        settings, grant = session.settings, session.grant
        assert settings is not None
        assert grant is not None
        # Another start goes on with other episodes than the first: the same might fail in the same way.
        session.seed = seed_for(settings.seed, "restart", session.starts) if session.starts else settings.seed
        acting, how = self._act(self.env, settings)
        with self._changed:
            states = session.new_states() or session.known_states
        if states is not None:  # before the first observations go through
            acting.env_to_module.set_state(states[0])
            acting.module_to_env.set_state(states[1])
        plan = LanePlan(
            lane=grant.lane,
            first_slot=grant.first_slot,
            sequence=session.sequence,
            fragment_length=settings.fragment_length,
            lookback=settings.lookback,
            seed=session.seed,
            acting=how,
            digests=settings.digests,
        )
        weights = WeightsFrom(acting.copy, -1, partial(self._between, session), digests=settings.digests)
        rollout = LaneRollout(
            self.env,
            plan,
            module=acting.copy,
            weights=weights,
            env_to_module=acting.env_to_module,
            module_to_env=acting.module_to_env,
            is_ours=self._maker.can_travel,
        )
        with self._changed:
            self._check(session)
            assert session.published is not None
            weights.put(*session.published)
            session.weights = weights  # for what is published from now on
        return rollout

    def _between(self, session: LaneSession) -> None:
        """Between two forward passes: see whether the fragment is still wanted, and all of it."""
        self._check(session)
        assert session.rollout is not None
        session.progress = Progress(session.starts, session.rollout.lane.num_steps, session.progress.pulse + 1)
        if session.cut >= session.turn:
            raise Drained

    def _check(self, session: LaneSession) -> None:
        if self.session is not session:
            raise _Outdated

    def describe(self) -> dict[str, Any]:
        """What a Hello says of the environments."""
        return described(self.env)

    def _make(self) -> None:
        self.env: VectorEnv[Any, Any, Any] = self._maker.make()


def _described(error: Exception) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
