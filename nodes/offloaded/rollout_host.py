"""`RolloutHost`: whole rollouts on this host, for a trainer on another."""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from rollflow.nodes.argument_checks import checking_keywords
from rollflow.nodes.env.env_source import Autoreset, EnvSource, LaneMaker, with_kwargs
from rollflow.nodes.env.environments import AgentEnvSource
from rollflow.nodes.env.lane_envs import AgentLaneMaker
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.remote.env_host import made_lanes, sent_description_of
from rollflow.nodes.env.remote.host import PLACES, Host
from rollflow.nodes.env.stepping import close_failed
from rollflow.nodes.modules import policy_weights
from rollflow.nodes.modules.policy_weights import from_arrays
from rollflow.nodes.offloaded.fragment_message import message_of_lane
from rollflow.nodes.offloaded.lane_rollout import AnyActing, Drained, LanePlan, LaneRollout, is_of_environment
from rollflow.nodes.offloaded.rollout_settings import LaneProgress, RolloutSettings
from rollflow.nodes.stages.acting import acting_for, compile_options
from rollflow.nodes.stages.module_set import AgentToModule, agents_acting_for
from rollflow.stream.data.errors import EnvError, RollflowError, WireError
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.wire import (
    Answer,
    Cut,
    Failed,
    Fragment,
    HostConnection,
    LaneGrant,
    Message,
    Metrics,
    Settings,
    States,
    Turn,
    Weights,
    Welcome,
)

logger = logging.getLogger(__name__)

Act = Callable[[Any, RolloutSettings], tuple[AnyActing, Mapping[str, Any]]]


@dataclass(slots=True, eq=False)
class RolloutSession:
    """What a rollout has told a host, from its welcome on.

    settings     None: they are yet to come
    published    module id -> version and weights
    fresh        ids of modules whose weights have come through the connection that there is now
    states       of connectors by pipeline; None: there are none
    rollouts     lane -> its rollout, which published weights go to
    changed      held while any of these changes
    """

    settings: RolloutSettings | None = None
    published: dict[Any, tuple[int, policy_weights.Weights]] = field(default_factory=dict)
    fresh: set[Any] = field(default_factory=set)
    states: Mapping[str, Any] | None = None
    rollouts: dict[Any, LaneRollout] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def is_equipped(self) -> bool:
        """True with settings, states and weights, which come in this order."""
        return self.settings is not None and self.settings.module.keys() <= self.fresh

    def resume(self) -> None:
        """Go on through another connection: the next turns wait for the weights that come through it.

        Those that came through the last one may not have been the newest, nor the connectors' states.
        """
        with self.changed:
            self.fresh.clear()

    def publish(self, version: int, weights: dict[str, Any], module_id: str | None = None) -> None:
        """Use these weights from the next forward pass on; the id is None if there is one module.

        Raises ModuleError if they are not the module's.
        """
        module = DEFAULT_MODULE_ID if module_id is None else module_id
        with self.changed:
            self.published[module] = version, weights
            self.fresh.add(module)
            for rollout in self.rollouts.values():
                rollout.put({module: (version, weights)})
            self.changed.notify_all()


