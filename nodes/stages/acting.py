"""What acts, made of what a user gives: the acting copy of a module, connector pieces, their pipelines, generators."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

from rollflow.nodes.connectors.common.batches import DEVICE
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.learner.train_columns import device_of
from rollflow.nodes.connectors.module_to_env.action_pieces import RACES
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2, pieces_of
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.modules.default_module import DefaultModule
from rollflow.nodes.modules.distribution import Races, TensorRaces
from rollflow.nodes.modules.given_module import GivenModule, RandomModule, is_function, is_given
from rollflow.nodes.modules.policy_weights import PolicyWeights
from rollflow.nodes.modules.rl_module import is_stateful
from rollflow.nodes.stages.env_to_module import EnvToModule
from rollflow.nodes.stages.module_forward import ModuleForward
from rollflow.nodes.stages.module_to_env import ModuleToEnv
from rollflow.stream.data.errors import ConnectorError, ModuleError, noted, page_on
from rollflow.stream.data.space import is_columnar, item_of
from rollflow.stream.data.tree import map_tree
from rollflow.stream.episodes.multi_agent import DEFAULT_MODULE_ID
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.graph.seeding import generator_for, seed_for
from rollflow.stream.multi_agent.agent_part import AgentPart


@dataclass(slots=True, eq=False)
class Acting:
    """A module as it acts in environments of one agent. A pickled one has the copy alone, with the weights loaded.

    What rollouts ask of it they ask of an `AgentsActing` as well.

    module                          as it was given, or made: it is not changed by acting
    copy                            that acts, and that published weights alone change
    spaces                          of what the module sees, and of what it chooses
    env_to_module, module_to_env    default pipelines with the pieces given

    weights                         of the copy, as they are published
    most_agents                     in each environment
    """

    most_agents: ClassVar = 1

    module: Any
    copy: Any
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    env_to_module: EnvToModulePipeline
    module_to_env: ModuleToEnvPipeline
    weights: PolicyWeights = field(init=False)

    def __post_init__(self) -> None:
        self.weights = PolicyWeights(self.copy)

    def __reduce__(self) -> Any:
        return Acting, (self.copy, self.copy, self.spaces, self.env_to_module, self.module_to_env)

    @property
    def is_stateful(self) -> bool:
        """True if the module has a state from one step to the next."""
        return is_stateful(self.copy)

    @property
    def by_id(self) -> dict[Any, tuple[Any, PolicyWeights]]:
        """Module id -> the copy that acts, and its weights as they are published."""
        return {DEFAULT_MODULE_ID: (self.copy, self.weights)}

    @property
    def named_pipelines(self) -> list[tuple[str, Any]]:
        """Every pipeline with its name in messages."""
        return [("env_to_module", self.env_to_module), ("module_to_env", self.module_to_env)]

    @property
    def pipelines(self) -> list[Any]:
        """Every pipeline."""
        return [self.env_to_module, self.module_to_env]

    def versions(self) -> dict[Any, int]:
        """Module -> policy version published last; "" stands for the only module."""
        return {"": self.weights.version}

    def go_on_from(self, versions: Mapping[Any, int]) -> None:
        """Begin with the policy versions of an earlier run. Raises ValueError, ModuleError or RunError."""
        if versions.keys() != {""}:
            raise ValueError(f"state has versions of {list(versions)}, expected that of one module, of a Rollout")
        self.weights.go_on_from(versions[""])

    def get_state(self) -> dict[str, Any]:
        """The weights of the module, of the copy that acts, and of those that wait: none is copied."""
        return state_of_module(self.module, self.copy, self.weights)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave. Before any weights are published."""
        set_state_of_module(self.module, self.copy, self.weights, state)

    def begin_lane(self, lane: Lane, seed: int) -> None:
        """Give a lane the generators that its actions are sampled with."""
        lane.shared_data |= sampling_data(lane.index, seed, "module", lane.device)

    def make_lanes(self, environments: Any, lookback: int, seed: int, sequence: int = 0) -> None:
        """Have environments make lanes that look back so many steps, with what the module samples with.

        sequence    number of their first fragments
        """
        parameters: Any = getattr(self.copy, "parameters", tuple)()
        environments.choose_memory(self.pipelines, next((each.device for each in parameters), None))
        environments.make_lanes(lookback)
        for lane in environments.lanes:
            self.begin_lane(lane, seed)
            lane.fragment.sequence = sequence

    def chosen_spaces(self) -> list[gym.Space[Any] | None]:
        """The space that the module chooses in."""
        return [self.spaces[1]]

    def stages(self, environments: Any, how: Mapping[str, Any], metrics: Any, **of_lanes: Any) -> tuple[Any, Any, Any]:
        """The stages before the forward pass, of it, and behind it.

        how         passes are done: what `ModuleForward` takes beside module and weights
        metrics     what pieces log into
        of_lanes    keywords of the first stage: which lanes come by, and who is told of them
        """
        context = {"module": self.copy, "explore": how["explore"], "metrics": metrics}
        before, env_space = [self.env_to_module], environments.action_space
        return (
            EnvToModule(self.env_to_module, **context, **of_lanes),
            ModuleForward(self.copy, self.weights, before=before, **how),
            ModuleToEnv(self.module_to_env, before=before, env_space=env_space, threads=how["threads"], **context),
        )

    def under_way(self, lane: Lane) -> int:
        """Transitions that a lane's next vector step may end."""
        return lane.layout.num_slots


