"""TorchRL's `ClipPPOLoss` over batches of rollflow, on CartPole-v1 (`pip install torchrl`).

A batch is a dict of tensors with one axis, so that a `TensorDict` of it needs no copy. The actor and the critic are
TorchRL's.
"""

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from rollflow import GeneralAdvantageEstimation, RLModule, Rollout, minibatches

NUM_ENVS, FRAGMENT_LENGTH, EPOCHS, MINIBATCH = 16, 128, 6, 512
TARGET_RETURN, MAX_UPDATES = 195.0, 200


def network(outputs: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class ActorAndCritic(RLModule):
    """TorchRL's actor and critic, as a module."""

    def setup(self) -> None:
        logits = TensorDictModule(network(2), in_keys=["obs"], out_keys=["logits"])
        self.actor = ProbabilisticActor(
            logits, in_keys=["logits"], out_keys=["actions"], distribution_class=OneHotCategorical
        )
        self.critic = ValueOperator(network(1), in_keys=["obs"])

    def _forward(self, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.actor.module[0].module(batch["obs"])
        return {"action_dist_inputs": logits, "vf_preds": self.critic.module(batch["obs"]).squeeze(-1)}


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    gae = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    options: dict[str, Any] = {"num_envs": NUM_ENVS, "fragment_length": FRAGMENT_LENGTH, "seed": seed}
    options |= {"module": ActorAndCritic, "learner_connector": lambda obs, act: gae}
    with Rollout("CartPole-v1", **options) as rollout:
        policy: Any = rollout.module
        loss_of = ClipPPOLoss(policy.actor, policy.critic)
        loss_of.set_keys(action="actions", sample_log_prob="action_logp")
        loss_of.set_keys(advantage="advantages", value_target="value_targets", value="state_value")
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
        for number, batch in enumerate(rollout.batches(), start=1):
            batch["actions"] = nn.functional.one_hot(batch["actions"], 2)
            for name in ("advantages", "value_targets"):
                batch[name] = batch[name].unsqueeze(-1)
            for _ in range(EPOCHS):
                for part in minibatches(batch, MINIBATCH):
                    losses = loss_of(TensorDict(part, [len(part["obs"])]))
                    optimizer.zero_grad()
                    sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
                    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                    optimizer.step()
            rollout.publish(policy.state_dict())
            if number == MAX_UPDATES or (number > 10 and rollout.returns.mean >= TARGET_RETURN):
                break
    print(f"mean return {rollout.returns.mean:.1f} after {rollout.num_steps:,} steps")
    return rollout.returns.mean


if __name__ == "__main__":
    main()
