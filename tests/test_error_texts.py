"""Errors print no data: a value that may be anything is told by `shown`, as its kind, in a line of bounded length."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollflow.nodes import MetricsLogger
from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.env.lane_envs import reset_values, step_values
from rollflow.nodes.env.observation_check import check_reset, info_given, rewards_of
from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import shown
from rollflow.stream.data.packing import pack
from rollflow.stream.data.space import row_of
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.multi_agent.agent_states import AgentNumbers
from rollflow.stream.wire.codec.field import wrong
from rollflow.stream.wire.codec.value import encode_value

PACKAGES = ("stream", "nodes", "sinks", "policy", "cli")
ROOT = Path(__file__).parent.parent
LARGE = np.linspace(0.1, 0.9, 5000).reshape(50, 100)
DATA: dict[str, Any] = {
    "array": LARGE,
    "tensor": torch.as_tensor(LARGE),
    "list": LARGE.tolist(),
    "dict of arrays": {f"part {part}": {"deep": LARGE} for part in range(30)},
    "list of arrays": [LARGE] * 30,
    "tuple": (LARGE, [LARGE, {"a": torch.as_tensor(LARGE)}]),
    "masked": np.ma.MaskedArray(LARGE),
    "objects": np.array([LARGE, None], object),
    "str": "0.1\n" * 5000,
    "bytes": b"\x01" * 5000,
    "set": set(range(5000)),
}
MOST = 400  # letters of a line


def check(text: str) -> None:
    """Raise AssertionError for a text that prints data."""
    assert "\n" not in text
    assert len(text) <= MOST
    assert "array(" not in text
    assert "tensor(" not in text


def slots() -> AgentNumbers:
    return AgentNumbers([["a"]], 1)


def column(space: gym.Space[Any]) -> Column:
    return Column.empty("obs", row_of(space, 4), 2)


BOX = spaces.Box(-1, 1, (2,))
NESTED = spaces.Dict({"a": BOX, "b": spaces.Tuple([BOX, spaces.Discrete(3)])})
RAISING: dict[str, Callable[[Any], Any]] = {
    "Column.write": lambda data: column(BOX).write(0, data),
    "Column.write, nested": lambda data: column(NESTED).write(0, data),
    "Column.write, a part": lambda data: column(NESTED).write(0, {"a": data, "b": (data, data)}),
    "Column.write_slot": lambda data: column(BOX).write_slot(0, 0, data),
    "Column.cast": lambda data: column(NESTED).cast({"a": data}, 4),
    "check_reset": lambda data: check_reset([data], "slot 0"),
    "info_given": lambda data: info_given([data], "slot 0"),
    "rewards_of": lambda data: rewards_of([data, 1.0]),
    "reset_values": lambda data: reset_values([0], [[data]], slots()),
    "observations by agent": lambda data: reset_values([0], [([data], {})], slots()),
    "rewards by agent": lambda data: step_values([({}, {"a": data}, {}, {}, {})], slots()),
    "infos by agent": lambda data: step_values([({}, {}, {}, {}, {"a": [data]})], slots()),
    "pack": lambda data: pack({"a": [data, object(), {1, 2}]}),
    "encode_value": lambda data: encode_value({"a": [data, 1j, {1, 2}]}, "rows"),
    "wire field": lambda data: _raise(wrong(data, "rows.number", "a whole number")),
    "checked_count": lambda data: checked_count("num_envs", data, 0),
    "metrics": lambda data: MetricsLogger().log_value("loss", [data, "x"]),
    "episode": lambda data: SingleAgentEpisode(observations=[1, 2], actions=[data], rewards=[1.0]).get_rewards("x"),
}


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", RAISING)
def test_an_error_about_large_data_prints_none_of_it(name: str, data: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # each has a class of its own
        RAISING[name](DATA[data])
    check(str(raised.value))
    for note in getattr(raised.value, "__notes__", []):
        check(note)


@pytest.mark.parametrize("data", DATA)
def test_a_value_is_shown_in_one_short_line(data: str) -> None:
    check(shown(DATA[data]))
    check(shown({"a": [DATA[data]] * 9}))
    assert len(shown(DATA[data])) < 250


def test_what_is_shown_says_what_it_is() -> None:
    assert shown(np.zeros((3, 4), np.uint8)) == "an array uint8[3, 4]"
    assert shown(torch.zeros(2, requires_grad=True)) == "a Tensor float32[2]"
    assert shown({"a": np.zeros(2), "b": (1, "x")}) == "{'a': float64[2], 'b': (1, 'x')}"
    assert shown([1] * 9) == "[1, 1, 1, 1, 1, 1, … (9 in all)]"
    assert shown(spaces.Discrete(2)) == "Discrete(2)"


def reprs_that_are_cut() -> Iterator[str]:
    """Places where an f-string cuts a `repr`, as is done for values that may be anything."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FormattedValue) and node.conversion == ord("r") and node.format_spec:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.slow
def test_no_text_cuts_a_repr_that_may_be_data() -> None:
    assert list(reprs_that_are_cut()) == []
