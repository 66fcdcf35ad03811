"""Receipts come from the forward nodes: a trainer sees one that acts with other weights than it has published."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from feeding_rollouts import graph_over, running, trainer
from numbered_module import NumberedEnv, NumberedModule
from other_weights import SpoiltInOneWorker
from remote_hosts import HostProcess, listening
from remote_rollouts import await_that, makers, rollout_over, rollouts_on, told

from rollflow.nodes import RemoteRollouts, Rollout, RolloutHost
from rollflow.nodes.modules.loaded_weights import LoadedWeights
from rollflow.nodes.modules.weights_codec import digest_of, to_arrays
from rollflow.nodes.offloaded.rollout_settings import RolloutSettings
from rollflow.stream import Fragment
from rollflow.stream.wire import Settings


def rollouts(module: Any = None, **options: Any) -> Rollout:
    """Two lanes in two worker processes."""
    given = {"where": "rollouts", "workers": 2, "lanes": 2, "fragment_length": 8, "seed": 0, **options}
    return Rollout([partial(NumberedEnv, slot) for slot in (0, 1)], module=module or NumberedModule(), **given)


def uses_of(rollout: Rollout, published: torch.Tensor, lanes: int = 2) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a trainer's view of a rollout once each lane has reported the weights that it loaded and acted with.

    By the names of nodes: whether they are the same, and the weight.
    """
    acted: dict[str, float] = {}
    with trainer(yields="fragments") as stream, running(*graph_over(rollout, stream.address)):
        for fragment in stream:
            if stream.version == 0:
                assert stream.weights_in_use() == []
                assert stream.publish({"weight": published}) == 1
            acted |= acted_with(fragment)
            uses = stream.weights_in_use()
            if len(uses) == len(acted) == lanes:
                break
        assert {use.version for use in uses} == {1}
    return {use.node: use.is_same for use in uses}, acted


def acted_with(fragment: Fragment) -> dict[str, float]:
    """The weight of version 1 in a lane, where the fragment has it."""
    weights = fragment.column("weight")[:, 0]
    rows = weights[fragment.column("policy_version")[: len(weights), 0] == 1]
    return {f"lane {fragment.lane}": float(weight) for weight in rows[-1:]}


@pytest.mark.slow
def test_a_worker_process_that_has_other_weights_is_seen(tmp_path: Path) -> None:
    is_same, acted = uses_of(rollouts(SpoiltInOneWorker(tmp_path)), torch.tensor(1.0))
    assert sorted(acted.values()) == [1.0, 1.5]
    assert is_same == {node: weight == 1.0 for node, weight in acted.items()}


@pytest.mark.slow
def test_a_host_that_has_other_weights_is_seen() -> None:
    envs = listening(RemoteRollouts, hosts=2)
    modules: Sequence[str] = ("numbered_module", "other_weights")
    with ExitStack() as stack:
        for slot, module in enumerate(modules):
            host = HostProcess(envs.addresses[0], told(slot), kind=RolloutHost, name=module, module=module)
            stack.callback(host.end)
        is_same, acted = uses_of(rollout_over(envs), torch.tensor(1.0))
    assert sorted(acted.values()) == [1.0, 1.5]
    assert is_same == {node: weight == 1.0 for node, weight in acted.items()}


def test_hosts_say_what_their_lanes_have_loaded() -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], makers(0, 1), lanes=2):
        is_same, acted = uses_of(rollout_over(envs), torch.tensor(1.0))
    assert is_same == {"lane 0": True, "lane 1": True}
    assert acted == {"lane 0": 1.0, "lane 1": 1.0}


def test_weights_that_are_converted_to_the_module_s_dtype_are_the_same() -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], makers(0)):
        is_same, acted = uses_of(rollout_over(envs), torch.tensor(0.1, dtype=torch.float64), lanes=1)
    assert is_same == {"lane 0": True}
    assert acted == {"lane 0": float(torch.tensor(0.1))}


def test_of_a_host_that_does_not_say_what_it_has_loaded_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its software is older."""
    message = RolloutSettings.message

    def without_digests(self: RolloutSettings) -> Settings:
        settings = dict(message(self).settings)
        assert settings.pop("digests")
        return Settings(settings)

    monkeypatch.setattr(RolloutSettings, "message", without_digests)
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], makers(0)), trainer(yields="fragments") as stream:
        with running(*graph_over(rollout_over(envs), stream.address)):
            stream.publish({"weight": torch.tensor(1.0)})
            acted: list[float] = []
            for fragment in stream:
                acted += acted_with(fragment).values()
                if len(acted) == 3:
                    break
            assert stream.weights_in_use() == []


class Large(torch.nn.Module):
    """Is too large to be digested at once."""

    size = (1 << 18) + 1

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(self.size))
        self.register_buffer("passes", torch.zeros(()))

    def load(self, value: float) -> bytes:
        """Have another value; the digest of that."""
        self.load_state_dict({"values": torch.full((self.size,), value), "passes": torch.zeros(())})
        arrays = to_arrays(self.state_dict())
        return digest_of(arrays.tensors, arrays.dtypes)


def test_what_a_module_becomes_while_large_weights_are_digested_does_not_matter() -> None:
    module, loaded = Large(), LoadedWeights()
    for version in range(1, 21):
        digest = module.load(version)
        loaded.look_at(version, module)
        module.passes += 1  # type: ignore[operator]
        await_that(lambda version=version: loaded.newest is not None and loaded.newest.version == version)
        assert loaded.newest is not None
        assert loaded.newest.digest == digest


def test_of_large_weights_the_newest_are_digested_in_the_end() -> None:
    module, loaded = Large(), LoadedWeights()
    digests = {}
    for version in range(1, 41):
        digests[version] = module.load(version)
        loaded.look_at(version, module)
        newest = loaded.newest
        assert newest is None or newest.digest == digests[newest.version]
    await_that(lambda: loaded.newest is not None and loaded.newest == (40, digests[40]))
