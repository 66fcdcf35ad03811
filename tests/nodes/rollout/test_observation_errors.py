"""Errors about observations that pieces write: they name the leaf and both shapes, and print no data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numbered_env import numbered_envs
from small_env import SmallEnv
from together import Together

from rollflow import ConnectorV2, MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule
from rollflow.stream import ColumnError

IMAGE = spaces.Dict({"image": spaces.Box(0, 255, (12, 12, 3), np.uint8)})
SEEN = {"image": np.zeros((12, 12, 3), np.uint8)}


class Camera(SmallEnv):
    observation_space = IMAGE

    def look(self) -> Any:
        return SEEN


class Adds(ConnectorV2):
    """Declares `extra` of two numbers, and adds what it is given."""

    def __init__(self, added: dict[str, Any], *, declares: bool = True) -> None:
        super().__init__()
        self.added, self.declares = added, declares

    def recompute_output_observation_space(self, observation_space: Any, action_space: Any) -> Any:
        extra = {"extra": spaces.Box(0, 1, (2,), np.float32)} if self.declares else {}
        return spaces.Dict({**observation_space.spaces, **extra})

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            seen = {**episode.get_observations(-1), **self.added}
            episode.set_observations(new_data=seen, at_indices=-1)
        return batch


class Cuts(ConnectorV2):
    """Leaves the last observations of ended episodes with `length(place of the episode)` numbers."""

    def __init__(self, length: Callable[[int], int]) -> None:
        super().__init__()
        self.length = length

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for place, episode in enumerate(self.single_agent_episode_iterator(episodes)):
            if episode.is_done:
                episode.set_observations(new_data=np.zeros(self.length(place), np.int64), at_indices=-1)
        return batch


def ended_after(*pieces: ConnectorV2) -> list[int]:
    envs = numbered_envs(2, lengths=(3, 3))[1]
    options = {"module": RandomModule, "fragment_length": 8, "num_fragments": 1, "seed": 0}
    with Rollout(envs, **options, env_to_module_connector=lambda env: list(pieces)) as rollout:
        return [len(episode.observations) for fragment in rollout.fragments() for episode in fragment.episodes()]


def test_a_piece_may_make_last_observations_equal_that_the_one_before_left_in_different_shapes() -> None:
    uneven, even = Cuts(lambda place: 3 + place), Cuts(lambda place: 3)
    assert ended_after(uneven, even) == ended_after(even)
    with pytest.raises(ColumnError, match=r"observations of different shapes: .*slot 0"):
        ended_after(uneven)


@pytest.mark.parametrize("agents", ["one", "several"])
@pytest.mark.parametrize(
    ("piece", "told"),
    [
        (lambda: Adds({"extra": np.zeros(3, np.float32)}), "['extra']: got float32[4, 3], expected float32[4, 2]"),
        (lambda: Adds({"extra": np.zeros(2, complex)}), "['extra']: got complex128[4, 2], expected float32[4, 2]"),
        (
            lambda: Adds({"image": np.zeros((2, 2), np.uint8), "extra": np.zeros(2, np.float32)}),
            "['image']: got uint8[",
        ),
        (lambda: Adds({"more": np.zeros(2), "extra": np.zeros(2)}), "the keys ['more'] are new, expected the keys"),
        (
            lambda: Adds({"extra": np.zeros(2)}, declares=False),
            "the keys ['extra'] are new, expected the keys ['image']",
        ),
    ],
)
def test_observations_of_pieces_that_do_not_fit_are_told_by_leaf_and_shapes(piece: Any, told: str, agents: str) -> None:
    kind: Any = Rollout if agents == "one" else MultiAgentRollout
    env: Any = Camera if agents == "one" else lambda: Together({agent: Camera() for agent in "ab"})
    count = 4 if agents == "one" else 2
    options = {"module": RandomModule, "num_envs": count, "fragment_length": 8, "num_fragments": 1, "seed": 0}
    options |= {"env_to_module_connector": lambda *args: piece()}
    with pytest.raises(ColumnError) as raised, kind(env, **options) as rollout:
        list(rollout.fragments())
    text = str(raised.value)
    assert text.startswith("column 'obs'")
    assert told in text
    assert "\n" not in text
    assert len(text) < 200
    assert any("recompute_output_observation_space" in note for note in raised.value.__notes__)
