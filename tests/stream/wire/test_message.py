"""Messages as frames and back, field by field."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from wire_ends import frame_as, refusing
from wire_messages import EXAMPLES, rows
from wire_values import ARRAYS, VALUES, same

from rollflow.stream import wire
from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.wire.codec.field import checks_of
from rollflow.stream.wire.codec.frame import frame_of, taken_apart
from rollflow.stream.wire.codec.message import KINDS
from rollflow.stream.wire.codec.value import decode_value, encode_value


def fields_of(message: Any) -> dict[str, Any]:
    """A message's fields as plain values."""
    return {
        field.name: [fields_of(each) for each in value]
        if field.name in ("lanes", "calls") and isinstance(value, tuple)
        else value
        for field in dataclasses.fields(message)
        for value in [getattr(message, field.name)]
    }


def assert_same(left: wire.Message, right: wire.Message) -> None:
    assert type(left) is type(right)
    assert same(fields_of(left), fields_of(right))


def changed(message: wire.Message, **fields: Any) -> bytes:
    """The frame of a message with other fields, unchecked; `...` leaves a field out."""
    told = decode_value(*taken_apart(frame_as(message))) | fields
    kept = {name: value for name, value in told.items() if value is not ...}
    return b"".join(frame_of(*encode_value(kept, "told")))


TREES = st.recursive(
    ARRAYS,
    lambda trees: st.lists(trees, max_size=3) | st.dictionaries(st.text(max_size=4), trees, max_size=3),
    max_leaves=5,
)
MAPS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
LANES = st.integers(0, 2**53 - 1)
NUMBERS = st.integers(1, 2**53 - 1)
MESSAGES = (
    st.builds(wire.Step, LANES, NUMBERS, TREES)
    | st.builds(
        wire.Reset,
        LANES,
        NUMBERS,
        st.none() | st.lists(st.integers(0, 2**64 - 1), max_size=3).map(tuple),
        st.none() | MAPS,
    )
    | st.builds(wire.Fragment, LANES, NUMBERS, st.dictionaries(st.text(max_size=4), TREES, max_size=3), MAPS)
    | st.builds(
        wire.Weights,
        st.integers(0, 2**53 - 1),
        st.dictionaries(st.text(max_size=4), ARRAYS, max_size=3),
        st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
        MAPS,
    )
    | st.builds(wire.Refused, st.text(max_size=64), st.text(max_size=9))
    | st.builds(rows, obs=TREES, final_obs=st.none() | TREES, infos=MAPS, final_infos=MAPS)
)


@given(MESSAGES)
def test_decoding_undoes_encoding(message: wire.Message) -> None:
    assert_same(wire.decode(frame_as(message)), message)


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(message) for message in EXAMPLES.values()} == set(KINDS.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_of_other_names_are_passed_over(name: str) -> None:
    assert_same(wire.decode(changed(EXAMPLES[name], later_version={"a": [1, np.zeros(2)]})), EXAMPLES[name])


MAY_BE_MISSING = {("hello", "busy"), ("hello", "agents"), ("hello", "parts"), ("step", "agent_slots")}
MAY_BE_MISSING |= {("turn", "step"), ("goodbye", "drained"), ("weights", "module"), ("weights", "id")}
MAY_BE_MISSING |= {("done", "freed")}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, message in EXAMPLES.items() for field in checks_of(type(message))]
)
def test_a_field_that_is_missing_or_of_another_type_is_refused_by_name_and_not_sent(name: str, field: str) -> None:
    message: Any = EXAMPLES[name]
    if (message.kind, field) not in MAY_BE_MISSING:
        with pytest.raises(WireError, match=f"{message.kind} has no field '{field}', expected"):
            wire.decode(changed(message, **{field: ...}))
    with pytest.raises(WireError, match=rf"{message.kind}\.{field}"):
        wire.encode(dataclasses.replace(message, **{field: -1.5}))
    with pytest.raises(WireError, match=rf"{message.kind}\.{field}.* is .*, expected "):
        wire.decode(changed(message, **{field: -1.5}))


