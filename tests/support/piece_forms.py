"""Calls of pieces, and checks of a columnar form against the per-episode one."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from benchmarks.host_reads import counting_reads
from rollflow import ConnectorV2, SingleAgentEpisode
from rollflow.nodes.connectors.common.batches import DEVICE
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.fragments.live_episode import LaneEpisodes

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


class Doubled(ConnectorV2):
    """Writes twice every observation, as floats."""

    def recompute_output_observation_space(self, observations: gym.Space[Any], actions: gym.Space[Any]) -> Any:
        return gym.spaces.Box(0, 2.0**32, observations.shape, np.float64)

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in episodes:
            episode.set_observations(new_data=episode.get_observations(-1) * 2.0, at_indices=-1)
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


class Tensors(LaneEpisodes):
    """The episodes of a lane with tensors for arrays, as those of a lane on a device; `made` is what a piece writes."""

    made: Any = None
    brought = 0  # tensors that were made of the lane's arrays

    def __init__(self, episodes: LaneEpisodes) -> None:
        self._episodes, self.slots = episodes, episodes.slots
        self.lane = episodes.lane

    def set_observations(self, observations: Any) -> None:
        self.made = observations

    def bring(self, tree: Any) -> Any:
        made = tensors(tree)
        self.brought += sum(map(torch.is_tensor, leaves_of(made)))
        return made


for read in ("newest", "recent", "steps_there", "just_begun", "values_before"):
    setattr(Tensors, read, lambda own, *given, read=read: own.bring(getattr(own._episodes, read)(*given)))


def tensors(tree: Any) -> Any:
    """A tree of arrays as one of tensors, copied; anything else as it is."""
    return map_tree(lambda leaf: torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf, tree)


class OnTensors(ConnectorV2):
    """Calls a piece, and another like it on tensors that are read on no account, and compares what they make.

    bound      relative and absolute difference that is allowed for
    compared   calls so far
    """

    columnar = True

    def __init__(self, make: Any, bound: float = 0.0) -> None:
        super().__init__()
        self.piece, self.twin, self.bound, self.compared = make(), make(), bound, 0
        assert self.piece.on_device
        self.lookback = self.piece.lookback

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        for piece in (self.piece, self.twin):
            piece.set_input_spaces(observation_space, action_space)
        return self.piece.observation_space

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def __call__(self, *, batch: Any, episodes: Any, shared_data: Any, **kwargs: Any) -> Any:
        shared, seen = {**shared_data, DEVICE: torch.device("cpu")}, Tensors(episodes)
        if "generator" in shared:
            shared["generator"] = torch.Generator().set_state(shared["generator"].get_state())
        given = {"batch": tensors(batch), "episodes": seen, "shared_data": shared, **kwargs}
        with counting_reads() as reads:
            made = self.twin(**given)
        # What is made once may be brought to the device: bounds, and statistics.
        assert reads == ["lift_fresh"] * seen.brought or not self.compared, reads
        batch = self.piece(batch=batch, episodes=episodes, shared_data=shared_data, **kwargs)
        expected = tensors([dict(batch), None if seen.made is None else episodes.newest()])
        torch.testing.assert_close([dict(made), seen.made], expected, rtol=self.bound, atol=self.bound)
        self.compared += 1
        return batch


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
