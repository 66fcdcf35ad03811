"""Errors about what one slot's environment gave that has no place in an array: they name the slot and what it was."""

import re
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sloppy_envs import fragments_of
from small_env import SmallEnv

from rollflow import ConnectorV2, Rollout
from rollflow.nodes import RandomModule
from rollflow.stream import ColumnError, EnvError
from rollflow.stream.graph.inline_run import InlineRun

PLACES = ["inline", "threads", "processes", "rollouts"]


ZEROS, LONG = np.zeros(3, np.float32), np.zeros(4, np.float32)


class Odd(SmallEnv):
    """Environment that is wrong from step `since` on: in its observation, or its reward. Episodes of four steps."""

    observation_space: gym.Space[Any] = spaces.Box(-1, 1, (3,), np.float32)
    length = 4

    since = 0
    right: Any = ZEROS
    wrong: Any = ZEROS
    reward: Any = 1.0
    error: Any = None

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def look(self) -> Any:
        return self.wrong if self.t >= self.since else self.right

    def pay(self, action: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.reward if self.t >= self.since else 1.0


WRONG_SHAPE = r"slot 1: an observation that is not in its space: column 'obs': got float32\[4\], expected float32\[3\]"


@pytest.mark.parametrize("where", PLACES)
def test_a_wrong_shape_names_the_slot_and_both_shapes(where: Any) -> None:
    """After the first reset, and in every slot of a later step."""
    with pytest.raises(EnvError, match=WRONG_SHAPE):
        fragments_of([Odd, partial(Odd, wrong=LONG)], lanes=1, where=where)
    told = r"column 'obs': got float32\[2, 4\], expected float32\[2, 3\]; slot 0 has shape \[4\], expected \[3\]"
    with pytest.raises(ColumnError, match=told):
        fragments_of([partial(Odd, wrong=LONG, since=2)] * 2, lanes=1, where=where)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_in_a_vector_environment_of_ones_own_slots_are_named_as_well(mode: Any) -> None:
    def vector(**odd: Any) -> SyncVectorEnv:
        return SyncVectorEnv([Odd, partial(Odd, **odd)], autoreset_mode=mode)

    for since in (0, 2):
        with pytest.raises(EnvError, match=WRONG_SHAPE):
            fragments_of(vector(wrong=LONG, since=since))
    with pytest.raises((TypeError, ValueError), match=r"sequence|scalar") as raised:
        fragments_of(vector(reward=np.ones(2)))
    assert any("each environment's gives (observation, reward," in note for note in raised.value.__notes__)


class ResetsAlone(Odd):
    """Its `reset` gives the observation alone from some reset on: an array of two rows comes apart like a pair."""

    def __init__(self, size: int = 2, *, since: int = 0) -> None:
        super().__init__(wrong=np.zeros(size, np.float32), observation_space=spaces.Box(-1, 1, (size,), np.float32))
        self.resets_left = since

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        self.resets_left -= 1
        return observation if self.resets_left < 0 else (observation, info)


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("size", [2, 3])
def test_a_reset_that_gives_the_observation_alone_is_named(size: int, mode: Any) -> None:
    for since in (0, 1):
        told = rf"^slot 0: reset gave an array float32\[{size}\], expected a tuple \(observation, info\)"
        with pytest.raises(EnvError, match=told):
            fragments_of(partial(ResetsAlone, size, since=since), autoreset_mode=mode)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(2, r"slot 0: an observation that is not in its space"), (3, r"and gives \(observation, info\)")],
)
def test_a_reset_without_infos_is_told_of_a_vector_environment_of_ones_own(size: int, expected: str) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)) as raised:
        fragments_of(SyncVectorEnv([partial(ResetsAlone, size)]))
    assert re.search(expected, "\n".join([str(raised.value), *raised.value.__notes__]))


def test_a_vector_environment_whose_reset_gives_the_observations_alone_is_named() -> None:
    class Alone(gym.vector.VectorWrapper):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0]

    told = r"reset gave an array float32\[2, 3\], expected a tuple \(observations, infos\)"
    with pytest.raises(EnvError, match=told):
        fragments_of(Alone(SyncVectorEnv([Odd, Odd])))


