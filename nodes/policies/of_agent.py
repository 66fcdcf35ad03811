"""Policies of several agents: that of one agent of a rollout, and evaluation of one for each agent."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.multi_agent.multi_agent_env import agent_spaces
from rollflow.nodes.env.multi_agent.petting_zoo import adapted
from rollflow.nodes.policies.artifact_files import folder_of
from rollflow.nodes.policies.evaluation import Evaluation, Player, check_spaces, play
from rollflow.nodes.policies.policy import VECTOR_STEPS, Policy, policy_now
from rollflow.nodes.stages.agent_stages import AgentsActing
from rollflow.nodes.stages.module_set import ActingModule
from rollflow.stream.data.errors import PolicyError
from rollflow.stream.episodes.agent_step import ALL_AGENTS
from rollflow.stream.graph.seeding import env_seed_for
from rollflow.stream.multi_agent.agent_part import AgentPart


class AgentPolicies:
    """The policies of a rollout's agents, each with the weights published last.

    parts     the agents by their spaces
    acting    the modules that act for them, with the pipelines of each part
    source    steps their environments
    """

    def __init__(self, parts: Sequence[AgentPart], acting: AgentsActing, source: LaneSource) -> None:
        self._parts, self._acting, self._modules, self._source = parts, acting, acting.modules, source

    def of(self, agent: Any, module_id: Any = None, **options: Any) -> Policy:
        """The policy that acts for an agent.

            module_id    None: of the module that the agent is mapped to
            options      of `Policy`

        Raises PolicyError for an unknown agent, and where its module is up to the episode, or it can't act alone.
        """
        if self._acting.joint is not None:
            raise PolicyError(f"joint_connector pieces see all agents together, and agent {agent!r} can't act alone")
        place, acting = self._place_of(agent), self._module_of(agent, module_id)
        part, pipelines = self._parts[place], (self._acting.env_to_module[place], self._acting.module_to_env[place])
        spaces = {"observation_space": part.observation_space, "action_space": part.action_space}
        facts = {"agent": str(agent), "module": str(acting.module_id), VECTOR_STEPS: self._source.vector_steps}
        return policy_now(acting.module, acting.weights, pipelines, facts, **spaces, **options)

    def of_all(self) -> dict[Any, Policy]:
        """Agent -> its policy, which agents of the same spaces and the same module share. Raises as `of` does."""
        made: dict[tuple[int, Any], Policy] = {}
        found: dict[Any, Policy] = {}
        for agent in (agent for part in self._parts for agent in part.agents):
            key = self._place_of(agent), self._module_of(agent, None).module_id
            if key not in made:
                made[key] = self.of(agent)
            found[agent] = made[key]
        return found

    def to_save(self, path: Path, agent: Any, module_id: Any, **options: Any) -> dict[Path, Policy]:
        """Path -> the policy of an agent or of a module; None for both: those of all modules, in folders of their own.

        Raises as `of` does, and PolicyError where several can't be saved at the path.
        """
        if agent is not None or module_id is not None:
            return {path: self.of(self._modules.agent_of(module_id) if agent is None else agent, module_id, **options)}
        if path.suffix == ".zip":
            raise PolicyError(f"{path} is one file, expected a folder for the policies of all modules, or agent=…")
        ids = list(self._modules.versions())
        made = {path / folder_of(str(each)): self.of(self._modules.agent_of(each), each, **options) for each in ids}
        if len(made) < len(ids):
            raise PolicyError(f"some of the modules {ids} have one text as their ids, expected another for each")
        return made

    def _place_of(self, agent: Any) -> int:
        for place, part in enumerate(self._parts):
            if agent in part.agents:
                return place
        agents = [each for part in self._parts for each in part.agents]
        raise PolicyError(f"there is no policy for agent {agent!r}: the agents are {agents}")

    def _module_of(self, agent: Any, module_id: Any) -> ActingModule:
        if module_id is not None:
            return self._modules.of_id(module_id)
        if self._modules.is_by_agent:
            return self._modules.module_of(agent, "policy")
        raise PolicyError(
            f"agent {agent!r} may have another module in each episode; expected policy({agent!r}, module_id), and "
            "evaluate_agents to evaluate such policies"
        )


def evaluate_agents(
    policies: Mapping[Any, Policy], env: Callable[[], Any], episodes: int = 100, *, seed: int = 0
) -> dict[Any, Evaluation]:
    """Returns and lengths of each agent, over whole episodes that the agents play together.

        policies    agent -> its policy, which may be that of other agents, too
        env         makes a `MultiAgentEnv`, or what PettingZoo has
        seed        of the environments

    An agent's length is the number of its actions. Sessions of the policies are begun anew, one for each agent. Raises
    PolicyError for an agent without a policy, or with one for other spaces.
    """
    if episodes < 1:
        raise PolicyError(f"episodes is {episodes}, expected 1 or more")
    made = adapted(env())
    try:
        _check_agents(policies, made)
        found = {agent: Evaluation(np.zeros(episodes), np.zeros(episodes, np.int64)) for agent in policies}
        play([_player(policies, made, found, episodes, seed)], policies.__getitem__)
    finally:
        made.close()
    return found


def _player(
    policies: Mapping[Any, Policy], env: Any, found: Mapping[Any, Evaluation], episodes: int, seed: int
) -> Player:
    """Player of all agents, whose returns and lengths go into `found`."""
    for episode in range(episodes):
        for agent, policy in policies.items():
            policy.reset(agent)
        since = dict.fromkeys(policies, 0.0)  # an agent's last action
        observations, _ = env.reset(seed=env_seed_for(seed, "evaluation", episode))
        ended: set[Any] = set()
        while observations:
            actions = yield {agent: (seen, since[agent]) for agent, seen in observations.items()}
            for agent in actions:
                found[agent].lengths[episode] += 1
                since[agent] = 0.0
            observations, rewards, terminateds, truncateds, _ = env.step(actions)
            for agent, reward in rewards.items():
                found[agent].returns[episode] += float(reward)
                since[agent] += float(reward)
            ended |= {agent for told in (terminateds, truncateds) for agent, flag in told.items() if flag}
            is_over = ALL_AGENTS in ended or ended >= policies.keys()
            observations = {} if is_over else {each: seen for each, seen in observations.items() if each not in ended}


def _check_agents(policies: Mapping[Any, Policy], env: Any) -> None:
    spaces = agent_spaces(env)
    missing = [agent for agent in spaces.agents if agent not in policies]
    unknown = [agent for agent in policies if agent not in spaces.agents]
    if missing or unknown:
        raise PolicyError(f"policies are missing of {missing}, and {unknown} are no agents; expected {spaces.agents}")
    for agent, policy in policies.items():
        theirs = spaces.observation_spaces[agent], spaces.action_spaces[agent]
        check_spaces(policy, *theirs, f"agent {agent!r}", "its policy")