@pytest.mark.parametrize(
    ("name", "field", "value", "told"),
    [
        ("hello", "versions", [1], r"hello.versions is \[1\], expected \[lowest, highest\]"),
        ("hello", "versions", [2, 1], r"hello.versions is \[2, 1\], expected \[lowest, highest\]"),
        ("hello", "versions", [0, 1], r"hello.versions\[0\] is 0, expected a whole number from 1 to 65535"),
        ("hello", "role", "trainer", "hello.role is 'trainer', expected one of env, agents, rollout, agent_rollout"),
        ("hello", "nonce", bytes(31), "hello.nonce is .*, expected 32 bytes"),
        ("hello", "session", bytes(15), "hello.session is .*, expected 16 bytes"),
        ("hello", "name", "x" * 257, "hello.name is .*, expected a string of at most 256 characters"),
        ("hello", "slots", [2, 0], r"hello.slots\[1\] is 0, expected a whole number from 1 to"),
        ("hello", "slots", [True], r"hello.slots\[0\] is True, expected a whole number"),
        ("hello", "autoreset", "NEVER", "expected one of NEXT_STEP, SAME_STEP, DISABLED"),
        ("hello", "metadata", {1: 2}, "a key of hello.metadata is 1, expected a string"),
        ("hello", "max_frame", 100, "hello.max_frame is 100, expected a whole number from 65536"),
        ("challenge", "heartbeat_s", 0, "challenge.heartbeat_s is 0, expected a number of seconds, more than 0"),
        ("challenge", "heartbeat_s", float("nan"), "challenge.heartbeat_s is nan"),
        ("challenge", "grace_s", float("inf"), "challenge.grace_s is inf"),
        ("challenge", "secret", 1, "challenge.secret is 1, expected true or false"),
        ("proof", "mac", bytes(16), "proof.mac is .*, expected 0 or 32 bytes"),
        ("welcome", "lanes", [{"lane": 0}], r"welcome.lanes\[0\] has no field 'slots'"),
        ("welcome", "lanes", [3], r"welcome.lanes\[0\] is 3, expected a map"),
        ("step", "number", 0, "step.number is 0, expected a whole number from 1 to 9007199254740991"),
        ("step", "actions", {"a": [3]}, r"step.actions\['a'\]\[0\] is 3, expected an array, or a map or list of"),
        ("step", "actions", np.array([None]), r"step.actions is an array \|O\[1\], expected an array of numbers"),
        (
            "rows",
            "rewards",
            np.zeros(2, np.float32),
            r"rows.rewards is an array <f4\[2\], expected an array <f8\[slots",
        ),
        ("rows", "rewards", np.zeros((2, 1)), r"rows.rewards is an array <f8\[2, 1\], expected an array <f8\[slots\]"),
        ("rows", "terminateds", np.zeros(2, np.uint8), r"expected an array \|b1\[slots\]"),
        ("rows", "final_slots", [-1], r"rows.final_slots\[0\] is -1, expected a whole number from 0"),
        ("reset", "seeds", [-1], r"reset.seeds\[0\] is -1, expected a whole number from 0 to 18446744073709551615"),
        ("agents hello", "agents", ["red", True, 7], r"hello.agents\[1\] is True, expected a string"),
        ("agents hello", "agents", ["red", 2**53, 7], r"hello.agents\[1\] is 9007199254740992, expected a string"),
        ("agents hello", "parts", [0, -1, 1], r"hello.parts\[1\] is -1, expected a whole number from 0 to 4095"),
        ("agents step", "agent_slots", [None, [1]], r"step.agent_slots\[1\] is \[1\], expected an array <i8\[slots\]"),
        (
            "agent rows",
            "rewards",
            [np.zeros(4)],
            r"agent_rows.rewards\[0\] is an array <f8\[4\], expected an array <f4",
        ),
        ("agent rows", "infos", [[[0]]], r"agent_rows.infos\[0\] is \[0\], expected \[number of an agent, map\]"),
        ("agent rows", "infos", [3], r"agent_rows.infos\[0\] is 3, expected a list of \[number of an agent, map\]"),
        ("agent rows", "infos", [[[2, 3]]], r"agent_rows.infos\[0\]: the info of agent 2 is 3, expected a map"),
        ("failed", "notes", "slot 1", "failed.notes is 'slot 1', expected a list"),
    ],
)
def test_a_field_is_refused_with_what_was_expected(name: str, field: str, value: Any, told: str) -> None:
    with refusing("message", told):
        wire.decode(changed(EXAMPLES[name], **{field: value}))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1], r"header: \[1\], expected a map"),
        ({}, "header: kind None, expected one of hello, challenge"),
        ({"kind": "steps"}, "header: kind 'steps', expected one of hello"),
        ({"kind": ["step"]}, r"header: kind \['step'\], expected one of hello"),
    ],
)
def test_a_header_that_is_no_message_is_refused(value: Any, told: str) -> None:
    with pytest.raises(WireError, match=told):
        wire.decode(b"".join(frame_of(*encode_value(value, "value"))))


