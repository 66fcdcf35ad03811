"""Records of one env step for several agents, and for each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rollflow.stream.data.errors import EpisodeError

NOTHING: Final[Any] = object()
"""Placeholder for a missing observation, action or reward of an agent, for which None is a valid value."""

ALL_AGENTS = "__all__"
"""The key of a dict of end flags that stands for all agents."""

AgentValues = Mapping[Any, Any]
"""Agent id -> value; an agent without a value is absent."""


@dataclass(frozen=True, slots=True)
class PendingAction:
    """An agent's action and extra outputs, while no observation has answered it."""

    action: Any
    extra_model_outputs: AgentValues


@dataclass(frozen=True, slots=True)
class AgentShare:
    """One agent's part of an env step: observation, action and reward (or NOTHING), and its end flags."""

    observation: Any
    action: Any
    reward: Any
    infos: Any
    extra_model_outputs: Mapping[str, Any]
    terminated: bool
    truncated: bool

    @property
    def observed(self) -> bool:
        """True if there is an observation."""
        return self.observation is not NOTHING

    @property
    def acted(self) -> bool:
        """True if there is an action."""
        return self.action is not NOTHING

    @property
    def ended(self) -> bool:
        """True if this is the agent's last env step."""
        return self.terminated or self.truncated

    @property
    def has_data(self) -> bool:
        """True if there is more than an end flag."""
        return self.observed or self.acted or self.reward is not NOTHING or self.infos is not None

    def pending(self) -> PendingAction:
        """The action with its extra outputs."""
        return PendingAction(self.action, self.extra_model_outputs)


@dataclass(frozen=True, slots=True)
class EnvStep:
    """Data of one env step by agent ids; end flags may have the key "__all__"."""

    observations: AgentValues
    actions: AgentValues
    rewards: AgentValues
    infos: AgentValues = field(default_factory=dict)
    terminateds: AgentValues = field(default_factory=dict)
    truncateds: AgentValues = field(default_factory=dict)
    extra_model_outputs: AgentValues = field(default_factory=dict)

    @property
    def all_terminated(self) -> bool:
        """True if the task ended for all agents."""
        return bool(self.terminateds.get(ALL_AGENTS, False))

    @property
    def all_truncated(self) -> bool:
        """True if only the recording ended, for all agents."""
        return bool(self.truncateds.get(ALL_AGENTS, False))

    def agents(self) -> list[Any]:
        """The ids of all agents in the data, each once."""
        parts = (self.observations, self.actions, self.rewards, self.infos, self.terminateds, self.truncateds)
        return [agent_id for agent_id in dict.fromkeys(key for part in parts for key in part) if agent_id != ALL_AGENTS]

    def share_of(self, agent_id: Any) -> AgentShare:
        """One agent's part of the env step."""
        return AgentShare(
            observation=self.observations.get(agent_id, NOTHING),
            action=self.actions.get(agent_id, NOTHING),
            reward=self.rewards.get(agent_id, NOTHING),
            infos=self.infos.get(agent_id),
            extra_model_outputs=self.extra_model_outputs.get(agent_id) or {},
            terminated=self.all_terminated or bool(self.terminateds.get(agent_id, False)),
            truncated=self.all_truncated or bool(self.truncateds.get(agent_id, False)),
        )


def end_flags(flags: AgentValues | bool | None) -> AgentValues:
    """End flags by agent ids; a bool is for all agents."""
    if flags is None:
        return {}
    return {ALL_AGENTS: flags} if isinstance(flags, bool) else flags


def env_steps_of(
    observations: Sequence[AgentValues],
    infos: Sequence[AgentValues] | None,
    actions: Sequence[AgentValues] | None,
    rewards: Sequence[AgentValues] | None,
    extra_model_outputs: Sequence[AgentValues] | None,
    terminateds: AgentValues,
    truncateds: AgentValues,
) -> list[EnvStep]:
    """The reset, and then each env step; the end flags belong to the last one.

    Raises EpisodeError unless observations, and infos if any, are one more than everything else.
    """
    steps = len(observations) - 1
    counts = {"actions": len(actions or ()), "rewards": len(rewards or ())}
    if extra_model_outputs is not None:
        counts["extra_model_outputs"] = len(extra_model_outputs)
    if any(count != steps for count in counts.values()) or (infos is not None and len(infos) != steps + 1):
        others = ", ".join(f"{count} {name}" for name, count in counts.items())
        others += "" if infos is None else f", {len(infos)} infos"
        raise EpisodeError(
            f"{steps + 1} observations do not go with {others}; expected as many infos, and one less of everything else"
        )
    nothing: list[AgentValues] = [{}] * steps
    acts, gets, extra = ([{}, *(given or nothing)] for given in (actions, rewards, extra_model_outputs))
    ends = ([*nothing, flags] for flags in (terminateds, truncateds))
    return list(map(EnvStep, observations, acts, gets, infos or [*nothing, {}], *ends, extra))
