import functools
from typing import Any

import pytest
from graph_rows import Halves, show, split

from rollflow.stream import Inlet, Outlet
from rollflow.stream.graph.port import meet, read_node


def split_or_nothing(number: int) -> Halves | None:
    return Halves(number, None) if number else None


def maybe(number: int) -> float | None:
    return number or None


class Scale:
    def __call__(self, number: int, factor: int = 2) -> int:
        return number * factor


async def relay(items: Inlet[int], out: Outlet[str]) -> None:
    del items, out


@pytest.mark.parametrize(
    ("node", "inlets", "outlets"),
    [
        (split, {"number": int}, {"low": int, "high": str}),
        (split_or_nothing, {"number": int}, {"low": int, "high": str}),
        (show, {"text": str}, {}),
        (maybe, {"number": int}, {"out": float}),
        (Scale(), {"number": int}, {"out": int}),
        (functools.partial(Scale(), factor=3), {"number": int}, {"out": int}),
        (lambda item: item, {"item": Any}, {"out": Any}),
        (relay, {"items": int}, {"out": str}),
        (functools.partial(relay), {"items": int}, {"out": str}),
    ],
)
def test_a_signature_gives_the_ports(node: Any, inlets: dict[str, Any], outlets: dict[str, Any]) -> None:
    spec = read_node("x", node)
    assert (spec.inlets, spec.outlets) == (inlets, outlets)


@pytest.mark.parametrize(
    ("given", "taken", "fits"),
    [
        (int, int, True),
        (bool, int, True),
        (int, bool, False),
        (int, float, True),
        (int, str, False),
        (int, Any, True),
        (Any, str, True),
        (int | str, str, True),
        (int | bytes, str | float, True),
        (bytes | bool, str, False),
        (list[int], list[str], True),
        (list[int], dict[str, int], False),
        ("int", str, True),
    ],
)
def test_types_meet_unless_that_is_known_to_be_impossible(given: Any, taken: Any, fits: bool) -> None:
    assert meet(given, taken) is fits
