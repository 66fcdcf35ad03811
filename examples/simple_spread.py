"""PPO with two agents that are to cover two landmarks together: with a policy for each, and with one for both.

The environment comes with the package mpe2.
"""

import time
from typing import Any

import torch
from mpe2 import simple_spread_v3

from rollflow import GeneralAdvantageEstimation, MultiAgentRollout, RLModule, minibatches
from rollflow.nodes import RandomModule

NUM_ENVS, EPISODE_LENGTH, UPDATES = 128, 25, 100
EPOCHS, MINIBATCH, LEARNING_RATE, CLIP, ENTROPY = 8, 800, 2e-3, 0.2, 0.01
VALUE_WEIGHT = 0.05  # returns are about -20: by 0.5 their squares would leave the clipped gradient little of the gain


def update(policy: RLModule, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """Some epochs of PPO's clipped objective."""
    for _ in range(EPOCHS):
        for part in minibatches(batch, MINIBATCH):
            output = policy.forward_train(part)
            distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
            ratio = torch.exp(distribution.log_prob(part["actions"]) - part["action_logp"])
            gain = torch.min(ratio * part["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantages"]).mean()
            value_loss = (output["vf_preds"] - part["value_targets"]).square().mean()
            optimizer.zero_grad()
            (VALUE_WEIGHT * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def mean_return(modules: dict[str, Any], *, trained: list[str], updates: int, seed: int) -> float:
    """Train some of the modules; the mean return of the last 100 episodes, both agents' rewards added up."""
    torch.manual_seed(seed)
    with MultiAgentRollout(
        lambda: simple_spread_v3.parallel_env(N=2, max_cycles=EPISODE_LENGTH),
        num_envs=NUM_ENVS,
        fragment_length=EPISODE_LENGTH,
        module=modules,
        modules_to_train=trained,
        model_config={"fcnet_hiddens": [64, 64]} if None in modules.values() else None,
        learner_connector=lambda obs_space, act_space: GeneralAdvantageEstimation(gamma=0.95, lambda_=0.95),
        num_fragments=updates,
        seed=seed,
    ) as rollout:
        policies = {name: rollout.module[name] for name in trained}
        optimizers = {name: torch.optim.Adam(policies[name].parameters(), lr=LEARNING_RATE) for name in trained}
        for batches in rollout.batches():
            for name, batch in batches.items():
                update(policies[name], optimizers[name], batch)
            rollout.publish({name: policy.state_dict() for name, policy in policies.items()})
    return rollout.returns.mean


def main(seed: int = 0) -> dict[str, float]:
    """Train a policy for each agent, then one for both; the mean return of each, and of acting at random."""
    torch.set_num_threads(1)
    both, each = "default_policy", ["agent_0", "agent_1"]  # an agent's module has its id, or else is the default one
    returns, began = {}, time.perf_counter()
    returns["random"] = mean_return({both: RandomModule}, trained=[], updates=2, seed=seed)
    returns["two policies"] = mean_return(dict.fromkeys(each), trained=each, updates=UPDATES, seed=seed)
    returns["shared parameters"] = mean_return({both: None}, trained=[both], updates=UPDATES, seed=seed)
    told = ", ".join(f"{name} {mean:.1f}" for name, mean in returns.items())
    print(f"mean return: {told}, in {time.perf_counter() - began:.0f} s")
    return returns


if __name__ == "__main__":
    main()
