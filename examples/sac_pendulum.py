"""SAC on Pendulum-v1 with replay, until 100 episodes of the likeliest actions have a mean return of -200."""

import copy
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollflow import Replay, RLModule, Rollout
from rollflow.sinks import SamplesPerInsert

NUM_ENVS, FRAGMENT_LENGTH, CAPACITY, MIN_SIZE = 8, 4, 50_000, 1_000
BATCH, SAMPLES_PER_INSERT, GAMMA, HIDDEN = 128, 64.0, 0.97, 64
LEARNING_RATE, TARGET_RATE, TARGET_ENTROPY, LARGEST = 2e-3, 0.02, -1.0, 2.0
TARGET_RETURN, MAX_STEPS, EVALUATE_EVERY, EPISODES = -200.0, 40_000, 4_000, 100


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    hidden = [nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(HIDDEN, outputs))


class Actor(RLModule):
    """Normal distribution, squashed to the largest torque on either side; it chooses its actions itself."""

    def setup(self) -> None:
        self.net = layers(3, 2)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions f32[B, 1], and their log-probabilities f32[B]."""
        mean, log_std = self.net(obs).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5.0, 2.0).exp())
        free = normal.rsample()
        logp = normal.log_prob(free) - 2.0 * (math.log(2.0) - free - functional.softplus(-2.0 * free))  # of tanh(free)
        return LARGEST * free.tanh(), logp.sum(-1)

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": self.sample(batch["obs"])[0]}

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": LARGEST * self.net(batch["obs"])[:, :1].tanh()}


class Critics(nn.Module):
    """Two Q-functions, which err on different sides."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([layers(4, 1), layers(4, 1)])

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q-values f32[2, B]."""
        seen = torch.cat([obs, actions / LARGEST], -1)
        return torch.stack([net(seen).squeeze(-1) for net in self.nets])


class Learner:
    """Actor, critics and the price of entropy, each with an optimizer."""

    def __init__(self) -> None:
        self.actor, self.critics = Actor(), Critics()
        self.target = copy.deepcopy(self.critics)
        self.log_price = nn.Parameter(torch.zeros(()))
        parts = [self.actor.parameters(), self.critics.parameters(), [self.log_price]]
        self.optimizers = [torch.optim.Adam(part, lr=LEARNING_RATE) for part in parts]

    def update(self, batch: dict[str, Tensor]) -> None:
        """One step of each. Pendulum's episodes are all truncated, so there is a value after their ends."""
        price = self.log_price.detach().exp()
        with torch.no_grad():
            actions, logp = self.actor.sample(batch["new_obs"])
            following = self.target(batch["new_obs"], actions).min(0).values - price * logp
            wanted = batch["rewards"].float() + GAMMA * following
        self._step(1, functional.mse_loss(self.critics(batch["obs"], batch["actions"]), wanted.expand(2, -1)))
        actions, logp = self.actor.sample(batch["obs"])
        self._step(0, (price * logp - self.critics(batch["obs"], actions).min(0).values).mean())
        self._step(2, -self.log_price * (logp.detach().mean() + TARGET_ENTROPY))
        with torch.no_grad():
            for slow, new in zip(self.target.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(new, TARGET_RATE)

    def _step(self, number: int, loss: Tensor) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()
        self.optimizers[number].step()


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over 100 episodes of the likeliest actions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    learner = Learner()
    rate = SamplesPerInsert(SAMPLES_PER_INSERT, min_size=MIN_SIZE)
    replay = Replay(CAPACITY, rate=rate, batch_size=BATCH, seed=seed)
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    began, best, evaluated = time.perf_counter(), -math.inf, 0
    with Rollout("Pendulum-v1", module=learner.actor, **settings) as rollout:
        for fragment in rollout.fragments():
            replay.insert(fragment)
            for batch in replay.batches():
                learner.update(batch)
            rollout.publish(learner.actor.state_dict())
            is_over = rollout.num_steps >= MAX_STEPS
            if is_over or rollout.num_steps - evaluated >= EVALUATE_EVERY:
                evaluated = rollout.num_steps
                best = rollout.evaluate(episodes=EPISODES, seed=seed).mean
                if is_over or best >= TARGET_RETURN:
                    break
        seconds = time.perf_counter() - began
    print(f"mean return {best:.1f} after {rollout.num_steps:,} steps in {seconds:.0f} s")
    print(replay.report())
    return best


if __name__ == "__main__":
    main()
