"""RLlib's `SingleAgentEnvRunner`, and groups of them: new API stack, default connectors; acting by its parts."""

from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode


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
        made = None if scale is None else (lambda *args, **kwargs: Scale(scale=scale))
        self._steps = slots * fragment_length
        self._runner = SingleAgentEnvRunner(config=_config(slots).env_runners(env_to_module_connector=made))

    def fragment(self) -> int:
        """One fragment's steps; how many there were."""
        episodes = self._runner.sample(num_timesteps=self._steps)
        self._runner.get_metrics()
        return sum(len(episode) for episode in episodes)


class Group:
    """`EnvRunnerGroup` whose runners are actors that sample a fragment at a time, as IMPALA drives it.

    A runner has two requests at a time, so that it never waits for this process.
    """

    def __init__(self, runners: int, slots: int, fragment_length: int) -> None:
        config = _config(slots).env_runners(
            num_env_runners=runners,
            rollout_fragment_length=fragment_length,
            max_requests_in_flight_per_env_runner=2,
        )
        self._group = EnvRunnerGroup(config=config, local_env_runner=False)
        self._group.foreach_env_runner("ping", local_env_runner=False)  # until all have started

    def fragments(self) -> int:
        """The fragments that are there; how many steps they have."""
        ready = self._group.foreach_env_runner_async_fetch_ready("sample_get_state_and_metrics", timeout_seconds=0.01)
        return sum(len(episode) for result in ready for episode in ray.get(result[0]))

    def close(self) -> None:
        """Stop the runners."""
        self._group.stop()


def _config(slots: int) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1")
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=slots, gym_env_vectorize_mode="vector_entry_point")
    return config.rl_module(model_config={"fcnet_hiddens": [64, 64], "fcnet_activation": "tanh"})


class Actor:
    """Acts for one environment as RLlib's example of inference with connectors does: pipelines, module, an episode."""

    def __init__(self) -> None:
        runner = Runner(1, 1)._runner
        self._module, self._before, self._after = runner.module, runner._env_to_module, runner._module_to_env
        self._spaces = {
            "observation_space": runner.env.single_observation_space,
            "action_space": runner.env.single_action_space,
        }

    def calls(self, observation: Any, count: int) -> int:
        """Act so many times in an episode; how often it did."""
        episode = SingleAgentEpisode(**self._spaces)
        episode.add_env_reset(observation=observation, infos={})
        for _ in range(count):
            shared: dict[str, Any] = {}
            options = {"episodes": [episode], "rl_module": self._module, "explore": True, "shared_data": shared}
            with torch.inference_mode():
                output = self._module.forward_exploration(self._before(**options))
            made = self._after(batch=output, **options)
            action = made.pop("actions_for_env")[0]
            extra = {name: column[0] for name, column in made.items()}
            episode.add_env_step(observation, extra.pop("actions", action), 0.0, infos={}, extra_model_outputs=extra)
        return count
