"""PPO on CartPole-v1 with its rollouts on two other hosts, each of which runs environments and policy.

The hosts are processes of this machine here; on others, give the command the learner's address. They import the policy
from the same file as this program.
"""

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from cartpole import LEARNING_RATE, MAX_UPDATES, TARGET_RETURN, Policy, update

from rollflow import GeneralAdvantageEstimation, RemoteRollouts, Rollout


def host(name: str, address: str, key: Path) -> "subprocess.Popen[bytes]":
    """What `rollflow rollout-host --env CartPole-v1 …` does on another machine."""
    arguments = ["--env", "CartPole-v1", "--num-envs", "32", "--lanes", "1", "--module", "cartpole:Policy"]
    arguments += ["--connect", address, "--secret-file", str(key), "--name", name]
    command = [sys.executable, "-m", "rollflow.cli.main", "rollout-host", *arguments]
    return subprocess.Popen(command, cwd=Path(__file__).parent)


def main(seed: int = 0) -> float:
    """Train one policy; the mean return over the last 100 episodes."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, eps=1e-5)
    gae = GeneralAdvantageEstimation(gamma=0.99, lambda_=0.95)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        rollouts = RemoteRollouts.listen("tcp://127.0.0.1:0", secret=key.read_text(), hosts=2)
        hosts = [host(name, str(rollouts.addresses[0]), key) for name in ("one", "two")]
        with Rollout(
            rollouts, module=policy, learner_connector=lambda obs, act: gae, fragment_length=64, seed=seed
        ) as rollout:
            print(rollout.explain())
            for number, batch in enumerate(rollout.batches(), start=1):
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - number / (MAX_UPDATES + 1))
                update(policy, optimizer, batch)
                rollout.publish(policy.state_dict())
                returns = rollout.returns
                if number == MAX_UPDATES or (len(returns.returns) == 100 and returns.mean >= TARGET_RETURN):
                    break
        for process in hosts:
            process.wait()
    print(f"mean return {returns.mean:.1f} after {rollout.num_steps:,} steps, lost: {rollout.lost}")
    return returns.mean


if __name__ == "__main__":
    main()
