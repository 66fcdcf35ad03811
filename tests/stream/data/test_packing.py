"""Infos as bytes: what is packed comes back as it was, and what can't be is named by the way to it."""

import enum
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from property_examples import examples
from wire_values import KEYS, TEXTS, objects, same, values_of

from rollflow.stream import ColumnError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.packing import pack, sendable, unpack

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
    hnp.datetime64_dtypes(),
)
VALUES = values_of(DTYPES, KEYS | st.tuples(TEXTS, st.booleans()))


@given(value=VALUES)
@settings(max_examples=examples(300))
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(value, unpack(pack(value)))
    assert same(value, unpack(memoryview(pack(value))))


def test_arrays_come_back_as_views_of_the_bytes() -> None:
    array = unpack(pack(np.arange(1000.0)))
    assert not array.flags.writeable
    assert not array.flags.owndata


def test_an_array_that_runs_another_way_comes_back() -> None:
    for array in (np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(10)[::-3], np.broadcast_to(7, (2, 2))):
        np.testing.assert_array_equal(unpack(pack(array)), array)


WAYS: list[tuple[Any, str]] = [
    (lambda bad: bad, ""),
    (lambda bad: {"a": bad}, r"\['a'\]"),
    (lambda bad: {"a": [1, (2, bad)]}, r"\['a'\]\[1\]\[1\]"),
    (lambda bad: {3: {"b": bad}, "c": 1}, r"\[3\]\['b'\]"),
    (lambda bad: {"a": objects([None, bad])}, r"\['a'\]\[1\]"),
    (lambda bad: objects([1, 2, 3, bad]).reshape(2, 2), r"\[1\]\[1\]"),
    (lambda bad: SlotInfos([{}, {"k": [bad]}]), r" of slot 1\['k'\]\[0\]"),
]


@pytest.mark.parametrize(("nest", "way"), WAYS, ids=[way or "bare" for _, way in WAYS])
@pytest.mark.parametrize(
    ("bad", "kind"), [(object(), "object"), ({1, 2}, "set"), (1j, "complex"), (2**64, "int"), (print, "builtin.*")]
)
def test_what_can_not_be_packed_is_named_by_the_way_to_it(nest: Any, way: str, bad: Any, kind: str) -> None:
    with pytest.raises(ColumnError, match=rf"^infos{way}: .* of type {kind} can't be handed to another process"):
        pack(nest(bad), "infos")


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ColumnError, match=r"^infos(\[0\])+: \[\[\[\[…\]\]\]\] of type list can't be handed"):
        pack(value, "infos")


class Kind(enum.IntEnum):
    MID = 1


class Name(enum.StrEnum):
    ARM = "arm"


class Seconds(float):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Kind.MID, 1),
        (Name.ARM, "arm"),
        (Seconds(0.5), 0.5),
        ({Kind.MID: [Name.ARM]}, {1: ["arm"]}),
        (objects([Kind.MID, None]), objects([1, None])),
        (OrderedDict(a=1), {"a": 1}),
    ],
)
def test_members_of_enums_and_of_other_subclasses_are_packed_as_their_plain_values(value: Any, plain: Any) -> None:
    assert same(unpack(pack(value)), plain)


@pytest.mark.parametrize("array", [np.ma.MaskedArray([1, 2], [True, False]), np.zeros(2, [("a", "i4"), ("b", "f4")])])
def test_an_array_with_more_than_its_values_is_refused(array: Any) -> None:
    with pytest.raises(ColumnError, match="can't be handed"):
        pack(array)


def test_what_can_not_be_packed_is_left_out_of_infos_and_told() -> None:
    told: list[str] = []
    value = {
        "infos": [SlotInfos([{"a": {1}, "b": {"c": [object()], "d": 1}}, {"a": 2}]), {}],
        "finals": {"infos": [{"v": objects([{1}, 2]), "_v": np.array([True, False]), "w": 3}]},
        "parts": [{"infos": [[[0, {"x": 2**70, 3: 4}], [1, {"y": 5}]]]}],
        "custom_data": ({1},),
    }
    kept = sendable(value, told.append)
    infos = [info.dicts if isinstance(info, SlotInfos) else info for info in kept["infos"]]
    assert infos == [[{"b": {"d": 1}}, {"a": 2}], {}]
    assert kept["finals"] == {"infos": [{"w": 3}]}
    assert kept["parts"] == [{"infos": [[[0, {3: 4}], [1, {"y": 5}]]]}]
    assert kept["custom_data"] is value["custom_data"]
    names = ["slot 0: info['a']", "slot 0: info['b']['c']", "infos['v']", "agent 0: info['x']"]
    assert [text.partition(" is ")[0] for text in told] == names
    assert told[0].endswith("is {1}, of type set")