def acting_for(
    env: Any,
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    *,
    module: Any,
    model_config: Any,
    env_to_module_connector: Any,
    module_to_env_connector: Any,
    device: Any,
    seed: int,
    home: Any = None,
) -> Acting:
    """Module and pipelines that act in environments of these spaces, as `Rollout` takes them.

    env     a lane's vector environment, or a description of it, for functions that make connector pieces
    seed    of a module that is made here
    home    device to which a module goes that is made here; None: it stays where it is made

    Raises ModuleError, ConnectorError or ValueError for a module, a config or a connector that can't be used.
    """
    before = pieces_given(env_to_module_connector, "env_to_module_connector", env, spaces=spaces)
    after = pieces_given(module_to_env_connector, "module_to_env_connector", env, spaces=spaces)
    seen = left_by(before, spaces)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # inference tensors take no weights
        torch.default_generator.manual_seed(seed_for(seed, "weights"))  # the one that is restored
        made = module_for(module, model_config, *seen)
    if home is not None and (module is None or _makes_modules(module)):
        made.to(home)
    copy = acting_copy(made, device)
    if isinstance(copy, RandomModule):
        copy.seed(seed_for(seed, "actions"))
    stateful, on, chosen = is_stateful(copy), device_of(copy), chosen_space(copy, spaces[1])
    on_device = None if on.type == "cpu" else on
    return Acting(
        made,
        copy,
        (seen[0], chosen),
        EnvToModulePipeline.default(*spaces, before, stateful=stateful, device=on_device),
        ModuleToEnvPipeline.default(*spaces, after, stateful=stateful),
    )


def state_of_module(module: Any, copy: Any, weights: PolicyWeights) -> dict[str, Any]:
    """The weights of a module that is trained, of the copy that acts, and of those that wait: none is copied."""
    trained = module.state_dict() if hasattr(module, "state_dict") else None
    draws = copy.generator.bit_generator.state if isinstance(copy, RandomModule) else None
    return {"trained": trained, "acts": weights.get_state(copy), "draws": draws}


def set_state_of_module(module: Any, copy: Any, weights: PolicyWeights, state: Mapping[str, Any]) -> None:
    """Have a module, and the copy that acts, go on from what `state_of_module` gave."""
    if state["trained"] is not None:
        module.load_state_dict(state["trained"])
    weights.set_state(copy, state["acts"])
    if state["draws"] is not None:
        copy.generator.bit_generator.state = state["draws"]


def left_by(pieces: Sequence[Any], spaces: tuple[gym.Space[Any], gym.Space[Any]]) -> tuple[Any, Any]:
    """The spaces of observations and actions that env-to-module pieces leave for the module."""
    left = EnvToModulePipeline(*spaces, connectors=list(pieces))
    seen, chosen = left.observation_space, left.action_space
    return spaces[0] if seen is None else seen, spaces[1] if chosen is None else chosen


def chosen_space(module: Any, action_space: gym.Space[Any]) -> gym.Space[Any]:
    """The space of what a module chooses: its own `action_space`, or that of the environments if both are alike.

    action_space    of the environments
    """
    own = getattr(module, "action_space", None)
    if not isinstance(own, gym.Space) or not is_columnar(own) or are_alike(own, action_space):
        return action_space
    return own


