"""A host or a trainer is asked what it is at: only where it has said that it answers, and for one answer each."""

import pytest
from wire_ends import Ends, StreamEnds, greeted, running, taken_from
from wire_messages import EXAMPLES, hello

from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.wire import ConnectionBroken, Event, Inspect, StackCall, Standing, decode, encode

IDLE = Standing(0, "has nothing to do", 0.0, ())
CALL = StackCall("arm.py", 31, "step", "read()", True)


def inspecting(*, answers: bool = True, role: str = "env") -> Ends:
    return running(said=hello(role=role, answers_inspect=answers))


def error_of(events: list[Event]) -> WireError:
    assert isinstance(events[-1], ConnectionBroken), events
    return events[-1].error


def sent(message: Inspect | Standing) -> bytes:
    return b"".join(encode(message))


@pytest.mark.parametrize("role", ["env", "rollout"])
def test_a_host_that_answers_is_asked_and_its_answer_comes(role: str) -> None:
    ends = inspecting(role=role)
    assert ends.gateway.inspect(1)
    (asked,) = ends.to_host()
    assert isinstance(asked, Inspect)
    assert asked.lane == 1
    ends.host.tell(Standing(1, "is in step()", 5.25, (CALL,)))
    (standing,) = ends.to_gateway()
    assert isinstance(standing, Standing)
    assert (standing.lane, standing.doing, standing.elapsed) == (1, "is in step()", 5.25)
    (call,) = standing.calls
    assert (call.file, call.line, call.name, call.source, call.is_own) == ("arm.py", 31, "step", "read()", True)


def test_a_host_that_has_not_said_so_is_not_asked_and_would_refuse() -> None:
    ends = inspecting(answers=False)
    assert not ends.gateway.inspect(0)
    assert taken_from(ends.gateway) == b""
    error = error_of(ends.host.receive(sent(Inspect(0)), 1.0))
    assert (error.code, str(error)) == ("order", "gateway: inspect to a host of role env")


def test_nobody_is_asked_before_the_welcome() -> None:
    ends = greeted(said=hello(answers_inspect=True))
    assert not ends.gateway.inspect(0)
    assert error_of(ends.host.receive(sent(Inspect(0)), 1.0)).code == "order"


def test_a_lane_that_the_host_does_not_have_is_refused() -> None:
    ends = inspecting()
    error = error_of(ends.host.receive(sent(Inspect(9)), 1.0))
    assert (error.code, str(error)) == ("number", "gateway: lane 9, expected one of [0, 1]")


@pytest.mark.parametrize("asked", [0, 1])
def test_an_answer_that_nobody_has_asked_for_is_refused(asked: int) -> None:
    ends = inspecting()
    for _ in range(asked):
        ends.gateway.inspect(0)
        assert ends.gateway.receive(sent(IDLE), 1.0)
    error = error_of(ends.gateway.receive(sent(IDLE), 1.0))
    assert error.code == "order"
    assert "standing without an inspect, expected to be asked" in str(error)


def test_a_trainer_is_asked_as_well() -> None:
    ends = StreamEnds()
    assert ends.source.inspect(0)
    (asked,) = ends.to_trainer()
    assert isinstance(asked, Inspect)
    ends.trainer.tell(Standing(0, "works on its batch", 41.0, (CALL,)))
    (standing,) = ends.to_source()
    assert isinstance(standing, Standing)
    assert standing.doing == "works on its batch"
    assert error_of(ends.source.receive(sent(IDLE), 1.0)).code == "order"


def test_a_trainer_that_has_said_goodbye_is_asked_in_vain() -> None:
    ends = StreamEnds()
    ends.trainer.goodbye("the stream has ended")
    assert ends.source.inspect(0)
    assert ends.to_trainer() == []


@pytest.mark.parametrize(
    ("standing", "told"),
    [
        (Standing(0, "x" * 257, 0.0, ()), "standing.doing"),
        (Standing(0, "x", -1.0, ()), "standing.elapsed"),
        (Standing(0, "x", float("nan"), ()), "standing.elapsed"),
        (Standing(0, "x", 0.0, (CALL,) * 65), "standing.calls"),
        (Standing(0, "x", 0.0, (StackCall("x" * 1025, 1, "f", "", True),)), "standing.calls.file"),
        (Standing(0, "x", 0.0, (StackCall("x", -1, "f", "", True),)), "standing.calls.line"),
        (Standing(0, "x", 0.0, (StackCall("x", 1, "f", "", 1),)), "standing.calls.is_own"),  # type: ignore[arg-type]
    ],
    ids=["doing", "elapsed", "nan", "calls", "file", "line", "is_own"],
)
def test_an_answer_beyond_its_bounds_is_not_sent(standing: Standing, told: str) -> None:
    with pytest.raises((WireError, ColumnError), match=told):
        encode(standing)


def test_an_answer_with_a_stack_that_is_no_list_of_calls_is_refused() -> None:
    frame = sent(EXAMPLES["standing"]).replace(b"\xa4name", b"\xa4nime")  # type: ignore[arg-type]
    with pytest.raises(WireError, match=r"standing\.calls\[0\] has no field 'name'"):
        decode(frame)
