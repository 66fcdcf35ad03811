"""Random episodes, each in both implementations."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
from both import Answer, ask, assert_same_answer
from gymnasium import spaces
from hypothesis import strategies as st
from ray.rllib.env.single_agent_episode import SingleAgentEpisode as RayEpisode

from rollflow import SingleAgentEpisode

BOX = spaces.Box(-100.0, 100.0, (2,), np.float32)


@dataclass(frozen=True)
class Kind:
    """A space, and what stands for the number i in it."""

    space: gym.Space[Any]
    item: Callable[[int], Any] = field(repr=False)


def _box(i: int) -> Any:
    return np.array([i, i / 2], np.float32)


KINDS = [
    Kind(spaces.Discrete(3), lambda i: i % 3),
    Kind(BOX, _box),
    Kind(spaces.Box(-100.0, 100.0, (), np.float32), np.float32),
    Kind(spaces.Box(0, 255, (2, 1), np.uint8), lambda i: np.full((2, 1), i, np.uint8)),
    Kind(spaces.MultiDiscrete([2, 3]), lambda i: np.array([i % 2, i % 3])),
    Kind(spaces.MultiBinary(2), lambda i: np.array([i % 2, 1], np.int8)),
    Kind(spaces.Dict({"a": spaces.Discrete(3), "b": BOX}), lambda i: {"a": i % 3, "b": _box(i)}),
    Kind(spaces.Tuple((BOX, spaces.Discrete(3))), lambda i: (_box(i), i % 3)),
    Kind(
        spaces.Dict({"a": spaces.Tuple((spaces.MultiDiscrete([2, 3]), BOX)), "b": spaces.Dict({"c": BOX})}),
        lambda i: {"a": (np.array([i % 2, i % 3]), _box(i)), "b": {"c": _box(-i)}},
    ),
]
OUTPUTS: dict[str, Callable[[int], Any]] = {
    "action_logp": lambda i: np.float32(-i),
    "state_out": lambda i: {"h": _box(i), "c": _box(2 * i)},
}
"""Extra model outputs and what stands for the number i in them."""

numbers = st.integers(0, 20)


@dataclass(frozen=True)
class Setting:
    """Random settings of an episode's items."""

    observation: Kind
    action: Kind
    spaces_given: bool
    outputs: tuple[str, ...]

    def step(self, numbers: tuple[int, int, int, int], **flags: bool) -> dict[str, Any]:
        """Return arguments of `add_env_step`."""
        observation, action, reward, extra = numbers
        return {
            "observation": self.observation.item(observation),
            "action": self.action.item(action),
            "reward": reward / 2,
            "infos": {"n": extra},
            "extra_model_outputs": {key: OUTPUTS[key](extra) for key in self.outputs} or None,
            **flags,
        }


quads = st.tuples(numbers, numbers, numbers, numbers)
kinds = st.sampled_from(KINDS)
any_setting = st.builds(Setting, kinds, kinds, st.booleans(), st.sampled_from([(), ("action_logp",), tuple(OUTPUTS)]))


@st.composite
def arguments(draw: st.DrawFn, setting: Setting, min_steps: int = 0, max_steps: int = 6) -> dict[str, Any]:
    """Return arguments that both constructors take: of a chunk, mostly with a lookback."""
    steps = draw(st.lists(quads, min_size=min_steps, max_size=max_steps))
    made = [setting.step(step) for step in steps]
    spaces_ = {"observation_space": setting.observation.space, "action_space": setting.action.space}
    return {
        "observations": [setting.observation.item(draw(numbers)), *(step["observation"] for step in made)],
        "actions": [step["action"] for step in made],
        "rewards": [step["reward"] for step in made],
        "infos": draw(st.sampled_from([None, [{"n": -1}, *(step["infos"] for step in made)]])),
        "extra_model_outputs": {key: [step["extra_model_outputs"][key] for step in made] for key in setting.outputs},
        "len_lookback_buffer": draw(st.integers(0, 4) | st.just("auto")),
        "t_started": draw(st.none() | st.integers(0, 9)),
        "terminated": draw(st.sampled_from([False, False, True])),
        "truncated": draw(st.sampled_from([False, False, True])),
        **(spaces_ if setting.spaces_given else {}),
    }


@dataclass
class Pair:
    """One episode in two implementations, to which the same is done."""

    types: ClassVar[tuple[Any, Any]] = (SingleAgentEpisode, RayEpisode)
    alike: ClassVar[dict[str, Any]] = {}  # options of `difference_of`

    ours: Any
    theirs: Any

    @classmethod
    def of(cls, arguments: dict[str, Any], numpy: bool = False, id_: str = "e") -> Self:
        given = {key: value for key, value in arguments.items() if value is not None}
        pair = cls(*(type_(id_, **copy.deepcopy(given)) for type_ in cls.types))
        return pair.map(lambda episode: episode.to_numpy()) if numpy else pair

    def map(self, call: Callable[[Any], Any]) -> Self:
        return type(self)(call(self.ours), call(self.theirs))

    def ask(self, call: Callable[[Any], Any]) -> tuple[Answer, Answer]:
        return ask(lambda: call(self.ours)), ask(lambda: call(self.theirs))

    def check(self, call: Callable[[Any], Any], told: object = "", **how: Any) -> None:
        assert_same_answer(*self.ask(call), told, **{**self.alike, **how})

    def check_all(self, told: object = "") -> None:
        """Both episodes hold the same."""
        self.check(everything, told)


def everything(episode: Any) -> dict[str, Any]:
    """All that an episode tells of itself, its lookback included."""
    whole = slice(-99, None)
    return {
        "id": episode.id_,
        "t": (episode.t_started, episode.t),
        "lengths": (len(episode), episode.env_steps(), episode.agent_steps()),
        "flags": (episode.is_reset, episode.is_terminated, episode.is_truncated, episode.is_done, episode.is_numpy),
        "buffers": [len(x) for x in (episode.observations, episode.actions, episode.rewards, episode.infos)],
        "observations": episode.get_observations(whole, neg_index_as_lookback=True),
        "actions": episode.get_actions(whole, neg_index_as_lookback=True),
        "rewards": episode.get_rewards(whole, neg_index_as_lookback=True),
        "infos": episode.get_infos(whole, neg_index_as_lookback=True),
        "outputs": {
            key: episode.get_extra_model_outputs(key, whole, neg_index_as_lookback=True)
            for key in episode.extra_model_outputs
        },
        "current": [episode.get_observations(), episode.get_actions(), episode.get_rewards(), episode.get_infos()],
        "spaces": (episode.observation_space, episode.action_space),
        "custom": episode.custom_data,
    }
