"""A lane whose environments are lost again and again is set aside: a trainer that takes rounds waits for it no more."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from doomed import NeverReset, NotMadeAgain
from feeding import SHORT, graph_over, running, weights
from numbered import NumberedEnv, NumberedModule
from remote_hosts import hosting, listening

from rollflow.nodes import Rollout
from rollflow.sinks import TrainerStream
from rollflow.sinks.trainer.pace_gate import PaceGate
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.supply import Rounds
from rollflow.stream import Columns, Fragment, WireError, wire
from rollflow.stream.wire import Aside, TrainerSession


class OfLane(Fragment):
    """A fragment of which nothing but its lane is looked at."""

    def __init__(self, lane: int) -> None:
        self.lane = lane


def source_of(lanes: int) -> Source:
    source = Source(TrainerSession(bytes(16)))
    source.lanes = lanes
    source.connection = object()  # type: ignore[assignment]
    return source


def test_a_round_is_whole_without_a_lane_once_all_of_that_has_come() -> None:
    source, rounds = source_of(3), Rounds()
    items = [Arrived(source, number, OfLane(lane), None) for number, lane in enumerate((0, 1, 2, 0, 1), 1)]

    def come(*places: int) -> None:
        for place in places:
            rounds.add(items[place])
            source.session.taken = items[place].number

    come(0, 1)
    source.take_news(Aside(2, 3))  # its last is on the way
    assert rounds.take([source]) == []
    come(2)
    assert rounds.take([source]) == items[:3]
    come(3)
    assert rounds.take([source]) == []
    come(4)
    assert rounds.take([source]) == items[3:]
    assert source.streams == 2


@pytest.mark.parametrize(
    ("lane", "number", "told"),
    [
        (3, 0, "lane 3 is set aside, expected one of 3"),
        (-1, 0, "lane -1 is set aside, expected one of 3"),
        (0, -1, "lane 0 is set aside behind -1, expected a number"),
    ],
)
def test_a_lane_or_a_number_that_there_is_not_is_refused(lane: int, number: int, told: str) -> None:
    with pytest.raises(WireError, match=told):
        source_of(3).take_news(Aside(lane, number))


def test_what_comes_of_a_lane_that_is_gone_is_refused() -> None:
    source = source_of(3)
    source.action_space = gym.spaces.Discrete(2)
    source.take_news(Aside(1, 4))
    with pytest.raises(WireError, match="fragment 5 of lane 1, which is set aside behind 4, expected another lane"):
        source.read(wire.Fragment(1, 5, {}, {}))


def test_a_lane_is_told_of_once_its_last_fragment_has_been_given() -> None:
    rung: list[None] = []
    gate = PaceGate(None, None, "it", lambda: rung.append(None))  # type: ignore[arg-type]
    gate.give(1, 0)
    gate.gone(1, 2)
    gate.gone(0, 0)
    assert len(rung) == 2
    assert gate.newly_aside(5) == [(0, 5)]
    gate.give(1, 1)
    assert gate.newly_aside(6) == [(1, 6)]
    assert gate.newly_aside(7) == []
    assert gate.aside == {0: 5, 1: 6}


Make = Callable[[int, Path], Any]
LOST: dict[str, Make] = {"later": NotMadeAgain, "at once": lambda slot, folder: NeverReset(slot)}


def rollout_that_loses_a_lane(where: Any, make: Make, folder: Path) -> Rollout:
    envs = [partial(NumberedEnv, 0), partial(make, 1, folder), partial(NumberedEnv, 2)]
    return Rollout(envs, module=NumberedModule(), lanes=3, where=where, workers=1, fragment_length=8)


@pytest.mark.slow
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("where", ["processes", "rollouts"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_others_go_on_as_fresh_as_before_also_at_another_trainer(
    max_lag: int, where: Any, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.nodes.backoff.FIRST_S", 0.0)
    rollout = rollout_that_loses_a_lane(where, LOST[how], tmp_path)
    address, settings = f"unix:{tmp_path}/trainer", {"max_lag": max_lag, "on_excess": "pace", "limits": SHORT}

    def rounds_without_it(stream: TrainerStream, rounds: int) -> None:
        left = rounds
        for number, batch in enumerate(stream):
            assert number < 500
            assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - max_lag
            left -= {fragment.lane for fragment in stream.handed} == {0, 2}
            if not left:
                return
            stream.publish(weights(stream.version + 1.0))

    with running(*graph_over(rollout, address)):
        with pytest.raises(ZeroDivisionError), TrainerStream(address, **settings) as stream:
            rounds_without_it(stream, 5)
            state = stream.state_dict()
            raise ZeroDivisionError
        with TrainerStream(address, **settings) as another:
            another.load_state_dict(state)
            another.publish(weights(another.version + 1.0))
            rounds_without_it(another, 5)


def test_of_a_rollout_that_is_drained_no_lane_is_set_aside() -> None:
    envs = [partial(NumberedEnv, slot) for slot in range(3)]
    rollout = Rollout(envs, module=NumberedModule(), lanes=3, where="processes", workers=1, fragment_length=8)
    with TrainerStream("tcp://127.0.0.1:0", limits=SHORT, join_timeout=60.0, yields="fragments") as stream:
        with running(*graph_over(rollout, stream.address)) as feed:
            for number, _ in enumerate(stream):
                if number == 5:
                    feed.drain()
            [source] = stream._door.sources.values()
            assert source.has_finished
            assert source.aside == {}


def test_where_lanes_come_and_go_nothing_is_told_of_those_that_go() -> None:
    """A lane that has come later is not one of those that the trainer was told of at first."""
    envs = listening()
    with hosting(envs.addresses[0], [partial(NumberedEnv, 0)]):
        rollout = Rollout(envs, module=NumberedModule(), fragment_length=8)
        stream = TrainerStream("tcp://127.0.0.1:0", limits=SHORT, join_timeout=60.0, yields="fragments")
        with stream, running(*graph_over(rollout, stream.address)):
            fragments = iter(stream)
            assert next(fragments).lane == 0
            with hosting(envs.addresses[0], [partial(NumberedEnv, 1)]):
                while next(fragments).lane == 0:
                    pass
            for _ in range(16):
                next(fragments)
            [source] = stream._door.sources.values()
            assert source.is_present
            assert source.aside == {}
