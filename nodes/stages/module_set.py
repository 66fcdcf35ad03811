"""The modules of a multi-agent rollout: copies that act, which agent each serves, and batches for those trained."""

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import gymnasium as gym
import torch

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.learner.train_columns import device_of
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import slowest_piece
from rollflow.nodes.connectors.pipelines.default_pipelines import (
    EnvToModulePipeline,
    LearnerConnectorPipeline,
    ModuleToEnvPipeline,
)
from rollflow.nodes.modules.given_module import RandomModule
from rollflow.nodes.modules.policy_weights import PolicyWeights, Weights
from rollflow.nodes.modules.rl_module import MultiRLModule, is_stateful
from rollflow.nodes.stages.acting import (
    acting_copy,
    check_actions,
    chosen_space,
    left_by,
    module_for,
    one_of,
    pieces_given,
    sampling_data,
    set_state_of_module,
    state_of_module,
)
from rollflow.nodes.stages.agent_stages import AgentForward, AgentsToModule, JointPieces, ModuleToAgents
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.stream.data.errors import EnvError, ModuleError, located, noted, shown
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID, MultiAgentEpisode
from rollflow.stream.fragments.fragment import EpisodeIds
from rollflow.stream.graph.seeding import seed_for
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment, parts_by_module
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

_PROBES, _MOST_PROBES = EpisodeIds("probe"), 16

AgentToModule = Mapping[Any, Any] | Callable[..., Any] | None


@dataclass(slots=True, eq=False)
class ActingModule:
    """One module as it acts.

    module_id     its id
    module        the copy that acts
    weights       what is published for it
    forward       a pass
    explore       whether actions are sampled
    seed_name     seeds its sampling, beside the rollout's seed
    is_checked    True if its actions were checked against its agents' space
    """

    module_id: Any
    module: Any
    weights: PolicyWeights
    forward: ModuleForward
    explore: bool
    seed_name: str
    is_checked: bool = False