class Informs(Odd):
    """Its infos are what it is given: of a reset, and of every step."""

    def __init__(self, reset: Any, step: Any) -> None:
        super().__init__()
        self.of_reset, self.of_step = reset, step

    def tell(self) -> Any:
        return self.of_step if self.t else self.of_reset


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_an_info_that_cannot_be_recorded_is_named(where: Any) -> None:
    with pytest.raises(EnvError, match="slot 1, its first step: info is a list of 1, expected a dict"):
        fragments_of([Odd, partial(Informs, {}, ["a"])], lanes=1, where=where)
    with pytest.raises(EnvError, match="slot 1, the first reset: info is a list of 1, expected a dict"):
        fragments_of([Odd, partial(Informs, ["a"], {})], lanes=1, where=where)


def test_one_slot_without_infos_leaves_those_of_the_others() -> None:
    [fragment, _, _] = fragments_of([partial(Informs, {}, None), partial(Informs, {}, {"a": 1})], fragment_length=2)
    first, second = (chunk.get_infos(-1) for chunk in fragment.episodes())
    assert (first, second) == ({}, {"a": 1})


def test_an_error_of_the_environments_own_stays_what_it_is() -> None:
    vector = SyncVectorEnv([Odd, partial(Odd, error=ValueError("its own"))])
    with pytest.raises(ValueError, match="its own") as raised:
        fragments_of(vector)
    assert str(raised.value) == "its own"


class Writes(Odd):
    observation_space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"note": spaces.Text(3)})})


@pytest.mark.parametrize("where", PLACES)
def test_a_part_without_columns_is_named_alike_everywhere(where: Any) -> None:
    told = r"slot 0: the observation space at \['b'\]\['note'\] is Text\(.*\), which has no columns; expected Box"
    with pytest.raises(EnvError, match=told):
        fragments_of([Writes, Writes], where=where)


BOX = spaces.Box(-1, 1, (2,), np.float32)
PARTS = spaces.Dict({"a": BOX, "b": spaces.Discrete(2)})
PART = {"a": np.zeros(2, np.float32), "b": 0}
WRONG: dict[str, tuple[gym.Space[Any], Any, Any, str]] = {
    "None": (BOX, np.zeros(2, np.float32), None, r"'obs': got None, expected float32\[2\]"),
    "a str": (BOX, np.zeros(2, np.float32), "far", r"'obs': got 'far', expected float32\[2\]"),
    "a dict": (BOX, np.zeros(2, np.float32), PART, r"'obs': got {'a': float32\[2\], 'b': 0}, expected float32\[2\]"),
    "a key less": (PARTS, PART, {"a": PART["a"]}, r"the keys \['b'\] are missing, expected the keys \['a', 'b'\]"),
    "a key more": (PARTS, PART, {**PART, "c": 1}, r"the keys \['c'\] are new, expected the keys \['a', 'b'\]"),
    "no dict": (PARTS, PART, PART["a"], r"got an array float32\[2\], expected a dict of 2 parts"),
    "a part": (PARTS, PART, {**PART, "b": None}, r"'obs'\['b'\]: got None, expected int64\[\]"),
    "a gradient": (BOX, np.zeros(2, np.float32), torch.zeros(2, requires_grad=True), r"got a Tensor float32\[2\]"),
}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("since", [0, 2, 4])  # the first reset, a step, the last one of an episode
@pytest.mark.parametrize("name", WRONG)
def test_an_observation_of_another_kind_is_told_with_its_slot_and_what_fits(name: str, since: int, mode: Any) -> None:
    space, right, wrong, told = WRONG[name]
    with pytest.raises(EnvError, match=rf"^slot 1: an observation that is not in its space: column .*{told}") as raised:
        envs = [partial(Odd, observation_space=space, right=right, wrong=each, since=since) for each in (right, wrong)]
        fragments_of(envs, lanes=1, autoreset_mode=mode)
    assert any(note.startswith("lane 0, ") for note in raised.value.__notes__)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_tensors_are_taken_by_their_values(mode: Any) -> None:
    seen = {"a": torch.tensor([0.5, -0.25]), "b": torch.tensor(1)}
    envs = [partial(Odd, observation_space=PARTS, wrong=seen, reward=torch.tensor(0.5))] * 2
    [fragment] = fragments_of(envs, num_fragments=1, autoreset_mode=mode)
    np.testing.assert_array_equal(fragment.column("obs")["a"], np.full((4, 2, 2), [0.5, -0.25], np.float32))
    np.testing.assert_array_equal(fragment.column("obs")["b"], np.ones((4, 2), np.int64))
    np.testing.assert_array_equal(fragment.column("rewards"), np.full((4, 2), 0.5, np.float32))


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Decimal("0.1"), np.float32(0.1)),
        (Fraction(1, 3), np.float32(1 / 3)),
        (2**70, np.float32(2.0**70)),
        (np.array([0.25]), np.float32(0.25)),
        (np.array(-3), np.float32(-3)),
        (np.float16(0.5), np.float32(0.5)),
        (np.True_, np.float32(1)),
    ],
)
def test_a_real_number_of_any_class_is_a_reward(reward: Any, expected: Any, mode: Any) -> None:
    [fragment] = fragments_of([partial(Odd, reward=reward), Odd], num_fragments=1, autoreset_mode=mode)
    np.testing.assert_array_equal(fragment.column("rewards"), np.array([[expected, 1.0]] * 4, np.float32))


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (None, "None"),
        ("0.5", "'0.5'"),
        (1j, "1j"),
        (np.zeros(2), r"an array float64\[2\]"),
        (np.zeros(0), r"an array float64\[0\]"),
        ([0.5], r"\[0.5\]"),
        (10**400, "1000"),
    ],
)
def test_a_reward_that_is_no_number_is_refused(reward: Any, told: str, mode: Any) -> None:
    with pytest.raises(EnvError, match=f"slot 1: its reward is {told}.*, expected one number") as raised:
        fragments_of([Odd, partial(Odd, reward=reward)], lanes=1, autoreset_mode=mode)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("reward", [np.nan, -np.inf])