@dataclass(slots=True, eq=False)
class LaneSession:
    """Session of a lane with a rollout, from its welcome on; None as the grant: there is no rollout.

    told           what the rollout has told the host
    states         of connectors that were taken over last
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
    told: RolloutSession
    states: Mapping[str, Any] | None = None
    cut: int = 0
    progress: LaneProgress = LaneProgress()  # noqa: RUF009  # it can't be changed
    turn: int = 0
    is_beginning: bool = False
    rollout: LaneRollout | None = None
    starts: int = -1
    sequence: int = 0
    seed: int = 0


class RolloutLane:
    """Environments, connectors and a module of one lane. Raises EnvError if environments can't be made.

    maker    of the environments
    act      gives what is to act in them, and how, by the rollout's settings; raises if the two don't fit

    env        as they are now: made again when a rollout begins after they have raised
    session    with the rollout that there is
    """

    def __init__(self, maker: LaneMaker | AgentLaneMaker, act: Act) -> None:
        self._maker, self._act = maker, act
        self._deviations = Deviations(is_logged=False)
        self.session = LaneSession(None, RolloutSession())
        self._has_failed = False
        self._make()

    # Called where the socket is

    def begin(self, grant: LaneGrant | None, told: RolloutSession) -> None:
        """Begin anew, for a rollout that calls this lane so, or for none; what is done for another ends unsaid."""
        before = self.session.told.changed
        with before:
            self.session = LaneSession(grant, told)
            before.notify_all()

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
        """Make a fragment; None if the session is over. Raises what the module or a connector raises."""
        told = session.told
        with told.changed:
            told.changed.wait_for(lambda: self.session is not session or told.is_equipped)
        answer = self._fragment(turn, session) if self.session is session else None
        return answer if self.session is session else None

    def _fragment(self, turn: Turn, session: LaneSession) -> Fragment | Failed:
        session.turn = turn.number
        try:
            rollout = session.rollout or self._started(session, turn.step)
            states = session.told.states
            if states is not session.states and states is not None:
                session.states = states
                rollout.take_states(states.values())
            fragment, report, raised = rollout.turn()
        except Exception as error:
            gave_refused = session.rollout is not None and isinstance(error, EnvError)
            if not (gave_refused or self._has_failed or is_of_environment(error)):  # it was not made, or not reset
                raise
            self._note_failure(turn, session, error)
            return Failed.of(turn, error)
        # What was made in vain takes no number: there is no fragment then.
        session.sequence = fragment.sequence + (raised is None or fragment.num_rows > 0)
        if raised is not None:
            self._note_failure(turn, session, raised)
        more = report | {"start": session.starts, "seed": session.seed}
        return message_of_lane(rollout.lane, turn.number, fragment, more)

    def _note_failure(self, turn: Turn, session: LaneSession, error: Exception) -> None:
        logger.warning("lane %d: %r", turn.lane, error, exc_info=error)
        session.rollout, self._has_failed = None, True

    def _started(self, session: LaneSession, first_step: int) -> LaneRollout:
        """Another start. It is told of from now on, when whoever asks has the answer of the one before."""
        session.is_beginning = True
        try:
            session.starts += 1
            session.progress = LaneProgress(session.starts, 0, session.progress.pulse)
            if self._has_failed and self._maker.can_travel:
                close_failed(self.env)
                self._make()
            self._has_failed = False
            session.rollout = rollout = self._made(session, first_step)
            return rollout
        finally:
            session.is_beginning = False

    def _made(self, session: LaneSession, first_step: int) -> LaneRollout:
        told, grant = session.told, session.grant
        settings = told.settings
        assert settings is not None
        assert grant is not None
        # Another start goes on with other episodes than the first: the same might fail in the same way.
        session.seed = seed_for(settings.seed, "restart", session.starts) if session.starts else settings.seed
        acting, how = self._act(self.env, settings)
        states = session.states = told.states
        if states is not None:  # before the first observations go through
            for name, pipeline in acting.named_pipelines:
                pipeline.set_state(states[name])
        environments = {
            "first_lane": grant.lane,
            "first_slot": grant.first_slot,
            "fragment_length": settings.fragment_length,
            "seed": session.seed,
        }
        plan = LanePlan(
            environments, session.sequence, first_step, settings.lookback, how, dict.fromkeys(acting.by_id, -1)
        )
        between = partial(self._between, session)
        rollout = LaneRollout(self.env, plan, acting, deviations=self._deviations, between=between)
        with told.changed:
            rollout.put(told.published)
            told.rollouts[self] = rollout  # for what is published from now on
        return rollout

    def _between(self, session: LaneSession) -> None:
        """Between two forward passes: see whether the fragment is still wanted, and all of it."""
        assert session.rollout is not None
        session.progress = LaneProgress(session.starts, session.rollout.lane.num_steps, session.progress.pulse + 1)
        if session.cut >= session.turn or self.session is not session:
            raise Drained

    def describe(self) -> dict[str, Any]:
        """Fields of a Hello."""
        return sent_description_of(self.env)

    def _make(self) -> None:
        self.env: Any = self._maker.lane_env(self._deviations)


class RolloutHost(Host):
    """Environments, connectors and copies of modules: whole rollouts for a rollout over `RemoteRollouts`.

        env, num_envs, lanes        as for `Rollout`, or for `MultiAgentRollout`; every lane has a thread of its own
        env_kwargs                  as for `Rollout`
        autoreset_mode              as for `Rollout`; not for environments with several agents
        module                      as for the rollout: the same as there, for weights come from there. None: default
                                    modules, of the rollout's configuration
        env_to_module_connector,    as for the rollout: the same as there
        module_to_env_connector
        agent_to_module_mapping_fn, as for `MultiAgentRollout`: the same as there
        joint_connector
        compile_forward             forward passes by `torch.compile`, with these options if it is a mapping of them
        device                      where forward passes are done; None: where the module is
        name                        as for `EnvHost`

    role    "agent_rollout" if an environment has several agents, else "rollout"

    Nothing but numbers and names comes over the wire: if modules or connectors are not those of the rollout, the
    gateway is told so, and `connect` raises.

    Leave it by `with`, or `close` it: this ends the threads, in the middle of their fragments, and closes the
    environments.

    Raises EnvError if environments can't be made, or lanes differ.
    """

    report_s: float = 0.25

    @checking_keywords("RolloutHost", PLACES)
    def __init__(
        self,
        env: EnvSource | AgentEnvSource,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        lanes: int | None = None,
        autoreset_mode: Autoreset = None,
        module: Any = None,
        agent_to_module_mapping_fn: AgentToModule = None,
        joint_connector: Callable[[Any], Any] | None = None,
        env_to_module_connector: Callable[[Any], Any] | None = None,
        module_to_env_connector: Callable[[Any], Any] | None = None,
        compile_forward: bool | Mapping[str, Any] = False,
        device: Any = None,
        name: str | None = None,
    ) -> None:
        self._module, self._device = module, device
        metadata = {"env": env} if isinstance(env, str) else {}
        env = with_kwargs(env, env_kwargs)
        self._compiled = compile_options(compile_forward)
        self._connectors = {
            "env_to_module_connector": env_to_module_connector,
            "module_to_env_connector": module_to_env_connector,
        }
        self._of_agents = {"mapping": agent_to_module_mapping_fn, "joint_connector": joint_connector}
        self._lanes, self._has_several = made_lanes(
            env,
            num_envs,
            lanes,
            autoreset_mode,
            lambda maker, _: RolloutLane(maker, self._acting_for),
            {"agent_to_module_mapping_fn": agent_to_module_mapping_fn, "joint_connector": joint_connector},
        )
        self.role = "agent_rollout" if self._has_several else "rollout"
        self._ids: list[int] = []  # of the lanes, as the rollout has them
        self._told = RolloutSession()
        self._reported: dict[int, LaneProgress] = {}
        self._reported_at = 0.0
        super().__init__(self._lanes, name=name, metadata=metadata)

    # For `Host`

    def _welcomed(self, welcome: Welcome) -> None:
        self._reported = {}
        if welcome.resumed and self._ids:
            self._told.resume()
            return
        self._ids, self._fatal, self._told = [grant.lane for grant in welcome.lanes], None, RolloutSession()
        for lane, grant in zip(self._lanes, welcome.lanes, strict=True):
            lane.begin(grant, self._told)

    def _dismissed(self) -> None:
        self._ids, self._told = [], RolloutSession()
        for lane in self._lanes:
            lane.begin(None, self._told)

    def _cut_short(self) -> None:
        for lane in self._lanes:
            lane.cut(sys.maxsize)  # the turn that it is at, whichever that is

    def _work_on(self, lane: RolloutLane, request: Any) -> Callable[[], Answer | None]:
        return partial(lane.answer, request, lane.session)

    def _take_news(self, news: Message) -> None:
        try:
            self._take(news)
        except Exception as error:  # its content may be anything
            is_ours = isinstance(error, RollflowError)
            self._fatal = error if is_ours else WireError(f"{news.kind}: {type(error).__name__}: {error}")

    def _report(self, connection: HostConnection) -> None:
        """Tell the gateway how far the lanes are, if that has changed."""
        now = monotonic()
        if now - self._reported_at < self.report_s:
            return
        progress = dict(zip(self._ids, [lane.progress for lane in self._lanes], strict=False))
        if progress and progress != self._reported:
            self._reported, self._reported_at = progress, now
            connection.tell(Metrics({"lanes": [[lane, *each] for lane, each in progress.items()]}))

    def _failed(self, request: Any, error: Exception) -> None:
        """End the session: the module or a connector has raised, or a fragment can't be sent."""
        with self._lock:
            if self._session.waits_for(request):
                self._fatal = error
        self._wakeup.ring()

    # Inside

    def _take(self, news: Message) -> None:
        match news:
            case Settings():
                self._told.settings = RolloutSettings(**news.settings)
            case States():
                self._told.states = news.states
            case Weights():
                self._told.publish(news.version, from_arrays(news), news.module)
            case Cut():
                self._lanes[self._ids.index(news.lane)].cut(news.number)

    def _acting_for(self, env: Any, settings: RolloutSettings) -> tuple[AnyActing, dict[str, Any]]:
        """What acts in a lane, and options of acting. Raises ModuleError or ConnectorError for a misfit."""
        given = self._module if isinstance(self._module, Mapping) else {DEFAULT_MODULE_ID: self._module}
        if self._module is None:
            given = dict.fromkeys(settings.module)
        settings.check_given(given, self.name)
        configs = [config for each, config in settings.model_config.items() if given[each] is None]
        options: dict[str, Any] = {
            "model_config": next((config for config in configs if config is not None), None),
            "device": self._device,
            "seed": settings.seed,
            **self._connectors,
        }
        how: dict[str, Any] = {"flat": settings.flat, "threads": settings.threads, "compiled": self._compiled}
        if self._compiled is not None:
            how["flat"] = False
        acting: AnyActing
        if self._has_several:
            options |= {"explore": settings.explore, "how": how}
            acting = agents_acting_for(env.parts, env, module=given, **options, **self._of_agents)
        else:
            vector = env.env
            spaces = vector.single_observation_space, vector.single_action_space
            acting = acting_for(vector, spaces, module=given[DEFAULT_MODULE_ID], **options)
        settings.check(acting, self.name)
        return acting, {"explore": settings.explore, **how}
