"""One lane of a host that runs whole rollouts: makes a fragment, in a thread, whenever a turn comes."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from gymnasium.vector import VectorEnv

from rollflow.nodes.acting import Acting
from rollflow.nodes.env_source import LaneMaker
from rollflow.nodes.lane_rollout import Drained, LanePlan, LaneRollout, WeightsFrom, is_of_environment
from rollflow.nodes.remote.fragment_message import message_of
from rollflow.nodes.stepping import autoreset_mode
from rollflow.stream.seeding import seed_for
from rollflow.stream.wire import Failed, Fragment, LaneGrant, Turn


class Progress(NamedTuple):
    """How far a lane is.

    start       how often its environments were made anew
    steps       transitions made since then
    pulse       how often it has got on with something
    is_in_vain  whether its turn will end without a step: it is to end, and environments are still made or reset
    """

    start: int = 0
    steps: int = 0
    pulse: int = 0
    is_in_vain: bool = False


class _Outdated(BaseException):
    """Raised in the middle of a fragment that nobody wants any more."""


class RolloutLane:
    """Environments, connectors and a module of one lane. Raises EnvError where environments can't be made.

    maker    of the environments
    act      gives what is to act in them, by the rollout's settings; raises where the two don't fit

    env        as they are now: made again when a rollout begins after they have raised
    session    how often it has begun
    """

    def __init__(self, maker: LaneMaker, act: Callable[[Any, Mapping[str, Any]], Acting]) -> None:
        self._maker, self._act = maker, act
        self._changed = threading.Condition()
        self.session = 0
        self._grant: LaneGrant | None = None
        self._settings: Mapping[str, Any] | None = None
        self._published: tuple[int, dict[str, Any]] | None = None
        self._states: list[Any] | None = None  # to be taken over before the next turn
        self._weights: WeightsFrom | None = None
        self._cut = 0
        self._is_equipped = False  # with settings, states and weights, which come in this order
        self._known_states: list[Any] | None = None  # taken over last
        self._rollout: LaneRollout | None = None
        self._rollout_session = 0
        self._seed = self._starts = self._sequence = self._turn = 0
        self._is_beginning = False
        self._done = 0, Progress()  # and the session that it is of
        self._has_failed = False
        self._make()

    # Called where the socket is

    def begin(self, grant: LaneGrant | None) -> None:
        """Begin anew, for a rollout that calls this lane so, or for none; what is done for another ends unsaid."""
        with self._changed:
            self.session += 1
            self._grant, self._settings, self._published = grant, None, None
            self._states = self._weights = None
            self._cut = 0
            self._is_equipped = False
            self._changed.notify_all()

    def resume(self) -> None:
        """Go on through another connection: the next turn waits for the weights that come through it.

        Those that came through the last one may not have been the newest, nor the connectors' states.
        """
        with self._changed:
            self._is_equipped = False

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Take the rollout's settings."""
        with self._changed:
            self._settings = settings
            self._changed.notify_all()

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        """Use these weights from the next forward pass on. Raises ModuleError where they are not the module's."""
        with self._changed:
            self._published = version, weights
            if self._weights is not None:
                self._weights.put(version, weights)
            self._is_equipped = True
            self._changed.notify_all()

    def take_states(self, states: list[Any]) -> None:
        """Have the connectors go on from these states from the next turn on."""
        with self._changed:
            self._states = states

    def cut(self, number: int) -> None:
        """Have the turn of this number end now."""
        self._cut = number

    @property
    def progress(self) -> Progress:
        """How far it is."""
        session, done = self._done
        if session != self.session:
            return Progress()
        return done._replace(is_in_vain=self._is_beginning and self._cut >= self._turn)

    # Called where the environments are

    def answer(self, turn: Turn, session: int) -> Fragment | Failed | None:
        """Make a fragment; None where the session is over. Raises what the module or a connector raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(session) or self._is_equipped)
            if self._is_over(session):
                return None
        try:
            return self._fragment(turn, session)
        except _Outdated:
            return None

    def _fragment(self, turn: Turn, session: int) -> Fragment | Failed:
        try:
            rollout = self._begun(turn, session)
        except Exception as error:
            if not (self._has_failed or is_of_environment(error)):  # it was not made, or not reset
                raise
            self._rollout, self._has_failed = None, True
            return Failed.of(turn, error)
        states = self._new_states()
        if states is not None:
            rollout.take_states(states)
        turned = rollout.turn()
        # What was made in vain takes no number: there is no fragment then.
        self._sequence = turned.fragment.sequence + (turned.error is None or turned.fragment.num_rows > 0)
        more = rollout.told() | {"start": self._starts, "seed": self._seed, "lost_steps": turned.lost_steps}
        more["failure"] = None if turned.error is None else _described(turned.error)
        if turned.error is not None:
            self._rollout, self._has_failed = None, True
        return message_of(turn, turned.fragment, more)

    def _begun(self, turn: Turn, session: int) -> LaneRollout:
        """The session's rollout. Raises what environments raise, and what does not fit."""
        if self._rollout_session != session:
            self._rollout_session, self._rollout, self._known_states = session, None, None
            self._starts, self._sequence, self._done = -1, 0, (session, Progress())
        self._turn = turn.number
        if self._rollout is None:
            self._is_beginning = True
            try:
                self._rollout = self._started(session)
            finally:
                self._is_beginning = False
        return self._rollout

    def _started(self, session: int) -> LaneRollout:
        """Another start. It is told of from now on, when whoever asks has the answer of the one before."""
        self._starts += 1
        self._done = session, Progress(self._starts, 0, self._done[1].pulse)
        if self._has_failed and self._maker.can_travel:
            self.env.close()
            self._make()
        self._has_failed = False
        return self._made(session)

    def _made(self, session: int) -> LaneRollout:
        with self._changed:
            if self._is_over(session):
                raise _Outdated
            told, grant, published = self._settings, self._grant, self._published
        assert told is not None
        assert grant is not None
        assert published is not None
        # Another start goes on with other episodes than the first: the same might fail in the same way.
        self._seed = seed_for(told["seed"], "restart", self._starts) if self._starts else told["seed"]
        acting = self._act(self.env, told)
        states = self._new_states() or self._known_states
        if states is not None:  # before the first observations go through
            acting.env_to_module.set_state(states[0])
            acting.module_to_env.set_state(states[1])
        plan = LanePlan(
            lane=grant.lane,
            first_slot=grant.first_slot,
            sequence=self._sequence,
            fragment_length=told["fragment_length"],
            lookback=told["lookback"],
            seed=self._seed,
            acting=told["acting"],
        )
        weights = WeightsFrom(acting.copy, -1, partial(self._between, session))
        weights.put(*published)
        rollout = LaneRollout(
            self.env,
            plan,
            module=acting.copy,
            weights=weights,
            env_to_module=acting.env_to_module,
            module_to_env=acting.module_to_env,
            began=_nothing,
            is_ours=self._maker.can_travel,
        )
        self._take_weights(weights, session)
        return rollout

    def _take_weights(self, weights: WeightsFrom, session: int) -> None:
        """Have what is published from now on go to these as well, with what was meanwhile."""
        with self._changed:
            if self._is_over(session):
                raise _Outdated
            assert self._published is not None
            weights.put(*self._published)
            self._weights = weights

    def _new_states(self) -> list[Any] | None:
        """What connectors are to take over, once."""
        with self._changed:
            states, self._states = self._states, None
        self._known_states = states or self._known_states
        return states

    def _between(self, session: int) -> None:
        """Between two forward passes: see whether the fragment is still wanted, and all of it."""
        if self._is_over(session):
            raise _Outdated
        assert self._rollout is not None
        self._done = session, Progress(self._starts, self._rollout.lane.num_steps, self._done[1].pulse + 1)
        if self._cut >= self._turn:
            raise Drained

    def _is_over(self, session: int) -> bool:
        return self.session != session

    def _make(self) -> None:
        self.env: VectorEnv[Any, Any, Any] = self._maker.make()
        self.autoreset = autoreset_mode(self.env)


def _described(error: Exception) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _nothing() -> None:
    """Nobody has to be told that the first forward pass is done."""