@dataclass(eq=False, repr=False)
class AgentsActing:
    """The modules of a rollout as they act in environments of several agents each, and their pipelines; see `Acting`.

    A pickled one has copies of the modules, with the weights that they have loaded.

        module     one module, or a mapping of them by id, or None: a `DefaultModule` for all agents, "default_policy"
        mapping    agent id -> module id, as a mapping, or a function of the agent's id and the episode; None: an
                   agent's own module if there is one with its id, else "default_policy"
        parts      the agents by their spaces
        seen       of each part, the spaces of what the module sees, and of what it chooses unless it says otherwise
        acted      of each part, the space that the module's actions are to be in; None: connector pieces see to that
        joint      pieces that see all agents together; None: there are none
        env_to_module, module_to_env    default pipelines of each part, with the pieces given
        explore    whether actions are sampled, of all modules or by id; of those that are not named they are
        how        forward passes are done: what `ModuleForward` takes beside module, weights and `explore`

    module     those that are trained, by id
    version_elsewhere    that somebody else has published last, for all that he publishes
    acting     the copies that act, by id

    Raises ModuleError for what are no modules.
    """

    module: Any
    mapping: AgentToModule
    parts: tuple[AgentPart, ...]
    seen: tuple[Any, ...]
    acted: tuple[Any, ...]
    joint: JointPieces | None
    env_to_module: list[EnvToModulePipeline]
    module_to_env: list[ModuleToEnvPipeline]
    model_config: Any
    device: Any
    seed: int
    explore: bool | Mapping[Any, bool]
    how: Mapping[str, Any]

    def __post_init__(self) -> None:
        module = self.module
        self.acting: dict[Any, ActingModule] = {}
        self._probe_number = count()
        self._named: dict[Any, set[Any]] = {}  # agent -> modules that the mapping has named for it in probes
        self._raised: Exception | None = None  # by the mapping, in the last of these probes that failed
        self._elsewhere: frozenset[Any] | None = None  # modules whose weights somebody else publishes
        self.version_elsewhere = 0
        self._lock = threading.Lock()  # held by whoever publishes
        _check_modules(module, self.mapping, self.parts)
        named = module if isinstance(module, Mapping) else {DEFAULT_MODULE_ID: module}
        if self.model_config is not None and all(module is not None for module in named.values()):
            raise ModuleError(
                "model_config is for default modules, but every module is given: expected a None among them, or "
                "model_config to be given to your modules' constructors instead"
            )
        self._first_ids = frozenset(named)
        self.module = MultiRLModule({module_id: self._made(module_id, module) for module_id, module in named.items()})
        self._raised = None  # whose traceback refers to this
        self.explore = self._checked_explore(self.explore)
        for module_id, module in self.module.items():
            self._have_act(module_id, module)

    def __reduce__(self) -> Any:
        acting = self.acting.items()
        given = {module_id: each.module for module_id, each in acting}
        explore = {module_id: each.explore for module_id, each in acting}
        made_for = given, self.mapping, self.parts, self.seen, self.acted
        how = None, self.device, self.seed, explore, self.how
        return AgentsActing, (*made_for, self.joint, self.env_to_module, self.module_to_env, *how)

    def serving_none(self) -> str:
        """The words for modules that serve no agent, if agents have modules by their ids; "" if there are none."""
        agents = [agent for part in self.parts for agent in part.agents]
        unserved = [each for each in self._first_ids if each != DEFAULT_MODULE_ID and each not in agents]
        if self.mapping is not None or not unserved:
            return ""
        return (
            f"no agent has the modules {sorted(unserved, key=str)}: expected ids of the agents, {shown(agents)}, "
            f"'{DEFAULT_MODULE_ID}' for all others, or agent_to_module_mapping_fn"
        )

    @property
    def is_stateful(self) -> bool:
        """True if one of them has a state."""
        return any(is_stateful(acting.module) for acting in list(self.acting.values()))

    @property
    def explores(self) -> bool:
        """True if actions of one of them are sampled."""
        return any(acting.explore for acting in list(self.acting.values()))

    @property
    def named_pipelines(self) -> list[tuple[str, Any]]:
        """Every pipeline with its name in messages; each part's goes by the part's agents."""
        named: list[tuple[str, Any]] = [] if self.joint is None else [("joint", self.joint.pipeline)]
        for name, pipelines in (("env_to_module", self.env_to_module), ("module_to_env", self.module_to_env)):
            for part, pipeline in zip(self.parts, pipelines, strict=True):
                named.append((name if len(self.parts) == 1 else f"{name} of agents {list(part.agents)}", pipeline))
        return named

    @property
    def pipelines(self) -> list[Any]:
        """Every pipeline, that of the joint pieces first."""
        return [pipeline for _, pipeline in self.named_pipelines]

    @property
    def most_agents(self) -> int:
        """Number of the agents in each environment."""
        return sum(len(part.agents) for part in self.parts)

    def begin_lane(self, lane: MultiAgentLane, seed: int) -> None:
        """Do nothing: a lane makes what a module samples with when it first serves an agent."""

    @property
    def by_id(self) -> dict[Any, tuple[Any, PolicyWeights]]:
        """Module id -> the copy that acts, and its weights as they are published."""
        return {module_id: (each.module, each.weights) for module_id, each in self.acting.items()}

    def make_lanes(self, environments: Any, lookback: int, seed: int, sequence: int = 0) -> None:
        """Have environments make lanes that look back so many agent steps, with what modules sample with."""
        environments.make_lanes(lookback, self, lambda lane, acting: sampling_data(lane, seed, acting.seed_name))
        for lane in environments.lanes:
            lane.sequence = sequence
            for part in lane.parts:
                part.fragment.sequence = sequence

    def stages(self, environments: Any, how: Mapping[str, Any], metrics: Any, **of_lanes: Any) -> tuple[Any, Any, Any]:
        """The stages before the forward passes, of them, and behind them."""
        return (
            AgentsToModule(self.env_to_module, self, joint=self.joint, metrics=metrics, **of_lanes),
            AgentForward(self),
            ModuleToAgents(self.module_to_env, metrics=metrics, threads=how["threads"]),
        )

    def under_way(self, lane: MultiAgentLane) -> int:
        """Transitions that a lane's next vector step may end."""
        return lane.steps_under_way + sum(len(part.acting) for part in lane.parts)

    @property
    def is_by_agent(self) -> bool:
        """True if every agent has the same module in all episodes that begin now."""
        return not callable(self.mapping)

    def module_of(self, agent: Any, episode_id: str) -> ActingModule:
        """The module that serves an agent in an episode.

        Raises EnvError for one that does not exist, and ModuleError for one that chooses other actions than the agent
        has, if that could not be told before.
        """
        acting = self._mapped_to(agent, episode_id)
        if not acting.is_checked:
            self._check_actions_of(acting, agent)
            acting.is_checked = True
        return acting

    def publish(self, weights: Mapping[Any, Weights]) -> dict[Any, int]:
        """Have the next pass of each module named use its weights; the policy versions that they get.

        Raises ModuleError for a module that does not exist, and for weights that are not its own; then none is used.
        """
        with self._lock:
            self._check(weights)
            return {module_id: self.acting[module_id].weights.publish(state) for module_id, state in weights.items()}

    def publish_as(self, version: int, weights: Mapping[Any, Weights]) -> bool:
        """Publish under a version that somebody else counts; False: there is a newer one, or this one, already.

        Raises ModuleError as `publish` does, and if they are not of all modules that are published elsewhere.
        """
        with self._lock:
            self.check_elsewhere(weights)
            if version <= self.version_elsewhere:
                return False
            for module_id, state in weights.items():
                self.acting[module_id].weights.publish_as(version, state)
            self.version_elsewhere = version  # last: who sees it lets lanes act with what it stands for
            return True

    def check_elsewhere(self, weights: Mapping[Any, Weights]) -> None:
        """Raise ModuleError unless weights are of the modules that are published elsewhere, all of them."""
        if self._elsewhere is not None and weights.keys() != self._elsewhere:
            raise ModuleError(
                f"weights are of the modules {sorted(weights)}, expected those of {sorted(self._elsewhere)}"
            )
        self._check(weights)

    def be_published_elsewhere(self, ids: Sequence[Any]) -> None:
        """Have somebody else publish the weights of these modules, under versions above those that they have."""
        with self._lock:
            self._elsewhere = frozenset(ids)
            self.version_elsewhere = max((self.acting[each].weights.version for each in ids), default=0)

    def versions(self) -> dict[Any, int]:
        """Module id -> the policy version that was published last."""
        return {module_id: acting.weights.version for module_id, acting in self.acting.items()}

    def go_on_from(self, versions: Mapping[Any, int]) -> None:
        """Have modules begin with the policy versions of an earlier run, by id.

        Raises ModuleError for an id that no module has, RunError once weights have been published.
        """
        with self._lock:
            if missing := [module_id for module_id in versions if module_id not in self.acting]:
                raise ModuleError(
                    f"the state has versions of the modules {missing}, which are not there; expected them to be given "
                    f"to the rollout; there are {list(self.acting)}"
                )
            for module_id, version in versions.items():
                self.acting[module_id].weights.go_on_from(version)

    def get_state(self) -> list[list[Any]]:
        """Of each module its weights, those of the copy that acts, and those that wait: none is copied."""
        with self._lock:
            modules = self.module.items()
            return [[name, state_of_module(module, *self.by_id[name])] for name, module in modules]

    def set_state(self, state: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Go on from what `get_state` gave. Before any weights are published. Raises ValueError for other modules."""
        if (names := [name for name, _ in state]) != list(self.module):
            raise ValueError(f"the run had the modules {names}, and there are {list(self.module)}")
        for name, each in state:
            set_state_of_module(self.module[name], *self.by_id[name], each)

    def newest_weights(self, module_id: Any) -> tuple[int, dict[str, Any]]:
        """The newest version of a module that acts, and copies of its weights.

        Raises ModuleError if there is none of this id.
        """
        acting = self.of_id(module_id)
        return acting.weights.newest(acting.module)

    def of_id(self, module_id: Any) -> ActingModule:
        """The module of this id, as it acts. Raises ModuleError if there is none."""
        self.module[module_id]
        return self.acting[module_id]

    def agent_of(self, module_id: Any) -> Any:
        """An agent that a module serves. Raises ModuleError if there is no such module, or that can't be told."""
        part = self._part_for(module_id, self.of_id(module_id).module)
        if part is None:
            raise ModuleError(
                f"which agents module '{module_id}' serves can't be told by what agent_to_module_mapping_fn gives for "
                "their ids; expected one of them to be named"
            )
        for agent in self.parts[part].agents:
            self._may_serve(agent)
        return self._agent_in(part, module_id)

    def chosen_spaces(self) -> list[gym.Space[Any] | None]:
        """Spaces that modules choose in, part by part, if pieces make the actions of it; None: the agents' space.

        Raises ModuleError if the choices of modules that serve agents of one part do not fit one column.
        """
        chosen: list[gym.Space[Any] | None] = []
        for place, (part, acted) in enumerate(zip(self.parts, self.acted, strict=True)):
            own = {
                module_id: chosen_space(acting.module, part.action_space)
                for module_id, acting in self.acting.items()
                if acted is None and self._part_for(module_id, acting.module) == place
            }
            first = one_of(own, part)
            chosen.append(None if first == part.action_space else first)
        return chosen

    def _made(self, module_id: Any, module: Any) -> Any:
        part = self._part_for(module_id, module)
        if part is None:
            return module
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]), located(f"module '{module_id}'"):
            torch.default_generator.manual_seed(seed_for(self.seed, f"weights/{module_id}"))  # the one restored
            config = self.model_config if module is None else None
            made = module_for(module, config, *self.seen[part])
            if self.acted[part] is not None:
                check_actions(made, self.acted[part], self._agent_in(part, module_id))
            return made

    def _agent_in(self, part: int, module_id: Any) -> Any:
        """An agent of a part that a module serves: one that the mapping has named it for, if there is one."""
        agents = self.parts[part].agents
        return next((agent for agent in agents if module_id in self._named.get(agent, ())), agents[0])

    def _check(self, weights: Mapping[Any, Weights]) -> None:
        """Raise ModuleError unless they are modules' of ours."""
        for module_id, state in weights.items():
            if module_id not in self.module:
                raise ModuleError(
                    f"there is no module '{module_id}' to publish weights for, expected module id -> state_dict(), "
                    f"with ids among {list(self.module)}"
                )
            with located(f"module '{module_id}'"):
                self.acting[module_id].weights.check(state)

    def _mapped_to(self, agent: Any, episode_id: str) -> ActingModule:
        """The module that serves an agent in an episode. Raises EnvError for one that does not exist."""
        mapping = self.mapping
        if mapping is None:
            module_id = agent if agent in self.acting else DEFAULT_MODULE_ID
        elif callable(mapping):
            module_id = mapping(agent, MultiAgentEpisode(episode_id))
        elif agent in mapping:
            module_id = mapping[agent]
        else:
            missing = [each for part in self.parts for each in part.agents if each not in mapping]
            raise EnvError(
                f"agent_to_module_mapping_fn is {dict(mapping)}, expected every agent: {missing} are missing"
            ).see("agents")
        if module_id not in self.acting:
            raise EnvError(
                f"agent '{agent}' is mapped to module '{module_id}', which does not exist: expected one of "
                f"{list(self.acting)}; module={{id: module}} has all of them from the beginning, and publish gives one "
                "other weights"
            ).see("agents")
        return self.acting[module_id]

    def _check_actions_of(self, acting: ActingModule, agent: Any) -> None:
        """Raise ModuleError unless a module chooses actions that its first agent has, and so all its agents."""
        acted = next(acted for part, acted in zip(self.parts, self.acted, strict=True) if agent in part.agents)
        if acted is not None and getattr(acting.module, "action_space", None) is not None:
            with located(f"module '{acting.module_id}'"):
                check_actions(acting.module, acted, agent)

    def _part_for(self, module_id: Any, module: Any) -> int | None:
        """The part whose agents a module serves, as far as that can be told before any episode.

        The mapping is asked for episodes that there are not.
        """
        if len(self.parts) == 1:
            return 0
        is_to_be_made = module is None or isinstance(module, type) or inspect.isfunction(module)
        for place, part in enumerate(self.parts):
            if any(module_id in self._may_serve(agent) for agent in part.agents):
                return place
        if is_to_be_made:
            names = ", ".join(sorted(map(repr, set().union(*self._named.values())))) or "none"
            gave = f"it named {names}" if self._raised is None else f"it raised {self._raised!r}"
            raise ModuleError(
                f"module '{module_id}': which agents it serves, and so its spaces, can't be told before their episodes "
                f"begin, by what agent_to_module_mapping_fn gave for their ids ({gave}); expected an instance, or a "
                "mapping that names it: a dict, or a function of (agent_id, episode)"
            ) from self._raised
        return None

    def _may_serve(self, agent: Any) -> set[Any]:
        """Modules that the mapping names for an agent in one episode or another; none if it can't say that yet."""
        if agent not in self._named:
            self._named[agent] = set()
            try:
                self._named[agent] = self._named_for(agent)
            except Exception as error:  # it is asked again, and may say so, when an agent begins
                self._raised = error
        return self._named[agent]

    def _named_for(self, agent: Any) -> set[Any]:
        mapping = self.mapping
        if mapping is None:
            return {agent if agent in self._first_ids else DEFAULT_MODULE_ID}
        if not callable(mapping):
            return {mapping.get(agent)}
        numbers = islice(self._probe_number, _MOST_PROBES)  # never those of before
        return {mapping(agent, MultiAgentEpisode(_PROBES(0, number))) for number in numbers}

    def _checked_explore(self, explore: bool | Mapping[Any, bool]) -> bool | Mapping[Any, bool]:
        by_id = dict(explore) if isinstance(explore, Mapping) else {}
        unknown = [module_id for module_id in by_id if module_id not in self.module]
        flags = by_id.values() if isinstance(explore, Mapping) else [explore]
        if unknown or not all(isinstance(each, bool) for each in flags):
            raise ModuleError(
                f"explore is {explore!r}, expected a bool, or a dict: module id -> bool, with ids among "
                f"{list(self.module)}"
            )
        return by_id if isinstance(explore, Mapping) else explore

    def _have_act(self, module_id: Any, module: Any) -> None:
        explore = self.explore.get(module_id, True) if isinstance(self.explore, Mapping) else self.explore
        copy = acting_copy(module, self.device)
        if isinstance(copy, RandomModule):
            copy.seed(seed_for(self.seed, f"actions/{module_id}"))
        weights = PolicyWeights(copy)
        forward = ModuleForward(copy, weights, explore=explore, before=self.env_to_module, **self.how)
        self.acting[module_id] = ActingModule(module_id, copy, weights, forward, explore, f"module/{module_id}")


