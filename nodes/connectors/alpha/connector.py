"""The interface of Alpha connectors: read this file to write one.

    class HalvesObservations(AgentConnector):
        def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
            ac_data.data[SampleBatch.NEXT_OBS] = ac_data.data[SampleBatch.NEXT_OBS] / 2
            return ac_data

        def to_state(self) -> tuple[str, Any]:
            return "HalvesObservations", None

    register_connector("HalvesObservations", HalvesObservations)

A connector that learns from the data puts it into `to_state`, and takes it from the params of `from_state`. Where
copies of it run in workers it overrides `merge_states` as well.
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.spaces import Space
from rollflow.nodes.connectors.state_watch import check_same, fingerprint
from rollflow.stream.data.errors import ConnectorError, RollflowError, shown
from rollflow.stream.data.space import item_of, tree_of
from rollflow.stream.data.tree import Tree, leaves_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

PolicyOutputType = tuple[Any, list[Any], dict[str, Any]]
"""Output of a policy: actions, states as a list of arrays, and further outputs by name."""

AGENT_ID = "agent0"
"""Agent id of an environment with a single agent."""


class SampleBatch(dict[str, Any]):
    """A dict of columns, with the names of RLlib's columns; states are `state_in_0`, `state_out_0` and so on."""

    OBS = "obs"
    CUR_OBS = "obs"
    NEXT_OBS = "new_obs"
    ACTIONS = "actions"
    REWARDS = "rewards"
    PREV_ACTIONS = "prev_actions"
    PREV_REWARDS = "prev_rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    INFOS = "infos"
    SEQ_LENS = "seq_lens"
    T = "t"
    EPS_ID = "eps_id"
    ENV_ID = "env_id"
    AGENT_INDEX = "agent_index"
    UNROLL_ID = "unroll_id"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_LOGP = "action_logp"
    ACTION_PROB = "action_prob"
    VF_PREDS = "vf_preds"
    RETURNS_TO_GO = "returns_to_go"


@dataclass(slots=True)
class AgentConnectorDataType:
    """Data of one agent at one step, on the way to its policy.

    env_id      of the environment
    agent_id    of the agent in it
    data        column -> value of this step; `AgentConnectorsOutput` behind a `ViewRequirementAgentConnector`
    """

    env_id: str
    agent_id: str
    data: Any


@dataclass(slots=True)
class AgentConnectorsOutput:
    """Result of an agent connector pipeline for one agent.

    raw_dict        column -> value of this step, as the connectors left it
    sample_batch    column -> any[1, ...]: the input of the policy
    for_training    the same as `raw_dict`; empty in evaluation
    """

    raw_dict: dict[str, Any]
    sample_batch: SampleBatch
    for_training: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ActionConnectorDataType:
    """Output of a policy for one agent, on the way to its environment.

    env_id        of the environment
    agent_id      of the agent in it
    input_dict    column -> value: the data that the output was computed from
    output        (actions, states, fetches)
    """

    env_id: str
    agent_id: str
    input_dict: dict[str, Any]
    output: PolicyOutputType


PROBE = "probe"
"""Environment id of the item that is sent through."""


def observation_of(data: Any) -> Any:
    """The observation in an agent's data, as it is recorded."""
    columns = data.raw_dict if isinstance(data, AgentConnectorsOutput) else data
    return columns[SampleBatch.NEXT_OBS]


def data_of(env_id: str, episode: SingleAgentEpisode, place: int) -> AgentConnectorDataType:
    """An agent's data of its episode's newest step; `place` is its place among the agents."""
    reward = float(episode.get_rewards(-1)) if episode.t else 0.0
    data = {
        SampleBatch.NEXT_OBS: map_tree(np.array, episode.get_observations(-1)),
        SampleBatch.REWARDS: reward,
        SampleBatch.TERMINATEDS: bool(episode.is_terminated),
        SampleBatch.TRUNCATEDS: bool(episode.is_truncated),
        SampleBatch.INFOS: episode.get_infos(-1),
        SampleBatch.T: episode.t - 1,
        SampleBatch.EPS_ID: episode.id_,
        SampleBatch.ENV_ID: env_id,
        SampleBatch.AGENT_INDEX: place,
    }
    if np.isnan(reward):  # a policy acts, and nobody gave it the reward
        del data[SampleBatch.REWARDS]
    return AgentConnectorDataType(env_id, agent_id_of(episode), data)