def compile_options(asked: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Options of `torch.compile`; None if passes are not compiled."""
    return None if asked is False else {} if asked is True else dict(asked)


def sampling_data(lane: int, seed: int, name: str, device: Any = None) -> dict[str, Any]:
    """Entries of a lane's `shared_data` that a module of this name samples its actions with.

    device    of the lane's columns; None: they are arrays
    """
    if device is not None:
        generator = torch.Generator(device).manual_seed(seed_for(seed, name, lane))
        return {"lane": lane, "generator": generator, RACES: TensorRaces(generator), DEVICE: device}
    return {
        "lane": lane,
        "generator": torch.Generator().manual_seed(seed_for(seed, name, lane)),
        RACES: Races(generator_for(seed, name, lane)),
    }


def check_actions(module: Any, expected: gym.Space[Any], agent: Any) -> None:
    """Raise ModuleError if a module chooses actions that are none in the space `expected`, that of an agent's."""
    own = module.action_space
    if not are_alike(own, expected):
        raise ModuleError(
            f"'{type(module).__name__}' was made for actions in {own}, but those of agent {agent!r} are in {expected}"
        )


def one_of(chosen: Mapping[Any, gym.Space[Any]], part: AgentPart) -> gym.Space[Any]:
    """The space in which what several modules choose, module id -> space, is recorded for the agents of a part.

    It is the modules' own if they all have one; else the agents', or any of the modules', whichever fits all of them.
    Raises ModuleError if none does.
    """
    spaces = list(chosen.values()) or [part.action_space]
    if any(_kind(space) != _kind(spaces[0]) for space in spaces):
        raise ModuleError(
            f"modules choose in {dict(chosen)}, but serve agents of one pair of spaces, as {part.agents[0]!r}; "
            "expected spaces of one structure, shape and dtype"
        )
    is_one = all(space == spaces[0] for space in spaces)
    return part.action_space if not is_one and _kind(part.action_space) == _kind(spaces[0]) else spaces[0]


def _kind(space: gym.Space[Any]) -> Any:
    """The structure, dtypes and shapes of an item."""
    return map_tree(lambda leaf: (leaf.dtype, leaf.shape), item_of(space))


def are_alike(one: Any, other: Any) -> bool:
    """True if actions of the one space are actions of the other, but for the bounds and the dtype of Boxes."""
    if type(one) is not type(other) or one.shape != other.shape:
        return False
    if isinstance(one, gym.spaces.Discrete):
        return bool(one.n == other.n and one.start == other.start)
    if isinstance(one, gym.spaces.MultiDiscrete):
        return np.array_equal(one.nvec, other.nvec) and np.array_equal(one.start, other.start)
    if isinstance(one, gym.spaces.Dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one.keys())
    if isinstance(one, gym.spaces.Tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return True


def pieces_given(
    connector: Callable[..., Any] | None, name: str, *args: Any, spaces: tuple[Any, Any] | None = None
) -> list[ConnectorV2]:
    """The pieces that a function of this name makes of its arguments; none for None.

    spaces    of observations and actions, for functions in the form of RLlib's newer pages

    Raises ConnectorError for what is no such function, or makes other things.
    """
    if connector is None:
        return []
    named = "env" if len(args) == 1 else "obs_space, act_space"
    check_connector(connector, name, named)
    signature = inspect.signature(connector)
    # RLlib's newer pages hand an environment's builder the spaces and a device as well.
    for passed in (args, (*args, {"__env_single__": spaces}, None)):
        try:
            signature.bind(*passed)
        except TypeError:
            continue
        return pieces_of(connector(*passed), name)
    raise ConnectorError(f"{name} takes {signature}, expected ({named})")


def check_connector(connector: Any, name: str, named: str) -> None:
    """Raise ConnectorError for what is no function that makes connector pieces; `named` are its parameters."""
    if not callable(connector) or isinstance(connector, ConnectorV2):
        raise ConnectorError(
            f"{name} is {connector!r}, expected a function that returns a piece or a list of pieces, such as "
            f"lambda {named}: MyPiece()"
        )
    if isinstance(connector, type) and issubclass(connector, ConnectorV2):
        raise ConnectorError(
            f"{name} is the class {connector.__name__}, expected lambda {named}: {connector.__name__}()"
        )


def module_for(module: Any, model_config: Any, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
    """The module, with its spaces filled in, or a default one for None. Raises ModuleError for what is no module."""
    if module is None:
        return DefaultModule(observation_space, action_space, model_config=model_config)
    if model_config is not None:
        raise ModuleError("model_config is for the default module: give it to your module's constructor instead")
    if _makes_modules(module):
        module = _made(module, observation_space, action_space)
    if is_given(module):
        spaces = getattr(module, "observation_space", None), getattr(module, "action_space", None)
        module = GivenModule(*spaces, model_config={"given": module})
    if isinstance(module, torch.nn.Module) and "_modules" not in vars(module):
        name = type(module).__name__
        raise ModuleError(f"{name}.__init__ did not call super().__init__(), expected that first").see("module")
    for method in ("forward_exploration", "forward_inference", "state_dict", "load_state_dict"):
        if not callable(getattr(module, method, None)):
            raise ModuleError(
                f"module is {type(module).__name__}, which has no method {method}(); expected an RLModule, an object "
                "with forward_exploration(batch) and forward_inference(batch), or a function of observations"
            ).see("module")
    for name, space in (("observation_space", observation_space), ("action_space", action_space)):
        if getattr(module, name, None) is None:
            setattr(module, name, space)
    _check_space(module, observation_space)
    return module


def copied_pieces(connector: Any) -> Any:
    """A function that makes copies of the connector pieces that `connector` makes, which may keep its own."""
    if not callable(connector):
        return connector

    @wraps(connector)
    def made(*args: Any) -> Any:
        return copy.deepcopy(connector(*args))

    return made


def _makes_modules(module: Any) -> bool:
    return isinstance(module, type) or (inspect.isfunction(module) and not is_function(module))


def _made(module: Any, *spaces: gym.Space[Any]) -> Any:
    """The module that a class or function makes. Raises ModuleError if it can't be called with the spaces."""
    try:
        signature = inspect.signature(module)
        signature.bind(*spaces)
    except TypeError:
        raise ModuleError(
            f"module is {module.__qualname__}, which takes {signature}, expected (observation_space, action_space), "
            "(observations) of a function that chooses actions itself, or a module that is made already"
        ) from None
    except ValueError:  # it has no signature
        pass
    observations, actions = spaces
    with noted(f"where a module is made for observations in {observations}, actions in {actions}; {page_on('module')}"):
        return module(*spaces)


def _check_space(module: Any, space: gym.Space[Any]) -> None:
    own = module.observation_space
    if getattr(own, "shape", None) != space.shape:
        raise ModuleError(
            f"module '{type(module).__name__}' was made for observations in {own}, but those that come are in {space}"
        ).see("spaces")


def acting_copy(module: Any, device: Any = None) -> Any:
    """A copy of a module that acts, that `publish` alone changes: in evaluation mode, on the device if one is given."""
    try:
        with torch.inference_mode(False):
            acting = copy.deepcopy(module)
    except Exception as error:
        raise ModuleError(
            f"module '{type(module).__name__}' can't be copied: {error}; a copy of it acts, so that training the one "
            "that was given does not change what is acting: expected it to hold nothing that can't be copied"
        ).see("module") from error
    if device is not None:
        try:
            acting.to(device)
        except (RuntimeError, AssertionError, TypeError) as error:  # torch's, which don't say whose it is
            raise ModuleError(f"device is {device!r}, to which the module can't go: {error}") from error
    acting.eval()
    return acting


def lookback_for(lookback: int | None, pipelines: Iterable[ConnectorPipelineV2], *, stateful: bool) -> int:
    """Steps of lookback: those asked for, or for None those needed. Raises ValueError for fewer than needed."""
    needed = {"a stateful module": int(stateful)}
    for pipeline in pipelines:
        for name, piece in pipeline.get_checkpointable_components():
            needed[name] = max(piece.lookback, needed.get(name, 0))
    most = max(needed, key=lambda name: needed[name])
    if lookback is not None and lookback < needed[most]:
        raise ValueError(f"lookback is {lookback}, expected at least {needed[most]}: {most} looks back as far as that")
    return max(1, needed[most]) if lookback is None else lookback
