"""Environments on other hosts, over a real socket: that are dialled, with TLS."""

import ssl
from pathlib import Path
from typing import Any

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
    proof: Any = {"secret": b"open sesame", "tls": certificates["client"]}
    with hosting(envs.addresses[0], "CartPole-v1", num_envs=2, **proof), Rollout(envs, **options) as rollout:
        ours = list(rollout.fragments())
    with Rollout("CartPole-v1", num_envs=2, **options) as inline:
        assert_alike(ours, list(inline.fragments()))
