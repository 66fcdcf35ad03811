"""Spaces that a host describes."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from drawn_spaces import FLOATS, INTEGERS, SPACES
from gymnasium import spaces
from hypothesis import example, given, strategies as st
from wire_values import VALUES, same

from rollflow.stream.data.errors import WireError
from rollflow.stream.data.space import describe_space, row_of
from rollflow.stream.wire.codec.frame import frame_of, taken_apart
from rollflow.stream.wire.codec.spaces import placed, read_space
from rollflow.stream.wire.codec.value import decode_value, encode_value


def sent(value: Any) -> Any:
    return decode_value(*taken_apart(b"".join(frame_of(*encode_value(value, "value")))))


@given(SPACES)
@example(spaces.Tuple([spaces.MultiDiscrete([3, 2], dtype=dtype) for dtype in INTEGERS]))
@example(spaces.Tuple([spaces.Box(0, 1, (2,), dtype) for dtype in [*FLOATS, *INTEGERS]]))  # type: ignore[arg-type]
def test_a_space_is_made_again_from_its_description(space: gym.Space[Any]) -> None:
    assert read_space(sent(describe_space(space)), "space") == space


@given(SPACES, st.integers(0, 3))
def test_rows_of_a_space_are_placed_as_the_space_has_them(space: gym.Space[Any], count: int) -> None:
    rows = row_of(space, count)
    assert same(placed(listed(rows), space, count, "obs"), rows)


def listed(tree: Any) -> Any:
    """Return a description with lists for tuples, as it comes over the wire."""
    if isinstance(tree, dict):
        return {key: listed(part) for key, part in tree.items()}
    return [listed(part) for part in tree] if isinstance(tree, tuple) else tree


@given(SPACES, st.data())
def test_a_description_with_another_part_is_a_space_or_refused(space: gym.Space[Any], data: st.DataObject) -> None:
    told = describe_space(space)
    part: Any = told
    while isinstance(part, dict | list) and part:
        keys = list(part) if isinstance(part, dict) else range(len(part))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(part[key], dict | list) or data.draw(st.booleans()):
            part[key] = data.draw(VALUES)
            break
        part = part[key]
    try:
        read_space(told, "space")
    except WireError as error:
        assert error.code == "spaces"


ONE = np.float32(1).tobytes()


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, "space is {}, expected a space: one of Dict, Tuple, Box"),
        ({"kind": "Text"}, "expected a space: one of Dict, Tuple, Box"),
        ({"kind": "Box", "low": ["<f4", [1], ONE]}, "expected low, high of a Box"),
        (
            {"kind": "Box", "low": ["<f4", [1], ONE], "high": ["<f8", [1], ONE * 2]},
            "expected the dtype and shape of low",
        ),
        ({"kind": "Box", "low": ["|O", [1], ONE], "high": ["|O", [1], ONE]}, "is '|O', expected a dtype"),
        ({"kind": "Box", "low": ["<f4", [9999, 9999], ONE]} | {"high": None}, "a shape of at most 67108864 bytes"),
        ({"kind": "Box", "low": ["<f4", [3], ONE * 2]} | {"high": None}, "expected 4 bytes, .* or 12"),
        ({"kind": "Box", "low": ["|b1", [1], b"\x02"]} | {"high": None}, "expected bytes of 0 or 1"),
        ({"kind": "Discrete", "n": 0, "start": 0, "dtype": "<i8"}, "expected whole numbers n > 0 and start"),
        ({"kind": "Discrete", "n": 2**63 - 1, "start": 2, "dtype": "<i8"}, r"expected start and start \+ n - 1 from"),
        ({"kind": "MultiBinary", "shape": [0]}, "expected a list of numbers of 1 or more"),
        ({"kind": "MultiBinary", "shape": [2**62]}, "a shape of at most"),
        ({"kind": "Dict", "parts": [["a", {}], 1]}, r"space\['a'\] is {}, expected a space"),
        ({"kind": "Dict", "parts": [["a", {"kind": "MultiBinary", "shape": [1]}]] * 2}, "each key once"),
        (
            {"kind": "Tuple", "parts": [{"kind": "Tuple", "parts": [None]}]},
            r"space\[0\]\[0\] is None, expected a space",
        ),
    ],
)
def test_what_is_no_space_is_refused(told: Any, expected: str) -> None:
    with pytest.raises(WireError, match=expected.replace("{}", r"\{\}")):
        read_space(told, "space")


def test_spaces_that_take_too_much_together_are_refused_before_they_are_made() -> None:
    box = {"kind": "Box", "low": ["<f4", [1 << 20], ONE], "high": ["<f4", [1 << 20], ONE]}  # 4 MiB
    assert isinstance(read_space({"kind": "Tuple", "parts": [box]}, "space"), spaces.Tuple)
    with pytest.raises(WireError, match="space takes more than 67108864 bytes"):
        read_space({"kind": "Tuple", "parts": [box] * 20}, "space")
    with pytest.raises(WireError, match=r"space\['a'\] takes more than 67108864 bytes"):
        read_space({"kind": "Dict", "parts": [["a", {"kind": "Tuple", "parts": [box] * 20}]]}, "space")
