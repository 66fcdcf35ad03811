"""A lane whose environments are lost again and again is set aside: a trainer that takes rounds waits for it no more."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from ending_envs import NeverReset, NotMadeAgain
from feeding_rollouts import SHORT, graph_over, running, weights
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import hosting, listening

from rollflow import Columns, Graph, Rollout, TrainerStream
from rollflow.sinks import TrainerSink
from rollflow.sinks.trainer.rollout_peer import PeerLife, RolloutPeer
from rollflow.stream import WireError, wire
from rollflow.stream.wire import Limits, TrainerSession


def source_of(lanes: int) -> RolloutPeer:
    source = RolloutPeer(TrainerSession(bytes(16)))
    source.lanes = set(range(lanes))
    source.life = PeerLife.HERE
    return source


def test_a_lane_that_there_is_not_is_refused() -> None:
    with pytest.raises(WireError, match="lane 3 is set aside, expected one of 3"):
        source_of(3).set_aside(3, 0)


def test_what_comes_of_a_lane_that_is_gone_is_refused() -> None:
    source = source_of(3)
    source.action_space = gym.spaces.Discrete(2)
    source.set_aside(1, 4)
    with pytest.raises(WireError, match="fragment 5 of lane 1, which is set aside behind 4, expected another lane"):
        source.read(wire.Fragment(1, 5, {}, {}))


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
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("where", ["processes", "rollouts"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_others_go_on_as_fresh_as_before_also_at_another_trainer(
    max_lag: int, where: Any, how: str, tmp_path: Path
) -> None:
    rollout = rollout_that_loses_a_lane(where, LOST[how], tmp_path)
    address, settings = f"unix:{tmp_path}/trainer", {"max_lag": max_lag, "on_excess": "pace", "limits": SHORT}
    with running(*graph_over(rollout, address)):
        with pytest.raises(ZeroDivisionError), TrainerStream(address, **settings) as stream:
            rounds_without_it(stream, 5)
            state = stream.state_dict()
            raise ZeroDivisionError
        with TrainerStream(address, **settings) as another:
            another.load_state_dict(state)
            another.publish(weights(another.version + 1.0))
            rounds_without_it(another, 5)


PACED: dict[str, Any] = {"max_lag": 0, "on_excess": "pace"}


def graph_for_two(rollout: Rollout, folder: Path) -> tuple[Graph, Rollout, TrainerSink]:
    """A rollout for the trainers 'one' and 'other'; the second one's sink."""
    graph, sinks = Graph("two"), {name: TrainerSink(f"unix:{folder}/{name}", limits=SHORT) for name in ("one", "other")}
    graph.add(rollout=rollout, **sinks)
    for name in sinks:
        graph.connect("rollout.fragments", name, capacity=1)
    return graph, rollout, sinks["other"]


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=0.0)
@pytest.mark.parametrize("bound", [{}, PACED], ids=["free", "paced"])
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_each_of_two_trainers_is_told(where: Any, bound: dict[str, Any], tmp_path: Path) -> None:
    rollout = rollout_that_loses_a_lane(where, NotMadeAgain, tmp_path, num_fragments=12)

    def other() -> dict[int, list[int]]:
        with TrainerStream(f"unix:{tmp_path}/other", limits=Limits(grace_s=5.0), join_timeout=20.0, **bound) as stream:
            return rounds_without_it(stream, 500, publishes=False)

    with ThreadPoolExecutor() as pool, running(*graph_for_two(rollout, tmp_path)):
        others = pool.submit(other)
        with TrainerStream(f"unix:{tmp_path}/one", limits=SHORT, **PACED) as stream:
            ours = rounds_without_it(stream, 500)
        for taken in (ours, others.result()):
            assert taken == {lane: list(range(3 if lane == 1 else 12)) for lane in range(3)}


def test_of_a_rollout_that_is_drained_no_lane_is_set_aside() -> None:
    envs = [partial(NumberedEnv, slot) for slot in range(3)]
    rollout = Rollout(envs, module=NumberedModule(), lanes=3, where="processes", workers=1, fragment_length=8)
    with TrainerStream("tcp://127.0.0.1:0", limits=SHORT, join_timeout=60.0, yields="fragments") as stream:
        with running(*graph_over(rollout, stream.address)) as feed:
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
        stream = TrainerStream("tcp://127.0.0.1:0", limits=SHORT, join_timeout=60.0)
        with stream, running(*graph_over(rollout, stream.address)):
            batches = iter(stream)
            for count in (1, 2, 1):
                with hosting(envs.addresses[0], [partial(NumberedEnv, 1)]) if count == 2 else nullcontext():
                    while next(batches) is None or len(stream.handed) != count:
                        pass
