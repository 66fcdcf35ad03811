"""Weights and connector states reach hosts of whole rollouts while they are at work."""

import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ending_envs import Doomed
from fragment_equality import assert_alike
from held_envs import Held, await_held, let_go
from numbered_module import NumberedModule, WideModule
from piece_forms import log_rows
from places import rollout_at
from remote_hosts import listening
from remote_rollouts import await_that, check_counts, hosted, makers, raw_host_of, rollout_over, rollouts_on, wired

from rollflow import Fragment, MeanStdFilter, RemoteRollouts, Rollout
from rollflow.nodes import LambdaConnector
from rollflow.stream.wire import Weights


def weight(version: int) -> dict[str, Any]:
    return {"weight": torch.tensor(float(version))}


def check_weights(fragments: list[Fragment]) -> None:
    """Every step was done with the weights of the version that it names, and versions only grow."""
    newest: dict[int, int] = {}
    for fragment in sorted(fragments, key=lambda fragment: fragment.sequence):
        versions = fragment.column("policy_version")
        np.testing.assert_array_equal(fragment.column("weight"), versions)
        rows = versions[:, 0].tolist()
        assert rows == sorted(rows)
        assert rows[0] >= newest.get(fragment.lane, 0)
        newest[fragment.lane] = rows[-1]


@pytest.mark.parametrize("place", ["hosted rollouts", "rollouts"])
def test_published_weights_are_used_in_the_next_fragment_of_every_lane(place: str) -> None:
    options: Any = {"acts": {"module": NumberedModule()}, "envs": {"lanes": 3}, "fragment_length": 5, "seed": 0}
    with rollout_at(place, makers(0, 1, 2), **options) as made, made as rollout:
        fragments = iter(rollout.fragments())
        for version in range(4):
            for fragment in [next(fragments) for _ in range(3)]:
                assert fragment.policy_version == version
                np.testing.assert_array_equal(fragment.column("weight"), version)
            assert rollout.publish(weight(version + 1)) == version + 1


def test_a_host_that_comes_later_begins_with_the_newest() -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], makers(0)), rollout_over(envs) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        rollout.publish(weight(1))
        rollout.publish(weight(2))
        with rollouts_on(envs.addresses[0], makers(1)):
            taken: list[Fragment] = []
            while not any(fragment.lane for fragment in taken):
                taken.append(next(fragments))
    assert taken[-1].policy_version == 2
    check_weights(taken)


