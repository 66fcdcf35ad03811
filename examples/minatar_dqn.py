"""Prioritized double DQN with 3-step returns on MinAtar's Breakout, for 100,000 steps (`pip install minatar`).

With the seed 0, 100 episodes of the likeliest actions have a mean return of 3.1 after 25,088 steps, 3.4 after 50,176,
5.0 after 75,264 and 5.3 after 100,096; with random actions it is about 0.4.
"""

import copy
import time
from typing import Any

import gymnasium as gym
import torch
from minatar.gym import register_envs
from torch import Tensor, nn

from rollflow import EpsilonGreedy, Replay, RLModule, Rollout
from rollflow.nodes import Linear
from rollflow.sinks import Prioritized, SampledNStepReturns, SamplesPerInsert

GAME, NUM_ENVS, FRAGMENT_LENGTH, CAPACITY, MIN_SIZE = "MinAtar/Breakout-v1", 16, 8, 100_000, 2_000
BATCH, SAMPLES_PER_INSERT, N_STEP, GAMMA = 64, 8.0, 3, 0.99
CHANNELS, HIDDEN, LEARNING_RATE, TARGET_RATE, EXPLORATION_STEPS = 16, 128, 3e-4, 0.005, 1_000
MAX_STEPS, EVALUATE_EVERY, EPISODES = 100_000, 25_000, 100


class QNetwork(RLModule):
    """A convolution and a hidden layer; `obs` is bool[B, 10, 10, planes], a plane for each kind of thing."""

    def setup(self) -> None:
        self.net = nn.Sequential(
            nn.Conv2d(self.observation_space.shape[-1], CHANNELS, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(CHANNELS * 8 * 8, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, int(self.action_space.n)),
        )  # fmt: skip

    def _forward(self, batch: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        return {"action_dist_inputs": self.values(batch["obs"])}

    def values(self, obs: Tensor) -> Tensor:
        """Q-values f32[B, actions]."""
        return self.net(obs.float().permute(0, 3, 1, 2))


def update(module: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    """One step of double DQN by importance weights; the errors f32[B], which become priorities."""
    with torch.no_grad():
        best = module.values(batch["new_obs"]).argmax(1, keepdim=True)
        following = target.values(batch["new_obs"]).gather(1, best).squeeze(1)
        wanted = batch["rewards"] + GAMMA ** batch["n_step"] * ~batch["terminateds"] * following
    errors = wanted.float() - module.values(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
    losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    optimizer.zero_grad()
    (batch["weights"] * losses).mean().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, new in zip(target.parameters(), module.parameters(), strict=True):
            slow.lerp_(new, TARGET_RATE)
    return errors.detach()


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over 100 episodes of the likeliest actions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    register_envs()
    env = gym.make(GAME)
    module = QNetwork(observation_space=env.observation_space, action_space=env.action_space)
    target, optimizer = copy.deepcopy(module), torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    replay = Replay(
        CAPACITY,
        sampler=Prioritized(),
        rate=SamplesPerInsert(SAMPLES_PER_INSERT, min_size=MIN_SIZE),
        batch_size=BATCH,
        pieces=[SampledNStepReturns(n_step=N_STEP, gamma=GAMMA)],
        seed=seed,
    )
    explores = EpsilonGreedy(schedule=Linear(1.0, 0.05, EXPLORATION_STEPS))
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    began, mean, evaluated = time.perf_counter(), 0.0, 0
    with Rollout(GAME, module=module, module_to_env_connector=lambda env: explores, **settings) as rollout:
        for fragment in rollout.fragments():
            replay.insert(fragment)
            for batch in replay.batches():
                replay.update_priorities(batch["ids"], update(module, target, optimizer, batch))
            rollout.publish(module.state_dict())
            is_over = rollout.num_steps >= MAX_STEPS
            if is_over or rollout.num_steps - evaluated >= EVALUATE_EVERY:
                evaluated = rollout.num_steps
                mean = rollout.evaluate(episodes=EPISODES, seed=seed).mean
                print(f"mean return {mean:.1f} after {evaluated:,} steps")
            if is_over:
                break
    print(f"{time.perf_counter() - began:.0f} s; {replay.report()}")
    return mean


if __name__ == "__main__":
    main()
