"""RLlib's `MultiAgentEnvRunner`, driven directly: new API stack, default connectors, no learner pipeline."""

from collections.abc import Mapping
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner


class Runner:
    """Samples a fragment at a time."""

    def __init__(self, env: type, envs: int, fragment_length: int, module_of: Mapping[str, str]) -> None:
        made: Any = type("Env", (env, MultiAgentEnv), {})
        modules = sorted(set(module_of.values()))
        specs = {module_id: RLModuleSpec(model_config={"fcnet_hiddens": [64, 64]}) for module_id in modules}
        config = (
            PPOConfig()
            .environment(made)
            .env_runners(num_env_runners=0, num_envs_per_env_runner=envs)
            .multi_agent(policies=set(modules), policy_mapping_fn=lambda agent, episode, **kwargs: module_of[agent])
            .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        )
        self._steps = envs * fragment_length
        self._runner = MultiAgentEnvRunner(config=config)

    def fragment(self) -> int:
        """One fragment's steps of agents; how many there were."""
        episodes = self._runner.sample(num_timesteps=self._steps)
        self._runner.get_metrics()
        return sum(episode.agent_steps() for episode in episodes)
