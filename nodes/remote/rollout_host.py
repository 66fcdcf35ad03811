"""Whole rollouts on this host, for a trainer on another."""

import logging
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any

from rollflow.nodes.acting import Acting, acting_for, compile_options
from rollflow.nodes.env_source import EnvSource, lane_makers
from rollflow.nodes.remote.account import Progress, metrics_of
from rollflow.nodes.remote.host import Host
from rollflow.nodes.remote.lane_threads import all_made
from rollflow.nodes.remote.remote_envs import Secret
from rollflow.nodes.remote.rollout_lane import RolloutLane
from rollflow.nodes.remote.rollout_settings import PIPELINES, RolloutSettings
from rollflow.nodes.weights_codec import Arrays, from_arrays
from rollflow.stream.errors import RollflowError, WireError
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
    """Environments, connectors and copies of a module: whole rollouts for a `Rollout` over `RemoteRollouts`.

        env, num_envs, lanes        as for `Rollout`; every lane has a thread of its own
        module                      as for `Rollout`: the same as there, for its weights come from there. None: the
                                    default one, of the rollout's configuration
        env_to_module_connector,    as for `Rollout`: the same as there
        module_to_env_connector
        compile_forward             forward passes by `torch.compile`, with these options if it is a mapping of them
        device                      where forward passes are done; None: where the module is
        secret, tls, name, limits   as for `EnvHost`

    Nothing but numbers and names comes over the wire: where module or connectors are not those of the rollout, the
    gateway is told so, and `connect` raises.

    Leave it by `with`, or `close` it: this ends the threads and closes the environments.

    Raises EnvError where environments can't be made, or lanes differ.
    """

    role = "rollout"
    word_s: float = 0.25

    def __init__(
        self,
        env: EnvSource,
        *,
        num_envs: int | None = None,
        lanes: int | None = None,
        module: Any = None,
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
        self._compiled = compile_options(compile_forward)
        self._connectors = {
            "env_to_module_connector": env_to_module_connector,
            "module_to_env_connector": module_to_env_connector,
        }
        self._lanes = all_made(RolloutLane(maker, self._acting) for maker in lane_makers(env, num_envs, lanes))
        self._ids: list[int] = []  # what the rollout calls the lanes
        self._said: dict[int, Progress] = {}
        self._said_at = 0.0
        metadata = {"env": env} if isinstance(env, str) else {}
        super().__init__(self._lanes, secret=secret, tls=tls, name=name, limits=limits, metadata=metadata)

    def close(self) -> None:
        """End the threads, in the middle of their fragments, and close the environments."""
        self._dismissed()
        super().close()

    # What Host leaves open

    def _welcomed(self, welcome: Welcome) -> None:
        self._said = {}
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

    def _work_on(self, lane: RolloutLane, request: Any) -> Callable[[], Answer | None]:
        return partial(lane.answer, request, lane.session)

    def _told(self, news: Message) -> None:
        try:
            self._take(news)
        except Exception as error:  # what it says may be anything
            is_ours = isinstance(error, RollflowError)
            self._fatal = error if is_ours else WireError(f"{news.kind}: {type(error).__name__}: {error}")

    def _say(self, connection: HostConnection) -> None:
        """Say how far the lanes are, where that has changed."""
        now = monotonic()
        if not connection.credits or now - self._said_at < self.word_s:
            return
        progress = dict(zip(self._ids, [lane.progress for lane in self._lanes], strict=False))
        if progress and progress != self._said:
            self._said, self._said_at = progress, now
            connection.tell(Metrics(metrics_of(progress)))

    def _failed(self, request: Any, error: Exception) -> None:
        """The module or a connector has raised, or a fragment can't be sent: there is no going on."""
        with self._lock:
            if self._session.waits_for(request):
                self._fatal = error
        self._bell.ring()

    # Inside

    def _take(self, news: Message) -> None:
        match news:
            case Settings():
                settings = RolloutSettings.of_message(news)
                for lane in self._lanes:
                    lane.configure(settings)
            case States():
                states = [_entry(news.states, name) for name in PIPELINES]
                for lane in self._lanes:
                    lane.take_states(states)
            case Weights():
                weights = from_arrays(Arrays(dict(news.tensors), dict(news.dtypes), dict(news.others)))
                for lane in self._lanes:
                    lane.publish(news.version, weights)
            case Cut():
                self._lanes[self._ids.index(news.lane)].cut(news.number)

    def _acting(self, env: Any, settings: RolloutSettings) -> tuple[Acting, dict[str, Any]]:
        """What acts in a lane's environments, and how. Raises ModuleError or ConnectorError where it doesn't fit."""
        settings.check_given(self._module, self.name)
        acting = acting_for(
            env,
            (env.single_observation_space, env.single_action_space),
            module=self._module,
            model_config=settings.model_config if self._module is None else None,
            device=self._device,
            seed=settings.seed,
            **self._connectors,
        )
        settings.check_module(acting.module, self.name)
        settings.check_pieces({name: getattr(acting, name) for name in PIPELINES}, self.name)
        how: dict[str, Any] = {"explore": settings.explore, "threads": settings.threads, "compiled": self._compiled}
        return acting, how | {"flat": settings.flat and self._compiled is None}


def _entry(states: Mapping[str, Any], name: str) -> Any:
    if not isinstance(states.get(name), dict):
        raise WireError(f"states: {name} is {states.get(name)!r:.100}, expected a map of states")
    return states[name]
