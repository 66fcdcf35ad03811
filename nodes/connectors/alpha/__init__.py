"""RLlib's connectors of the older stack, "Connectors (Alpha)": what a policy carries to act anywhere.

To write one:

    class HalvesObservations(AgentConnector):
        def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
            ac_data.data[SampleBatch.NEXT_OBS] = ac_data.data[SampleBatch.NEXT_OBS] / 2
            return ac_data

Programs call pipelines of them around a policy. Rollouts, and `Policy`, take `ConnectorV2` pieces alone.
"""

import abc
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.common.batches import TensorToNumpy
from rollflow.nodes.connectors.connector_v2 import Space
from rollflow.nodes.connectors.list_form import check_has_numbers
from rollflow.nodes.connectors.module_to_env.action_pieces import ClipActions
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import NamedPieces, NameOrClass
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.space import flatten
from rollflow.stream.data.tree import Tree, map_tree

PolicyOutputType = tuple[Any, list[Any], dict[str, Any]]
"""Output of a policy: actions, states as a list of arrays, and further outputs by name."""


class SampleBatch(dict[str, Any]):
    """A dict of columns, with the names of RLlib's columns; states are `state_in_0`, `state_out_0` and so on."""

    OBS = "obs"
    NEXT_OBS = "new_obs"
    ACTIONS = "actions"
    REWARDS = "rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    INFOS = "infos"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_LOGP = "action_logp"
    VF_PREDS = "vf_preds"


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


class Connector:
    """A transformation of what goes into a policy or comes out of it.

    ctx            the context; None: that of the pipeline that the connector is put into
    is_training    False in evaluation, if nothing is learnt and nothing is made for training
    connectors     those of a pipeline, which are told all that it is told
    """

    ctx: ConnectorContext | None = None
    connectors: Sequence[Any] = ()
    _is_training = True

    def __init__(self, ctx: ConnectorContext | None = None) -> None:
        self.ctx = ctx

    @property
    def name(self) -> str:
        """The name in a pipeline."""
        return type(self).__name__

    @property
    def is_training(self) -> bool:
        """True unless in evaluation."""
        return self._is_training

    def in_training(self) -> None:
        """Learn from the data, and make what training needs."""
        self._is_training = True
        for connector in self.connectors:
            connector.in_training()

    def in_eval(self) -> None:
        """Learn nothing, and make only what acting needs."""
        self._is_training = False
        for connector in self.connectors:
            connector.in_eval()

    def bind(self, ctx: ConnectorContext | None) -> None:
        """Take a pipeline's context if the connector has none of its own."""
        if self.ctx is None:
            self.ctx = ctx
        for connector in self.connectors:
            connector.bind(ctx)

    @property
    def context(self) -> ConnectorContext:
        """The context. Raises ConnectorError if there is none."""
        if self.ctx is None:
            raise ConnectorError(
                f"{type(self).__name__} has no context, expected {type(self).__name__}(ctx), or a pipeline with one"
            )
        return self.ctx

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class AgentConnector(Connector):
    """A connector before the policy; a subclass overrides `transform`, or `__call__` if agents depend on each other.

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
        for connector in self.connectors:
            connector.reset(env_id)

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        """Take note of what the policy chose, before action connectors have changed it."""
        for connector in self.connectors:
            connector.on_policy_output(output)


class ActionConnector(Connector):
    """A connector behind the policy; a subclass overrides `transform` or `__call__`, which are the same."""

    def __call__(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        """Transform the output for one agent."""
        return self.transform(ac_data)

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        """Transform the output for one agent, which may be changed in place."""
        raise ConnectorError(f"{type(self).__name__} overrides neither transform nor __call__, expected one of them")


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
    """Make an agent connector class of a function.

    fn    takes the data of one agent and returns it; `d["new_obs"]` and `d.data["new_obs"]` both read a column

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it if the
    function returns anything else.
    """

    def transform(connector: AgentConnector, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        env_id, agent_id = ac_data.env_id, ac_data.agent_id
        returned = fn(AgentData(columns_of(connector, ac_data), env_id, agent_id))
        if isinstance(returned, AgentConnectorDataType):
            return returned
        if not isinstance(returned, Mapping):
            raise ConnectorError(
                f"the function of {name} returned {type(returned).__name__}, expected the data: does it return it?"
            )
        return AgentConnectorDataType(env_id, agent_id, dict(returned))

    return _class_of(name, fn, 1, "(data)", AgentConnector, transform)


def register_lambda_action_connector(name: str, fn: Callable[[Any, Any, Any], PolicyOutputType]) -> type[Any]:
    """Make an action connector class of a function.

    fn    takes actions, states and fetches, and returns the three

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it if the
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

    return _class_of(name, fn, 3, "(actions, states, fetches)", ActionConnector, transform)