def agents_acting_for(
    parts: Sequence[AgentPart],
    env: Any,
    *,
    module: Any,
    joint_connector: Any,
    env_to_module_connector: Any,
    module_to_env_connector: Any,
    **options: Any,
) -> AgentsActing:
    """Modules and pipelines that act in environments with these agents, as `MultiAgentRollout` takes them.

    parts      the agents by their spaces
    env        the environments of a lane, or a description of them, for `joint_connector`
    options    what else `AgentsActing` is made with

    Raises ModuleError or ConnectorError for modules or connectors that can't be used.
    """
    joint = pieces_given(joint_connector, "joint_connector", env)
    together = JointPieces(parts, joint) if joint else None
    left = tuple(parts) if together is None else together.parts_left()
    before = [_pieces(env_to_module_connector, "env_to_module_connector", part) for part in left]
    after = [_pieces(module_to_env_connector, "module_to_env_connector", part) for part in left]
    # With what stateful modules need: the pieces do nothing for others.
    pipelines: dict[str, Any] = {
        "env_to_module": [
            EnvToModulePipeline.default(*_spaces(part), pieces, stateful=True, device=options["device"])
            for part, pieces in zip(left, before, strict=True)
        ],
        "module_to_env": [
            ModuleToEnvPipeline.default(*_spaces(part), pieces, stateful=True)
            for part, pieces in zip(left, after, strict=True)
        ],
    }
    seen = tuple(left_by(pieces, _spaces(part)) for part, pieces in zip(left, before, strict=True))
    acted = tuple(None if pieces else part.action_space for part, pieces in zip(left, after, strict=True))
    return AgentsActing(module, parts=left, seen=seen, acted=acted, joint=together, **pipelines, **options)


