"""Tic-tac-toe by self-play: PPO against frozen copies of what has been learnt so far, on both sides of the board."""

from typing import Any

import torch
from pettingzoo.classic.tictactoe import tictactoe
from torch import nn

from rollflow import GeneralAdvantageEstimation, MultiAgentRollout, RLModule
from rollflow.nodes import RandomModule, mask_logits

SIDES, SIZE = ("player_1", "player_2"), {"num_envs": 128, "fragment_length": 32}
UPDATES, UPDATES_PER_OPPONENT = 120, 20
EPOCHS, LEARNING_RATE, CLIP, ENTROPY = 6, 2e-3, 0.2, 0.02


class Player(RLModule):
    """Two hidden layers over the board; what the mask rules out is never chosen."""

    def setup(self) -> None:
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(18, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.logits, self.value = nn.Linear(128, 9), nn.Sequential(nn.Linear(128, 1), nn.Flatten(0))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        hidden = self.trunk(batch["obs"]["observation"].float())
        logits = mask_logits(self.logits(hidden), batch["obs"]["action_mask"])
        return {"action_dist_inputs": logits, "vf_preds": self.value(hidden)}


def update(player: Player, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    """Some steps with PPO's clipped objective, each over the whole batch."""
    for _ in range(EPOCHS):
        output = player.forward_train(batch)
        distribution = torch.distributions.Categorical(logits=output["action_dist_inputs"])
        ratio = torch.exp(distribution.log_prob(batch["actions"]) - batch["action_logp"])
        gain = torch.min(ratio * batch["advantages"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantages"]).mean()
        value_loss = (output["vf_preds"] - batch["value_targets"]).square().mean()
        optimizer.zero_grad()
        (0.5 * value_loss - gain - ENTROPY * distribution.entropy().mean()).backward()
        optimizer.step()


def returns_against_random(player: Player, seed: int) -> list[float]:
    """The mean return of a hundred games on each side of the board: 1 where all are won, -1 where all are lost."""
    returns = []
    for side in SIDES:
        modules = {side: player, "default_policy": RandomModule}
        with MultiAgentRollout(tictactoe.env, module=modules, num_fragments=1, seed=seed, **SIZE) as rollout:
            list(rollout.fragments())
        returns.append(round(rollout.returns.by_module[side].mean, 2))
    return returns


def main(seed: int = 0) -> list[float]:
    """Train a player; its mean returns against one that plays at random."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    player, opponents, gae = Player(), ["opponent 0"], GeneralAdvantageEstimation(gamma=1.0, lambda_=0.95)
    optimizer = torch.optim.Adam(player.parameters(), lr=LEARNING_RATE)
    before = returns_against_random(player, seed)

    def module_of(agent: str, episode: Any) -> str:
        opponent, side = divmod(int(episode.id_, 16), 2)  # by chance
        return "player" if agent == SIDES[side] else opponents[opponent % len(opponents)]

    settings = {"agent_to_module_mapping_fn": module_of, "learner_connector": lambda obs, act: gae, "seed": seed}
    # Copies act: what is not published stays as it is. An opponent acts once it is among `opponents`.
    modules = {"player": player} | {f"opponent {each}": player for each in range(0, UPDATES + 1, UPDATES_PER_OPPONENT)}
    with MultiAgentRollout(tictactoe.env, module=modules, modules_to_train=["player"], **settings, **SIZE) as rollout:
        for number, batch in zip(range(1, UPDATES + 1), rollout.batches(), strict=False):
            update(player, optimizer, batch["player"])
            rollout.publish({"player": player.state_dict()})
            if number % UPDATES_PER_OPPONENT == 0:
                rollout.publish({f"opponent {number}": player.state_dict()})
                opponents.append(f"opponent {number}")
    after = returns_against_random(player, seed)
    print(f"mean return as either player {before} at first, {after} after {rollout.num_steps:,} steps")
    return after


if __name__ == "__main__":
    main()
