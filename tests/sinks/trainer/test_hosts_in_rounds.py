"""Under pace, rounds are of the lanes that there are, whatever hosts come, leave or are lost: as fresh as ever."""

import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_agent_envs import DoomedAgents
from feeding_rollouts import SHORT, feeding, graph_over, running, trainer, weights
from held_envs import Held, let_go
from paced_hosts import PacedHosts
from remote_hosts import BrokenWire
from remote_rollouts import await_that

from rollflow import Columns, Graph, TrainerStream
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.sinks import TrainerSink
from rollflow.stream import WireError


def _named(given: Any) -> str:
    return f"{given[0].__name__}, {'several agents' if given[1] else 'one agent'}"


@pytest.fixture(params=[(EnvHost, 0), (EnvHost, 2), (RolloutHost, 0), (RolloutHost, 2)], ids=_named)
def remote(request: pytest.FixtureRequest) -> PacedHosts:
    """Hosts of either kind, of one agent or of several."""
    return PacedHosts(*request.param)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_hosts_that_come_late_join_the_next_round_and_those_that_leave_are_not_waited_for(
    max_lag: int, remote: PacedHosts
) -> None:
    rounds = remote.rounds(max_lag)
    with ExitStack() as hosts, trainer(**rounds.settings()) as stream:
        first = hosts.enter_context(remote.host(0))
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address)) as feed:
            rounds.until(stream, rounds.are_of(0))
            with remote.host(1, 2, lanes=2):
                rounds.until(stream, rounds.are_of(0, 1, 2))
            rounds.until(stream, rounds.are_of(0))
            first.stop()
            hosts.enter_context(remote.host(3))  # no host is left, until this one comes
            rounds.until(stream, rounds.are_of(3))
            feed.drain()
            rounds.rest(stream)
    assert rounds.steps == rollout.num_steps
    assert stream.lost == {}


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_connection_that_is_cut_again_and_again_leaves_nobody_waiting(max_lag: int, remote: PacedHosts) -> None:
    rounds = remote.rounds(max_lag)
    lengths = iter([4000, 9000, 3000, 15000, 6000, 5000, 2500, 4000, 3000, 5000, 2500])
    with ExitStack() as hosts, trainer(**rounds.settings()) as stream:
        wire = BrokenWire(stream.address, lambda: next(lengths, None))
        hosts.callback(wire.close)
        hosts.enter_context(remote.host(0))
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, wire.address)) as feed:
            for slot in range(1, 20):
                with remote.host(slot):
                    rounds.until(stream, rounds.are_of(0, slot, times=1))
                if next(lengths, None) is None:
                    break
            feed.drain()
            rounds.rest(stream)
    assert wire.cuts > 3
    assert rounds.steps == rollout.num_steps
    assert stream.lost == {}


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_host_that_is_killed_is_waited_for_no_more_and_comes_back_with_the_next_round(
    max_lag: int, remote: PacedHosts
) -> None:
    rounds = remote.rounds(max_lag)
    with ExitStack() as hosts, trainer(**rounds.settings()) as stream:
        hosts.enter_context(remote.host(0))
        rollout = remote.rollout()
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address)) as feed:
            for lane in (1, 2):
                host = remote.process(lane)
                hosts.callback(host.end)
                rounds.until(stream, rounds.are_of(0, lane))
                host.signal(signal.SIGKILL)
                rounds.until(stream, rounds.are_of(0))
            feed.drain()
            rounds.rest(stream)
    assert rounds.steps == rollout.num_steps
    assert stream.lost == {}
    assert set(rollout.lost) <= {"workers"}


