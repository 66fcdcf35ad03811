"""Records that pass through Alpha connectors, and the keys of the data in them."""

from dataclasses import dataclass, field
from typing import Any

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

    @property
    def for_action(self) -> SampleBatch:
        """The input of the policy, by its older name in RLlib."""
        return self.sample_batch


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
