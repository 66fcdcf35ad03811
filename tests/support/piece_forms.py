"""Checks of a piece's columnar form against its per-episode one."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rollflow import ConnectorV2
from rollflow.stream.data.tree import map_tree

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class OneByOne(ConnectorV2):
    """Does nothing, but has no columnar form: all pieces before it get a plain list of episodes."""

    changes_episodes = False

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return batch


def equal(one: Any, other: Any) -> None:
    def compared(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    map_tree(compared, one, other)
