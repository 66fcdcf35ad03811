"""Under pace a host of whole rollouts begins a fragment when the trainer wants it, with the newest weights."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ending_agent_envs import DoomedAgents, NeverResetAgents
from ending_envs import Doomed, NeverReset
from feeding_rollouts import graph_over, running, trainer, weights
from numbered_module import NumberedEnv, NumberedModule
from paced_hosts import PacedHosts
from remote_hosts import SHORT, BrokenWire, listening
from remote_rollouts import RawRollouts, makers, rollout_over, rollouts_on

from rollflow import Columns, RemoteRollouts, TrainerStream
from rollflow.nodes import RolloutHost
from rollflow.stream.wire import HostConnection, Turn, Weights, Welcome


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried again, is without a delay."""
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("agents", [0, 2])
def test_every_lane_acts_with_what_was_published(max_lag: int, agents: int, address: str) -> None:
    remote = PacedHosts(RolloutHost, agents, hosts=2)
    rounds = remote.rounds(max_lag)
    with ExitStack() as hosts, TrainerStream(address, **rounds.settings()) as stream:
        hosts.enter_context(remote.host(0, 1, 2, lanes=2))
        hosts.enter_context(remote.host(3))
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address)) as feed:
            rounds.until(stream, rounds.are_of(0, 1, 2, times=20))
            feed.drain()
            rounds.rest(stream)
    assert rounds.steps == rollout.num_steps
    assert stream.lost == rollout.lost == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("agents", [0, 2])
def test_a_host_that_is_cut_off_again_and_again_loses_nothing(max_lag: int, agents: int) -> None:
    remote = PacedHosts(RolloutHost, agents, hosts=2, limits=SHORT)  # so that it is never taken for lost
    rounds = remote.rounds(max_lag)
    lengths = iter(range(1000, 100_000, 379))
    with ExitStack() as hosts, trainer(**rounds.settings()) as stream:
        wire = BrokenWire(remote.address, lambda: next(lengths))
        hosts.callback(wire.close)
        # By a name of its own: one of the same name that joins meanwhile would take its place.
        hosts.enter_context(remote.host_of(remote.makers(0, 1), wire.address, lanes=2, name="cut off"))
        hosts.enter_context(remote.host(2))
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address)) as feed:
            rounds.until(stream, lambda: wire.cuts >= 20 and len(rounds.lanes) > 1)
            feed.drain()
            rounds.rest(stream)
    assert set(map(frozenset, rounds.lanes[:-1])) == {frozenset({0, 1, 2})}
    assert rounds.steps == rollout.num_steps
    assert stream.lost == rollout.lost == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("step", [16, 21], ids=["in its first step", "later"])
