"""Numbers that public classes take: what is no number, or out of bounds, is refused by name."""

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollflow import nodes, policy, sinks
from rollflow.nodes.argument_checks import checked_count, checked_fraction, checked_number
from rollflow.nodes.env.environments import Environments

ADDRESS = "unix:/nowhere/socket"
# Public classes with numbers among their arguments, and the arguments that they can't do without.
CLASSES: dict[Any, dict[str, Any]] = {
    nodes.ComputeReturnsToGo: {},
    Environments: {"env": "CartPole-v1"},
    nodes.EpisodeReturns: {},
    nodes.FrameStacking: {"num_frames": 2},
    nodes.GeneralAdvantageEstimation: {},
    nodes.Linear: {"begin": 1.0, "end": 0.1, "steps": 100},
    nodes.MeanStdFilter: {},
    nodes.NStepReturns: {"n_step": 3},
    nodes.OnProcesses: {},
    nodes.Rollout: {"env": "CartPole-v1", "module": nodes.RandomModule},
    nodes.VTrace: {},
    policy.PolicyClient: {"address": "http://nowhere:1"},
    sinks.DatasetSink: {},
    sinks.Prioritized: {},
    sinks.Replay: {"capacity": 100},
    sinks.ReplayClient: {"address": ADDRESS},
    sinks.SampledNStepReturns: {"n_step": 3, "gamma": 0.9},
    sinks.SamplesPerInsert: {"ratio": 2.0},
    sinks.Sequences: {"length": 4},
    sinks.Storage: {},
    sinks.TrainerSink: {"address": ADDRESS},
    sinks.TrainerStream: {"address": ADDRESS},
}


def numbers() -> Iterator[Any]:
    """Each number among the arguments of each class, with what is none."""
    for made, needed in CLASSES.items():
        parameters = inspect.signature(made).parameters
        for name, parameter in parameters.items():
            value = needed.get(name, parameter.default)
            if isinstance(value, int | float) and not isinstance(value, bool):
                is_optional = "None" in str(parameter.annotation)
                for wrong in ("3", [1], math.nan, -1, *([] if is_optional else [None])):
                    yield pytest.param(made, name, wrong, id=f"{made.__name__}-{name}-{wrong}")


@pytest.mark.parametrize(("made", "name", "wrong"), list(numbers()))
def test_what_is_no_number_is_refused_by_the_arguments_name(made: Any, name: str, wrong: Any, tmp_path: Any) -> None:
    needed = {"path": tmp_path} if made is sinks.DatasetSink else CLASSES[made]
    with pytest.raises(ValueError, match=rf"\b{name}\b.* {re.escape(repr(wrong))}, expected"):
        made(**{**needed, name: wrong})


def test_numbers_of_numpy_are_numbers() -> None:
    assert checked_count("n", np.int64(3), 1) == 3
    assert checked_number("x", np.float32(0.5), above=0) == 0.5
    assert checked_fraction("share", 1) == 1.0


@pytest.mark.parametrize("wrong", [True, np.bool_(True), 1 + 0j, np.ones(1), "1", None])
def test_no_other_kind_is_a_number(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"x is .*, expected a number from 0 on"):
        checked_number("x", wrong, least=0)


@pytest.mark.parametrize(
    ("bounds", "wrong", "expected"),
    [
        ({"least": 0}, -0.1, "from 0 on"),
        ({"least": 0}, math.inf, "from 0 on"),
        ({"least": 0, "most": math.inf}, -1, "from 0 on"),
        ({"least": 0, "most": 1}, 1.5, "from 0 to 1"),
        ({"above": 0}, 0, "above 0"),
        ({"above": 0, "most": 1}, 0.0, "above 0, up to 1"),
        ({"above": 0, "why": "it would stand still"}, 0, "above 0: it would stand still"),
    ],
)
def test_bounds_are_named(bounds: Any, wrong: float, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^x is {wrong!r}, expected a number {expected}$"):
        checked_number("x", wrong, **bounds)


def test_infinity_passes_where_it_is_let() -> None:
    assert checked_number("x", math.inf, least=0, most=math.inf) == math.inf
