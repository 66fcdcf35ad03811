"""RLlib's connectors of the older stack, "Connectors (Alpha)": what a policy carries to act anywhere.

To write one:

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
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, Space
from rollflow.nodes.connectors.list_form import episode_key, rewrite_last
from rollflow.nodes.connectors.module_to_env.action_pieces import GetActions, NormalizeAndClipActions
from rollflow.nodes.connectors.named_pieces import NamedPieces, NameOrClass, names_of
from rollflow.nodes.connectors.spaces import check_has_numbers
from rollflow.nodes.connectors.state_watch import StateWatch, check_same, fingerprint
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.modules.evaluating import evaluating
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, RollflowError, shown
from rollflow.stream.data.space import flat_size, flatten, item_of, tree_of
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


_PROBE = "probe"  # environment id of what is sent through to find a space


def raw_columns(data: Any) -> dict[str, Any]:
    """The columns in an agent's data, also in the policy's input."""
    raw: dict[str, Any] = data.raw_dict if isinstance(data, AgentConnectorsOutput) else data
    return raw


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
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        return spaces.Dict({key: space_like(part, parts.get(key)) for key, part in item.items()})
    if isinstance(item, tuple):
        return spaces.Tuple([space_like(part, None) for part in item])
    array = np.asarray(item)
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        return spaces.Box(limits.min, limits.max, array.shape, array.dtype.type)
    if array.dtype.kind != "f":
        raise ConnectorError(f"an item is {shown(item)}, {array.dtype}, expected numbers")
    return spaces.Box(-np.inf, np.inf, array.shape, array.dtype.type)


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

    def get_state(self) -> dict[str, Any]:
        """State that a rollout saves, merges and sends; the params of `to_state`, unless overridden."""
        if type(self).to_state is Connector.to_state:
            return {}
        params = self.to_state()[1]
        return {} if params is None else {"params": params}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `get_state`: unless overridden, by the attributes of `from_state(ctx, params)`."""
        if state and fingerprint(state) != fingerprint(self.get_state()):
            is_training, made = self._is_training, type(self).from_state(self.context, state["params"])
            vars(self).update(vars(made))
            self._is_training = is_training

    def reset_state(self) -> None:
        """Forget all that has been learnt."""

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
        connector = copy.deepcopy(self)
        connector.in_eval()
        episode = SingleAgentEpisode(observations=[sample_of(observation_space)])
        returned = connector([data_of(_PROBE, episode, 0)])
        if len(returned) != 1:
            raise ConnectorError(f"{type(self).__name__} made {len(returned)} items of 1, expected one for each agent")
        return space_like(raw_columns(returned[0].data)[SampleBatch.NEXT_OBS], observation_space)


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
        connector = copy.deepcopy(self)
        connector.in_eval()
        given = ActionConnectorDataType(_PROBE, AGENT_ID, {}, (sample_of(action_space), [], {}))
        return space_like(connector(given).output[0], action_space)


def without_params(connector: Connector) -> tuple[str, Any]:
    """`to_state` of a connector without params: the class's name, by which it is registered."""
    return type(connector).__name__, None


def array_of(leaf: Any) -> Any:
    """The array of a tensor; anything else as it is."""
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf


_CONNECTORS: dict[str, type[Connector]] = {}  # those of users, by the names that they are registered by


def _built_in() -> dict[str, type[Connector]]:
    """rollflow's own connector classes that can be made, by their names."""
    bases = Connector, AgentConnector, ActionConnector, ConnectorPipeline
    found = {name: each for name, each in globals().items() if isinstance(each, type) and issubclass(each, Connector)}
    return {name: each for name, each in found.items() if name[0] != "_" and each not in bases}


def register_connector(name: str, cls: type[Connector]) -> None:
    """Give a connector class a stable name, by which `get_connector` makes one. A class of one's own may be replaced.

    Raises ConnectorError for anything but a connector class, and for the name of a connector of rollflow's.
    """
    if not isinstance(cls, type) or not issubclass(cls, Connector):
        raise ConnectorError(f"register_connector('{name}', …) got {cls!r}, expected a subclass of Connector")
    if _built_in().get(name, cls) is not cls:
        raise ConnectorError(f"'{name}' is a connector of rollflow's, expected another name for {cls.__qualname__}")
    _CONNECTORS[name] = cls


