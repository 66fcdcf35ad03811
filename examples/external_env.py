"""PPO on CartPole-v1 that steps itself: a game that asks for actions and logs rewards, in a process of its own.

The game is a process of this machine here; on another, give it the learner's address. With INFERENCE = "client" the
policy acts in the game's process, with the weights that the learner publishes.
"""

import secrets
import subprocess
import sys
import threading

import gymnasium as gym
import torch
from cartpole import LEARNING_RATE, MAX_UPDATES, Policy, update

from rollflow import GeneralAdvantageEstimation, RemoteEnvs, RemoteRollouts, Rollout, Timeouts
from rollflow.nodes import ExternalEnv
from rollflow.stream import EnvError

INFERENCE = "server"
GAMES, TARGET_RETURN = 16, 475.0


def play(external: ExternalEnv, seed: int) -> None:
    """Play one episode after the other, until the learner has enough."""
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    try:
        while True:
            episode, is_over = external.start_episode(), False
            while not is_over:
                action = external.get_action(episode, observation)
                observation, reward, terminated, truncated, _ = env.step(action)
                external.log_returns(episode, float(reward))
                is_over = terminated or truncated
            external.end_episode(episode, observation, truncated=truncated)
            observation, _ = env.reset()
    except EnvError as error:
        print(error, file=sys.stderr)


def game(address: str, secret: str, inference: str) -> None:
    """The program that has the environments: some games at a time, each in a thread."""
    env = gym.make("CartPole-v1")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    options = {"module": Policy()} if inference == "client" else {}
    with ExternalEnv(address, **spaces, episodes=GAMES, inference=inference, secret=secret, **options) as external:
        players = [threading.Thread(target=play, args=(external, seed)) for seed in range(GAMES)]
        for player in players:
            player.start()
        for player in players:
            player.join()


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    gae = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    secret = secrets.token_hex(32)
    kind = RemoteEnvs if INFERENCE == "server" else RemoteRollouts
    envs = kind.listen("tcp://127.0.0.1:0", secret=secret)
    command = [sys.executable, __file__, str(envs.addresses[0]), secret, INFERENCE]
    settings = {"module": policy, "fragment_length": 256, "seed": seed, "timeouts": Timeouts(step=None, reset=None)}
    with subprocess.Popen(command), Rollout(envs, learner_connector=lambda obs, act: gae, **settings) as rollout:
        for number, batch in enumerate(rollout.batches(), start=1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
            update(policy, optimizer, batch)
            rollout.publish(policy.state_dict())
            returns = rollout.returns
            if number == MAX_UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN):
                break
    print(f"mean return {returns.mean:.1f} after {rollout.num_steps:,} steps, lost: {rollout.lost}")
    return returns.mean


if __name__ == "__main__":
    if len(sys.argv) == 4:
        game(*sys.argv[1:])
    else:
        main()