def test_arrays_of_what_was_received_can_be_written() -> None:
    message = wire.decode(bytearray(frame_as(EXAMPLES["step"])))
    assert isinstance(message, wire.Step)
    message.actions[:] = 5
    assert message.actions.tolist() == [5, 5]


def test_tuples_of_trees_are_lists_on_the_wire() -> None:
    message = wire.decode(frame_as(wire.Step(0, 1, {"a": (np.zeros(1), [np.ones(2)])})))
    assert isinstance(message, wire.Step)
    assert same(message.actions, {"a": [np.zeros(1), [np.ones(2)]]})


def test_what_cant_be_sent_is_named_in_its_message() -> None:
    with pytest.raises(ColumnError, match=r"fragment\['rest'\]\['custom_data'\]: <object .* can't be sent"):
        wire.encode(wire.Fragment(0, 1, {}, {"custom_data": object()}))


@pytest.mark.parametrize(
    ("infos", "kept", "told"),
    [
        ({"arm": object(), "_arm": np.array([True, False])}, {}, "infos['arm'] is <object"),
        (SlotInfos([{"a": {"b": {1}, "c": 2}}, {"d": 3}]), SlotInfos([{"a": {"c": 2}}, {"d": 3}]), "slot 0: info['a']"),
        (SlotInfos([{}, {(1, 2): 3, "d": 3}]), SlotInfos([{}, {"d": 3}]), "slot 1: info[(1, 2)] is 3"),
        (SlotInfos([{"big": 2**70, "e": 4}, {}]), SlotInfos([{"e": 4}, {}]), "slot 0: info['big'] is 1180591620"),
    ],
)
def test_entries_of_infos_that_cant_be_sent_are_left_out(
    infos: Any, kept: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # it is said once
        message = wire.decode(frame_as(rows(infos=infos)))
    assert isinstance(message, wire.Rows)
    assert type(message.infos) is type(kept)
    assert (message.infos.dicts if isinstance(message.infos, SlotInfos) else message.infos) == getattr(
        kept, "dicts", kept
    )
    [line] = caplog.messages
    assert line.startswith(told)
    assert line.endswith("can't be sent to another process: it is left out (said once)")


def test_a_failure_says_what_was_raised_and_where() -> None:
    try:
        raise ValueError("the arm is stuck" + "!" * 100_000)
    except ValueError as error:
        error.add_note("slot 1")
        failed = wire.Failed.of(wire.Reset(3, 4, None, None), error)
    assert (failed.lane, failed.number, failed.type, failed.notes) == (3, 4, "ValueError", ("slot 1",))
    assert failed.text.startswith("the arm is stuck!")
    assert_same(wire.decode(frame_as(failed)), failed)


@given(st.text(st.characters(), max_size=20))
@example("\ud800")
def test_whatever_was_raised_can_be_told(text: str) -> None:
    error = WireError(text * 1000, text)
    assert isinstance(wire.decode(frame_as(wire.Failed.of(wire.Reset(0, 1, None, None), error))), wire.Failed)
    assert isinstance(wire.decode(frame_as(wire.Refused.of(error))), wire.Refused)