def get_connector(name: str, ctx: ConnectorContext | None, params: Any = None) -> Any:
    """A connector of the class that is registered by a name, made by its `from_state(ctx, params)`.

    Raises ConnectorError for a name of no class, and where the class does not take the params.
    """
    known = {**_built_in(), **_CONNECTORS}
    cls = known.get(name)
    if cls is None:
        raise ConnectorError(
            f"no connector is registered by the name '{name}', expected register_connector('{name}', its class) "
            f"before; registered: {', '.join(sorted(known))}"
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

    def transform(connector: AgentConnector, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
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

    return _registered(name, fn, 1, "(data)", AgentConnector, transform)


def register_lambda_action_connector(name: str, fn: Callable[[Any, Any, Any], PolicyOutputType]) -> type[Any]:
    """Make an action connector class of a function, and register it.

    fn    takes actions, states and fetches, and returns the three

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it where the
    function does not return a tuple of three.
    """

    def transform(connector: ActionConnector, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        returned: Any = fn(*ac_data.output)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise ConnectorError(
                f"the function of {name} returned {type(returned).__name__}, expected a tuple of three: (actions, "
                "states, fetches); a lambda needs parentheses around them"
            )
        return replace(ac_data, output=returned)

    return _registered(name, fn, 3, "(actions, states, fetches)", ActionConnector, transform)


def _registered(name: str, fn: Any, count: int, expected: str, base: type[Any], transform: Any) -> type[Any]:
    """Make and register the class of a function. Raises ConnectorError unless that takes `count` arguments."""
    if not callable(fn):
        raise ConnectorError(
            f"{name} is to be a Connector of {type(fn).__name__} {shown(fn)}, expected a function {expected}"
        )
    try:
        signature = inspect.signature(fn)
        signature.bind(*range(count))
    except TypeError:
        raise ConnectorError(f"the function of {name} takes {signature}, expected {expected}") from None
    except ValueError:  # it has no signature
        pass
    # With the function's module and the registered name, a class that is kept under that name there can be pickled.
    of_function = {"__module__": getattr(fn, "__module__", None) or __name__, "__doc__": getattr(fn, "__doc__", None)}
    made = type(name, (base,), {"transform": transform, "to_state": without_params, **of_function})
    register_connector(name, made)
    return made


class ConnectorPipeline(NamedPieces, Connector):
    """Connectors that are called in order.

    ctx           for connectors that have none of their own
    connectors    the connectors, which may be pipelines

    Connectors go by their class's name, the second of a class by `Name_2`. Raises ConnectorError for a connector of the
    other kind, and for an object that is in the pipeline already.
    """

    kind: ClassVar[type[Connector]] = Connector

    def __init__(self, ctx: ConnectorContext | None, connectors: Sequence[Any] = ()) -> None:
        super().__init__(ctx)
        self.name = type(self).__name__
        self._pieces = []
        self._edit(list(connectors))

    @property
    def connectors(self) -> list[Any]:
        """The connectors, in order."""
        return self._pieces

    @connectors.setter
    def connectors(self, connectors: Sequence[Any]) -> None:
        self._edit(list(connectors))

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

    @property
    def names(self) -> list[str]:
        """The names that the connectors go by, in order."""
        return names_of([type(each).__name__ for each in self._pieces])

    def remove(self, name_or_class: NameOrClass) -> None:
        """Take a connector out. Raises ConnectorError where there is none of the name."""
        self._edit(self._without(name_or_class))

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

    def _edit(self, pieces: list[Any]) -> None:
        for place, connector in enumerate(pieces):
            self._check(connector, pieces[:place])
        new = [connector for connector in pieces if not any(connector is each for each in self._pieces)]
        self._pieces[:] = pieces
        for connector in new:
            connector.bind(self.ctx)
            if self._is_training:
                connector.in_training()
            else:
                connector.in_eval()

    def _check(self, connector: Any, others: list[Any]) -> None:
        kind = self.kind
        if not isinstance(connector, kind):
            is_class = isinstance(connector, type)
            text = f"the class {connector.__name__}" if is_class else type(connector).__name__
            remedy = f"{connector.__name__}(ctx)" if is_class else f"one that is an {kind.__name__}"
            raise ConnectorError(
                f"{self.name} was to have {text}, expected {remedy}; an AgentConnector goes into an "
                "AgentConnectorPipeline, and an ActionConnector into an ActionConnectorPipeline"
            )
        if connector is self or any(connector is each for each in others):
            raise ConnectorError(
                f"{self.name}: the same {type(connector).__name__} object twice, expected another object"
            )

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

    def get_state(self) -> dict[str, Any]:
        states = {name: each.get_state() for name, each in self._named().items()}
        return {name: state for name, state in states.items() if state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.take_over_state(state)

    def reset_state(self) -> None:
        for connector in self.connectors:
            connector.reset_state()

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


# rollflow's own connectors


OBSERVATIONS = (SampleBatch.OBS, SampleBatch.NEXT_OBS)
UNFIT = "ObsPreprocessorConnector can't make vectors of observations"


def columns_of(connector: AgentConnector, ac_data: AgentConnectorDataType) -> dict[str, Any]:
    """The columns of an agent's data. Raises ConnectorError where they are the policy's input already."""
    data = ac_data.data
    if not isinstance(data, dict):
        raise ConnectorError(
            f"{type(connector).__name__}: the data of agent {ac_data.agent_id!r} of environment {ac_data.env_id!r} are "
            f"{type(data).__name__}, expected a dict of columns; it stands before ViewRequirementAgentConnector"
        )
    return data


class ObsPreprocessorConnector(AgentConnector):
    """Turns observations in Discrete, MultiDiscrete, Dict and Tuple spaces into vectors, f32[D]; Boxes stay.

    Whole numbers become one-hot vectors. The space is the context's, or the `original_space` of that. Raises
    ConnectorError for a space that has no numbers in it, and for observations that are not in it.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        space = original_space(self.context, self)
        if isinstance(space, spaces.Box):
            return ac_data
        data = columns_of(self, ac_data)
        for name in OBSERVATIONS:
            if name in data:
                data[name] = self._flat(space, data[name])
        return ac_data

    def observation_space_after(self, observation_space: Space) -> Space:
        if isinstance(observation_space, spaces.Box):
            return observation_space
        check_has_numbers(observation_space, UNFIT)
        return spaces.Box(-np.inf, np.inf, (flat_size(observation_space),), np.float32)

    to_state = without_params

    def _flat(self, space: Space, observation: Any) -> Any:
        check_has_numbers(space, UNFIT)
        try:
            rows = map_tree(lambda leaf: np.asarray(leaf)[None], observation)
            return flatten(space, rows)[0]
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(
                f"ObsPreprocessorConnector: an observation is {shown(observation)}, expected one in {space}"
            ) from error


def original_space(ctx: ConnectorContext, connector: AgentConnector) -> Space:
    """The space of the environment's observations. Raises ConnectorError where the context has none."""
    space = ctx.observation_space
    if space is None:
        raise ConnectorError(
            f"{type(connector).__name__}: the context has no observation_space, expected "
            "ConnectorContext(observation_space=…)"
        )
    original: Space = getattr(space, "original_space", space)
    return original


class ClipRewardAgentConnector(AgentConnector):
    """Replaces rewards by their sign, or clips them to -limit … limit; does nothing without either.

    Raises ConnectorError for both, and for a limit that is not more than 0.
    """

    def __init__(self, ctx: ConnectorContext | None = None, sign: bool = False, limit: float | None = None) -> None:
        super().__init__(ctx)
        if sign and limit:
            raise ConnectorError(f"ClipRewardAgentConnector: sign is True and limit is {limit}, expected one of them")
        if limit is not None and not limit > 0:
            raise ConnectorError(f"ClipRewardAgentConnector: limit is {limit}, expected more than 0, or None")
        self.sign, self.limit = sign, limit

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = columns_of(self, ac_data)
        if SampleBatch.REWARDS in data:
            if self.sign:
                data[SampleBatch.REWARDS] = np.sign(data[SampleBatch.REWARDS])
            elif self.limit is not None:
                data[SampleBatch.REWARDS] = np.clip(data[SampleBatch.REWARDS], -self.limit, self.limit)
        return ac_data

    def to_state(self) -> tuple[str, Any]:
        return "ClipRewardAgentConnector", {"sign": self.sign, "limit": self.limit}


class StateBufferConnector(AgentConnector):
    """Adds the last output of the policy: `actions`, `state_out_0` and so on, and what it gave beside.

    At the start of an episode actions are zeros in the context's action space, and states its initial ones. What is
    buffered belongs to episodes under way, and is no part of the saved connector.
    """

    def __init__(self, ctx: ConnectorContext | None = None) -> None:
        super().__init__(ctx)
        self._outputs: dict[str, dict[str, PolicyOutputType]] = {}

    def reset(self, env_id: str) -> None:
        self._outputs.pop(env_id, None)

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        self._outputs.setdefault(output.env_id, {})[output.agent_id] = output.output

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data = columns_of(self, ac_data)
        output = self._outputs.get(ac_data.env_id, {}).get(ac_data.agent_id)
        if output is None:
            space = self.context.action_space
            actions, states = (None if space is None else sample_of(space)), self.context.initial_states
            fetches: Any = {}
        else:
            actions, states, fetches = output
        if actions is not None:
            data[SampleBatch.ACTIONS] = actions
        data.update({f"state_out_{i}": state for i, state in enumerate(states)})
        data.update(fetches)
        return ac_data

    to_state = without_params


class ViewRequirementAgentConnector(AgentConnector):
    """Makes the policy's input, any[1, ...] each: `AgentConnectorsOutput`.

        obs                the newest observation, `new_obs`
        state_in_0, …      of a recurrent policy: what `StateBufferConnector` has added as `state_out_0` and so on

    Raises ConnectorError for data without one of those.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data, env_id, agent_id = columns_of(self, ac_data), ac_data.env_id, ac_data.agent_id
        states = {f"state_in_{i}": f"state_out_{i}" for i in range(len(self.context.initial_states))}
        sources = {SampleBatch.OBS: SampleBatch.NEXT_OBS, **states}
        if missing := [source for source in sources.values() if source not in data]:
            remedy = "one" if missing[0] == SampleBatch.NEXT_OBS else "StateBufferConnector before it"
            raise ConnectorError(
                f"ViewRequirementAgentConnector: the data of agent {agent_id!r} of environment {env_id!r} have no "
                f"'{missing[0]}', expected {remedy}; columns: {', '.join(map(str, data)) or 'none'}"
            )
        batch = SampleBatch(
            {name: map_tree(lambda leaf: _array_of(leaf)[None], data[source]) for name, source in sources.items()}
        )
        for_training = data if self._is_training else {}
        return AgentConnectorDataType(env_id, agent_id, AgentConnectorsOutput(data, batch, for_training))

    to_state = without_params


def _array_of(leaf: Any) -> Any:
    return np.float32(leaf) if isinstance(leaf, float) else np.asarray(leaf)


class ConvertToNumpyConnector(ActionConnector):
    """Turns tensors among actions and states into arrays; fetches stay as they are."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        actions, states, fetches = ac_data.output
        output = (map_tree(array_of, actions), [map_tree(array_of, state) for state in states], fetches)
        return replace(ac_data, output=output)

    to_state = without_params


class _BoundedActions(ActionConnector):
    """Brings actions into the bounds of the context's action space, with the piece that rollouts use."""

    normalize_actions = False
    _piece: NormalizeAndClipActions | None = None

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        if self._piece is None:
            space, normalizes = self.context.action_space, self.normalize_actions
            if space is None:
                raise ConnectorError(
                    f"{type(self).__name__}: the context has no action_space, expected ConnectorContext(action_space=…)"
                )
            self._piece = NormalizeAndClipActions(
                None, space, normalize_actions=normalizes, clip_actions=not normalizes
            )
        batch = self._piece(batch={Columns.ACTIONS: [ac_data.output[0]]})
        return replace(ac_data, output=(batch[Columns.ACTIONS_FOR_ENV][0], *ac_data.output[1:]))

    def action_space_after(self, action_space: Space) -> Space:
        return action_space

    to_state = without_params


class NormalizeActionsConnector(_BoundedActions):
    """Scales actions from -1 … 1 to low … high of Boxes that are bounded on all sides."""

    normalize_actions = True


class ClipActionsConnector(_BoundedActions):
    """Clips actions to the bounds that Boxes have."""


class ImmutableActionsConnector(ActionConnector):
    """Makes actions read-only: arrays, and dicts of them; so nobody changes what has been recorded."""

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        return replace(ac_data, output=(_read_only(ac_data.output[0]), *ac_data.output[1:]))

    def action_space_after(self, action_space: Space) -> Space:
        return action_space

    to_state = without_params


def _read_only(actions: Tree) -> Any:
    if isinstance(actions, np.ndarray):
        view = actions.view()
        view.flags.writeable = False
        return view
    if isinstance(actions, dict):
        return types.MappingProxyType({key: _read_only(part) for key, part in actions.items()})
    if isinstance(actions, list | tuple):
        return tuple(map(_read_only, actions))
    return actions


# Acting with a policy and its connectors, one observation at a time


def default_agent_connectors(ctx: ConnectorContext) -> AgentConnectorPipeline:
    """Rewards clipped, observations preprocessed, states buffered, and the policy's input made.

    `ctx.config["clip_rewards"]` clips rewards by their sign if it is True, to -number … number if it is a number.
    Raises ConnectorError for an `observation_filter` in `ctx.config` other than "NoFilter".
    """
    connectors: list[AgentConnector] = []
    clip = ctx.config.get("clip_rewards")
    if clip:
        connectors.append(ClipRewardAgentConnector(ctx, sign=clip is True, limit=None if clip is True else abs(clip)))
    name = ctx.config.get("observation_filter") or "NoFilter"
    if name != "NoFilter":
        raise ConnectorError(f"observation_filter is {name!r}, expected NoFilter; the piece MeanStdFilter filters")
    makers = ObsPreprocessorConnector, StateBufferConnector, ViewRequirementAgentConnector
    return AgentConnectorPipeline(ctx, [*connectors, *(make(ctx) for make in makers)])


def default_action_connectors(ctx: ConnectorContext) -> ActionConnectorPipeline:
    """Actions as arrays, brought into their bounds, and read-only.

    `ctx.config` says how: `normalize_actions` scales from -1 … 1, `clip_actions` clips; both are absent for neither.
    """
    bounded: list[ActionConnector] = []
    if ctx.config.get("normalize_actions"):
        bounded.append(NormalizeActionsConnector(ctx))
    if ctx.config.get("clip_actions"):
        bounded.append(ClipActionsConnector(ctx))
    return ActionConnectorPipeline(ctx, [ConvertToNumpyConnector(ctx), *bounded, ImmutableActionsConnector(ctx)])


class ConnectorPolicy:
    """A module with the connectors around it: what `local_policy_inference` acts with.

    module               an RLModule, which acts in evaluation mode
    agent_connectors     before the module; they make its input
    action_connectors    behind it
    """

    def __init__(
        self, module: Any, agent_connectors: AgentConnectorPipeline, action_connectors: ActionConnectorPipeline
    ) -> None:
        self.module = module
        self.agent_connectors, self.action_connectors = agent_connectors, action_connectors
        self.observation_space, self.action_space = module.observation_space, module.action_space
        self.config: dict[str, Any] = {}
        self._get_actions = GetActions()
        self._get_actions.set_input_spaces(self.observation_space, self.action_space)

    def get_initial_state(self) -> Any:
        """The module's state at the start of an episode; empty without one."""
        return self.module.get_initial_state() if is_stateful(self.module) else {}

    def compute_actions_from_input_dict(self, input_dict: dict[str, Any], explore: bool = True) -> PolicyOutputType:
        """Actions any[B, ...], a list of states any[B, ...], and further outputs any[B, ...], of columns any[B, ...].

        Raises ConnectorError for a recurrent module's input without its states.
        """
        batch = {name: map_tree(_tensor, value) for name, value in input_dict.items() if _is_numeric(value)}
        stateful = is_stateful(self.module)
        if stateful:
            self._add_states(batch, input_dict)
            batch[Columns.OBS] = map_tree(lambda leaf: leaf[:, None], batch[Columns.OBS])
        module = evaluating(self.module)
        forward = module.forward_exploration if explore else module.forward_inference
        with torch.inference_mode():
            output = forward(batch)
            states = leaves_of(output.pop(Columns.STATE_OUT)) if Columns.STATE_OUT in output else []
            if stateful:
                output = {name: map_tree(lambda leaf: leaf[:, 0], column) for name, column in output.items()}
            output = self._get_actions(rl_module=self.module, batch=output, episodes=[], explore=explore)
        made = {name: map_tree(array_of, column) for name, column in output.items()}
        return made.pop(Columns.ACTIONS), [array_of(state) for state in states], made

    def _add_states(self, batch: dict[str, Any], input_dict: dict[str, Any]) -> None:
        initial = self.module.get_initial_state()
        names = [f"state_in_{i}" for i in range(len(leaves_of(initial)))]
        missing = [name for name in names if name not in input_dict]
        if missing:
            raise ConnectorError(
                f"the input of {type(self.module).__name__} has no {', '.join(missing)}, which a recurrent module "
                "needs; expected StateBufferConnector and ViewRequirementAgentConnector among the agent connectors"
            )
        states = iter([batch.pop(name) for name in names])
        batch[Columns.STATE_IN] = map_tree(lambda _: next(states), initial)


def local_policy_inference(
    policy: Any,
    env_id: str,
    agent_id: str,
    obs: Any,
    reward: float | None = None,
    terminated: bool | None = None,
    truncated: bool | None = None,
    info: Any = None,
    explore: bool | None = None,
) -> list[PolicyOutputType]:
    """Act for one agent: a list with its (action, states, fetches); the connectors are put into evaluation.

        policy        has `agent_connectors`, `action_connectors` and `compute_actions_from_input_dict`
        env_id        of the environment; states are kept for each, until its `agent_connectors.reset(env_id)`
        agent_id      of the agent in it
        obs           its observation
        reward, terminated, truncated, info    what came with that; None: nothing has come
        explore       False: the likeliest action; True or None: a sampled one

    Where the step before has ended its episode, as `terminated` or `truncated` said, the next call begins a new one.
    Raises ConnectorError for a policy without connectors, and where these do not make the policy's input.
    """
    given = {
        SampleBatch.NEXT_OBS: obs,
        SampleBatch.REWARDS: reward,
        SampleBatch.TERMINATEDS: terminated,
        SampleBatch.TRUNCATEDS: truncated,
        SampleBatch.INFOS: info,
    }
    data = {name: value for name, value in given.items() if value is not None}
    for name in ("agent_connectors", "action_connectors"):
        if getattr(policy, name, None) is None:
            raise ConnectorError(
                f"policy {type(policy).__name__} has no {name}, expected a policy with both, such as ConnectorPolicy"
            )
    policy.agent_connectors.in_eval()
    policy.action_connectors.in_eval()
    made = policy.agent_connectors([AgentConnectorDataType(env_id, agent_id, data)])
    outputs = [_acted(policy, each, explore) for each in made]
    if terminated or truncated:
        policy.agent_connectors.reset(env_id)
    return outputs


def _acted(policy: Any, each: AgentConnectorDataType, explore: bool | None) -> PolicyOutputType:
    data = each.data
    if not isinstance(data, AgentConnectorsOutput):
        raise ConnectorError(
            f"the agent connectors left {type(data).__name__} for agent {each.agent_id!r} of environment "
            f"{each.env_id!r}, expected AgentConnectorsOutput: ViewRequirementAgentConnector makes it"
        )
    batched = policy.compute_actions_from_input_dict(data.sample_batch, explore=explore is not False)
    actions, states, fetches = (map_tree(lambda leaf: leaf[0], part) for part in batched)
    output: PolicyOutputType = (actions, states, fetches)
    policy.agent_connectors.on_policy_output(
        ActionConnectorDataType(
            each.env_id, each.agent_id, data.raw_dict, (map_tree(np.array, actions), states, fetches)
        )
    )
    chosen = ActionConnectorDataType(each.env_id, each.agent_id, data.raw_dict, output)
    left: PolicyOutputType = policy.action_connectors(chosen).output
    return left


def _is_numeric(value: Any) -> bool:
    return all(np.asarray(leaf).dtype.kind in "biuf" for leaf in leaves_of(value))


def _tensor(leaf: Any) -> torch.Tensor:
    tensor = torch.as_tensor(np.array(leaf))
    return tensor.float() if tensor.dtype is torch.float64 else tensor


# Pipelines as ConnectorV2 pieces, for the pipelines of rollouts


_DECLARATION = (
    "to_state and from_state, and merge_states where copies run in workers; or a get_state that returns {} where "
    "nothing has to last"
)


def _undeclaring(pipeline: Any) -> Iterator[Any]:
    """The connectors without a `to_state` or `get_state` of their own, also in nested pipelines."""
    for connector in pipeline:
        if hasattr(connector, "connectors"):
            yield from _undeclaring(connector)
        elif type(connector).to_state is Connector.to_state and type(connector).get_state is Connector.get_state:
            yield connector


def as_connector_v2(connector: Any) -> Any:
    """A ConnectorV2 piece that calls an Alpha connector or pipeline; anything else is returned as it is."""
    if isinstance(connector, AgentConnector):
        return AgentConnectorPiece(connector)
    return ActionConnectorPiece(connector) if isinstance(connector, ActionConnector) else connector


class _AlphaPiece(ConnectorV2):
    """A piece that calls Alpha connectors: their state is its state."""

    pipeline: Any
    _watches: list[tuple[Any, StateWatch]] | None = None  # (connector that declares no state, its watch)

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Name -> state of each connector that has learnt something. Raises StateError for undeclared state."""
        for connector, watch in self._watches or ():
            watch.check(connector, _DECLARATION)
        state: dict[str, Any] = self.pipeline.get_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Give connectors a state that `get_state` gave."""
        self.pipeline.set_state(state)

    def reset_state(self) -> None:
        """Make connectors that can forget do so."""
        self.pipeline.reset_state()

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Name -> merged state, connector by connector."""
        merged: dict[str, Any] = self.pipeline.merge_states(states)
        return merged

    def _take(self, connector: Connector, kind: type[Any]) -> None:
        self.pipeline = connector if isinstance(connector, kind) else kind(connector.ctx, [connector])
        self.name = type(connector).__name__

    def _watch_states(self) -> None:
        """Watch the connectors that declare no state, from the end of the first call on."""
        if self._watches is None:
            self._watches = [(each, StateWatch(each)) for each in _undeclaring(self.pipeline)]
            for connector, watch in self._watches:
                watch.begin(connector)

    def _complete_context(self, observation_space: Space | None, action_space: Space | None) -> None:
        """Fill in the spaces that the connectors' context lacks."""
        if self.pipeline.ctx is None:
            self.pipeline.bind(ConnectorContext())
        ctx: ConnectorContext = self.pipeline.ctx
        ctx.observation_space = observation_space if ctx.observation_space is None else ctx.observation_space
        ctx.action_space = action_space if ctx.action_space is None else ctx.action_space


class AgentConnectorPiece(_AlphaPiece):
    """Calls agent connectors over the episodes' newest steps, with the agents of one environment as one list.

        connector    an `AgentConnector` or an `AgentConnectorPipeline`

    Each agent's data are `new_obs`, `rewards`, `terminateds`, `truncateds` and `infos` of its newest step, with `t`,
    `eps_id`, `env_id` and `agent_index`. Before that the connectors get what the module chose at the step before, by
    `on_policy_output`, and `reset` where an environment has begun an episode. The `new_obs` and the `rewards` that they
    leave are written to the episodes. Columns that they make for the policy are added to the batch, without the
    states, which rollouts keep themselves.

    Raises ConnectorError where the connectors do not leave one item for each agent.
    """

    columnar = False
    changes_episodes = True
    lookback = 1

    def __init__(self, connector: AgentConnector) -> None:
        self._take(connector, AgentConnectorPipeline)
        self._episodes: dict[str, Any] = {}  # environment -> id of its newest episode
        self._answered: dict[str, dict[Any, int]] = {}  # environment -> agent -> steps whose output has been passed on
        self._is_complete = False
        super().__init__()

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self._complete_context(input_observation_space, input_action_space)
        left: Space = self.pipeline.observation_space_after(input_observation_space)
        return left

    def __call__(self, *, rl_module: Any = None, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if not self._is_complete:
            self._complete_states(rl_module)
        added: list[tuple[str, Any, SingleAgentEpisode]] = []
        for env_id, agents in _by_environment(self.single_agent_episode_iterator(episodes)).items():
            self._begin(env_id, agents)
            given = [data_of(env_id, agent, place) for place, agent in enumerate(agents)]
            made = self.pipeline(list(given))
            ids = [(each.env_id, each.agent_id) for each in made]
            expected = [(env_id, agent_id_of(agent)) for agent in agents]
            if ids != expected:
                raise ConnectorError(
                    f"{self.name} left data of {ids}, expected one item for each agent, in order: {expected}"
                )
            for agent, each in zip(agents, made, strict=True):
                added += self._written(agent, each.data)
        self._watch_states()
        return _with_columns(batch, added)

    def _begin(self, env_id: str, agents: list[SingleAgentEpisode]) -> None:
        """Reset an environment that has begun an episode, or pass on what the module chose at the step before."""
        episode_id = agents[0].multi_agent_episode_id or agents[0].id_
        if self._episodes.get(env_id) != episode_id:
            self._episodes[env_id], self._answered[env_id] = episode_id, {}
            self.pipeline.reset(env_id)
        answered = self._answered[env_id]
        for agent in agents:
            steps = agent.t
            if steps and answered.get(agent.agent_id) != steps:
                answered[agent.agent_id] = steps
                self.pipeline.on_policy_output(_output_of(env_id, agent))

    def _written(self, episode: SingleAgentEpisode, data: Any) -> list[tuple[str, Any, SingleAgentEpisode]]:
        """Write what connectors left to an episode; return the further columns of the policy's input."""
        columns = raw_columns(data)
        if SampleBatch.NEXT_OBS not in columns:
            raise ConnectorError(
                f"{self.name} left data without 'new_obs', expected the observation; columns: {', '.join(columns)}"
            )
        observation = columns[SampleBatch.NEXT_OBS]
        rewrite_last(episode, observation, self.observation_space)
        reward = columns.get(SampleBatch.REWARDS)
        if episode.t and reward is not None and reward != episode.get_rewards(-1):
            episode.set_rewards(new_data=np.float32(reward), at_indices=-1)
        if not isinstance(data, AgentConnectorsOutput):
            return []
        items = {name: map_tree(lambda leaf: leaf[0], column) for name, column in data.sample_batch.items()}
        if SampleBatch.OBS in items and _are_equal(items[SampleBatch.OBS], observation):
            del items[SampleBatch.OBS]
        return [(name, item, episode) for name, item in items.items() if not name.startswith("state_in_")]

    def _complete_states(self, rl_module: Any) -> None:
        self._is_complete = True
        ctx: ConnectorContext | None = self.pipeline.ctx
        if ctx is not None and not ctx.initial_states and is_stateful(rl_module):
            states = ConnectorContext.from_policy(rl_module)
            ctx.initial_states, ctx.is_policy_recurrent = states.initial_states, True


class ActionConnectorPiece(_AlphaPiece):
    """Calls action connectors over a module's choices; what they leave becomes `actions_for_env`.

    connector    an `ActionConnector` or an `ActionConnectorPipeline`

    `actions` stay as the module chose them, so that they go with their log-probabilities. The connectors see the
    agent's observation as `obs` in the input, and the module's further outputs as fetches.
    """

    columnar = False
    changes_episodes = False

    def __init__(self, connector: ActionConnector) -> None:
        self._take(connector, ActionConnectorPipeline)
        super().__init__()

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self._complete_context(input_observation_space, input_action_space)
        left: Space = self.pipeline.action_space_after(input_action_space)
        return left

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.ACTIONS not in batch:
            return batch
        made: dict[tuple[Any, ...], list[Any]] = {}
        for env_id, agents in _by_environment(self.single_agent_episode_iterator(episodes)).items():
            for agent in agents:
                key = episode_key(agent)
                columns = {name: items[key][0] for name, items in batch.items() if key in items}
                if Columns.ACTIONS not in columns:
                    continue
                state = columns.pop(Columns.STATE_OUT, None)
                action = columns.pop(Columns.ACTIONS_FOR_ENV, columns[Columns.ACTIONS])
                del columns[Columns.ACTIONS]
                given = {SampleBatch.OBS: agent.get_observations(-1)}
                output = (map_tree(np.array, action), [] if state is None else leaves_of(state), columns)
                result = self.pipeline(ActionConnectorDataType(env_id, agent_id_of(agent), given, output))
                made[key] = [result.output[0]]
        self._watch_states()
        batch[Columns.ACTIONS_FOR_ENV] = made
        return batch


def _by_environment(episodes: Iterator[SingleAgentEpisode]) -> dict[str, list[SingleAgentEpisode]]:
    """Environment id -> the episodes of its agents, in order; an episode built by hand is its own environment."""
    found: dict[str, list[SingleAgentEpisode]] = {}
    for episode in episodes:
        built = episode.lane is None or episode.slot is None
        alone = episode.multi_agent_episode_id or episode.id_
        found.setdefault(alone if built else f"env_{episode.lane}_{episode.slot}", []).append(episode)
    return found


def _output_of(env_id: str, episode: SingleAgentEpisode) -> ActionConnectorDataType:
    """Output of the module at an episode's last step."""
    outputs = {name: episode.get_extra_model_outputs(name, -1) for name in episode.extra_model_outputs}
    state = outputs.pop(Columns.STATE_OUT, None)
    for name in (Columns.ACTIONS_FOR_ENV, Columns.POLICY_VERSION):
        outputs.pop(name, None)
    states = [] if state is None else leaves_of(state)
    output = (episode.get_actions(-1), states, outputs)
    return ActionConnectorDataType(env_id, agent_id_of(episode), {}, output)


def _are_equal(one: Any, other: Any) -> bool:
    mine, theirs = leaves_of(one), leaves_of(other)
    return len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))


def _with_columns(batch: Batch, added: list[tuple[str, Any, SingleAgentEpisode]]) -> Batch:
    for name, item, episode in added:
        ConnectorV2.add_batch_item(batch, name, item, episode)
    return batch
