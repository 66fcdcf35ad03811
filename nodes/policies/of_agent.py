"""Policy of one agent of a rollout over several: its module, and the pipelines of the agents with its spaces."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.policies.policy import Policy
from rollflow.nodes.stages.module_set import ModuleSet
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.multi_agent.agent_part import AgentPart


def policy_of_agent(
    agent: Any,
    module_id: Any,
    parts: Sequence[AgentPart],
    modules: ModuleSet,
    pipelines: Sequence[tuple[EnvToModulePipeline, ModuleToEnvPipeline]],
    options: Mapping[str, Any],
) -> Policy:
    """The policy that acts for an agent, with the weights published last.

        module_id    None: of the module that the agent is mapped to
        parts        the agents by their spaces
        pipelines    of each part
        options      of `Policy`

    Raises PolicyError for an unknown agent, and where its module is up to the episode.
    """
    places = [place for place, part in enumerate(parts) if agent in part.agents]
    if not places:
        agents = [each for part in parts for each in part.agents]
        raise PolicyError(f"there is no policy for agent {agent!r}: the agents are {agents}")
    if module_id is None and not modules.is_by_agent:
        raise PolicyError(f"the module of agent {agent!r} is up to the episode, expected module_id to name one")
    acting = modules.module_of(agent, "policy") if module_id is None else modules.of_id(module_id)
    version, weights = acting.weights.newest(acting.module)
    part, (before, after) = parts[places[0]], pipelines[places[0]]
    spaces: Any = {"observation_space": part.observation_space, "action_space": part.action_space}
    policy = Policy(acting.module, before, after, **spaces, **options)
    policy.publish(weights)
    policy.trained_on = {"agent": str(agent), "module": str(acting.module_id), "policy_version": version}
    return policy
