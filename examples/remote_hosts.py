"""Environments on two other hosts, one of which is killed on the way and replaced by a third.

The hosts are processes of this machine here; on others, give the command the learner's address.
"""

import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from rollflow import RemoteEnvs, Rollout
from rollflow.stream.wire import Limits

FRAGMENTS = 60


def host(name: str, address: str, key: Path) -> "subprocess.Popen[bytes]":
    """What `rollflow env-host --env CartPole-v1 …` does on another machine."""
    arguments = ["--env", "CartPole-v1", "--num-envs", "8", "--name", name]
    arguments += ["--connect", address, "--secret-file", str(key)]
    return subprocess.Popen([sys.executable, "-m", "rollflow.cli.main", "env-host", *arguments])


def main() -> set[int]:
    """Take some fragments; the lanes that took part."""
    lanes: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(secrets.token_hex(32))
        limits = Limits(grace_s=1.0)  # seconds that a lost host has to come back
        envs = RemoteEnvs.listen("tcp://127.0.0.1:0", secret=key.read_text(), hosts=2, limits=limits)
        address = str(envs.addresses[0])
        hosts = [host(name, address, key) for name in ("one", "two")]
        with Rollout(envs, fragment_length=32, prefetch=1, seed=0) as rollout:
            print(rollout.explain())
            for number, fragment in enumerate(rollout.fragments(), start=1):
                lanes.add(fragment.lane)
                if number == FRAGMENTS // 3:
                    hosts[0].kill()
                    hosts.append(host("three", address, key))
                if number >= FRAGMENTS and len(lanes) == 6:
                    break
        for process in hosts:
            process.wait()
    print(f"{rollout.num_steps:,} steps in lanes {sorted(lanes)}, lost: {rollout.lost}")
    return lanes


if __name__ == "__main__":
    main()
