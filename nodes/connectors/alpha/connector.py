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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollflow.nodes.connectors.alpha.probing import space_after_actions, space_after_observations
from rollflow.nodes.connectors.alpha.records import ActionConnectorDataType, AgentConnectorDataType
from rollflow.nodes.connectors.spaces import Space
from rollflow.nodes.connectors.state_watch import check_same, fingerprint
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import leaves_of


@dataclass
class ConnectorContext:
    """Facts about a policy that its connectors need.

    config                 options of the policy, such as `clip_rewards`, `normalize_actions` and `clip_actions`
    initial_states         list of any[...]: the states of a recurrent policy at the start of an episode
    observation_space      of the environment's observations; one with an `original_space` stands for that
    action_space           of the environment's actions
    view_requirements      column of the policy's input -> `ViewRequirement`; None: observations and states
    is_policy_recurrent    True if the policy has states
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    initial_states: Sequence[Any] = ()
    observation_space: Space | None = None
    action_space: Space | None = None
    view_requirements: Mapping[str, Any] | None = None
    is_policy_recurrent: bool = False

    @classmethod
    def from_policy(cls, policy: Any) -> Self:
        """The context of a policy, or of an RLModule: its spaces, its states, and the rest as far as it has it."""
        states = policy.get_initial_state() if callable(getattr(policy, "get_initial_state", None)) else None
        config = getattr(policy, "config", None)
        leaves = [] if states is None else [_array_of(leaf) for leaf in leaves_of(states)]
        return cls(
            config=config if isinstance(config, Mapping) else {},
            initial_states=leaves,
            observation_space=getattr(policy, "observation_space", None),
            action_space=getattr(policy, "action_space", None),
            view_requirements=getattr(policy, "view_requirements", None),
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

    def copied(self) -> Self:
        """A copy of this connector, which learns by itself."""
        return copy.deepcopy(self)

    def __str__(self, indentation: int = 0) -> str:
        return " " * indentation + type(self).__name__

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
        return space_after_observations(self.copied(), observation_space)


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
        return space_after_actions(self.copied(), action_space)


def _array_of(leaf: Any) -> Any:
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf
