"""`RolloutHost`: whole rollouts on this host, for a trainer on another."""

import contextlib
import logging
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from rollflow.nodes.env.env_source import Autoreset, EnvSource, LaneMaker, lane_makers, with_kwargs
from rollflow.nodes.env.multi_agent.agent_environments import AgentEnvSource, agent_makers
from rollflow.nodes.env.multi_agent.lane_envs import AgentLaneMaker, first_made, with_first
from rollflow.nodes.env.remote.host import Host
from rollflow.nodes.env.remote.host_lane import all_made
from rollflow.nodes.env.remote.remote_envs import Secret
from rollflow.nodes.modules.weights_codec import Arrays, from_arrays
from rollflow.nodes.offloaded.replica import OneReplica, Replica, SeveralReplica
from rollflow.nodes.offloaded.rollout_lane import RolloutLane
from rollflow.nodes.offloaded.rollout_report import LaneProgress, metrics_of
from rollflow.nodes.offloaded.rollout_settings import RolloutSettings
from rollflow.nodes.stages.acting import acting_for, compile_options
from rollflow.nodes.stages.agents_acting import agents_acting_for
from rollflow.nodes.stages.module_set import AgentToModule
from rollflow.stream.data.errors import EnvError, RollflowError, WireError
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.wire import (
    Answer,
    Cut,
    HostConnection,
    Limits,
    Message,
    Metrics,
    Settings,
    States,
    Weights,
    Welcome,
)

logger = logging.getLogger(__name__)


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
        secret, tls, name, limits   as for `EnvHost`

    role    "agent_rollout" where an environment has several agents, else "rollout"

    Nothing but numbers and names comes over the wire: where modules or connectors are not those of the rollout, the
    gateway is told so, and `connect` raises.

    Leave it by `with`, or `close` it: this ends the threads, in the middle of their fragments, and closes the
    environments.

    Raises EnvError where environments can't be made, or lanes differ.
    """

    report_s: float = 0.25

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
        secret: Secret = None,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
        limits: Limits | None = None,
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
        first = first_made(env)
        with contextlib.nullcontext() if first is None else first:
            several = None if first is None or not first.has_several else first
            self._has_several = several is not None
            self.role = "rollout" if several is None else "agent_rollout"
            self._check_kind(autoreset_mode)
            made: Any = env if first is None else with_first(env, first)
            makers: Sequence[LaneMaker | AgentLaneMaker] = (
                lane_makers(made, num_envs, lanes, autoreset_mode)
                if several is None
                else agent_makers(made, num_envs, lanes, are_vectors=several.is_vector)
            )
            self._lanes = all_made(RolloutLane(maker, self._replica) for maker in makers)
        self._ids: list[int] = []  # of the lanes, as the rollout has them
        self._reported: dict[int, LaneProgress] = {}
        self._reported_at = 0.0
        super().__init__(self._lanes, secret=secret, tls=tls, name=name, limits=limits, metadata=metadata)

    # For `Host`

    def _welcomed(self, welcome: Welcome) -> None:
        self._reported = {}
        if welcome.resumed and self._ids:
            for lane in self._lanes:
                lane.resume()
            return
        self._ids, self._fatal = [grant.lane for grant in welcome.lanes], None
        for lane, grant in zip(self._lanes, welcome.lanes, strict=True):
            lane.begin(grant)

    def _dismissed(self) -> None:
        self._ids = []
        for lane in self._lanes:
            lane.begin(None)

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
        """Tell the gateway how far the lanes are, where that has changed."""
        now = monotonic()
        if not connection.credits or now - self._reported_at < self.report_s:
            return
        progress = dict(zip(self._ids, [lane.progress for lane in self._lanes], strict=False))
        if progress and progress != self._reported:
            self._reported, self._reported_at = progress, now
            connection.tell(Metrics(metrics_of(progress)))

    def _failed(self, request: Any, error: Exception) -> None:
        """End the session: the module or a connector has raised, or a fragment can't be sent."""
        with self._lock:
            if self._work.session.waits_for(request):
                self._fatal = error
        self._wakeup.ring()

    # Inside

    def _take(self, news: Message) -> None:
        match news:
            case Settings():
                settings = RolloutSettings.of_message(news)
                for lane in self._lanes:
                    lane.configure(settings)
            case States():
                for lane in self._lanes:
                    lane.take_states(news.states)
            case Weights():
                weights = from_arrays(Arrays(dict(news.tensors), dict(news.dtypes), dict(news.others)))
                for lane in self._lanes:
                    lane.publish(news.version, weights, news.module)
            case Cut():
                self._lanes[self._ids.index(news.lane)].cut(news.number)

    def _replica(self, env: Any, settings: RolloutSettings) -> tuple[Replica, dict[str, Any]]:
        """The replica that acts in a lane, and options of acting. Raises ModuleError or ConnectorError for a misfit."""
        given = self._module if isinstance(self._module, Mapping) else {DEFAULT_MODULE_ID: self._module}
        if self._module is None:
            given = dict.fromkeys(settings.modules)
        settings.check_given(given, self.name)
        configs = [config for each, (_, config) in settings.modules.items() if given[each] is None]
        options: dict[str, Any] = {
            "model_config": next((config for config in configs if config is not None), None),
            "device": self._device,
            "seed": settings.seed,
            **self._connectors,
        }
        how: dict[str, Any] = {"flat": settings.flat, "threads": settings.threads, "compiled": self._compiled}
        if self._compiled is not None:
            how["flat"] = False
        replica: Replica
        if self._has_several:
            options |= {"explore": settings.explore, "may_be_stateful": settings.lookback > 0, "acting": how}
            several = agents_acting_for(env.parts, env, module=given, **options, **self._of_agents)
            replica = SeveralReplica(several, dict.fromkeys(given, -1))
        else:
            spaces = env.single_observation_space, env.single_action_space
            acting = acting_for(env, spaces, module=given[DEFAULT_MODULE_ID], **options)
            replica = OneReplica(acting.copy, -1, acting.env_to_module, acting.module_to_env)
        settings.check_modules(replica.modules, self.name)
        settings.check_pieces(replica.named_pipelines, self.name)
        return replica, {"explore": settings.explore, **how}

    def _check_kind(self, autoreset_mode: Autoreset) -> None:
        """Raise EnvError for an option that the environments are not of a kind for."""
        if self._has_several and autoreset_mode is not None:
            raise EnvError(
                f"autoreset_mode is {autoreset_mode!r}, but these environments have several agents; expected it to be "
                "left out"
            )
        for name, value in self._of_agents.items():
            if value is not None and not self._has_several:
                name = "agent_to_module_mapping_fn" if name == "mapping" else name
                raise EnvError(f"{name} is for environments with several agents; expected it to be left out")