@pytest.mark.slow
def test_lanes_that_have_given_all_that_they_are_to_give_are_waited_for_no_more(remote: PacedHosts) -> None:
    rounds = remote.rounds(0)
    with ExitStack() as hosts, trainer(**rounds.settings()) as stream:
        hosts.enter_context(remote.host(0))
        rollout = remote.rollout(num_fragments=20)
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, stream.address)):
            rounds.until(stream, rounds.are_of(0))
            hosts.enter_context(remote.host(1))
            rounds.rest(stream)
    assert rounds.lanes[-1] == {1}
    assert rounds.steps == rollout.num_steps == 2 * 20 * 8 * max(remote.agents, 1)


@pytest.mark.slow
def test_a_lane_that_ended_under_an_unpaced_trainer_is_not_waited_for(remote: PacedHosts, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/trainer"
    with ExitStack() as hosts:
        held = partial(Held, 0, tmp_path, steps=[4 * 8])  # until another lane is there
        if remote.agents:
            held = partial(DoomedAgents, 0, tmp_path, fate="hold", step=4 * 8, lives=1, **remote.options)
        hosts.enter_context(remote.host_of([held]))
        let_it_go = partial(let_go, tmp_path, 0) if not remote.agents else (tmp_path / "go 0").touch
        hosts.callback(let_it_go)
        rollout = remote.rollout(num_fragments=6)
        with running(*graph_over(rollout, address)) as feed:
            unpaced: dict[str, Any] = {"yields": "fragments", "limits": SHORT, "join_timeout": 60.0}
            with pytest.raises(ZeroDivisionError), TrainerStream(address, **unpaced) as stream:
                stream.publish(remote.weights(1.0))
                for fragment in stream:
                    saved = stream.state_dict()
                    if (fragment.lane, fragment.sequence) == (0, 2):
                        hosts.enter_context(remote.host(1))
                        await_that(lambda: rollout.environments.num_lanes == 2)
                        let_it_go()
                    if (fragment.lane, fragment.sequence) == (0, 5):
                        break
                raise ZeroDivisionError
            with TrainerStream(address, **remote.rounds(0).settings(), yields="fragments") as another:
                another.load_state_dict(saved)
                another.publish(remote.weights(another.version + 1.0))
                for fragment in another:
                    assert fragment.lane == 1
                    another.publish(remote.weights(another.version + 1.0))
    assert feed.sink.lost == {}


def test_several_trainers_which_might_count_a_lane_in_different_rounds_are_refused(
    remote: PacedHosts, tmp_path: Path
) -> None:
    with ExitStack() as hosts, TrainerStream(f"unix:{tmp_path}/one", **remote.rounds(0).settings()) as stream:
        hosts.enter_context(remote.host(0))
        rollout, graph = remote.rollout(), Graph("two")
        sinks = [TrainerSink(f"unix:{tmp_path}/{name}", limits=SHORT) for name in ("one", "other")]
        for sink in sinks:
            graph.connect(rollout.fragments, sink, capacity=1)
        with pytest.raises(WireError, match="no other trainers of RemoteEnvs or RemoteRollouts"):
            with running(graph, rollout, sinks[0]) as feed:
                stream._begin_next()
                feed.ended.result(60)


@pytest.mark.parametrize("sends", ["fragments", "batches"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_a_rollout_gives_that_comes_while_the_trainer_is_at_a_batch_is_no_older(max_lag: int, sends: str) -> None:
    sink = {"sends": sends} | ({"fragments_per_batch": 2} if sends == "batches" else {})
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        with feeding(stream.address, (0, 1), lanes=2, num_fragments=8, sink=sink) as one:
            batches = iter(stream)
            stream.publish(weights(1.0))
            next(batches)
            with feeding(stream.address, (2, 3), lanes=2, num_fragments=8, seed=1, sink=sink) as other:
                await_that(lambda: other.sink._rollout_end.gate.order)
                steps = 2 * 8
                stream.publish(weights(stream.version + 1.0))
                for batch in batches:
                    assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - max_lag
                    steps += len(batch["obs"])
                    stream.publish(weights(stream.version + 1.0))
    assert stream.lost == {}
    assert steps == one.rollout.num_steps + other.rollout.num_steps