def agent_id_of(episode: SingleAgentEpisode) -> Any:
    """The id that connectors know the episode's agent by."""
    return AGENT_ID if episode.agent_id is None else episode.agent_id


def space_after_observations(connector: Any, space: Space) -> Space:
    """The space behind an agent connector, which sees an observation of zeros, or the lowest ones that are allowed."""
    connector.in_eval()
    name = type(connector).__name__
    returned = connector([data_of(PROBE, SingleAgentEpisode(observations=[sample_of(space)]), 0)])
    if len(returned) != 1:
        raise ConnectorError(f"{name} made {len(returned)} items of 1, expected one for each agent")
    return space_like(observation_of(returned[0].data), space)


def space_after_actions(connector: Any, space: Space) -> Space:
    """The space behind an action connector, which sees the space's first action."""
    connector.in_eval()
    given = ActionConnectorDataType(PROBE, AGENT_ID, {}, (sample_of(space), [], {}))
    return space_like(connector(given).output[0], space)


def sample_of(space: Space) -> Tree:
    """An item of a space: zeros where it has them, else its lowest numbers; `any[...]` by leaf."""
    return tree_of(_sample, space)


def _sample(space: Space) -> Any:
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape), space.low, space.high).astype(space.dtype)
    if isinstance(space, spaces.Discrete):
        return np.int64(space.start)
    return np.array(space.start) if isinstance(space, spaces.MultiDiscrete) else map_tree(np.asarray, item_of(space))


def space_like(item: Tree, space: Space | None) -> Space:
    """The space of an item: `space` where structure, shapes and dtypes are the same, else Boxes without bounds."""
    if space is not None and _kinds(item) == _kinds(sample_of(space)):
        return space
    if isinstance(item, dict):
        return spaces.Dict({key: space_like(part, part_of(space, key)) for key, part in item.items()})
    if isinstance(item, tuple):
        return spaces.Tuple([space_like(part, None) for part in item])
    array = np.asarray(item)
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        return spaces.Box(limits.min, limits.max, array.shape, array.dtype.type)
    if array.dtype.kind != "f":
        raise ConnectorError(f"an item is {shown(item)}, {array.dtype}, expected numbers")
    return spaces.Box(-np.inf, np.inf, array.shape, array.dtype.type)


def part_of(space: Space | None, key: Any) -> gym.Space[Any] | None:
    """A part of a Dict space; None where there is none."""
    return space.spaces.get(key) if isinstance(space, spaces.Dict) else None


def _kinds(item: Tree) -> Tree:
    return map_tree(lambda leaf: (np.asarray(leaf).dtype.str, np.shape(leaf)), item)