def test_newer_weights_are_used_in_the_middle_of_a_fragment(tmp_path: Path) -> None:
    with hosted([partial(Held, 0, tmp_path, steps=[2, 5])], prefetch=1, num_fragments=1) as (rollout, host):
        for times, version in ((0, 1), (1, 2)):
            await_held(tmp_path, 0, times)
            rollout.publish(weight(version))
            await_that(lambda version=version: host._lanes[0].session.told.published["default_policy"][0] == version)
            let_go(tmp_path, 0, times)
        [fragment] = rollout.fragments()
    assert fragment.column("policy_version")[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    check_weights([fragment])


def test_a_host_that_is_slow_to_read_gets_the_newest_alone(tmp_path: Path) -> None:
    """One version is on its way into its socket, and the newest comes after it; nothing piles up meanwhile."""

    large = partial(WideModule, 4_000_000)  # more than sockets hold
    with raw_host_of(tmp_path, module=large) as (rollout, raw):
        raw.next_turn()
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # or the system may have room for all of it
        [slow] = [host for host in rollout.environments.gateway.hosts.values() if host.name.startswith("raw")]
        for version in range(1, 31):
            rollout.publish(large().state_dict() | weight(version))
            if version == 1:
                await_that(lambda: slow.connection.undelivered > 0)
            assert slow.connection.undelivered < 2 * 4 * 4_000_000
        versions: list[int] = []
        while 30 not in versions:
            event = raw.next_event()
            if isinstance(event, Weights):
                versions.append(event.version)
    assert len(versions) == 2
    assert versions[0] < versions[1] == 30


@pytest.mark.slow
def test_many_that_are_published_at_once_are_never_mixed() -> None:
    envs = listening(RemoteRollouts, hosts=2)
    done = threading.Event()
    two, one = rollouts_on(envs.addresses[0], makers(0, 1), lanes=2), rollouts_on(envs.addresses[0], makers(2))
    with two, one, rollout_over(envs, fragment_length=40, prefetch=2) as rollout:

        def publish() -> None:
            version = 0
            while not done.is_set():
                version += 1
                assert rollout.publish(weight(version)) == version

        publishing = threading.Thread(target=publish)
        publishing.start()
        fragments = iter(rollout.fragments())
        taken = [next(fragments) for _ in range(40)]
        done.set()
        publishing.join()
    check_weights(taken)
    assert any(len(np.unique(fragment.column("policy_version"))) > 1 for fragment in taken)


class Mixed(NumberedModule):
    """Has weights and buffers of several kinds, and shows what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("whole", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        rows = len(batch["obs"])
        shown = torch.cat([self.small.float(), self.whole.float(), self.flag.float()[None]])
        return super()._forward(batch) | {"shown": shown.expand(rows, -1)}

    def get_extra_state(self) -> Any:
        return {"steps": 3, "name": "x"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"steps": 3, "name": "x"}


def test_weights_and_buffers_of_every_kind_arrive_as_they_are() -> None:
    module = Mixed()
    with hosted(makers(0), on={"module": Mixed()}, module=module, fragment_length=3) as (rollout, _):
        fragments = iter(rollout.fragments())
        first = next(fragments)
        with torch.no_grad():
            module.small += torch.tensor([0.5, -1.5, 3.0])
            module.whole += torch.tensor([7, 2**20])
            module.flag.fill_(True)
        rollout.publish(module.state_dict())
        second = next(fragments)
    np.testing.assert_array_equal(first.column("shown"), np.zeros((3, 1, 6)))
    np.testing.assert_array_equal(second.column("shown")[0, 0], [0.5, -1.5, 3.0, 7, 2**20, 1])


def test_weights_that_are_published_after_the_end_are_for_nobody() -> None:
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], makers(0)):
        with rollout_over(envs) as rollout:
            next(iter(rollout.fragments()))
        assert rollout.publish(weight(1)) == 1


def test_what_is_too_old_is_dropped_and_counted() -> None:
    with hosted(makers(0, 1), on={"lanes": 2}, prefetch=2, max_lag=1) as (rollout, _):
        fragments = iter(rollout.fragments())
        taken: list[Fragment] = []
        for version in range(1, 60):
            fragment = next(fragments)
            assert fragment.policy_version >= rollout.policy_version - 1
            taken.append(fragment)
            rollout.publish(weight(version))
    assert rollout.lost["max_lag"] > 0
    check_counts(taken, rollout)
    check_weights(taken)


@pytest.mark.wait_times(first_pause_s=0.001)
def test_a_connection_that_breaks_brings_back_the_newest() -> None:
    left = iter(range(400, 100_000, 379))
    with wired(makers(0, 1), lambda: next(left), on={"lanes": 2}) as (rollout, _, wire):
        fragments = iter(rollout.fragments())
        taken: list[Fragment] = []
        version = 0
        while wire.cuts < 20:
            taken += [next(fragments), next(fragments)]
            assert {fragment.policy_version for fragment in taken[-2:]} == {version}
            version = rollout.publish(weight(version + 1))
    check_weights(taken)


# What connectors learn and log


FILTERS: Any = {"env_to_module_connector": lambda env: [LambdaConnector(log_rows), MeanStdFilter()]}
CARTS: Any = {"module": None, **FILTERS}


def filter_of(acting: Any) -> MeanStdFilter:
    [found] = [piece for piece in acting.env_to_module.connectors if isinstance(piece, MeanStdFilter)]
    return found


def hosts_of(envs: Any, count: int) -> list[Any]:
    return [rollouts_on(envs.addresses[0], "CartPole-v1", num_envs=2, **CARTS) for _ in range(count)]


def test_each_host_goes_on_from_what_all_have_seen() -> None:
    envs = listening(RemoteRollouts, hosts=2)
    hosts = hosts_of(envs, 2)
    with hosts[0] as one, hosts[1] as other, Rollout(envs, fragment_length=10, seed=0, **FILTERS) as rollout:
        fragments = iter(rollout.fragments())
        for _ in range(3):
            next(fragments), next(fragments)
        # Each has had the states after the second fragments by now, and its own third on top.
        for lane in (one._lanes[0], other._lanes[0]):
            filters = lane.session.told.rollouts[lane]._acting.named_pipelines[0][1].connectors
            [mine] = [piece for piece in filters if isinstance(piece, MeanStdFilter)]
            assert len(mine.get_state()["sources"]) == 2
            assert mine.count >= 2 * 2 * (2 * 10 + 1)


def test_a_filter_on_one_host_sees_what_it_sees_inline() -> None:
    options: Any = {"fragment_length": 20, "num_fragments": 3, "seed": 3, **FILTERS}
    envs = listening(RemoteRollouts)
    [host] = hosts_of(envs, 1)
    with host, Rollout(envs, **options) as rollout:
        ours = list(rollout.fragments())
    with Rollout("CartPole-v1", num_envs=2, **options) as inline:
        assert_alike(ours, list(inline.fragments()))
    np.testing.assert_array_equal(filter_of(rollout).mean, filter_of(inline).mean)


@pytest.mark.wait_times(first_pause_s=0.0)
def test_environments_that_are_made_anew_go_on_with_what_was_learnt(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counts(MeanStdFilter):
        def __call__(self, **kwargs: Any) -> Any:
            batch = super().__call__(**kwargs)
            seen.append(self.count)
            return batch

    counting: Any = {"env_to_module_connector": lambda env: Counts(clip_by_value=None)}
    breaking = [partial(Doomed, 0, tmp_path, "raise", 12, 1, lengths=(50, 60))]
    with hosted(breaking, on=counting, num_fragments=4, **counting) as (rollout, _):
        fragments = list(rollout.fragments())
    assert [fragment.num_steps for fragment in fragments] == [8, 4, 8, 8]
    assert seen == list(range(1, len(seen) + 1))