@pytest.mark.parametrize("agents", [0, 2])
def test_environments_that_raise_cut_a_fragment_short_and_those_that_always_do_are_waited_for_no_more(
    step: int, agents: int, tmp_path: Path
) -> None:
    remote = PacedHosts(RolloutHost, agents)
    rounds = remote.rounds(0)
    given = [partial(NumberedEnv, 0), partial(Doomed, 1, tmp_path, "raise", step, 1), partial(NeverReset, 2)]
    if agents:
        doomed = partial(DoomedAgents, 1, tmp_path, fate="raise", step=step, lives=1, **remote.options)
        given = [*remote.makers(0), doomed, partial(NeverResetAgents, 2, **remote.options)]
    with trainer(**rounds.settings()) as stream, remote.host_of(given, lanes=3):
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address)) as feed:
            rounds.until(stream, rounds.are_of(0, 1, times=10))
            feed.drain()
            rounds.rest(stream)
    assert rounds.steps == rollout.num_steps
    assert stream.lost == {}
    assert rollout.lost == {"workers": max(agents, 1)}  # the step that raised


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["fragments", "batches"])
@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("agents", [0, 2])
def test_what_a_host_was_making_when_it_was_killed_never_comes_and_is_not_waited_for(
    max_lag: int, agents: int, sends: str, tmp_path: Path
) -> None:
    remote = PacedHosts(RolloutHost, agents, hosts=2)
    rounds = remote.rounds(max_lag)
    env, doomed = Doomed, ((1, tmp_path, "kill", 21, 9), {"lengths": (100, 200)})
    if agents:
        env, doomed = DoomedAgents, ((1, tmp_path), {"fate": "kill", "step": 21, "lives": 9, **remote.options})
    sink = {"sends": sends} | ({"fragments_per_batch": 2} if sends == "batches" else {})
    with ExitStack() as hosts, trainer(**rounds.settings()) as stream:
        hosts.callback(remote.process_of([doomed], env=env).end)
        hosts.enter_context(remote.host(0))
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address, **sink)) as feed:
            rollout.explain()
            rounds.until(stream, lambda: rounds.slots == {0} and bool(rollout.lost))
            rounds.until(stream, rounds.are_of(*rounds.lanes[-1], times=5))
            feed.drain()
            rounds.rest(stream)
    assert rounds.steps == rollout.num_steps
    assert rounds.steps_of[1] == 16 * max(agents, 1)
    assert stream.lost == {}
    assert set(rollout.lost) == {"workers"}


class Large(NumberedModule):
    """Has more weights than sockets hold."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = torch.nn.Parameter(torch.zeros(4_000_000))


class Returning(RawRollouts):
    """Comes back through another connection."""

    def come_back(self) -> None:
        """Be welcomed, and read no further."""
        self.sock.close()
        self.sock = socket.create_connection((self._address.host, self._address.port))
        self.connection = HostConnection(self.hello, self.session, secret=None, limits=SHORT, now=0.0)
        self._host._welcomed(self.next_of(Welcome))

    def __init__(self, address: Any) -> None:
        super().__init__(address, module=Large())
        self._address = address


@pytest.mark.slow
def test_the_newest_weights_are_before_a_turn_though_older_ones_are_still_on_their_way() -> None:
    envs = listening(RemoteRollouts)
    with ThreadPoolExecutor(1) as pool, trainer(max_lag=0, on_excess="pace") as stream:
        made = pool.submit(rollout_over, envs, module=Large())
        with closing(Returning(envs.addresses[0])) as raw:
            raw._host._welcomed(raw.next_of(Welcome))
            graph = graph_over(made.result(), stream.address)
            stream.publish(Large().state_dict() | weights(1.0))
            with running(*graph):
                batches = iter(stream)
                first = pool.submit(next, batches)
                turn = raw.next_turn()
                answer = raw.made(turn)
                raw.come_back()
                raw.connection.answer(turn, answer)  # before the weights that come through this connection
                raw.flush()
                np.testing.assert_array_equal(first.result()[Columns.POLICY_VERSION], 1)
                stream.publish(Large().state_dict() | weights(2.0))
                second = pool.submit(next, batches)
                told: list[int] = []
                while not isinstance(event := raw.next_event(), Turn):
                    if isinstance(event, Weights):
                        told.append(event.version)
                    raw._host._take_news(event)
                assert told == [1, 2]
                raw.answer(event)
                np.testing.assert_array_equal(second.result()[Columns.POLICY_VERSION], 2)


def test_a_version_is_seen_once_turns_can_begin_with_it() -> None:
    envs, seen = listening(RemoteRollouts), []
    with rollouts_on(envs.addresses[0], makers(0)), rollout_over(envs) as rollout:
        broadcast = rollout.environments.broadcast

        def broadcasting(published: Any) -> None:
            seen.append(rollout.policy_version)
            broadcast(published)

        rollout.environments.broadcast = broadcasting
        assert rollout.publish_as(3, weights(3.0))
        assert not rollout.publish_as(3, weights(4.0))
        assert seen == [0]
        assert next(iter(rollout.fragments())).policy_version == 3