@dataclass
class ConnectorContext:
    """Facts about a policy that its connectors need.

    config                 options of the policy, such as `clip_rewards`, `normalize_actions` and `clip_actions`
    initial_states         list of any[...]: the states of a recurrent policy at the start of an episode
    observation_space      of the environment's observations; one with an `original_space` stands for that
    action_space           of the environment's actions
    is_policy_recurrent    True if the policy has states
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    initial_states: Sequence[Any] = ()
    observation_space: Space | None = None
    action_space: Space | None = None
    is_policy_recurrent: bool = False

    @classmethod
    def from_policy(cls, policy: Any) -> Self:
        """The context of a policy, or of an RLModule: its spaces, its states, and the rest as far as it has it."""
        states = policy.get_initial_state() if callable(getattr(policy, "get_initial_state", None)) else None
        config = getattr(policy, "config", None)
        leaves = [] if states is None else [array_of(leaf) for leaf in leaves_of(states)]
        return cls(
            config=config if isinstance(config, Mapping) else {},
            initial_states=leaves,
            observation_space=getattr(policy, "observation_space", None),
            action_space=getattr(policy, "action_space", None),
            is_policy_recurrent=bool(leaves),
        )


class Connector:
    """A transformation of what goes into a policy or comes out of it.

    ctx            the context; None: that of the pipeline that the connector is put into
    is_training    False in evaluation, where nothing is learnt and nothing is made for training
    """

    ctx: ConnectorContext | None = None
    _is_training = True

    def __init__(self, ctx: ConnectorContext | None = None) -> None:
        self.ctx = ctx
        self._is_training = True

    @property
    def is_training(self) -> bool:
        """True unless in evaluation."""
        return self._is_training

    def in_training(self) -> None:
        """Learn from the data, and make what training needs."""
        self._is_training = True

    def in_eval(self) -> None:
        """Learn nothing, and make only what acting needs."""
        self._is_training = False

    def bind(self, ctx: ConnectorContext | None) -> None:
        """Take a pipeline's context where the connector has none of its own."""
        if self.ctx is None:
            self.ctx = ctx

    @property
    def context(self) -> ConnectorContext:
        """The context. Raises ConnectorError where there is none."""
        if self.ctx is None:
            raise ConnectorError(
                f"{type(self).__name__} has no context, expected {type(self).__name__}(ctx), or a pipeline with one"
            )
        return self.ctx

    # State

    def to_state(self) -> tuple[str, Any]:
        """The name that the connector is registered by, and params of plain data for `from_state`."""
        raise ConnectorError(
            f"{type(self).__name__} has no to_state, so it can't be saved; expected one that returns the name it is "
            "registered by and its params, such as ('MyConnector', None)"
        )

    @classmethod
    def from_state(cls, ctx: ConnectorContext, params: Any) -> "Connector":
        """A connector of params that `to_state` gave; params are keyword arguments, or None, unless overridden."""
        return cls(ctx, **(params or {}))

    def learnt_state(self) -> dict[str, Any]:
        """State that a rollout saves, merges and sends; the params of `to_state`, unless overridden."""
        if type(self).to_state is Connector.to_state:
            return {}
        params = self.to_state()[1]
        return {} if params is None else {"params": params}

    def take_learnt_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `learnt_state`: unless overridden, by the attributes of `from_state(ctx, params)`."""
        if state and fingerprint(state) != fingerprint(self.learnt_state()):
            is_training, made = self._is_training, type(self).from_state(self.context, state["params"])
            vars(self).update(vars(made))
            self._is_training = is_training

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state of those of several copies. Raises StateError, unless overridden, where they differ."""
        check_same(type(self).__name__, states)
        return states[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class AgentConnector(Connector):
    """A connector before the policy; a subclass overrides `transform`, or `__call__` where agents depend on each other.

    Agents of one environment that are mapped to one policy come as one list.
    """

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        """Transform the data of several agents."""
        return [self.transform(ac_data) for ac_data in acd_list]

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        """Transform the data of one agent, which may be changed in place."""
        raise ConnectorError(f"{type(self).__name__} overrides neither transform nor __call__, expected one of them")

    def reset(self, env_id: str) -> None:
        """Forget what belongs to the episode of an environment: a new one begins."""

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        """Take note of what the policy chose, before action connectors have changed it."""

    def observation_space_after(self, observation_space: Space) -> Space:
        """The space that the connector leaves observations in; found by a zero observation, unless overridden.

        Where that keeps its shape and dtype it is the same space, else one without bounds.
        """
        return space_after_observations(copy.deepcopy(self), observation_space)


class ActionConnector(Connector):
    """A connector behind the policy; a subclass overrides `transform` or `__call__`, which are the same."""

    def __call__(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        """Transform the output for one agent."""
        return self.transform(ac_data)

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        """Transform the output for one agent, which may be changed in place."""
        raise ConnectorError(f"{type(self).__name__} overrides neither transform nor __call__, expected one of them")

    def action_space_after(self, action_space: Space) -> Space:
        """The space that the connector leaves actions in; found by the first action, unless overridden."""
        return space_after_actions(copy.deepcopy(self), action_space)


def without_params(connector: Connector) -> tuple[str, Any]:
    """`to_state` of a connector without params: the class's name, by which it is registered."""
    return type(connector).__name__, None


def array_of(leaf: Any) -> Any:
    """The array of a tensor; anything else as it is."""
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf


_CONNECTORS: dict[str, type[Connector]] = {}  # those of users, by the names that they are registered by


def _built_in(name: str) -> Any:
    """rollflow's own connector class of a name; None where there is none."""
    return _all_built_in().get(name)


def _all_built_in() -> dict[str, type[Connector]]:
    """rollflow's own connector classes that can be made, by their names."""
    package = importlib.import_module("rollflow.nodes.connectors.alpha")
    found = {name: getattr(package, name) for name in package.__all__}
    bases = Connector, AgentConnector, ActionConnector, ConnectorPipeline
    return {
        name: each
        for name, each in found.items()
        if isinstance(each, type) and issubclass(each, Connector) and each not in bases
    }


def register_connector(name: str, cls: type[Connector]) -> None:
    """Give a connector class a stable name, by which `get_connector` makes one. A class of one's own may be replaced.

    Raises ConnectorError for anything but a connector class, and for the name of a connector of rollflow's.
    """
    if not isinstance(cls, type) or not issubclass(cls, Connector):
        raise ConnectorError(f"register_connector('{name}', …) got {cls!r}, expected a subclass of Connector")
    if _built_in(name) not in (None, cls):
        raise ConnectorError(f"'{name}' is a connector of rollflow's, expected another name for {cls.__qualname__}")
    _CONNECTORS[name] = cls


def get_connector(name: str, ctx: ConnectorContext | None, params: Any = None) -> Any:
    """A connector of the class that is registered by a name, made by its `from_state(ctx, params)`.

    Raises ConnectorError for a name of no class, and where the class does not take the params.
    """
    cls = _CONNECTORS.get(name) or _built_in(name)
    if cls is None:
        raise ConnectorError(
            f"no connector is registered by the name '{name}', expected register_connector('{name}', its class) "
            f"before; registered: {', '.join(sorted(_CONNECTORS | _all_built_in()))}"
        )
    made: Any
    try:
        made = cls.from_state(ctx, params)  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, ConnectorError):
            raise
        raise ConnectorError(f"connector '{name}' can't be made of params {shown(params)}: {error!r}") from error
    return made


class AgentData(dict[str, Any]):
    """Columns of one agent, as a function gets them: a dict that is its own `data`, with the ids beside it."""

    def __init__(self, columns: Mapping[str, Any], env_id: str, agent_id: str) -> None:
        super().__init__(columns)
        self.env_id, self.agent_id = env_id, agent_id

    @property
    def data(self) -> "AgentData":
        """The columns, for functions that take an `AgentConnectorDataType`."""
        return self


def register_lambda_agent_connector(name: str, fn: Callable[[Any], Any]) -> type[AgentConnector]:
    """Make an agent connector class of a function, and register it.

    fn    takes the data of one agent and returns it; `d["new_obs"]` and `d.data["new_obs"]` both read a column

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it where the
    function returns anything else.
    """
    _check_arguments(name, fn, 1, "(data)")

    class LambdaAgentConnector(AgentConnector):
        def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
            env_id, agent_id, data = ac_data.env_id, ac_data.agent_id, ac_data.data
            if isinstance(data, AgentConnectorsOutput):
                raise ConnectorError(
                    f"{name} stands behind a connector that makes the policy's input, expected it before that: {name} "
                    "changes columns, which are then in 'raw_dict' and 'sample_batch'"
                )
            returned = fn(AgentData(data, env_id, agent_id))
            if isinstance(returned, AgentConnectorDataType):
                return returned
            if not isinstance(returned, Mapping):
                raise ConnectorError(
                    f"the function of {name} returned {type(returned).__name__}, expected the data: does it return it?"
                )
            return AgentConnectorDataType(env_id, agent_id, dict(returned))

        to_state = without_params

    return _registered(name, fn, LambdaAgentConnector)


def register_lambda_action_connector(name: str, fn: Callable[[Any, Any, Any], PolicyOutputType]) -> type[Any]:
    """Make an action connector class of a function, and register it.

    fn    takes actions, states and fetches, and returns the three

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it where the
    function does not return a tuple of three.
    """
    _check_arguments(name, fn, 3, "(actions, states, fetches)")

    class LambdaActionConnector(ActionConnector):
        def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
            returned: Any = fn(*ac_data.output)
            if not isinstance(returned, tuple) or len(returned) != 3:
                raise ConnectorError(
                    f"the function of {name} returned {type(returned).__name__}, expected a tuple of three: (actions, "
                    "states, fetches); a lambda needs parentheses around them"
                )
            return replace(ac_data, output=returned)

        to_state = without_params

    return _registered(name, fn, LambdaActionConnector)


def _registered(name: str, fn: Callable[..., Any], made: type[Any]) -> type[Any]:
    # With the function's module and the registered name, a class that is kept under that name there can be pickled.
    made.__name__ = made.__qualname__ = name
    made.__module__ = getattr(fn, "__module__", None) or made.__module__
    made.__doc__ = getattr(fn, "__doc__", None)
    register_connector(name, made)
    return made


def _check_arguments(name: str, fn: Any, count: int, expected: str) -> None:
    kind = Connector.__name__
    if not callable(fn):
        raise ConnectorError(
            f"{name} is to be a {kind} of {type(fn).__name__} {shown(fn)}, expected a function {expected}"
        )
    try:
        signature = inspect.signature(fn)
        signature.bind(*range(count))
    except TypeError:
        raise ConnectorError(f"the function of {name} takes {signature}, expected {expected}") from None
    except ValueError:  # it has no signature
        return


class ConnectorPipeline(Connector):
    """Connectors that are called in order.

    ctx           for connectors that have none of their own
    connectors    the connectors, which may be pipelines

    Connectors go by their class's name, the second of a class by `Name_2`. Raises ConnectorError for a connector of the
    other kind, and for an object that is in the pipeline already.
    """

    kind: ClassVar[type[Connector]] = Connector

    def __init__(self, ctx: ConnectorContext | None, connectors: Sequence[Any] = ()) -> None:
        super().__init__(ctx)
        self.connectors: list[Any] = []
        for connector in connectors:
            self.append(connector)

    def in_training(self) -> None:
        super().in_training()
        for connector in self.connectors:
            connector.in_training()

    def in_eval(self) -> None:
        super().in_eval()
        for connector in self.connectors:
            connector.in_eval()

    def bind(self, ctx: ConnectorContext | None) -> None:
        super().bind(ctx)
        for connector in self.connectors:
            connector.bind(ctx)

    # Editing

    @property
    def names(self) -> list[str]:
        """The names that the connectors go by, in order."""
        names: list[str] = []
        for connector in self.connectors:
            name = type(connector).__name__
            count = sum(type(other).__name__ == name for other in self.connectors[: len(names)])
            names.append(f"{name}_{count + 1}" if count else name)
        return names

    def remove(self, name: str) -> None:
        """Take a connector out. Raises ConnectorError where there is none of the name."""
        del self.connectors[self._place(name)]

    def insert_before(self, name: str, connector: Any) -> None:
        """Put a connector in front of another. Raises ConnectorError where there is none of the name."""
        self._insert(self._place(name), connector)

    def insert_after(self, name: str, connector: Any) -> None:
        """Put a connector behind another. Raises ConnectorError where there is none of the name."""
        self._insert(self._place(name) + 1, connector)

    def prepend(self, connector: Any) -> None:
        """Put a connector at the beginning."""
        self._insert(0, connector)

    def append(self, connector: Any) -> None:
        """Put a connector at the end."""
        self._insert(len(self.connectors), connector)

    def __getitem__(self, key: int | slice | str | type) -> list[Any]:
        """The list of connectors at a place, of a class's name, or of a class; empty where there is none.

        Raises IndexError for a place that there is not, and TypeError for any other key.
        """
        if isinstance(key, slice):
            return self.connectors[key]
        if isinstance(key, int):
            return [self.connectors[key]]
        if isinstance(key, str):
            named = zip(self.names, self.connectors, strict=True)
            return [each for name, each in named if key in (name, type(each).__name__)]
        if isinstance(key, type):
            return [each for each in self.connectors if isinstance(each, key)]
        raise TypeError(f"{type(self).__name__}[{key!r}]: expected a place, a name or a class")

    def __len__(self) -> int:
        return len(self.connectors)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.connectors)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' → '.join(self.names) or 'empty'}>"

    def _place(self, name: str) -> int:
        names = self.names
        if name not in names:
            raise ConnectorError(
                f"{type(self).__name__} has no connector '{name}'; connectors: {', '.join(names) or 'none'}"
            )
        return names.index(name)

    def _insert(self, place: int, connector: Any) -> None:
        kind = self.kind
        if not isinstance(connector, kind):
            is_class = isinstance(connector, type)
            text = f"the class {connector.__name__}" if is_class else type(connector).__name__
            remedy = f"{connector.__name__}(ctx)" if is_class else f"one that is an {kind.__name__}"
            raise ConnectorError(
                f"{type(self).__name__} was to have {text}, expected {remedy}; an AgentConnector goes into an "
                "AgentConnectorPipeline, and an ActionConnector into an ActionConnectorPipeline"
            )
        if connector is self or any(connector is each for each in self.connectors):
            raise ConnectorError(
                f"{type(self).__name__}: the same {type(connector).__name__} object twice, expected another object"
            )
        self.connectors.insert(place, connector)
        connector.bind(self.ctx)
        if self._is_training:
            connector.in_training()
        else:
            connector.in_eval()

    # State

    def to_state(self) -> tuple[str, Any]:
        """The class's name, and the list of the connectors' names and params."""
        return type(self).__name__, [list(each.to_state()) for each in self.connectors]

    @classmethod
    def from_state(cls, ctx: ConnectorContext, params: Any) -> Self:
        """A pipeline of params that `to_state` gave. Raises ConnectorError for names that are not registered."""
        if not isinstance(params, list | tuple) or not all(_is_pair(each) for each in params):
            raise ConnectorError(f"{cls.__name__}: params are {shown(params)}, expected a list of [name, params]")
        return cls(ctx, [get_connector(name, ctx, each) for name, each in params])

    def learnt_state(self) -> dict[str, Any]:
        states = {name: each.learnt_state() for name, each in self._named()}
        return {name: state for name, state in states.items() if state}

    def take_learnt_state(self, state: dict[str, Any]) -> None:
        self._check_names(state)
        for name, each in self._named():
            if name in state:
                each.take_learnt_state(state[name])

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        for state in states:
            self._check_names(state)
        merged: dict[str, Any] = {}
        for name, each in self._named():
            theirs = [state[name] for state in states if name in state]
            merged[name] = each.merge_states(theirs) if theirs else each.learnt_state()
        return {name: state for name, state in merged.items() if state}

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self.names, self.connectors, strict=True))

    def _check_names(self, state: Any) -> None:
        unknown = sorted(set(state) - set(self.names))
        if unknown:
            raise ConnectorError(
                f"{type(self).__name__}: a state for {unknown}, but the connectors are: "
                f"{', '.join(self.names) or 'none'}"
            )

    def _in_turn(self, item: Any, is_sound: Callable[[Any], bool], expected: str) -> Any:
        """Call the connectors one after the other, with a note of the place on errors.

        is_sound, expected    of what a connector returns: a test, and its text
        """
        for place, connector in enumerate(self.connectors):
            where = f"'{self.names[place]}' ({place + 1} of {len(self)} in {type(self).__name__})"
            try:
                item = connector(item)
            except Exception as error:
                error.add_note(f"in connector {where}")
                raise
            if not is_sound(item):
                raise ConnectorError(
                    f"connector {where} returned {shown(item)}, expected {expected}: does it return it?"
                )
        return item