@pytest.mark.parametrize("where", [*PLACES, "vector"])
def test_the_first_reward_in_time_that_is_not_finite_is_refused_with_its_place(where: Any, reward: float) -> None:
    """Those of the first slot are later, in the order of the chunks before it."""
    envs: Any = [partial(Odd, reward=reward, since=since, length=99) for since in (7, 6)]
    if where == "vector":
        envs, where = SyncVectorEnv(envs), "inline"
    told = f"^lane 0, slot 1, vector step 5: its reward is {reward}, expected a finite"
    with pytest.raises(EnvError, match=told) as raised:
        fragments_of(envs, where=where, **({"lanes": 1} if isinstance(envs, list) else {}))
    assert "vector step" not in " ".join(note.split("\n")[0] for note in raised.value.__notes__)


class Own(ConnectorV2):
    """Piece of the user that leaves everything as it is."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return batch


def test_no_piece_is_named_where_an_environment_gives_a_reward_that_is_not_finite() -> None:
    with pytest.raises(EnvError, match="its reward is nan") as raised:
        fragments_of(partial(Odd, reward=np.nan), env_to_module_connector=lambda *spaces: Own())
    assert not [note for note in raised.value.__notes__ if "connector piece" in note]


def test_at_a_drain_all_lanes_are_cut_before_a_reward_that_is_not_finite_is_refused() -> None:
    """Lanes 0 and 2 give such a reward in the third of five steps."""
    steps, envs = Counter[int](), [partial(Odd, length=99, reward=np.nan, since=each) for each in (3, 99, 3, 99)]
    rollout: Any = Rollout(envs, module=RandomModule, lanes=4, fragment_length=8)
    rollout.hold_back(
        SimpleNamespace(admits=lambda lane: steps.update([lane.index]) or steps[lane.index] <= 5, watch=id)
    )
    taken: list[Any] = []
    with InlineRun(rollout.graph()) as run:
        assert run.next_outputs() == []  # all lanes are held back
        run.finish()
        with pytest.raises(EnvError, match=r"^lane 0, slot 0, vector step 2: its reward is nan"):
            while True:
                taken += run.next_outputs()
    assert [(fragment.lane, fragment.num_steps) for _, fragment in taken] == [(1, 5), (3, 5)]


@pytest.mark.parametrize("where", PLACES)
def test_a_box_without_numbers_is_a_space(where: Any) -> None:
    empty, parts = np.zeros(0, np.float32), spaces.Dict({"none": spaces.Box(-1, 1, (0,)), "some": BOX})
    for space, seen in ((spaces.Box(-1, 1, (0,)), empty), (parts, {"none": empty, "some": PART["a"]})):
        options: Any = {"module": RandomModule, "fragment_length": 5, "num_fragments": 1, "where": where}
        with Rollout([partial(Odd, observation_space=space, wrong=seen)] * 2, **options) as rollout:
            [batch] = rollout.batches()
        obs = batch["obs"] if space is not parts else batch["obs"]["none"]
        assert tuple(obs.shape) == (10, 0)
