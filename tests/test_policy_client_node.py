"""The client in JavaScript, against a real server: its sessions are its own, also over connections that are cut."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from node_example import POLICY_CLIENT, ROOT, node as node
from remote_hosts import BrokenWire
from served_policies import Echo, Sums, policy_of, served

from rollflow import Policy, RLModule
from rollflow.stream.wire import parse_address

pytestmark = pytest.mark.usefixtures("node")

SECRET = "correct horse battery staple"
CLIENT = ROOT / "examples" / "policy_client_node"
SUMS = """
import { PolicyClient } from "./policy_client.js";
const client = new PolicyClient(process.argv[1], { secret: process.argv[2], policy: "sums" });
const sums = await Promise.all(Array.from({ length: 8 }, async (_, session) => {
  const made = [];
  for (let step = 1; step <= 100; step += 1) {
    const acted = client.act([step * (session + 1), 0], { session });
    made.push(await acted.then(([sum]) => sum, ({ status }) => (status === 504 ? null : Promise.reject(status))));
  }
  return made;
}));
await client.reset(0);
const [again] = await client.act([5, 0], { session: 0 });
const echoed = await client.act([7, 0], { policy: "echo" });
const refused = [];
for (const wrong of [{ policy: "none" }, {}]) {
  try { await client.act(wrong.policy ? [1, 2] : [1, 2, 3], wrong); } catch (error) { refused.push(error.message); }
}
console.log(JSON.stringify({ sums, again, echoed, refused }));
await client.close();
"""


class Balances(RLModule):
    """Pushes the cart to the side to which the pole falls."""

    def setup(self) -> None:
        self.gains = torch.nn.Parameter(torch.tensor([0.0, 0.1, 1.0, 0.3]))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        push = batch["obs"] @ self.gains
        return {"action_dist_inputs": torch.stack([-push, push], 1)}


@pytest.mark.slow
def test_sessions_go_on_over_connections_that_are_cut() -> None:
    rng = random.Random(0)
    with served(policy_of(Sums), policy_of(Echo, 4.0), names=("sums", "echo"), secret=SECRET) as (_, server):
        wire = BrokenWire(parse_address(server.url.replace("http", "tcp")), lambda: rng.randrange(1, 20_000))
        try:
            address = wire.address.replace("tcp", "http")
            command = [*POLICY_CLIENT, "--input-type=module", "--eval", SUMS, address, SECRET]
            ran = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, timeout=90)
        finally:
            wire.close()
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    for session, sums in enumerate(made["sums"], 1):
        total = 0
        for step, found in enumerate(sums, 1):
            total = 0 if found is None else total + step * session  # it begins anew where it was lost
            assert found in (None, total)
    assert made["again"] == 5
    assert made["echoed"] == [7, 4]
    told = ["no policy 'none' is served; served: sums, echo", "observation has shape [3], expected float32[2]"]
    assert made["refused"] == told
    assert wire.cuts >= 3


@pytest.mark.slow
def test_it_plays_cartpole_by_a_policy_that_balances(tmp_path: Path) -> None:
    box = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    policy = Policy(
        Balances(box, spaces.Discrete(2)), observation_space=box, action_space=spaces.Discrete(2), explore=False
    )
    (tmp_path / "key").write_text(f"{SECRET}\n")
    with served(policy, names=["pole"], secret=SECRET) as (_, server):
        for secret, expected in (("key", 0), ("none", 1)):
            command = [*POLICY_CLIENT, "play.js", "--connect", server.url, "--episodes", "4"]
            command += ["--secret-file", str(tmp_path / secret)] if secret == "key" else []
            ran = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, timeout=60)
            assert (ran.returncode != 0) == bool(expected), ran.stderr
            if secret == "key":
                lengths = json.loads(ran.stdout)
                assert len(lengths) == 4
                assert min(lengths) >= 150  # a cart that nobody steers makes ten steps or so
            else:
                assert "has another secret" in ran.stderr