def _class_of(name: str, fn: Any, count: int, expected: str, base: type[Any], transform: Any) -> type[Any]:
    """The connector class of a function. Raises ConnectorError unless that takes `count` arguments."""
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
    # With the function's module and this name, a class that is kept under that name there can be pickled.
    of_function = {"__module__": getattr(fn, "__module__", None) or __name__, "__doc__": getattr(fn, "__doc__", None)}
    return type(name, (base,), {"transform": transform, **of_function})


class ConnectorPipeline(NamedPieces, Connector):
    """Connectors that are called in order.

    ctx           for connectors that have none of their own
    connectors    the connectors, which may be pipelines

    Connectors go by their class's name, the second of a class by `Name_2`. Raises ConnectorError for a connector of the
    other kind, and for an object that is in the pipeline already.
    """

    kind: ClassVar[type[Connector]] = Connector
    passed_on: ClassVar[str]  # what a connector returns, for errors

    def __init__(self, ctx: ConnectorContext | None, connectors: Sequence[Any] = ()) -> None:
        super().__init__(ctx)
        self.connectors = self._pieces = []
        self._edit(list(connectors))

    def remove(self, name_or_class: NameOrClass) -> None:
        """Take a connector out. Raises ConnectorError if there is none of the name."""
        self._edit(self._without(name_or_class))

    def _edit(self, pieces: list[Any]) -> None:
        for place, connector in enumerate(pieces):
            self._check(connector, pieces[:place])
        new = [connector for connector in pieces if not any(connector is each for each in self._pieces)]
        self._pieces[:] = pieces
        for connector in new:
            connector.bind(self.ctx)
            (connector.in_training if self._is_training else connector.in_eval)()

    @abc.abstractmethod
    def _is_sound(self, item: Any) -> bool:
        """True for what a connector may return."""

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

    def __call__(self, item: Any) -> Any:
        """Call the connectors in order, each with what the one before returned. Notes on errors say which raised it."""
        for place, connector in enumerate(self.connectors):
            where = f"'{self.names[place]}' ({place + 1} of {len(self)} in {type(self).__name__})"
            try:
                item = connector(item)
            except Exception as error:
                error.add_note(f"in connector {where}")
                raise
            if not self._is_sound(item):
                raise ConnectorError(
                    f"connector {where} returned {shown(item)}, expected {self.passed_on}: does it return it?"
                )
        return item


class AgentConnectorPipeline(ConnectorPipeline, AgentConnector):
    """Agent connectors, called in order, each with the list that the one before returned."""

    kind = AgentConnector
    passed_on = "a list of AgentConnectorDataType"

    def _is_sound(self, item: Any) -> bool:
        return isinstance(item, list) and all(isinstance(each, AgentConnectorDataType) for each in item)


class ActionConnectorPipeline(ConnectorPipeline, ActionConnector):
    """Action connectors, called in order, each with the output that the one before returned."""

    kind = ActionConnector
    passed_on = "ActionConnectorDataType with an output of three parts, (actions, states, fetches)"

    def _is_sound(self, item: Any) -> bool:
        return isinstance(item, ActionConnectorDataType) and isinstance(item.output, tuple) and len(item.output) == 3


# rollflow's own connectors


