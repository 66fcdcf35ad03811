"""Infos are each slot's own objects: whatever the other slots give, in every autoreset mode and place."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from small_env import SmallEnv
from wire_values import same

from rollflow import Rollout
from rollflow.nodes import RandomModule

STEPS = 3  # of an episode

UNLIKE: dict[str, tuple[Any, Any]] = {
    "int, float": (1, 2.7),
    "bool, str": (False, "abc"),
    "u8, i64": (np.array([1], np.uint8), np.array([300])),
    "array, number": (np.array([7]), 7),
    "ragged": (np.arange(2), np.arange(3)),
    "list, array": ([1, [2.5]], np.zeros((2, 2))),
    "None": (1, None),
    "numpy's numbers": (np.float32(0.1), np.int64(2**40)),
    "dict, number": ({"a": 1}, 2),
    "nested": ({"a": {"b": np.int8(1)}}, {"a": {"b": "x", 3: [None]}}),
    "str": ("a", "much longer"),
}


class Informs(SmallEnv):
    """Environment of episodes of three steps whose infos have the value that it is given, and where it comes from."""

    length, truncates = STEPS, True

    def __init__(self, key: Any, value: Any) -> None:
        self.key, self.value = key, value

    def tell(self) -> dict[str, Any]:
        return {self.key: self.value, "t": self.t}


def infos_of(makers: list[Any], **options: Any) -> dict[int, list[list[dict[Any, Any]]]]:
    """Infos of every chunk, slot by slot, of seven vector steps."""
    settings = {"module": RandomModule, "lanes": 1, "fragment_length": 7, "num_fragments": 1, "seed": 0, **options}
    with Rollout(makers, **settings) as rollout:
        [fragment] = rollout.fragments()
    infos: dict[int, list[list[dict[Any, Any]]]] = {slot: [] for slot in range(len(makers))}
    for slot, episode in zip(fragment.chunks.slot.tolist(), fragment.episodes(), strict=True):
        infos[slot].append(episode.get_infos())
    return infos


@pytest.mark.parametrize("where", ["inline", "processes"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_slot_has_the_infos_that_its_own_environment_gave(mode: Any, where: Any) -> None:
    """One slot for each value, beside the one that it is unlike: gymnasium's vector form would take its type."""
    values = [value for pair in UNLIKE.values() for value in pair]
    infos = infos_of([partial(Informs, "v", value) for value in values], autoreset_mode=mode, where=where)
    times = [[0, 1, 2, 3], [0, 1, 2, 3], *([] if mode is AutoresetMode.NEXT_STEP else [[0, 1]])]
    for slot, value in enumerate(values):
        assert [[info["t"] for info in of_chunk] for of_chunk in infos[slot]] == times
        for info in (info for of_chunk in infos[slot] for info in of_chunk):
            assert same(info["v"], value)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_keys_may_be_anything_that_a_dict_takes(mode: Any) -> None:
    keys = [1, "_t", ("a", 2), None]
    infos = infos_of([partial(Informs, key, slot) for slot, key in enumerate(keys)], autoreset_mode=mode)
    for slot, key in enumerate(keys):
        assert infos[slot][0] == [{key: slot, "t": t} for t in range(4)]


def test_infos_of_the_first_reset_are_copies() -> None:
    """An environment may write into the info that it gave."""

    class Reuses(Informs):
        def __init__(self) -> None:
            super().__init__("v", 0)
            self.info = {"v": np.zeros(1), "t": 0}

        def tell(self) -> dict[str, Any]:
            self.info["v"] += self.t > 0
            return self.info

    infos = infos_of([Reuses, Reuses])
    assert [info["v"].tolist() for info in infos[0][0]] == [[0.0], [1.0], [2.0], [3.0]]
