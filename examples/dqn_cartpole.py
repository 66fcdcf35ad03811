"""Double DQN on CartPole-v1 with replay, until 100 episodes of the greedy policy have a mean return of 475."""

import copy
import time
from typing import Any

import torch
from torch import nn

from rollflow import EpsilonGreedy, Replay, RLModule, Rollout
from rollflow.nodes import Linear
from rollflow.sinks import SampledNStepReturns, SamplesPerInsert

NUM_ENVS, FRAGMENT_LENGTH, CAPACITY, MIN_SIZE = 8, 8, 100_000, 2_000
BATCH, SAMPLES_PER_INSERT, N_STEP, GAMMA = 128, 32.0, 3, 0.99
LEARNING_RATE, TARGET_RATE, EXPLORATION_STEPS = 1e-3, 0.005, 2_000
TARGET_RETURN, MAX_STEPS, EVALUATE_EVERY = 475.0, 150_000, 5_000


class QNetwork(RLModule):
    """Two hidden layers; the Q-values are what actions are chosen by."""

    def setup(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )  # fmt: skip

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"action_dist_inputs": self.net(batch["obs"])}


def update(
    module: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    """One step of double DQN; a truncated episode has a value after its end."""
    with torch.no_grad():
        best = module.net(batch["new_obs"]).argmax(1, keepdim=True)
        following = target.net(batch["new_obs"]).gather(1, best).squeeze(1)
        discount = GAMMA ** batch["n_step"] * ~batch["terminateds"]
        wanted = batch["rewards"] + discount * following
    value = module.net(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, wanted.float())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, new in zip(target.parameters(), module.parameters(), strict=True):
            slow.lerp_(new, TARGET_RATE)


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over 100 episodes of the likeliest actions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module = QNetwork()
    target, optimizer = copy.deepcopy(module), torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    replay = Replay(
        CAPACITY,
        rate=SamplesPerInsert(SAMPLES_PER_INSERT, min_size=MIN_SIZE),
        batch_size=BATCH,
        pieces=[SampledNStepReturns(n_step=N_STEP, gamma=GAMMA)],
        seed=seed,
    )
    explores = EpsilonGreedy(schedule=Linear(1.0, 0.04, EXPLORATION_STEPS))
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    began, best, evaluated = time.perf_counter(), 0.0, 0
    with Rollout("CartPole-v1", module=module, module_to_env_connector=lambda env: explores, **settings) as rollout:
        for fragment in rollout.fragments():
            replay.insert(fragment)
            for batch in replay.batches():
                update(module, target, optimizer, batch)
            rollout.publish(module.state_dict())
            is_over = rollout.num_steps >= MAX_STEPS
            if is_over or rollout.num_steps - evaluated >= EVALUATE_EVERY:
                evaluated = rollout.num_steps
                best = rollout.evaluate(episodes=100, seed=seed).mean
                if is_over or best >= TARGET_RETURN:
                    break
        seconds = time.perf_counter() - began
    print(f"mean return {best:.1f} after {rollout.num_steps:,} steps in {seconds:.0f} s")
    print(replay.report())
    return best


if __name__ == "__main__":
    main()
