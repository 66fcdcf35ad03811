"""Environments with several agents, modules and connectors as one node, and as a plain loop over train batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.given import check_numbers, lookback_for, pieces_given
from rollflow.nodes.lag import OnExcess
from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.multi_agent.agent_forward import AgentForward
from rollflow.nodes.multi_agent.agent_lag import AgentLagBound
from rollflow.nodes.multi_agent.agent_learner import AgentLearner
from rollflow.nodes.multi_agent.agent_placement import AgentWhere, agent_environments_for
from rollflow.nodes.multi_agent.agent_returns import AgentReturns
from rollflow.nodes.multi_agent.agents_to_module import AgentsToModule
from rollflow.nodes.multi_agent.joint_pieces import JointPieces
from rollflow.nodes.multi_agent.module_set import AgentToModule, ModuleSet
from rollflow.nodes.multi_agent.module_to_agents import ModuleToAgents
from rollflow.nodes.multi_agent.multi_rl_module import MultiRLModule
from rollflow.nodes.policy_weights import Weights
from rollflow.nodes.ring import ring_of, sampling_data
from rollflow.nodes.rollout_loop import Batch, RolloutLoop
from rollflow.nodes.rounds import Rounds
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent_episode import DEFAULT_MODULE_ID
from rollflow.stream.seeding import fresh_seed

Pieces = ConnectorV2 | Sequence[ConnectorV2]


class ActingWeights(NamedTuple):
    """The weights that a module acts with."""

    version: int  # the policy version
    weights: dict[str, Any]  # a `state_dict()`, copied


class MultiAgentRollout(RolloutLoop[MultiAgentFragment]):
    """Steps environments with several agents each, with modules, and gives what they made, fragment by fragment.

        env, num_envs, lanes          what is stepped: see `AgentEnvironments`; or a `RemoteEnvs`: hosts say how many
                                      environments and lanes they have
        where                         "inline": the environments step in the loop's thread, in one lane if `lanes` is
                                      left out. "processes": in worker processes, for those that are costly; forward
                                      passes stay here
        workers                       worker processes; None: one for each core
        step_timeout,                 seconds after which environments in processes, or on hosts, are taken for hung in
        reset_timeout                 a step or in a reset; None: never. On hosts a step includes the resets after ended
                                      episodes; a `MultiAgentVectorEnv`'s step has both times together. See
                                      `AgentProcesses`, `SteppedLanes`
        module                        a module, or a dict of them by id, each as `Rollout` takes them: an instance, a
                                      class or function of (observation space, action space), None for a
                                      `DefaultModule`. Copies of them act, which learn of new weights by `publish`
                                      alone. To be trained as `rollout.module[id]`. One by itself has the id
                                      "default_policy"
        agent_to_module_mapping_fn    agent id -> module id: a dict, or a function of the agent's id and its episode,
                                      of which there is the `id_`, asked whenever an agent begins an episode, and
                                      before the first to find out spaces. None: the agent's own module where there is
                                      one with its id, else "default_policy". All agents that a module serves have the
                                      same spaces
        modules_to_train              ids of the modules that batches are made for; None: all
        model_config                  of default modules
        fragment_length               vector steps in a fragment (T)
        lookback                      agent steps that a chunk can look back (H); None: as many as pieces need, and at
                                      least 1
        seed                          of environments and sampling; None: a fresh one, to be read from `seed`
        explore                       whether actions are sampled; or a dict, module id -> whether its are, as those of
                                      modules that it does not name are
        joint_connector               `lambda env: piece or list of pieces` that see all agents of an environment
                                      together, as `MultiAgentEpisode`s, before all others; they may rewrite the newest
                                      observations. `env` is the environments of the first lane
        env_to_module_connector       `lambda part: piece or list of pieces`, put before the default ones; called for
                                      every `AgentPart`, the agents that have the same spaces. A piece is given the
                                      episodes of one module's agents that are to act, each agent's own
        module_to_env_connector       `lambda part: piece or list of pieces`, put among the default ones; likewise
        learner_connector             `lambda obs_space, act_space: piece or list of pieces`, called for every module
        num_fragments                 after so many fragments a lane stops; None: it never does
        prefetch                      batches that the rollout may run ahead of its reader
        max_lag, on_excess            how many policy versions old a batch may be: see `LagBound`; of the modules that
                                      are trained, each beside its own
        flat_forward, forward_threads, device, metrics    as `Rollout` has them

    In every vector step each module does one forward pass over all the agents that it serves and that are to act.
    Batches are dicts: module id -> train batch. Otherwise it is used as a `Rollout` is. In a graph, a
    `MultiAgentLearnerPipeline` makes batches of its fragments.

    Raises EnvError, ModuleError, ConnectorError or ValueError where an argument can't be worked with.
    """

    def __init__(
        self,
        env: Any,
        *,
        module: Any = None,
        agent_to_module_mapping_fn: AgentToModule = None,
        modules_to_train: Sequence[Any] | None = None,
        model_config: Any = None,
        num_envs: int | None = None,
        lanes: int | None = None,
        where: AgentWhere = "inline",
        workers: int | None = None,
        step_timeout: float | None = 60.0,
        reset_timeout: float | None = 120.0,
        fragment_length: int = 128,
        lookback: int | None = None,
        seed: int | None = None,
        explore: bool | Mapping[Any, bool] = True,
        joint_connector: Callable[[Any], Pieces] | None = None,
        env_to_module_connector: Callable[[AgentPart], Pieces] | None = None,
        module_to_env_connector: Callable[[AgentPart], Pieces] | None = None,
        learner_connector: Callable[[gym.Space[Any], gym.Space[Any]], Pieces] | None = None,
        num_fragments: int | None = None,
        prefetch: int = 0,
        max_lag: int | None = None,
        on_excess: OnExcess = "drop",
        flat_forward: bool | None = None,
        forward_threads: int | None = 1,
        device: Any = None,
        metrics: Any = None,
    ) -> None:
        check_numbers(
            num_envs=(num_envs, 1),
            lanes=(lanes, 1),
            fragment_length=(fragment_length, 1),
            lookback=(lookback, 0),
            seed=(seed, 0),
            num_fragments=(num_fragments, 1),
            prefetch=(prefetch, 0),
            max_lag=(max_lag, 0),
            workers=(workers, 1),
            step_timeout=(step_timeout, 0),
            reset_timeout=(reset_timeout, 0),
            forward_threads=(forward_threads, 1),
        )
        self.seed = fresh_seed() if seed is None else seed
        self.metrics = MetricsLogger() if metrics is None else metrics
        environments = agent_environments_for(
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
        with closing_on_error(environments.close):
            joint = pieces_given(joint_connector, "joint_connector", environments.envs[0])
            self.joint = JointPieces(environments.parts, joint) if joint else None
            parts = environments.parts if self.joint is None else self.joint.parts_left()
            before = [_pieces(env_to_module_connector, "env_to_module_connector", part) for part in parts]
            after = [_pieces(module_to_env_connector, "module_to_env_connector", part) for part in parts]
            self._modules = ModuleSet(
                module,
                agent_to_module_mapping_fn,
                parts,
                tuple(_seen(part, pieces) for part, pieces in zip(parts, before, strict=True)),
                tuple(None if pieces else part.action_space for part, pieces in zip(parts, after, strict=True)),
                model_config=model_config,
                device=device,
                seed=self.seed,
                explore=explore,
                may_be_stateful=lookback != 0,
                acting={"flat": flat_forward, "threads": forward_threads, "compiled": None},
            )
            self.module: MultiRLModule = self._modules.modules
            self.learner = AgentLearner(self._modules, modules_to_train, learner_connector, self.metrics)
            # With what a stateful module needs: one may be added. The pieces do nothing for others.
            self.env_to_module = [
                EnvToModulePipeline.default(*_spaces(part), pieces, stateful=True, device=device)
                for part, pieces in zip(parts, before, strict=True)
            ]
            self.module_to_env = [
                ModuleToEnvPipeline.default(*_spaces(part), pieces, stateful=True)
                for part, pieces in zip(parts, after, strict=True)
            ]
            self._lookback_asked = lookback
            self.returns = AgentReturns(self.module.__contains__)
            lag = AgentLagBound(self._modules, self.learner.to_train, max_lag, on_excess)
            rounds: Rounds[MultiAgentFragment] = Rounds(environments.num_lanes, lag, self.returns)
            super().__init__(environments, lag=lag, rounds=rounds, prefetch=prefetch)
            self._prepare = AgentsToModule(
                self.env_to_module,
                self._modules,
                joint=self.joint,
                num_lanes=environments.num_lanes,
                num_fragments=num_fragments,
                metrics=self.metrics,
            )
            self._follow_lanes(self._prepare)
            self._forward = AgentForward()
            self._act = ModuleToAgents(self.module_to_env, metrics=self.metrics, threads=forward_threads)

    def publish(self, weights: Mapping[Any, Weights]) -> dict[Any, int]:
        """Have the next passes use weights, module id -> `state_dict()`, which are copied; the versions that they get.

        Modules that are not named stay as they are. From any thread. Raises ModuleError for a module that does not
        exist, and for weights that are not its own; then nothing is published.
        """
        return self._modules.publish(weights)

    def publish_as(self, version: int, weights: Mapping[Any, Weights]) -> bool:
        """The same under a version that somebody else counts, who alone publishes then: a trainer elsewhere.

        False: the modules have that version already, or a newer one; nothing changes. Raises ModuleError, too, where
        weights are not of all the modules that `be_published_elsewhere` has named.
        """
        return self._modules.publish_as(version, weights)

    def be_published_elsewhere(self, ids: Sequence[Any]) -> None:
        """Have a trainer elsewhere publish the weights of these modules, together: all that are trained stay then.

        Modules that are not trained may come and go.
        """
        self._modules.be_published_elsewhere(ids)

    @property
    def version_elsewhere(self) -> int:
        """The version that a trainer elsewhere has published last, or with which its modules began."""
        return self._modules.version_elsewhere

    def acting_weights(self, module_id: Any = DEFAULT_MODULE_ID) -> ActingWeights:
        """Copies of the weights that a module acts with, those published last, and their policy version.

        From any thread. `rollout.module[module_id].state_dict()` are those of the module that is trained. Raises
        ModuleError for a module that there is not.
        """
        return ActingWeights(*self._modules.newest_weights(module_id))

    def add_module(self, module_id: Any, module: Any, *, explore: bool | None = None) -> None:
        """Have a module act from now on, for agents that are mapped to it when they begin. From any thread.

            explore    whether its actions are sampled; None: as the rollout was given it

        It is not trained where `modules_to_train` was given. Under the id of one that was removed its policy versions
        go on from there; agents that the removed one serves keep that until their episodes end, and batches have the
        rows of both. Raises ModuleError for an id that is taken, and for a module whose initial state is not like that
        of the one that was removed.
        """
        if self.learner.would_train(module_id):
            self._modules.check_may_change(module_id)
        self._modules.add(module_id, module, explore=explore)

    def remove_module(self, module_id: Any) -> None:
        """Have a module serve no agent that begins; those that it serves keep it until their episodes end.

        Then nothing of it is kept, nor its returns, but the number of its last version. Raises ModuleError for one
        that there is not.
        """
        if self.learner.would_train(module_id):
            self._modules.check_may_change(module_id)
        self._modules.remove(module_id)

    @property
    def policy_versions(self) -> dict[Any, int]:
        """Module id -> the version published last; 0 before any."""
        return self._modules.versions()

    def explain(self) -> str:
        """How it runs: what is chained into one task, and how much each edge holds."""
        return self._ring(self._credits).explain()

    # What every rollout has

    def _ring(self, gate: Gate | None) -> Graph:
        if not self.environments.is_started:
            self._make_lanes()  # the pipelines may have been edited
        return ring_of(self.environments, self._prepare, self._forward, self._act, gate)

    def _batch_of(self, fragments: Sequence[MultiAgentFragment]) -> Batch:
        return self.learner.batch_of(fragments)

    # Inside

    def _make_lanes(self) -> None:
        learning = [self.learner.pipeline_of(module_id) for module_id in self.module if self.learner.trains(module_id)]
        jointly = [] if self.joint is None else [self.joint.pipeline]
        pipelines = *jointly, *self.env_to_module, *self.module_to_env, *learning
        self.environments.make_lanes(
            lookback_for(self._lookback_asked, pipelines, stateful=self._modules.is_stateful),
            self._modules,
            lambda lane, acting: sampling_data(lane, self.seed, acting.seed_name),
        )


def _spaces(part: AgentPart) -> tuple[gym.Space[Any], gym.Space[Any]]:
    return part.observation_space, part.action_space


def _pieces(connector: Any, name: str, part: AgentPart) -> list[ConnectorV2]:
    return pieces_given(connector, name, part, spaces=_spaces(part))


def _seen(part: AgentPart, pieces: Sequence[ConnectorV2]) -> gym.Space[Any]:
    """The space that modules see a part's observations in."""
    seen = EnvToModulePipeline(*_spaces(part), connectors=list(pieces)).observation_space
    return part.observation_space if seen is None else seen
