"""Acting with a policy and its connectors, one observation at a time."""

from typing import Any

import numpy as np
import torch

from rollflow.nodes.connectors.alpha.built_in import (
    ClipActionsConnector,
    ClipRewardAgentConnector,
    ConvertToNumpyConnector,
    ImmutableActionsConnector,
    NormalizeActionsConnector,
    ObsPreprocessorConnector,
    StateBufferConnector,
    ViewRequirementAgentConnector,
)
from rollflow.nodes.connectors.alpha.connector import (
    ActionConnector,
    ActionConnectorDataType,
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorDataType,
    AgentConnectorPipeline,
    AgentConnectorsOutput,
    ConnectorContext,
    PolicyOutputType,
    SampleBatch,
    array_of,
)
from rollflow.nodes.connectors.module_to_env.get_actions import GetActions
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.modules.evaluating import evaluating
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import leaves_of, map_tree


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
