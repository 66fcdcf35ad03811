"""Environments with several agents, modules and connectors as one node, and as a plain loop over train batches."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from rollflow.nodes.argument_checks import check_numbers, checking_keywords
from rollflow.nodes.connectors.connector_v2 import Batch
from rollflow.nodes.connectors.pipelines.default_pipelines import LearnerConnectorPipeline
from rollflow.nodes.env.environments import SEVERAL_AGENTS
from rollflow.nodes.metrics.episode_returns import AgentReturns
from rollflow.nodes.modules.policy_weights import ActingWeights, Weights
from rollflow.nodes.modules.rl_module import MultiRLModule
from rollflow.nodes.policies.artifact_files import folder_of
from rollflow.nodes.policies.evaluation import Evaluation, env_to_evaluate, evaluate_agents
from rollflow.nodes.policies.policy import AgentPolicies, Policy, save_all
from rollflow.nodes.rollout.options import MultiAgentKeywords, RolloutOptions, options_of, with_keywords
from rollflow.nodes.rollout.rollout_loop import RolloutLoop
from rollflow.nodes.stages.module_set import AgentLearner, AgentsActing, agents_acting_for
from rollflow.stream.data.errors import warn_caller
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


class MultiAgentRollout(RolloutLoop[MultiAgentFragment]):
    """Node that steps environments with several agents each, with modules, and gives what they made, by fragments.

    In every vector step each module does one forward pass over all the agents that it serves and that are to act.
    Batches are dicts: module id -> train batch. Otherwise it is used as a `Rollout` is. In a graph, a
    `MultiAgentLearnerPipeline` makes batches of its fragments.

        ENVIRONMENTS   default   meaning
        env                      Callables that make environments, or a vector environment: see `Environments`.
                                 `RemoteEnvs` or `RemoteRollouts`: hosts say how many environments and lanes they have.
        num_envs       None      Environments in all. None: one, or as many as `env` has.
        lanes          None      Groups of environments that step on their own. None: one inline, one for each
                                 environment in threads, one for each worker in processes.
        where          "inline"  "inline": environments step in the loop's thread. "threads": each lane in a thread of
                                 its own, for environments that wait, or let the interpreter go. "processes": in worker
                                 processes, for costly ones. "rollouts": each lane's whole rollout in a worker process,
                                 with copies of the modules. "auto": where it goes fastest, measured on copies.
                                 `OnProcesses`, `OnRay`: whole rollouts on hosts it starts, `num_envs` on each.
        workers        None      Worker processes. None: one for each core.
        timeouts       Timeouts  `Timeouts`: seconds after which environments in threads, in processes or on hosts are
                                 taken for hung. A `MultiAgentVectorEnv`'s step has both times together.
        seed           None      Of environments and sampling. None: a fresh one, to be read from `seed`. A list has one
                                 for each environment; the rest then follows from all of them.

        MODULES                     default  meaning
        module                      None     A module, or a dict of them by id, each as `Rollout` takes them: an
                                             instance, a class or function of (observation space, action space), None
                                             for a `DefaultModule`. One by itself has the id "default_policy". Copies
                                             act, and learn of new weights by `publish` alone.
        model_config                None     Of default modules.
        agent_to_module_mapping_fn  None     Agent id -> module id: a dict, or a function of the agent's id and its
                                             episode, of which there is the `id_`. It is asked whenever an agent begins
                                             an episode, and before the first to find out spaces. None: the agent's own
                                             module if there is one with its id, else "default_policy". All agents of
                                             a module have the same spaces.
        modules_to_train            None     Ids of the modules that batches are made for. None: all.
        explore                     True     Whether actions are sampled; or a dict, module id -> whether its are.
                                             Modules that it does not name sample.
        device                      None     Where forward passes are done while acting. None: where the modules are.

        FORWARD PASSES  default  meaning
        forward         Forward  `Forward`. With `max_batch`, as many agents act in one round of passes over several
                                 ready lanes, at most: each module does one pass over its agents in all of them.

        CONNECTORS               default  meaning
        joint_connector          None     `lambda env: piece or list of pieces`, which see all agents of an environment
                                          together, as `MultiAgentEpisode`s, before all others. They may rewrite the
                                          newest observations. `env` is the environments of the first lane.
        env_to_module_connector  None     `lambda part: piece or list of pieces`, put before the default ones. It is
                                          called for every `AgentPart`: the agents that have the same spaces. A piece is
                                          given the episodes of one module's agents that are to act, each agent's own.
        module_to_env_connector  None     `lambda part: piece or list of pieces`, put among the default ones, likewise.
        learner_connector        None     `lambda obs_space, act_space: piece or list of pieces`, for every module.

        FRAGMENTS        default  meaning
        fragment_length  128      Vector steps in a fragment (T).
        lookback         None     Agent steps that a chunk can look back (H). None: as many as pieces need, at least 1.
        num_fragments    None     A lane stops after so many. None: it never does.
        prefetch         0        Batches that the rollout may run ahead of its reader.
        max_lag          None     How many policy versions old a batch may be, of the modules that are trained, each
                                  beside its own.
        on_excess        "drop"   What is done with older ones: see `LagBound`.
        log              None     Where its figures are written: see `Rollout`.
        checkpoints      None     `Checkpoints`: where the run is saved, and how often, for `resume`.
        deterministic    False    Keep lanes in order: see `Rollout`.
        watch            Watch    `Watch`: the stall doctor, a trace, what pieces log into.
        debug            False    Everything inline, in the loop's thread, piece by piece, whatever else is asked for: a
                                  breakpoint stops right there. In a graph the graph says what runs where.

        PUBLIC ATTRIBUTE              what it is
        module                        The modules that are trained, by id: a `MultiRLModule`. Copies of them act.
        env_to_module, module_to_env  Connector pipelines, one for each part, to be edited before it runs.
        joint                         The pieces of `joint_connector`. None: there are none.
        learner                       Makes the train batches: see `AgentLearner`.
        metrics                       The `MetricsLogger` that pieces log into.
        returns                       `mean` and `count` of the last episodes' returns, all agents together;
                                      `by_module`.
        environments, lag, ledger     The node that steps them; the `LagBound`; counts of what a graph loses.
        seed, placement               The seed in use; why it goes where it goes, with `where="auto"`.
        log                           Logs one's own values, `log("train/loss", loss)`; `dropped_rows`.

    Also `stall`, `is_running`, `policy_versions`, `num_steps`, `lost`, `version_elsewhere`.

    Methods: `publish`, `acting_weights`, `policy`, `save_policy`, `evaluate`; `save` the run, `attach` what is saved
    with it, `resume` from it; loops `batches()`, `fragments()`; `start`, `drain`, `close`; `state_dict`,
    `load_state_dict` to count on from another run; `report`, `diagnose`, `explain`; `graph`; hooks `on_batch`,
    `on_episode`.

    Raises EnvError, ModuleError, ConnectorError or ValueError if an argument can't be worked with.
    """

    module: MultiRLModule
    returns: AgentReturns
    _acting: AgentsActing

    @with_keywords(MultiAgentKeywords)
    def __init__(self, env: Any, **keywords: Unpack[MultiAgentKeywords]) -> None:
        options = options_of(keywords, MultiAgentKeywords, "MultiAgentRollout")
        check_numbers(num_envs=(options.num_envs, 1), lanes=(options.lanes, 1))
        given = {"env": env, **keywords}
        super().__init__(env, options, given=given, rollout=MultiAgentRollout, kind=SEVERAL_AGENTS)
        if unserved := self._acting.serving_none():
            warn_caller(unserved, RuntimeWarning)

    def publish(self, weights: Mapping[Any, Weights]) -> dict[Any, int]:
        """Have the next passes use weights, module id -> `state_dict()`, which are copied; returns their versions.

        Modules that are not named stay as they are. From any thread. Raises ModuleError for a module that does not
        exist, and for weights that are not its own; then nothing is published.
        """
        versions = self._acting.publish(weights)
        self.environments.broadcast({module_id: (versions[module_id], weights[module_id]) for module_id in versions})
        return dict(self.hooks.tell("publish", versions))

    def publish_as(self, version: int, weights: Mapping[Any, Weights]) -> bool:
        """Publish weights under a version that a trainer elsewhere counts, which alone publishes then.

        Returns False if the modules have that version already, or a newer one; nothing changes then. Raises
        ModuleError as `publish` does, and if weights are not of all modules that `be_published_elsewhere` named.
        """
        self._acting.check_elsewhere(weights)
        if version <= self.version_elsewhere:
            return False
        self.environments.broadcast({module_id: (version, each) for module_id, each in weights.items()})
        is_new = self._acting.publish_as(version, weights)
        return self.hooks.tell_if_new(dict.fromkeys(weights, version), is_new=is_new)

    def be_published_elsewhere(self, ids: Sequence[Any]) -> None:
        """Have a trainer elsewhere publish the weights of these modules, together."""
        self._acting.be_published_elsewhere(ids)

    @property
    def version_elsewhere(self) -> int:
        """The version that a trainer elsewhere has published last, or with which its modules began."""
        return self._acting.version_elsewhere

    def acting_weights(self, module_id: Any = DEFAULT_MODULE_ID) -> ActingWeights:
        """Copies of the weights that a module acts with, those published last, and their policy version.

        From any thread. `rollout.module[module_id].state_dict()` are those of the module that is trained. Raises
        ModuleError for a module that there is not.
        """
        return ActingWeights(*self._acting.newest_weights(module_id))

    def policy(self, agent: Any, module_id: Any = None, **options: Any) -> Policy:
        """The policy that acts for an agent, as `Rollout.policy` gives it; each of its sessions is one agent.

            module_id    None: of the module that the agent is mapped to; to be named if that is up to the episode

        Raises PolicyError for an unknown agent, and if `joint_connector` pieces see all agents together.
        """
        return self._policies.of(agent, module_id, **options)

    def save_policy(
        self,
        path: str | os.PathLike[str],
        agent: Any = None,
        module_id: Any = None,
        *,
        explore: bool = False,
        **options: Any,
    ) -> None:
        """Save the policies that act now, for other programs: `Policy.load`. Options are those of `Policy.save`.

            agent        whose policy is saved; None: those of all modules, in `path / module_id` each
            module_id    as for `policy`; without an agent, the module whose policy is saved

        Raises PolicyError as `policy` does, and ModuleError if no agent is known that a module serves.
        """
        save_all(self._policies.to_save(Path(path), agent, module_id, explore=explore), **options)

    @checking_keywords("evaluate", {"num_episodes": "episodes=…"})
    def evaluate(
        self, env: Callable[[], Any] | None = None, episodes: int = 100, *, seed: int = 0
    ) -> dict[Any, Evaluation]:
        """Play whole episodes with the policies that act now: see `evaluate_agents`. Raises as `policy` does, too.

        env    makes an environment; None: the function that the rollout was given
        """
        found: dict[Any, Evaluation] = self._played(env, episodes, {"seed": seed})[0]()
        return found

    @property
    def policy_versions(self) -> dict[Any, int]:
        """Module id -> the version published last; 0 before any."""
        return self._acting.versions()

    # What every rollout has

    def _played(self, env: Any, episodes: int, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        made = env_to_evaluate(self._env, "the rollout was given", may_be_id=False) if env is None else env
        policies = self._policies.of_all()
        play = partial(evaluate_agents, policies, made, episodes, **options)
        folders = {folder_of(policy.trained_on["module"]): policy for policy in policies.values()}
        return play, lambda path: {path / name: each for name, each in folders.items()}, dict(self.policy_versions)

    def _batch_of(self, fragments: Sequence[MultiAgentFragment]) -> Batch:
        return self.learner.batch_of(fragments)

    def _slowest_learner_piece(self) -> str:
        return self.learner.slowest_piece

    # Inside

    def _make_acting(self, options: RolloutOptions) -> AgentsActing:
        acting = agents_acting_for(
            self.environments.parts,
            self.environments.envs[0],
            **options.acting_options,
            mapping=options.agent_to_module_mapping_fn,
            joint_connector=options.joint_connector,
            explore=options.explore,
            how=options.forward.options,
        )
        self.returns = AgentReturns()
        return acting

    def _make_learner(self) -> None:
        acting, options = self._acting, self._options
        self.joint = acting.joint
        self.env_to_module, self.module_to_env = acting.env_to_module, acting.module_to_env
        self._policies = AgentPolicies(self.environments.parts, acting, self.environments)
        self.learner = AgentLearner(acting, options.modules_to_train, options.learner_connector, self.metrics, self)

    def _learner_pipelines(self) -> Mapping[str, LearnerConnectorPipeline]:
        trained = filter(self.learner.trains, self.module)
        return {f"learner of module {each!r}": self.learner.pipeline_of(each) for each in trained}
