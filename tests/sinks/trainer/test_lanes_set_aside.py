"""A lane whose environments are lost again and again is set aside: a trainer that takes rounds waits for it no more."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doomed import NeverReset, NotMadeAgain
from feeding import SHORT, graph_over, running, weights
from numbered import NumberedEnv, NumberedModule

from rollflow.nodes import Rollout
from rollflow.sinks import TrainerStream
from rollflow.sinks.trainer.pace_gate import PaceGate
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.sinks.trainer.supply import Rounds
from rollflow.stream import Columns, Fragment, WireError
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


@pytest.mark.parametrize(("lane", "number"), [(3, 0), (-1, 0), (0, -1)])
def test_a_lane_that_there_is_not_is_refused(lane: int, number: int) -> None:
    with pytest.raises(WireError, match=f"lane {lane} is set aside, expected one of 3"):
        source_of(3).take_news(Aside(lane, number))


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
        for batch in stream:
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
