"""Under pace, rounds are of the lanes that there are, whatever hosts come, leave or are lost: as fresh as ever."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_agent_envs import DoomedAgents, NeverResetAgents
from ending_envs import Doomed, NeverReset, NotMadeAgain
from feeding_rollouts import SHORT, failing, feeding, graph_for_two, graph_over, running, trainer, weights
from held_envs import Held, let_go
from numbered_module import NumberedEnv, NumberedModule
from paced_hosts import PacedHosts, Rounds
from remote_hosts import BrokenWire, hosting, listening
from remote_rollouts import await_that, makers, rollout_over, rollouts_on

from rollflow import Columns, RemoteRollouts, Rollout, TrainerStream
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.sinks.trainer.rollout_peer import PeerLife
from rollflow.stream import WireError
from rollflow.stream.wire import Limits


def _named(given: Any) -> str:
    return f"{given[0].__name__}, {'several agents' if given[1] else 'one agent'}"


@pytest.fixture(params=[(EnvHost, 0), (EnvHost, 2), (RolloutHost, 0), (RolloutHost, 2)], ids=_named)
def remote(request: pytest.FixtureRequest) -> PacedHosts:
    """Hosts of either kind, of one agent or of several."""
    return PacedHosts(*request.param)


@contextmanager
def paced(
    remote: PacedHosts, max_lag: int = 0, through: Callable[[Any], Any] = str, drains: bool = True, **options: Any
) -> Iterator[tuple[Rounds, TrainerStream, Any]]:
    """Rounds of a rollout over hosts, its trainer, and the rollout; at the end the trainer has got every step.

    through    gives the address that the rollout dials, of the trainer's
    drains     whether the rollout is drained at the end
    options    of the rollout, and of the sink and what is before it as `sink`
    """
    rounds, sink = remote.rounds(max_lag), options.pop("sink", {})
    with trainer(**rounds.settings()) as stream:
        rollout = remote.rollout(**options)
        stream.publish(remote.weights(1.0))
        with running(*graph_over(rollout, through(stream.address), **sink)) as feed:
            yield rounds, stream, rollout
            if drains:
                feed.drain()
            rounds.rest(stream)
    assert rounds.steps == rollout.num_steps
    assert stream.lost == {}


@pytest.fixture
def max_lag(remote: PacedHosts) -> int:
    """0 or 1 with hosts of either kind, and with one agent or several."""
    return int((remote.kind is EnvHost) == (remote.agents > 0))


@pytest.mark.slow
def test_late_hosts_join_the_next_round_and_those_that_leave_hold_nobody_up(max_lag: int, remote: PacedHosts) -> None:
    with ExitStack() as hosts, remote.host(0) as first, paced(remote, max_lag) as (rounds, stream, _):
        rounds.until(stream, rounds.are_of(0))
        with remote.host(1, 2, lanes=2):
            rounds.until(stream, rounds.are_of(0, 1, 2))
        rounds.until(stream, rounds.are_of(0))
        first.stop()
        hosts.enter_context(remote.host(3))  # no host is left, until this one comes
        rounds.until(stream, rounds.are_of(3))


@pytest.mark.slow
def test_a_connection_that_is_cut_again_and_again_leaves_nobody_waiting(max_lag: int, remote: PacedHosts) -> None:
    lengths = iter([4000, 9000, 3000, 15000, 6000, 5000, 2500, 4000, 3000, 5000, 2500])
    wires: list[BrokenWire] = []

    def through(address: Any) -> Any:
        wires.append(hosts.enter_context(closing(BrokenWire(address, lambda: next(lengths, None)))))
        return wires[0].address

    with ExitStack() as hosts, remote.host(0), paced(remote, max_lag, through) as (rounds, stream, _):
        for slot in range(1, 20):
            with remote.host(slot):
                rounds.until(stream, rounds.are_of(0, slot, times=1))
            if next(lengths, None) is None:
                break
    assert wires[0].cuts > 3


@pytest.mark.slow
def test_a_host_that_is_killed_is_waited_for_no_more_and_joins_the_next_round(max_lag: int, remote: PacedHosts) -> None:
    with ExitStack() as hosts, remote.host(0), paced(remote, max_lag) as (rounds, stream, rollout):
        for lane in (1, 2):
            host = remote.process(lane)
            hosts.callback(host.end)
            rounds.until(stream, rounds.are_of(0, lane))
            host.signal(signal.SIGKILL)
            rounds.until(stream, rounds.are_of(0))
    assert set(rollout.lost) <= {"workers"}


@pytest.mark.slow
def test_lanes_that_have_given_all_that_they_are_to_give_are_waited_for_no_more(remote: PacedHosts) -> None:
    more = {"drains": False, "num_fragments": 20}
    with ExitStack() as hosts, remote.host(0), paced(remote, **more) as (rounds, stream, rollout):
        rounds.until(stream, rounds.are_of(0))
        hosts.enter_context(remote.host(1))
    assert rounds.lanes[-1] == {1}
    assert rollout.num_steps == 2 * 20 * 8 * max(remote.agents, 1)


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
            with failing(address, yields="fragments") as stream:
                stream.publish(remote.weights(1.0))
                for fragment in stream:
                    saved = stream.state_dict()
                    if (fragment.lane, fragment.sequence) == (0, 2):
                        hosts.enter_context(remote.host(1))
                        await_that(lambda: rollout.environments.num_lanes == 2)
                        let_it_go()
                    if (fragment.lane, fragment.sequence) == (0, 5):
                        break
            with TrainerStream(address, **remote.rounds(0).settings(), yields="fragments") as another:
                another.load_state_dict(saved)
                another.publish(remote.weights(another.version + 1.0))
                for fragment in another:
                    assert fragment.lane == 1
                    another.publish(remote.weights(another.version + 1.0))
    assert feed.sink.lost == {}


PACED: dict[str, Any] = {"max_lag": 0, "on_excess": "pace"}


def test_trainers_that_might_count_a_lane_in_different_rounds_are_refused(remote: PacedHosts, tmp_path: Path) -> None:
    with ExitStack() as hosts, TrainerStream(f"unix:{tmp_path}/one", **remote.rounds(0).settings()) as stream:
        hosts.enter_context(remote.host(0))
        graph, rollout, sinks = graph_for_two(remote.rollout(), tmp_path)
        with pytest.raises(WireError, match="no other trainers of RemoteEnvs or RemoteRollouts"):
            with running(graph, rollout, sinks[1]) as feed:
                stream._begin_next()
                feed.ended.result(60)


@pytest.mark.parametrize("sends", ["fragments", "batches"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_what_a_rollout_gives_that_comes_while_the_trainer_is_at_a_batch_is_no_older(max_lag: int, sends: str) -> None:
    options: dict[str, Any] = {"lanes": 2, "num_fragments": 8, "sink": {"sends": sends, "fragments_per_batch": 2}}
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        with feeding(stream.address, (0, 1), **options) as one:
            batches = iter(stream)
            stream.publish(weights(1.0))
            next(batches)
            with feeding(stream.address, (2, 3), seed=1, **options) as other:
                await_that(lambda: other.sink._gate.order)
                steps = 2 * 8
                stream.publish(weights(stream.version + 1.0))
                for batch in batches:
                    assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - max_lag
                    steps += len(batch["obs"])
                    stream.publish(weights(stream.version + 1.0))
    assert stream.lost == {}
    assert steps == one.rollout.num_steps + other.rollout.num_steps


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.001)
@pytest.mark.parametrize(("max_lag", "agents"), [(0, 2), (1, 0)])
def test_a_host_that_is_cut_off_again_and_again_loses_nothing(max_lag: int, agents: int) -> None:
    remote = PacedHosts(
        RolloutHost, agents, hosts=2, limits=Limits(heartbeat_s=5.0)
    )  # so that it is never taken for lost
    lengths = iter(range(1000, 100_000, 379))
    with closing(BrokenWire(remote.address, lambda: next(lengths))) as wire, remote.host(2):
        # By a name of its own: one of the same name that joins meanwhile would take its place.
        with remote.host_of(remote.makers(0, 1), wire.address, lanes=2, name="cut off"):
            with paced(remote, max_lag) as (rounds, stream, rollout):
                rounds.until(stream, lambda: wire.cuts >= 20 and len(rounds.lanes) > 1)
    assert set(map(frozenset, rounds.lanes[:-1])) == {frozenset({0, 1, 2})}
    assert rollout.lost == {}


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.001)
@pytest.mark.parametrize("step", [16, 21], ids=["in its first step", "later"])
@pytest.mark.parametrize("agents", [0, 2])
def test_environments_that_raise_cut_a_fragment_short_and_those_that_always_do_are_waited_for_no_more(
    step: int, agents: int, tmp_path: Path
) -> None:
    remote = PacedHosts(RolloutHost, agents)
    envs = [partial(NumberedEnv, 0), partial(Doomed, 1, tmp_path, "raise", step, 1), partial(NeverReset, 2)]
    if agents:
        doomed = partial(DoomedAgents, 1, tmp_path, fate="raise", step=step, lives=1, **remote.options)
        envs = [*remote.makers(0), doomed, partial(NeverResetAgents, 2, **remote.options)]
    with remote.host_of(envs, lanes=3), paced(remote) as (rounds, stream, rollout):
        rounds.until(stream, rounds.are_of(0, 1, times=10))
    assert rollout.lost == {"workers": max(agents, 1)}  # the step that raised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sends", "max_lag", "agents"), [("fragments", 0, 0), ("fragments", 1, 2), ("batches", 1, 0), ("batches", 0, 2)]
)
def test_what_a_host_was_making_when_it_was_killed_never_comes_and_is_not_waited_for(
    max_lag: int, agents: int, sends: str, tmp_path: Path
) -> None:
    remote = PacedHosts(RolloutHost, agents, hosts=2)
    env, doomed = Doomed, ((1, tmp_path, "kill", 21, 9), {"lengths": (100, 200)})
    if agents:
        env, doomed = DoomedAgents, ((1, tmp_path), {"fate": "kill", "step": 21, "lives": 9, **remote.options})
    with ExitStack() as hosts:
        hosts.callback(remote.process_of([doomed], env=env).end)
        hosts.enter_context(remote.host(0))
        with paced(remote, max_lag, sink={"sends": sends, "fragments_per_batch": 2}) as (rounds, stream, rollout):
            rollout.explain()
            rounds.until(stream, lambda: rounds.slots == {0} and bool(rollout.lost))
            rounds.until(stream, rounds.are_of(*rounds.lanes[-1], times=5))
    assert rounds.steps_of[1] == 16 * max(agents, 1)
    assert set(rollout.lost) == {"workers"}


def test_a_version_is_seen_once_turns_can_begin_with_it() -> None:
    envs, seen = listening(RemoteRollouts), []
    with rollouts_on(envs.addresses[0], makers(0)), rollout_over(envs) as rollout:
        send = rollout._execution.send

        def sending(published: Any) -> None:
            seen.append(rollout.policy_version)
            send(published)

        rollout._execution.send = sending
        assert rollout.publish_as(3, weights(3.0))
        assert not rollout.publish_as(3, weights(4.0))
        assert seen == [0]
        assert next(iter(rollout.fragments())).policy_version == 3


Make = Callable[[int, Path], Any]


LOST: dict[str, Make] = {"later": NotMadeAgain, "at once": lambda slot, folder: NeverReset(slot)}


def rollout_that_loses_a_lane(where: Any, make: Make, folder: Path, **options: Any) -> Rollout:
    envs = [partial(NumberedEnv, 0), partial(make, 1, folder), partial(NumberedEnv, 2)]
    return Rollout(envs, module=NumberedModule(), lanes=3, where=where, workers=1, fragment_length=8, **options)


def rounds_without_it(stream: TrainerStream, rounds: int, *, publishes: bool = True) -> dict[int, list[int]]:
    """Go on until so many batches were of two fragments, none of lane 1: the numbers of each lane's that came."""
    taken: dict[int, list[int]] = {}
    for number, batch in enumerate(stream):
        assert number < 500
        if stream._staleness.max_lag is not None:
            assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - stream._staleness.max_lag
        for each in stream.handed:
            taken.setdefault(each.lane, []).append(each.sequence)
        lanes = [each.lane for each in stream.handed]
        rounds -= len(lanes) == 2 and 1 not in lanes
        if not rounds:
            break
        if publishes:
            stream.publish(weights(stream.version + 1.0))
    return taken


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.0)
@pytest.mark.parametrize(
    ("max_lag", "where", "how"),
    [(0, "processes", "later"), (1, "processes", "at once"), (1, "rollouts", "later"), (0, "rollouts", "at once")],
)
def test_others_go_on_as_fresh_also_at_another_trainer(max_lag: int, where: Any, how: str, tmp_path: Path) -> None:
    rollout = rollout_that_loses_a_lane(where, LOST[how], tmp_path)
    address, settings = f"unix:{tmp_path}/trainer", {"max_lag": max_lag, "on_excess": "pace", "limits": SHORT}
    with running(*graph_over(rollout, address)):
        with failing(address, **settings) as stream:
            rounds_without_it(stream, 5)
            state = stream.state_dict()
        with TrainerStream(address, **settings) as another:
            another.load_state_dict(state)
            another.publish(weights(another.version + 1.0))
            rounds_without_it(another, 5)


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.0)
@pytest.mark.parametrize("bound", [{}, PACED], ids=["free", "paced"])
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_each_of_two_trainers_is_told(where: Any, bound: dict[str, Any], tmp_path: Path) -> None:
    rollout = rollout_that_loses_a_lane(where, NotMadeAgain, tmp_path, num_fragments=12)

    def other() -> dict[int, list[int]]:
        with TrainerStream(f"unix:{tmp_path}/other", limits=Limits(grace_s=5.0), **bound) as stream:
            return rounds_without_it(stream, 500, publishes=False)

    graph, _, sinks = graph_for_two(rollout, tmp_path)
    with ThreadPoolExecutor() as pool, running(graph, rollout, sinks[1]):
        others = pool.submit(other)
        with TrainerStream(f"unix:{tmp_path}/one", limits=SHORT, **PACED) as stream:
            ours = rounds_without_it(stream, 500)
        for taken in (ours, others.result()):
            assert taken == {lane: list(range(3 if lane == 1 else 12)) for lane in range(3)}


def test_of_a_rollout_that_is_drained_no_lane_is_set_aside() -> None:
    with trainer(yields="fragments") as stream:
        with feeding(stream.address, range(3), lanes=3, where="processes", workers=1) as feed:
            for number, _ in enumerate(stream):
                if number == 5:
                    feed.drain()
            [source] = stream._listener.sources.values()
            assert source.life is PeerLife.FINISHED
            assert source.aside == {}


def test_where_lanes_come_and_go_a_batch_is_of_as_many_fragments_as_there_are() -> None:
    envs = listening()
    with hosting(envs.addresses[0], [partial(NumberedEnv, 0)]):
        rollout = Rollout(envs, module=NumberedModule(), fragment_length=8)
        with trainer() as stream, running(*graph_over(rollout, stream.address)):
            batches = iter(stream)
            for count in (1, 2, 1):
                with hosting(envs.addresses[0], [partial(NumberedEnv, 1)]) if count == 2 else nullcontext():
                    while next(batches) is None or len(stream.handed) != count:
                        pass