class AgentConnectorPipeline(ConnectorPipeline, AgentConnector):
    """Agent connectors, called in order, each with the list that the one before returned."""

    kind = AgentConnector

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        made: list[AgentConnectorDataType] = self._in_turn(acd_list, _is_agent_list, "a list of AgentConnectorDataType")
        return made

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        """Transform the data of a single agent."""
        (made,) = self([ac_data])
        return made

    def reset(self, env_id: str) -> None:
        for connector in self.connectors:
            connector.reset(env_id)

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        for connector in self.connectors:
            connector.on_policy_output(output)

    def observation_space_after(self, observation_space: Space) -> Space:
        return _space_through(self, "observation_space_after", observation_space)


class ActionConnectorPipeline(ConnectorPipeline, ActionConnector):
    """Action connectors, called in order, each with the output that the one before returned."""

    kind = ActionConnector

    def __call__(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        made: ActionConnectorDataType = self._in_turn(
            ac_data,
            _is_action_data,
            "ActionConnectorDataType with an output of three parts, (actions, states, fetches)",
        )
        return made

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        return self(ac_data)

    def action_space_after(self, action_space: Space) -> Space:
        return _space_through(self, "action_space_after", action_space)


def _space_through(pipeline: ConnectorPipeline, method: str, space: Space) -> Space:
    for place, connector in enumerate(pipeline.connectors):
        try:
            space = getattr(connector, method)(space)
        except Exception as error:
            error.add_note(f"in the space of connector '{pipeline.names[place]}', which gets items of {space}")
            if isinstance(error, RollflowError):
                raise
            raise ConnectorError(f"{pipeline.names[place]} can't take an item of {space}: {error!r}") from error
    return space


def _is_agent_list(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(each, AgentConnectorDataType) for each in item)


def _is_action_data(item: Any) -> bool:
    return isinstance(item, ActionConnectorDataType) and isinstance(item.output, tuple) and len(item.output) == 3


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)
