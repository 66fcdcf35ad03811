"""Several agents of one policy: environments of VMAS, whose agents are slots."""

from collections.abc import Mapping
from typing import Any

import torch

from rollflow.nodes.device.foreign_spaces import gymnasium_space
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.tree import Tree, map_tree


class AgentRows:
    """An environment of VMAS as one of tensors any[N · A, ...]: N environments with A agents each, of one policy.

    Row e · A + a is agent a of environment e. If an environment ends, the episodes of all its agents do; it is reset
    in the same step, for which its flags, bool[N], are copied to the host in each step.

    num_agents           A
    observation_space    of one agent, and so is `action_space`

    Raises EnvError if agents have different spaces, and if time limits can't be told from terminations.
    """

    def __init__(self, env: Any) -> None:
        if env.max_steps is not None and not env.terminated_truncated:
            raise EnvError(
                f"env is {shown(env)}, with max_steps={env.max_steps}, but without telling truncations from "
                "terminations; expected vmas.make_env(…, terminated_truncated=True)"
            )
        self.env, self.num_agents, self.device = env, int(env.n_agents), env.device
        self.num_envs = int(env.num_envs) * self.num_agents
        alike: dict[str, list[str]] = {}
        for agent, *kinds in zip(env.agents, _each(env.observation_space), _each(env.action_space), strict=True):
            self.observation_space, self.action_space = map(gymnasium_space, kinds)
            text = f"{self.observation_space} and {self.action_space}"
            alike.setdefault(text, []).append(agent.name)
        if len(alike) > 1:
            groups = "; ".join(f"{', '.join(names)}: {text}" for text, names in alike.items())
            raise EnvError(f"agents have different spaces, expected the same for all, as of one policy: {groups}")

    def reset(self, *, seed: int | None = None) -> Tree:
        """Begin an episode in each environment: observations, any[N · A, ...]."""
        return self._rows(self.env.reset(seed=seed))

    def step(self, actions: Tree) -> tuple[Any, ...]:
        """Gymnasium's five values, any[N · A, ...]; `infos["agents"]` has VMAS's infos by the agents' names."""
        count = self.num_agents
        of_agents = [actions[agent::count].clone() for agent in range(count)]  # VMAS writes into them
        seen, rewards, *ends, infos = self.env.step(of_agents)
        terminated, truncated = ends if len(ends) == 2 else (*ends, torch.zeros_like(ends[0]))
        now, flags = self._rows(seen), [self._rows([each] * count) for each in (terminated, truncated)]
        extras: dict[str, Any] = {
            "agents": {agent.name: info for agent, info in zip(self.env.agents, _each(infos), strict=True)}
        }
        ended = (terminated | truncated).numpy(force=True).nonzero()[0].tolist()
        if ended:
            extras["final_obs"], done = now, flags[0] | flags[1]
            fresh = self._fresh(ended)
            now = map_tree(lambda new, old: torch.where(done.view(-1, *[1] * (old.ndim - 1)), new, old), fresh, now)
        # A scenario may give rewards any[N, 1].
        return now, self._rows(_each(rewards)).flatten(), *flags, extras

    def _fresh(self, ended: list[int]) -> Tree:
        """Observations after a reset of these environments; those of the others may be other than they were."""
        if len(ended) == self.env.num_envs:
            return self._rows(self.env.reset())
        for index in ended:
            self.env.reset_at(index, return_observations=False)
        names = ("get_rewards", "get_infos", "get_dones")
        return self._rows(*self.env.get_from_scenario(get_observations=True, **dict.fromkeys(names, False)))

    def _rows(self, of_agents: Any) -> Tree:
        """Trees of tensors any[N, ...], one for each agent, as any[N · A, ...]."""
        return map_tree(lambda *leaves: torch.stack(leaves, 1).flatten(0, 1), *_each(of_agents))


def _each(of_agents: Any) -> list[Any]:
    """What each agent has, of a list, of a dict, as by `dict_spaces=True`, or of a space of those."""
    parts = getattr(of_agents, "spaces", of_agents)
    return list(parts.values() if isinstance(parts, Mapping) else parts)
