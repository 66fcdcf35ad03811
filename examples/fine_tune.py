"""Double DQN on CartPole-v1 with half offline data: each batch is half a clumsy expert's steps, and half new ones."""

import copy
import tempfile
import time
from typing import Any

import torch
from dqn_cartpole import QNetwork, update

from rollflow import DatasetSink, DatasetSource, EpsilonGreedy, Replay, RLModule, Rollout
from rollflow.nodes import Linear
from rollflow.sinks import SampledNStepReturns, SamplesPerInsert, Storage

NUM_ENVS, FRAGMENT_LENGTH, CAPACITY, MIN_SIZE = 8, 8, 50_000, 500
HALF, SAMPLES_PER_INSERT, N_STEP, GAMMA = 64, 32.0, 3, 0.99
LEARNING_RATE, EXPLORATION_STEPS, RECORDED = 1e-3, 200, 100
TARGET_RETURN, MAX_STEPS, EVALUATE_EVERY, EPISODES = 475.0, 60_000, 2_000, 100


class Clumsy(RLModule):
    """A controller that pushes to where the pole leans, and trembles: its mean return is about 70."""

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        lean = batch["obs"] @ torch.tensor([0.0, 0.0, 1.0, 0.3])
        return {"action_dist_inputs": torch.stack([-1.5 * lean, 1.5 * lean], dim=-1)}


def record(path: str, seed: int) -> float:
    """Write steps of the expert to a dataset; its mean return."""
    settings: dict[str, Any] = {"num_envs": NUM_ENVS, "fragment_length": RECORDED, "num_fragments": 10, "seed": seed}
    with Rollout("CartPole-v1", module=Clumsy(), **settings) as rollout, DatasetSink(path, rollout=rollout) as sink:
        for fragment in rollout.fragments():
            sink(fragment)
    return rollout.returns.mean


def make_replay(seed: int, rate: SamplesPerInsert | None = None) -> Replay:
    """Replay of one half, of what both have in common."""
    pieces = [SampledNStepReturns(n_step=N_STEP, gamma=GAMMA)]
    return Replay(CAPACITY, rate=rate, batch_size=HALF, pieces=pieces, storage=Storage(extra=()), seed=seed)


def main(seed: int = 0) -> float:
    """Record, and train with both halves; the mean return over 100 episodes of the likeliest actions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    module = QNetwork()
    target, optimizer = copy.deepcopy(module), torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    offline, online = make_replay(seed), make_replay(seed, SamplesPerInsert(SAMPLES_PER_INSERT, min_size=MIN_SIZE))
    with tempfile.TemporaryDirectory() as path:
        expert = record(path, seed)
        for fragment in DatasetSource(path, complete_episodes=True).fragments():
            offline.insert(fragment)
    explores = EpsilonGreedy(schedule=Linear(0.5, 0.04, EXPLORATION_STEPS))
    settings = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    began, best, evaluated = time.perf_counter(), 0.0, 0
    with Rollout("CartPole-v1", module=module, module_to_env_connector=lambda env: explores, **settings) as rollout:
        for fragment in rollout.fragments():
            online.insert(fragment)
            for new in online.batches():
                old = offline.sample()
                both = {name: torch.cat([old[name], new[name]]) for name in new}
                update(module, target, optimizer, both)
            rollout.publish(module.state_dict())
            is_over = rollout.num_steps >= MAX_STEPS
            if is_over or rollout.num_steps - evaluated >= EVALUATE_EVERY:
                evaluated = rollout.num_steps
                best = rollout.evaluate(episodes=EPISODES, seed=seed).mean
                if is_over or best >= TARGET_RETURN:
                    break
        seconds = time.perf_counter() - began
    print(f"the expert {expert:.0f}; mean return {best:.1f} after {rollout.num_steps:,} steps in {seconds:.0f} s")
    return best


if __name__ == "__main__":
    main()
