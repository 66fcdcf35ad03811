"""Calls of pieces, and checks of a columnar form against the per-episode one."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from rollflow import ConnectorV2, SingleAgentEpisode
from rollflow.stream.data.tree import map_tree

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


class OneByOne(ConnectorV2):
    """Does nothing, but has no columnar form: all pieces before it get a plain list of episodes."""

    changes_episodes = False

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return batch


class ByEpisodes(ConnectorV2):
    """Makes the pipeline take the way by episodes from here on, and changes nothing."""

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=episode.get_observations(-1), at_indices=-1)
        return batch


class Breaks(ConnectorV2):
    """Raises at its tenth call, or when told to."""

    def __init__(self, *, at: int = 10) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError("no more")
        return batch


def log_rows(metrics: Any, episodes: Any) -> None:
    """Count the episodes that come by, for a `LambdaConnector`."""
    metrics.log_value("rows", len(list(episodes)), reduce="sum")


class Torch:
    """All that most pieces need to know of a module."""

    framework = "torch"


def call(piece: ConnectorV2, batch: dict[str, Any], episodes: Any = (), **kwargs: Any) -> dict[str, Any]:
    return piece(**{"rl_module": Torch(), "batch": batch, "episodes": episodes, **kwargs})


def ongoing(*ids: str) -> list[SingleAgentEpisode]:
    return [SingleAgentEpisode(id_, observations=[0], len_lookback_buffer=0) for id_ in ids]


def equal(one: Any, other: Any) -> None:
    """Assert that two trees have the same arrays, tensors or values, in the same dtypes."""

    def compared(*leaves: Any) -> None:
        mine, theirs = map(np.asarray, leaves)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)

    map_tree(compared, one, other)
