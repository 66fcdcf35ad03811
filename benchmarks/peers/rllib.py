"""RLlib's `SingleAgentEnvRunner`, driven directly: new API stack, default connectors, no learner pipeline."""

from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner


class Scale(ConnectorV2):  # type: ignore[misc]
    """Scales the newest observation of every episode, as `benchmarks.connector.Scale` does."""

    def __init__(self, *args: Any, scale: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scale = scale

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            episode.set_observations(new_data=episode.get_observations(-1) * self._scale, at_indices=-1)
        return batch


class Runner:
    """Samples a fragment at a time."""

    def __init__(self, slots: int, fragment_length: int, scale: Any = None) -> None:
        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(
                num_env_runners=0,
                num_envs_per_env_runner=slots,
                gym_env_vectorize_mode="vector_entry_point",
                env_to_module_connector=None if scale is None else (lambda *args, **kwargs: Scale(scale=scale)),
            )
        )
        config = config.rl_module(model_config={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"})
        self._steps = slots * fragment_length
        self._runner = SingleAgentEnvRunner(config=config)

    def fragment(self) -> int:
        """One fragment's steps; how many there were."""
        episodes = self._runner.sample(num_timesteps=self._steps)
        self._runner.get_metrics()
        return sum(len(episode) for episode in episodes)