def _spaces(part: AgentPart) -> tuple[gym.Space[Any], gym.Space[Any]]:
    return part.observation_space, part.action_space


def _pieces(connector: Any, name: str, part: AgentPart) -> list[ConnectorV2]:
    return pieces_given(connector, name, part, spaces=_spaces(part))


def _check_modules(module: Any, mapping: AgentToModule, parts: tuple[AgentPart, ...]) -> None:
    """Raise ModuleError for what is no mapping, and for no modules if one can't serve all agents."""
    if not (mapping is None or callable(mapping) or isinstance(mapping, Mapping)):
        raise ModuleError(
            f"agent_to_module_mapping_fn is {mapping!r}, expected a dict: agent id -> module id, or a function of "
            "the agent's id and its episode"
        ).see("agents")
    if module is None and len(parts) > 1:
        raise ModuleError(
            f"the agents have {len(parts)} different pairs of spaces, one each as "
            f"{', '.join(repr(part.agents[0]) for part in parts)}, of which one module can serve one; expected "
            "module={id: module, ...}, and agent_to_module_mapping_fn where ids are not the agents'"
        )


Batch = dict[str, Any]


class AgentLearner:
    """Makes a batch for every module that is trained.

        acting       the modules
        to_train     ids of those that batches are made for; None: all that there are
        connector    `lambda obs_space, act_space: piece or list of pieces`, called for every module
        metrics      what the pieces see as `metrics`
        runner       who runs the pipelines, which can't be edited meanwhile

    Raises ModuleError if there is no module of an id that is to be trained.
    """

    def __init__(
        self,
        acting: AgentsActing,
        to_train: Sequence[Any] | None,
        connector: Any,
        metrics: Any,
        runner: Any = None,
    ) -> None:
        modules = acting.module
        unknown = [] if to_train is None else [module_id for module_id in to_train if module_id not in modules]
        if unknown or isinstance(to_train, str):
            raise ModuleError(f"modules_to_train is {to_train!r}, expected a list of ids among {list(modules)}")
        self.to_train = None if to_train is None else frozenset(to_train)
        self._acting, self._modules = acting.acting, modules
        self._connector, self._metrics = connector, metrics
        self._runner = None if runner is None else weakref.ref(runner)  # it holds this
        self.has_pieces = connector is not None  # beside the default ones
        self._copies: dict[Any, tuple[int, Any]] = {}  # by id, each with its version, with the newest published weights
        self._pipelines: dict[Any, LearnerConnectorPipeline] = {}  # by id

    def trains(self, module_id: Any) -> bool:
        """True if batches are made for a module."""
        return module_id in self._acting and (self.to_train is None or module_id in self.to_train)

    @property
    def slowest_piece(self) -> str:
        """Name of the piece that took most of its time."""
        return slowest_piece(list(self._pipelines.values()))

    def pipeline_of(self, module_id: Any) -> LearnerConnectorPipeline:
        """The pipeline of one module that acts, made when first asked for."""
        return self._pipeline_for(module_id, self._modules[module_id])

    def batch_of(self, fragments: Sequence[MultiAgentFragment], *, as_published: bool = False) -> dict[Any, Batch]:
        """Module id -> its train batch, for those that are trained and have made steps in these fragments.

        as_published    pieces see copies of the modules, with the weights published last, and not those that are
                        trained: these may then be trained in another thread meanwhile
        """
        batches = {}
        for module_id, parts in parts_by_module(fragments, self.trains).items():
            module = self._modules[module_id]
            if as_published:
                module = self._published_of(self._acting[module_id], module)
            with noted(f"of module '{module_id}'; modules that are not trained are left out of modules_to_train"):
                pipeline = self._pipeline_for(module_id, module)
                batches[module_id] = pipeline.of_fragments(parts, module, self._metrics)
        return batches

    def _pipeline_for(self, module_id: Any, module: Any) -> LearnerConnectorPipeline:
        made = self._pipelines.get(module_id)
        if made is None:
            spaces = module.observation_space, module.action_space
            taught = pieces_given(self._connector, "learner_connector", *spaces)
            made = LearnerConnectorPipeline.default(*spaces, taught, stateful=is_stateful(module))
            runner = None if self._runner is None else self._runner()
            if runner is not None:
                made.refuse_edits_while_run_by(runner)
            self._pipelines[module_id] = made
        return made

    def _published_of(self, acting: ActingModule, trained: Any) -> Any:
        """A copy of a module, on the device of the trained one, whose weights stay until the next call.

        Of the one that acts: training may leave in the other what can't be copied. For one thread at a time.
        """
        copied = self._copies.get(acting.module_id)
        if copied is None:
            on, wanted = device_of(acting.module), device_of(trained)
            copied = -1, acting_copy(acting.module, None if wanted == on else wanted)
        version, module = copied
        if version != acting.weights.version:
            version, weights = acting.weights.newest(acting.module)
            module.load_state_dict(weights)
        self._copies[acting.module_id] = version, module
        return module
