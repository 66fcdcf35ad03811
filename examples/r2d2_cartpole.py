"""Recurrent replay (R2D2) on CartPole-v1 without velocities: sequences with stored state, burn-in and priorities."""

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn

from rollflow import EpsilonGreedy, Replay, RLModule, Rollout
from rollflow.nodes import Linear
from rollflow.sinks import Prioritized, SamplesPerInsert, Sequences

NUM_ENVS, FRAGMENT_LENGTH, CAPACITY, MIN_SIZE = 16, 16, 100_000, 2_000
SEQUENCES, LENGTH, BURN_IN, SAMPLES_PER_INSERT, LAMBDA = 32, 10, 5, 32.0, 0.9
GAMMA, HIDDEN, LEARNING_RATE, TARGET_RATE, EXPLORATION_STEPS = 0.98, 64, 3e-3, 0.02, 600
TARGET_RETURN, MAX_STEPS, EVALUATE_EVERY, EPISODES = 475.0, 200_000, 5_000, 100


class QNetwork(RLModule):
    """LSTM over the positions of cart and pole; the velocities, which it needs, it has to remember."""

    def setup(self) -> None:
        self.encode = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU())
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.values = nn.Linear(HIDDEN, 2)

    def get_initial_state(self) -> dict[str, Tensor]:
        return {"h": torch.zeros(HIDDEN), "c": torch.zeros(HIDDEN)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        state = batch["state_in"]
        hidden, (h, c) = self.lstm(self.encode(10.0 * batch["obs"][..., ::2]), (state["h"][None], state["c"][None]))
        return {"action_dist_inputs": self.values(hidden), "state_out": {"h": h[0], "c": c[0]}}


def lambda_returns(batch: dict[str, Any], following: Tensor) -> Tensor:
    """Targets f32[B, L], from the values f32[B, L] that follow the steps; behind a sequence's end the value counts."""
    rewards, discount = batch["rewards"].float(), GAMMA * ~batch["terminateds"]
    is_last = torch.arange(following.shape[1]) >= batch["seq_lens"][:, None] - 1
    share = torch.where(is_last, 0.0, LAMBDA)
    targets, target = [], following[:, -1]
    for t in reversed(range(following.shape[1])):
        target = rewards[:, t] + discount[:, t] * torch.lerp(following[:, t], target, share[:, t])
        targets.append(target)
    return torch.stack(targets[::-1], 1)


def update(module: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> Tensor:
    """One step of double DQN over sequences of L steps; the mean error of each, f32[B]."""
    # The observations of all steps, and the one after the last of them.
    seen = {"obs": torch.cat([batch["obs"][:, :1], batch["new_obs"]], 1), "state_in": batch["state_in"]}
    values, mask = module.forward_train(seen)["action_dist_inputs"], batch["loss_mask"]
    with torch.no_grad():
        best = values[:, 1:].argmax(-1, keepdim=True)
        following = target.forward_train(seen)["action_dist_inputs"][:, 1:].gather(-1, best).squeeze(-1)
        wanted = lambda_returns(batch, following)
    errors = wanted - values[:, :-1].gather(-1, batch["actions"][..., None]).squeeze(-1)
    losses = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none") * batch["weights"][:, None]
    optimizer.zero_grad()
    losses[mask].mean().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, new in zip(target.parameters(), module.parameters(), strict=True):
            slow.lerp_(new, TARGET_RATE)
    return (errors.detach().abs() * mask).sum(1) / mask.sum(1)


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over 100 episodes of the likeliest actions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module = QNetwork()
    target, optimizer = copy.deepcopy(module), torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    replay = Replay(
        CAPACITY,
        sampler=Sequences(LENGTH, BURN_IN, of=Prioritized()),
        rate=SamplesPerInsert(SAMPLES_PER_INSERT, min_size=MIN_SIZE),
        batch_size=SEQUENCES,
        seed=seed,
    )
    explores = EpsilonGreedy(schedule=Linear(1.0, 0.05, EXPLORATION_STEPS))
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    began, best, evaluated = time.perf_counter(), 0.0, 0
    with Rollout("CartPole-v1", module=module, module_to_env_connector=lambda env: explores, **settings) as rollout:
        for fragment in rollout.fragments():
            replay.insert(fragment)
            for batch in replay.batches():
                replay.update_priorities(batch["ids"], update(module, target, optimizer, batch))
            rollout.publish(module.state_dict())
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