def columns_of(connector: AgentConnector, ac_data: AgentConnectorDataType) -> dict[str, Any]:
    """The columns of an agent's data. Raises ConnectorError if they are the policy's input already."""
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
        space = self.context.observation_space
        if space is None:
            raise ConnectorError(
                f"{self.name}: the context has no observation_space, expected ConnectorContext(observation_space=…)"
            )
        space = getattr(space, "original_space", space)
        if isinstance(space, spaces.Box):
            return ac_data
        check_has_numbers(space, "ObsPreprocessorConnector can't make vectors of observations")
        data = columns_of(self, ac_data)
        for name in (SampleBatch.OBS, SampleBatch.NEXT_OBS):
            if name in data:
                data[name] = self._flat(space, data[name])
        return ac_data

    def _flat(self, space: Space, observation: Any) -> Any:
        try:
            return flatten(space, observation)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(
                f"ObsPreprocessorConnector: an observation is {shown(observation)}, expected one in {space}"
            ) from error


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
        if SampleBatch.REWARDS in data and self.sign:
            data[SampleBatch.REWARDS] = np.sign(data[SampleBatch.REWARDS])
        elif SampleBatch.REWARDS in data and self.limit is not None:
            data[SampleBatch.REWARDS] = np.clip(data[SampleBatch.REWARDS], -self.limit, self.limit)
        return ac_data


class ViewRequirementAgentConnector(AgentConnector):
    """Makes the policy's input, any[1, ...] each: `AgentConnectorsOutput`.

        obs                the newest observation, `new_obs`
        state_in_0, …      of a recurrent policy: `state_out_0` and so on, of which the context's initial states say how
                           many; a connector before adds them, by `on_policy_output`

    Raises ConnectorError for data without one of those.
    """

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        data, env_id, agent_id = columns_of(self, ac_data), ac_data.env_id, ac_data.agent_id
        states = {f"state_in_{i}": f"state_out_{i}" for i in range(len(self.context.initial_states))}
        sources = {SampleBatch.OBS: SampleBatch.NEXT_OBS, **states}
        if missing := [source for source in sources.values() if source not in data]:
            remedy = "one" if missing[0] == SampleBatch.NEXT_OBS else "a connector before it that adds it"
            raise ConnectorError(
                f"ViewRequirementAgentConnector: the data of agent {agent_id!r} of environment {env_id!r} have no "
                f"'{missing[0]}', expected {remedy}; columns: {', '.join(map(str, data)) or 'none'}"
            )
        batch = SampleBatch(
            {name: map_tree(lambda leaf: _array_of(leaf)[None], data[source]) for name, source in sources.items()}
        )
        for_training = data if self._is_training else {}
        return AgentConnectorDataType(env_id, agent_id, AgentConnectorsOutput(data, batch, for_training))


def _array_of(leaf: Any) -> Any:
    return np.float32(leaf) if isinstance(leaf, float) else np.asarray(leaf)


def _as_arrays(actions: Any, states: Any, fetches: Any) -> PolicyOutputType:
    """Turns tensors among actions and states into arrays; fetches stay as they are."""
    made = TensorToNumpy()(batch={"actions": actions, "states": list(states)})
    return made["actions"], made["states"], fetches


ConvertToNumpyConnector = register_lambda_action_connector("ConvertToNumpyConnector", _as_arrays)


class ClipActionsConnector(ActionConnector):
    """Clips actions to the bounds that Boxes of the context's action space have, with the piece that rollouts use."""

    _piece: ClipActions | None = None

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        if self._piece is None:
            if self.context.action_space is None:
                raise ConnectorError(
                    f"{self.name}: the context has no action_space, expected ConnectorContext(action_space=…)"
                )
            self._piece = ClipActions(None, self.context.action_space)
        batch = self._piece(batch={Columns.ACTIONS: [ac_data.output[0]]})
        return replace(ac_data, output=(batch[Columns.ACTIONS_FOR_ENV][0], *ac_data.output[1:]))


def _immutable(actions: Any, states: Any, fetches: Any) -> PolicyOutputType:
    """Makes actions read-only: arrays, and dicts of them; so nobody changes what has been recorded."""
    return _read_only(actions), states, fetches


ImmutableActionsConnector = register_lambda_action_connector("ImmutableActionsConnector", _immutable)


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
