"""Environments, module and connectors as one node that gives fragments, and as a plain loop over train batches."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from rollflow.nodes.argument_checks import check_flags
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import (
    EnvToModulePipeline,
    LearnerConnectorPipeline,
    ModuleToEnvPipeline,
)
from rollflow.nodes.device.environments import DeviceEnvironments
from rollflow.nodes.env.env_source import EnvSource, with_kwargs
from rollflow.nodes.env.environments import ONE_AGENT
from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.nodes.metrics.episode_returns import EpisodeReturns
from rollflow.nodes.modules.policy_weights import Weights
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.policies.evaluation import EnvMaker, Evaluation, check_spaces, env_to_evaluate, name_of_env
from rollflow.nodes.policies.policy import VECTOR_STEPS, Policy, policy_now
from rollflow.nodes.rollout.options import RolloutKeywords, RolloutOptions, options_of, with_keywords
from rollflow.nodes.rollout.rollout_loop import RolloutLoop
from rollflow.nodes.stages.acting import Acting, acting_for, pieces_given
from rollflow.stream.data.errors import ModuleError
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.observe.waits import Sign

_BATCHES = 10  # after which a module that was changed should have been published
_EPISODES = 100
_VERSIONS = 10  # over which returns are to have changed


class Rollout(RolloutLoop[Fragment]):
    """Steps environments with a module and gives what they made, fragment by fragment.

    ======================== ========= ================================================================================
    Argument                 Default   Meaning
    ======================== ========= ================================================================================
    Environments
    env                                An id, a callable or a list of them, or vector environments: see `Environments`.
                                       `RemoteEnvs` or `RemoteRollouts` for those on other hosts, which are waited for
    env_kwargs               None      Keywords for `gymnasium.make`, if `env` is an id
    num_envs                 None      Slots in all; None: taken from `env`, or one
    lanes                    None      Groups of slots that step on their own; None: as many as suit the place
    where                    "inline"  Where environments step:
                                       "inline"     in the loop's thread, by default in one lane
                                       "threads"    each lane in a thread, one lane for every slot. For environments
                                                    that wait, or let the interpreter go
                                       "processes"  in worker processes; forward passes stay here. For costly ones
                                       "rollouts"   each lane's whole rollout in a worker process, with connectors and
                                                    a copy of the module. For policies that run on CPUs
                                       "auto"       where it goes fastest, measured on copies of the module and of
                                                    the pieces, for some seconds. `explain()` says why
                                       `OnProcesses`, `OnRay`: whole rollouts on hosts it starts, `num_envs` on each
    autoreset_mode           None      Of vector environments made here of plain ones, as gymnasium takes it; None:
                                       SAME_STEP. An id's vectorized form and ready vector environments have their own
    workers                  None      Worker processes; None: one for each core
    timeouts                 Timeouts  `Timeouts`: seconds after which a step or a reset hangs, in threads, in processes
                                       or on hosts

    Policy
    module                   None      Has `forward_exploration` and `forward_inference`; or a function of observations,
                                       for actions; or a class or function of both spaces that makes either. A copy of
                                       it acts, which `publish` alone changes. None: a `DefaultModule`
    model_config             None      Of the default module: a `DefaultModelConfig`, or a dict of its fields
    explore                  True      Sample actions, by `forward_exploration`; False: take the likeliest
    env_to_module_connector  None      `lambda env: piece or list of pieces`, put before the default ones. `env` is the
                                       first lane's vector environment. If that is in another process, `env` has its
                                       spaces, `num_envs` and autoreset mode
    module_to_env_connector  None      `lambda env: piece or list of pieces`, put among the default ones
    learner_connector        None      `lambda obs_space, act_space: piece or list of pieces`, before the default ones

    Fragments
    fragment_length          128       Vector steps in a fragment (T)
    lookback                 None      Steps that a chunk can look back into the one before (H); None: as many as the
                                       connector pieces need, and at least 1
    num_fragments            None      Fragments after which a lane stops; None: it never does

    Flow
    prefetch                 0         Batches that the rollout may run ahead of its reader. With 0 it stands still
                                       while the reader works, so every batch is exactly on-policy
    max_lag                  None      Policy versions that a batch may be old: see `LagBound`; None: any number
    on_excess                "drop"    "drop" leaves out what is older; "pace" holds the rollout back

    Speed of forward passes while acting
    forward                  Forward   `Forward`: passes over several lanes, flat or compiled
    device                   None      Where passes are done; None: where the module is

    Other
    seed                     None      Of environments and sampling; None: a fresh one, to be read from `seed`. A list
                                       has one for each slot's environment; the rest follows from all of them
    log                      None      Where its figures are written, such as "tensorboard:runs/1"; or a list of them.
                                       Kinds: jsonl, mlflow, progress, prometheus, tensorboard, wandb
    checkpoints              None      `Checkpoints`: where the run is saved, and how often, for `resume`
    deterministic            False     Keep lanes in order: the same batches in every run, wherever lanes step, for a
                                       given `prefetch`. A lane waits for those before it
    watch                    Watch     `Watch`: the stall doctor, a trace, a record to replay the run by
    debug                    False     Run everything in the loop's thread, whatever else is asked for: a breakpoint in
                                       a piece stops right there. In a graph the graph says what runs where
    ======================== ========= ================================================================================

    Public attributes:

        module                           the module that is trained; a copy of it acts
        env_to_module, module_to_env     connector pipelines, to be edited before it runs; `timers()` of their pieces
        learner_pipeline                 makes train batches; `has_learner_pieces`: not of the default pieces alone
        metrics                          the `MetricsLogger` that pieces log into
        returns                          `mean` and `count` of the last episodes' returns: see `EpisodeReturns`
        environments, lag, ledger        the node that steps them; the `LagBound`; counts of what a graph loses
        env_kwargs                       keywords that an id's environments are made with
        seed, placement                  the seed in use; why it goes where it goes, with `where="auto"`
        stall                            the rules of the stall doctor, of `watch`
        log                              logs one's own values, `log("train/loss", loss)`; `dropped_rows`
        is_running, policy_version, num_steps, lost

    Methods: `publish` new weights; `save` the run, `attach` what is saved with it, `resume` from it; `state_dict`, and
    `load_state_dict` to count on from another run; loop over
    `batches()` or `fragments()`; `start`, `drain`, `close`; `report`, `diagnose` and `explain`; `policy`,
    `save_policy`, `evaluate` and `evaluate_every`; `graph`, which has `draw()`; hooks `on_batch`, `on_episode`,
    `on_publish`; for sinks `publish_as`, `watch`, `hold_back` and others.

    Either a plain loop, `with Rollout(...) as rollout: for batch in rollout.batches(): ...`, or the same with `async`,
    for which its stages run in a thread, or between `rollout.start()` and `rollout.close()`, or a node of a `Graph`,
    with the port `fragments`. It runs once.

    Raises EnvError, ModuleError, ConnectorError or ValueError if an argument can't be worked with, and TypeError for
    a keyword that there is not.
    """

    returns: EpisodeReturns
    _acting: Acting

    @with_keywords(RolloutKeywords)
    def __init__(self, env: EnvSource | RemoteHosts, **keywords: Unpack[RolloutKeywords]) -> None:
        options = options_of(keywords, RolloutKeywords, "Rollout")
        check_flags(explore=options.explore)
        self.env_kwargs, made = dict(options.env_kwargs or {}), with_kwargs(env, options.env_kwargs)
        super().__init__(made, options, given={"env": env, **keywords}, rollout=Rollout, kind=ONE_AGENT)

    def publish(self, weights: Weights) -> int:
        """Have the next forward pass use these weights, a `state_dict()`, which is copied; the policy version they get.

        May be called from any thread. Raises ModuleError when they are not the module's.
        """
        version = self._acting.weights.publish(weights)
        self.environments.broadcast({DEFAULT_MODULE_ID: (version, weights)})
        return self.hooks.tell("publish", version)

    def publish_as(self, version: int, weights: Weights) -> bool:
        """Publish weights under a version that a trainer has counted; False: they are not newer, and are passed over.

        Raises ModuleError when they are not the module's.
        """
        newest = self._acting.weights
        if version <= newest.version:
            return False
        newest.check(weights)
        self.environments.broadcast({DEFAULT_MODULE_ID: (version, weights)})  # first: a turn may begin once it is there
        return self.hooks.tell_if_new(version, is_new=newest.publish_as(version, weights))

    @property
    def policy_version(self) -> int:
        """The version published last; 0 before any."""
        return self._acting.weights.version

    def policy(self, **options: Any) -> Policy:
        """The policy that acts now, with the weights published last, to act without this rollout; see `Policy`.

        options    `explore`, `learns`, `device` and `seed` of it
        """
        environments, acting = self.environments, self._acting
        spaces = {"observation_space": environments.observation_space, "action_space": environments.action_space}
        facts = {"environment": name_of_env(self._env, self.env_kwargs), "steps": self.num_steps}
        facts |= {VECTOR_STEPS: environments.vector_steps}
        return policy_now(acting.copy, acting.weights, acting.pipelines, facts, **spaces, **options)

    def save_policy(self, path: str | os.PathLike[str], *, explore: bool = False, **options: Any) -> None:
        """Save the policy that acts now, for other programs: `Policy.load`. Options are those of `Policy.save`."""
        self.policy(explore=explore).save(path, **options)

    def evaluate(self, env: EnvMaker | None = None, episodes: int = 100, **options: Any) -> Evaluation:
        """Play whole episodes with the policy that acts now: see `Policy.evaluate`, whose options are taken.

        env    None: that of the rollout, if it was given as an id or a function

        Raises PolicyError if such environments can't be made one by one.
        """
        found: Evaluation = self._played(env, episodes, options)[0]()
        return found

    # What every rollout has

    def _played(self, env: Any, episodes: int, options: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        made = env_to_evaluate(self._env, "the rollout was given", may_be_id=True) if env is None else env
        policy = self.policy()
        play = partial(policy.evaluate, made, episodes, **options)
        return play, lambda path: {path: policy}, policy.trained_on["policy_version"]

    def signs(self) -> Sequence[Sign]:
        """Silent faults: those of every rollout, of its module and of its returns."""
        published = self.policy_version - self._acting.weights.first_version
        return *super().signs(), *self._check.signs(self.policy_version, published, self._learner_meter.items)

    def _batch_of(self, fragments: Sequence[Fragment]) -> Batch:
        return self.learner_pipeline.of_fragments(fragments, self.module, self.metrics)

    def _slowest_learner_piece(self) -> str:
        return slowest_piece([self.learner_pipeline])

    # Inside

    def _make_acting(self, options: RolloutOptions) -> Acting:
        environments = self.environments
        spaces = environments.observation_space, environments.action_space
        home = environments.device if isinstance(environments, DeviceEnvironments) else None
        self.returns = EpisodeReturns()
        return acting_for(environments.envs[0], spaces, **options.acting_options, home=home)

    def _make_learner(self) -> None:
        acting = self._acting
        self.env_to_module, self.module_to_env = acting.env_to_module, acting.module_to_env
        pieces = pieces_given(self._options.learner_connector, "learner_connector", *acting.spaces)
        self.has_learner_pieces = bool(pieces)  # beside the default ones
        options: dict[str, Any] = {"stateful": acting.is_stateful, "device": getattr(self.environments, "device", None)}
        self.learner_pipeline = LearnerConnectorPipeline.default(*acting.spaces, pieces, **options)
        self.learner_pipeline.refuse_edits_while_run_by(self)
        self._check = TrainingCheck(self.module, self.returns)
        self._make_lanes()

    def _check_fits(self) -> None:
        observations = self.env_to_module.observation_space
        if self._options.module is None and observations is not None and observations != self.module.observation_space:
            raise ModuleError(
                f"env_to_module was edited: it leaves observations in {observations}, but the default module was made "
                f"for {self.module.observation_space}; expected such pieces by env_to_module_connector, or a module"
            )

    def _learner_pipelines(self) -> Mapping[str, LearnerConnectorPipeline]:
        return {"learner": self.learner_pipeline}


class TrainingCheck:
    """Finds weights that are trained and never published, and returns that stay the same while the policy changes.

    module     that is trained: changes in place are counted by torch itself
    returns    has the last finished episodes' returns, and the count of all

    If returns have changed once, nothing is said of them any more: a policy that has learnt may well have one return.
    """

    def __init__(self, module: Any, returns: Any) -> None:
        self._module, self._returns = module, returns
        self._at_first = self._changes()
        self._since: tuple[float, int] | None = None  # return and version at the first look
        self._has_changed = False  # whether returns have

    def signs(self, version: int, published: int, batches: int) -> Iterator[Sign]:
        """Texts on what is so now.

        version      policy version that the rollout acts with
        published    number of those that were published
        batches      that were handed out
        """
        if not published and batches >= _BATCHES and self._changes() != self._at_first:
            yield Sign(
                "publish",
                f"rollout.module was changed while {batches} batches were handed out, and none of its weights were "
                "published: the rollout acts with those it began with; rollout.publish(rollout.module.state_dict())",
            )
        last, count = list(self._returns.returns), self._returns.count
        if not last or self._has_changed:
            return
        if self._since is None:
            self._since = last[0], version
        value, first = self._since
        self._has_changed = min(last) != value or max(last) != value
        if not self._has_changed and version >= first + _VERSIONS and count >= _EPISODES:
            yield Sign(
                "returns",
                f"the returns of all {count:,} episodes are {value:g}, through {version - first} published versions: "
                "look at the rewards, and whether actions reach the environment",
            )

    def _changes(self) -> int:
        if not hasattr(self._module, "parameters"):
            return 0
        # Parameters made in torch.inference_mode() have no version, and nothing trains them.
        return sum(int(each._version) for each in self._module.parameters() if not each.is_inference())


def rollout_of(policy: Policy, env: Any, **options: Any) -> Rollout:
    """A rollout with a policy's module and pieces, which are shared with it: what they have learnt stays as it is.

    env, options    as for `Rollout`

    Raises PolicyError for environments with other spaces than those that the policy was made for.
    """
    stateful = is_stateful(policy.module)
    rollout = Rollout(
        env,
        module=policy.module,
        env_to_module_connector=_own_pieces(
            policy, policy.env_to_module, EnvToModulePipeline.default(stateful=stateful)
        ),
        module_to_env_connector=_own_pieces(
            policy, policy.module_to_env, ModuleToEnvPipeline.default(stateful=stateful)
        ),
        explore=policy.explore,
        **options,
    )
    rollout.environments.begin_at(policy.trained_on.get(VECTOR_STEPS, 0))  # schedules go on
    # The default pieces, too, are the policy's: they may have other arguments, or another order.
    for ours, theirs in ((rollout.env_to_module, policy.env_to_module), (rollout.module_to_env, policy.module_to_env)):
        for name in ours.names:
            ours.remove(name)
        for piece in theirs:
            ours.append(piece)
    return rollout


def _own_pieces(
    policy: Policy, pieces: Iterable[ConnectorV2], usual: Iterable[ConnectorV2]
) -> Callable[[Any], list[ConnectorV2]]:
    """A function that gives a policy's pieces beside the usual ones, for environments with its spaces."""
    classes = {type(piece) for piece in usual}

    def made(env: Any) -> list[ConnectorV2]:
        check_spaces(policy, env.single_observation_space, env.single_action_space, "the environments")
        return [piece for piece in pieces if type(piece) not in classes]

    return made
