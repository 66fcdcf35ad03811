"""Logits changed before actions are sampled: in Taxi, what can not be done is ruled out, as its infos tell."""

from typing import Any

import numpy as np
import torch
from gymnasium.envs.toy_text import TaxiEnv
from gymnasium.wrappers import TimeLimit

from rollflow import ConnectorV2, GeneralAdvantageEstimation, RLModule, Rollout
from rollflow.nodes import OneHotObservations, mask_logits

NUM_ENVS, FRAGMENT_LENGTH, UPDATES, LEARNING_RATE, ENTROPY = 32, 64, 300, 3e-3, 0.05


class RuleOut(ConnectorV2):
    """Sets to -inf the logits of actions whose `action_mask`, in the latest infos, is 0."""

    changes_episodes = False

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        masks = np.stack([episode.get_infos(-1)["action_mask"] for episode in episodes])
        logits = batch["action_dist_inputs"]
        batch["action_dist_inputs"] = logits.masked_fill(torch.from_numpy(masks == 0), -torch.inf)
        return batch


def update(policy: RLModule, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    """One step of advantage actor-critic, with the same actions ruled out."""
    output = policy.forward_train(batch)
    logits = mask_logits(output["action_dist_inputs"], ~batch["action_dist_inputs"].isneginf())
    distribution = torch.distributions.Categorical(logits=logits)
    gain = (distribution.log_prob(batch["actions"]) * batch["advantages"]).mean()
    value_loss = (output["vf_preds"] - batch["value_targets"]).square().mean()
    optimizer.zero_grad()
    (0.01 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def main(seed: int = 0) -> int:
    """Train for a while; how many of all steps went to an action that can't be done: none."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    impossible = 0
    rollout = Rollout(
        lambda: TimeLimit(TaxiEnv(), max_episode_steps=200),
        num_envs=NUM_ENVS,
        fragment_length=FRAGMENT_LENGTH,
        seed=seed,
        env_to_module_connector=lambda env: OneHotObservations(),
        learner_connector=lambda obs_space, act_space: GeneralAdvantageEstimation(gamma=0.95),
    )
    # Pieces of `module_to_env_connector` come when actions have been sampled; this one has to come first.
    rollout.module_to_env.prepend(RuleOut())
    with rollout:
        policy = rollout.module
        optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
        for _, batch in zip(range(UPDATES), rollout.batches(), strict=False):
            chosen = batch["action_dist_inputs"].gather(1, batch["actions"][:, None])
            impossible += int(chosen.isneginf().sum())
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
    print(f"mean return {rollout.returns.mean:.1f}, {impossible} of {rollout.num_steps:,} steps impossible")
    return impossible


if __name__ == "__main__":
    main()
