"""Under pace a host of whole rollouts begins a fragment when the trainer wants it, with the newest weights."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_agent_envs import DoomedAgents, NeverResetAgents
from ending_envs import Doomed, NeverReset
from feeding_rollouts import graph_over, running, trainer, weights
from numbered_module import NumberedEnv
from paced_hosts import PacedHosts
from remote_hosts import SHORT, BrokenWire, listening
from remote_rollouts import makers, rollout_over, rollouts_on

from rollflow import RemoteRollouts
from rollflow.nodes import RolloutHost


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.001)
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
@pytest.mark.wait_times(first_pause_s=0.001)
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
