"""Environments on other hosts, over a real socket: that are dialled, with TLS, with spaces of every kind."""

import ssl
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from drawn_rollouts import Setting, fragments_of, makers_of
from fragment_equality import assert_alike
from remote_hosts import dialled_host, hosting, listening

from rollflow import RemoteEnvs, Rollout


def test_hosts_that_are_dialled_give_the_same_as_well(tmp_path: Path) -> None:
    drawn = Setting(4, 2, 8, 1, True, 6, 1, 7)
    addresses = [f"unix:{tmp_path}/one", f"unix:{tmp_path}/two"]
    makers = makers_of(drawn)
    # Both are dialled at once: which one is first is for the wire to say, so both have the same environments.
    with dialled_host(addresses[0], makers[:2]), dialled_host(addresses[1], makers[:2]):
        ours = fragments_of(RemoteEnvs.connect(addresses), drawn)
    assert_alike(ours, fragments_of(makers[:2] * 2, drawn, lanes=2))


def test_a_secret_and_certificates_on_both_sides(certificates: dict[str, ssl.SSLContext]) -> None:
    options: Any = {"fragment_length": 8, "num_fragments": 2, "seed": 1}
    envs = listening(secret="open sesame", tls=certificates["server"])
    with (
        hosting(envs.addresses[0], "CartPole-v1", num_envs=2, secret=b"open sesame", tls=certificates["client"]),
        Rollout(envs, **options) as rollout,
    ):
        ours = list(rollout.fragments())
    with Rollout("CartPole-v1", num_envs=2, **options) as inline:
        assert_alike(ours, list(inline.fragments()))


def test_spaces_of_every_kind_cross_the_wire() -> None:
    space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (4, 3, 2), np.uint8),
            "where": gym.spaces.Tuple((gym.spaces.Discrete(5, start=-2), gym.spaces.MultiBinary((2, 3)))),
            "numbers": gym.spaces.MultiDiscrete([3, 4]),
        }
    )

    class Sampled(gym.Env[Any, Any]):
        observation_space, action_space = (
            space,
            gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": space["numbers"]}),
        )

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            space.seed(int(self.np_random.integers(2**31)))
            return space.sample(), {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action)
            return space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {"seen": action["a"].sum()}

    options: Any = {"fragment_length": 8, "num_fragments": 2, "seed": 1}
    envs = listening()
    with hosting(envs.addresses[0], Sampled, num_envs=1), Rollout(envs, **options) as rollout:
        ours = list(rollout.fragments())
    with Rollout(Sampled, num_envs=1, **options) as inline:
        assert_alike(ours, list(inline.fragments()))
