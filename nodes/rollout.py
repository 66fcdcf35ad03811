"""Environments, module and connectors as one node that gives fragments, and as a plain loop over train batches."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from rollflow.nodes.acting import acting_for, compile_options
from rollflow.nodes.choice import Asked
from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.learner.learner_connector_pipeline import LearnerConnectorPipeline
from rollflow.nodes.default_module import DefaultModule
from rollflow.nodes.env_source import EnvSource
from rollflow.nodes.env_to_module import EnvToModule, shapes_of
from rollflow.nodes.episode_returns import EpisodeReturns
from rollflow.nodes.given import (
    check_for_rollouts,
    check_numbers,
    copied_module,
    copied_pieces,
    lookback_for,
    pieces_given,
)
from rollflow.nodes.lag import LagBound, OnExcess
from rollflow.nodes.loaded_weights import Loaded
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.module_forward import GatheringForward, ModuleForward, ReadyForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.pace import AllOf, FragmentCredits
from rollflow.nodes.placement import Where, environments_for, placed
from rollflow.nodes.policy_weights import PolicyWeights, Weights
from rollflow.nodes.remote.remote_envs import RemoteHosts, RemoteRollouts
from rollflow.nodes.ring import ring_of, seed_lane
from rollflow.nodes.rollout_loop import Batch, RolloutLoop
from rollflow.nodes.rollouts_elsewhere import Deal, RolloutsElsewhere, Turns, ring_of_turns
from rollflow.nodes.rounds import Rounds
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.fragment import Fragment
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.lane import Lane
from rollflow.stream.report import Report
from rollflow.stream.seeding import fresh_seed

Pieces = ConnectorV2 | Sequence[ConnectorV2]


class Rollout(RolloutLoop[Fragment]):
    """Steps environments with a module and gives what they made, fragment by fragment.

        env, num_envs, lanes       what is stepped: see `Environments`; `RemoteEnvs` or `RemoteRollouts` for what is on
                                   other hosts, which are waited for right here
        where                      "inline": the environments step in the loop's thread, in one lane. "threads": each
                                   lane in a thread of its own, one for every slot if `lanes` is left out: for
                                   environments that wait, or let the interpreter go. "processes": in worker processes,
                                   for those that are costly; forward passes stay here. "rollouts": each lane's whole
                                   rollout in a worker process, with connectors and a copy of the module: for policies
                                   that run on CPUs. "auto": where it goes fastest, measured for a moment and, where
                                   that leaves several, by trying each for a second: its environments are made there,
                                   copies of the module and of what connector functions give. `explain()` says why
        workers                    worker processes; None: one for each core
        step_timeout,              seconds after which environments in threads, in processes or on hosts are taken for
        reset_timeout              hung in a step or in a reset; None: never. The first reset includes the start of a
                                   process. A reset after an ended episode counts by itself, but for those on hosts,
                                   which `step_timeout` includes, and those within the `step` of vectorized
                                   environments, which has both times together. Nobody can tell inline. See
                                   `ThreadEnvironments`, `ProcessEnvironments`, `RemoteLanes`
        module                     has `forward_exploration` and `forward_inference`, or is a class or function that
                                   makes such a one of (observation space, action space); a copy of it acts, which
                                   learns of new weights by `publish` alone. None: a `DefaultModule` for the spaces. To
                                   be trained as `rollout.module`
        model_config               of the default module: a `DefaultModelConfig`, or a dict of its fields
        fragment_length            vector steps in a fragment (T)
        lookback                   steps that a chunk can look back into the one before (H); None: as many as the
                                   connector pieces need, and at least 1
        seed                       of environments and sampling; None: a fresh one, to be read from `seed`
        explore                    whether actions are sampled, by `forward_exploration`, or taken at their likeliest
        env_to_module_connector    `lambda env: piece or list of pieces`, put before the default ones. `env` is the
                                   first lane's vector environment, or, where that is in another process, what is
                                   known of it here: its spaces, `num_envs` and autoreset mode
        module_to_env_connector    `lambda env: piece or list of pieces`, put among the default ones
        learner_connector          `lambda obs_space, act_space: piece or list of pieces`, before the default ones
        num_fragments              after so many fragments a lane stops; None: it never does
        prefetch                   batches that the rollout may run ahead of its reader; 0: it stands still while the
                                   reader works, so that every batch is exactly on-policy
        max_lag, on_excess         how many policy versions old a batch may be: see `LagBound`
        max_batch, max_wait        slots in one forward pass over several ready lanes, and seconds to wait for more;
                                   None: every lane has a pass of its own
        forward_in_thread          forward passes in a worker thread, while other lanes' environments step
        flat_forward               forward passes as flat lists of torch operations, without the cost of `nn.Module`'s
                                   calls; for a module that does the same at every call: see `FlatForward`. None: for a
                                   `DefaultModule` alone
        compile_forward            forward passes by `torch.compile`, with these options if it is a mapping of them
        forward_threads            torch's threads for forward passes while acting and for what makes actions of them.
                                   One is best for small networks: two wait for each other, and for whatever else runs.
                                   None: as torch is set
        device                     where forward passes while acting are done; None: where the module is
        metrics                    what pieces log into; None: a `MetricsLogger`, to be read as `rollout.metrics`
        debug                      everything inline, in the loop's thread, whatever else is asked for: a breakpoint in
                                   a piece stops right there. In a graph the graph says what runs where

    Either a plain loop, `with Rollout(...) as rollout: for batch in rollout.batches(): ...`, or the same with `async`,
    or a node of a `Graph`, with the port `fragments`. It runs once.

    Raises EnvError, ModuleError, ConnectorError or ValueError where an argument can't be worked with.
    """

    def __init__(
        self,
        env: EnvSource | RemoteHosts,
        *,
        module: Any = None,
        model_config: Any = None,
        num_envs: int | None = None,
        lanes: int | None = None,
        where: Where = "inline",
        workers: int | None = None,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
        fragment_length: int = 128,
        lookback: int | None = None,
        seed: int | None = None,
        explore: bool = True,
        env_to_module_connector: Callable[[Any], Pieces] | None = None,
        module_to_env_connector: Callable[[Any], Pieces] | None = None,
        learner_connector: Callable[[gym.Space[Any], gym.Space[Any]], Pieces] | None = None,
        num_fragments: int | None = None,
        prefetch: int = 0,
        max_lag: int | None = None,
        on_excess: OnExcess = "drop",
        max_batch: int | None = None,
        max_wait: float = 0.0,
        forward_in_thread: bool = False,
        flat_forward: bool | None = None,
        compile_forward: bool | Mapping[str, Any] = False,
        forward_threads: int | None = 1,
        device: Any = None,
        metrics: Any = None,
        debug: bool = False,
    ) -> None:
        if debug:
            prefetch, max_batch, forward_in_thread, flat_forward = 0, None, False, False
            where, workers, compile_forward = "inline", None, False
        if flat_forward and compile_forward is not False:
            raise ValueError("flat_forward and compile_forward are two ways of doing a pass, expected one of them")
        check_numbers(
            fragment_length=(fragment_length, 1),
            lookback=(lookback, 0),
            seed=(seed, 0),
            num_fragments=(num_fragments, 1),
            prefetch=(prefetch, 0),
            max_lag=(max_lag, 0),
            max_batch=(max_batch, 1),
            max_wait=(max_wait, 0),
            workers=(workers, 1),
            step_timeout=(step_timeout, 0),
            reset_timeout=(reset_timeout, 0),
            forward_threads=(forward_threads, 1),
        )
        self.seed = fresh_seed() if seed is None else seed
        self.returns = EpisodeReturns()
        self.placement = ""  # why it goes where it goes, where that was left to it
        if where == "auto" and not isinstance(env, RemoteHosts):
            trial = partial(
                Rollout,
                module=copied_module(module),
                model_config=model_config,
                lookback=lookback,
                seed=self.seed,
                explore=explore,
                env_to_module_connector=copied_pieces(env_to_module_connector),
                module_to_env_connector=copied_pieces(module_to_env_connector),
                flat_forward=flat_forward,
                forward_threads=forward_threads,
                step_timeout=step_timeout,
                reset_timeout=reset_timeout,
                device=device,
            )
            asked = Asked(
                lanes, workers, max_batch, forward_in_thread, max_wait, prefetch, fragment_length, metrics, device
            )
            where, lanes, workers, self.placement = placed(env, num_envs, asked, trial)
        if where == "rollouts" or isinstance(env, RemoteRollouts):
            is_remote = isinstance(env, RemoteHosts)
            check_for_rollouts(metrics, max_batch, forward_in_thread, compile_forward, is_remote=is_remote)
        self.environments = environments_for(
            where,
            env,
            num_envs=num_envs,
            lanes=lanes,
            workers=workers,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
            fragment_length=fragment_length,
            seed=self.seed,
        )
        with closing_on_error(self.environments.close):
            acting = acting_for(
                self.environments.envs[0],
                (self.environments.observation_space, self.environments.action_space),
                module=module,
                model_config=model_config,
                env_to_module_connector=env_to_module_connector,
                module_to_env_connector=module_to_env_connector,
                device=device,
                seed=self.seed,
            )
            self.module, self._acting = acting.module, acting.copy
            self.env_to_module, self.module_to_env = acting.env_to_module, acting.module_to_env
            self._makes_module = module is None
            self._compared = False
            if debug:
                self.env_to_module.fuses = self.module_to_env.fuses = False
            self._weights = PolicyWeights(self._acting)
            lag = LagBound(self._weights, max_lag, on_excess)
            taught = pieces_given(learner_connector, "learner_connector", *acting.spaces)
            self.learner_pipeline = LearnerConnectorPipeline.default(
                *acting.spaces, taught, stateful=acting.is_stateful
            )
            self.has_learner_pieces = bool(taught)  # beside the default ones
            self._lookback_asked, self._stateful = lookback, acting.is_stateful
            self._set_lookback()
            self._lanes_count = self.environments.num_lanes
            self._num_fragments = num_fragments
            rounds = Rounds(self._lanes_count, lag, self.returns)
            super().__init__(self.environments, lag=lag, rounds=rounds, prefetch=prefetch)
            self.metrics = MetricsLogger() if metrics is None else metrics
            compiled = compile_options(compile_forward)
            flat = type(self._acting) is DefaultModule and compiled is None if flat_forward is None else flat_forward
            self._acting_version = 0  # of the copy that workers are given
            self._how_to_act: dict[str, Any] = {"explore": explore, "flat": flat, "threads": forward_threads}
            self._how_to_act["compiled"] = compiled
            self._forward = ModuleForward(self._acting, self._weights, **self._how_to_act)
            context = {"module": self._acting, "explore": explore, "metrics": self.metrics}
            self._prepare = EnvToModule(
                self.env_to_module, num_lanes=self._lanes_count, num_fragments=num_fragments, **context
            )
            self._act = ModuleToEnv(self.module_to_env, threads=forward_threads, **context)
            self._deal = Deal(self._lanes_count, num_fragments)
            self._loaded: dict[int, Loaded] = {}  # by lane
            self._states: dict[int, Any] = {}  # of the connectors in the workers, by lane
            if isinstance(self.environments, RolloutsElsewhere):
                self.environments.replica, self.environments.heard = self._replica, self._heard
                self.environments.acting = self._how_to_act
            self._follow_lanes(self._prepare, self._deal)
            self._gathering = self._gathering_forward(max_batch, max_wait, forward_in_thread)

    def explain(self) -> str:
        """How it runs: what is chained into one task, how much each edge holds, and why it goes where it goes."""
        told = self._ring(AllOf(self._gates) if self._gates else self._credits).explain()
        return f"{told}\n{self.placement}" if self.placement else told

    def _ring(self, gate: Gate | None) -> Graph:
        environments = self.environments
        if not environments.is_started:
            self._set_lookback()  # the pipelines may have been edited
        if isinstance(gate, AllOf):
            self._prepare.gone = self._deal.gone = partial(gate.gone_unless, lambda: environments.is_draining)
            if not environments.has_fixed_lanes:
                self._prepare.ended = self._deal.ended = self._prepare.gone  # others, which have come later, go on
        if isinstance(environments, RolloutsElsewhere):
            if isinstance(gate, AllOf):
                environments.wants_newest = lambda: gate.wants_newest
            if isinstance(gate, FragmentCredits | AllOf):
                self._deal.leave = gate.leave
            return ring_of_turns(environments, self._deal, gate)
        return ring_of(environments, self._prepare, self._gathering or self._forward, self._act, gate)

    def publish(self, weights: Weights) -> int:
        """Have the next forward pass use these weights, a `state_dict()`, which is copied; the policy version they get.

        May be called from any thread. Raises ModuleError when they are not the module's.
        """
        version = self._weights.publish(weights)
        if isinstance(self.environments, RolloutsElsewhere):
            self.environments.broadcast(version, weights)
        return version

    def publish_as(self, version: int, weights: Weights) -> bool:
        """The same under a version that somebody else has counted; False: they are not newer, and are passed over."""
        if version > self._weights.version and isinstance(self.environments, RolloutsElsewhere):
            self._weights.check(weights)
            self.environments.broadcast(version, weights)  # first: a turn may begin once the version is there
        return self._weights.publish_as(version, weights)

    @property
    def policy_version(self) -> int:
        """The version published last; 0 before any."""
        return self._weights.version

    def digest_loaded(self) -> None:
        """Have workers and hosts that do whole rollouts digest the weights that they have loaded: see `loaded`.

        Before it runs.
        """
        if isinstance(self.environments, RolloutsElsewhere):
            self.environments.digests = True

    @property
    def loaded(self) -> Mapping[int, Loaded] | None:
        """Lane -> what its worker or host has loaded, as far as it has said so; None: forward passes are done here."""
        return self._loaded if isinstance(self.environments, RolloutsElsewhere) else None

    # Inside

    def _with_parts(self, report: Report) -> Report:
        if isinstance(self.environments, RolloutsElsewhere):
            return report.with_parts("rollouts", self.environments.stages(report.elapsed_s))
        return report

    def _replica(self) -> dict[str, Any]:
        """What a worker needs for a rollout of its own, beside environments."""
        self._acting_version = self._weights.load_into(self._acting)
        return {
            "module": self._acting,
            "version": self._acting_version,
            "env_to_module": self.env_to_module,
            "module_to_env": self.module_to_env,
        }

    def _lane_joined(self, lane: Lane | Turns, fills_a_vacancy: bool) -> None:
        if isinstance(lane, Lane):
            seed_lane(lane, self.seed)
        super()._lane_joined(lane, fills_a_vacancy)

    def _heard(self, lane: int, told: Mapping[str, Any]) -> None:
        """Take in what a worker's connectors have learnt and logged, and what it has loaded."""
        if "loaded" in told:
            self._loaded[lane] = Loaded(*told["loaded"])
        else:
            self._loaded.pop(lane, None)  # that of a worker before this one
        if "states" in told:
            states = self._states | {lane: told["states"]}
            pipelines = self.env_to_module, self.module_to_env
            merged = [
                pipeline.merge_states(list(each))
                for pipeline, each in zip(pipelines, zip(*states.values(), strict=True), strict=True)
            ]
            for pipeline, state in zip(pipelines, merged, strict=True):
                pipeline.set_state(state)
            self._states = states  # not before: another host may have sent what can't be merged
            assert isinstance(self.environments, RolloutsElsewhere)
            self.environments.hand_on([pipeline.get_state() for pipeline in pipelines])
        if "metrics" in told:
            self.metrics.merge([told["metrics"]])

    def _check_ready(self) -> None:
        seen = self.env_to_module.observation_space
        if self._makes_module and seen is not None and seen != self.module.observation_space:
            raise ModuleError(
                f"env_to_module was edited: it leaves observations in {seen}, but the default module was made for "
                f"{self.module.observation_space}; expected such pieces by env_to_module_connector, or a module"
            )

    def _batch_of(self, fragments: Sequence[Fragment]) -> Batch:
        batch = self.learner_pipeline.of_fragments(fragments, self.module, self.metrics)
        self._compare_observations(batch)
        return batch

    def _compare_observations(self, batch: Batch) -> None:
        """Warn, at the first batch, where training and acting are given observations of different shapes."""
        if self._compared or self._prepare.observation_shapes is None:
            return
        self._compared = True
        acted, learnt = self._prepare.observation_shapes, shapes_of(batch, 2 if Columns.SEQ_LENS in batch else 1)
        if acted != learnt:
            warnings.warn(
                f"the module is given observations {acted} while acting, but the train batch has {learnt}: a piece "
                "that makes only the batch's observations, such as FrameStacking, has to stand in both pipelines "
                "(before the learner with as_learner_connector=True)",
                stacklevel=5,
            )

    def _set_lookback(self) -> None:
        pipelines = self.env_to_module, self.module_to_env, self.learner_pipeline
        self.environments.set_lookback(lookback_for(self._lookback_asked, pipelines, stateful=self._stateful))
        for lane in self.environments.lanes:
            seed_lane(lane, self.seed)

    def _gathering_forward(
        self, max_batch: int | None, max_wait: float, forward_in_thread: bool
    ) -> ReadyForward | GatheringForward | None:
        if max_batch is None and not forward_in_thread:
            return None
        largest = max(env.num_envs for env in self.environments.envs)
        if max_batch is not None and max_batch < largest:
            raise ValueError(f"max_batch is {max_batch}, expected at least {largest}: a lane's slots go together")
        if not max_wait and not forward_in_thread and max_batch is not None:
            return ReadyForward(self._forward, max_batch=max_batch)
        return GatheringForward(
            self._forward, max_batch=max_batch or largest, max_wait=max_wait, in_thread=forward_in_thread
        )
