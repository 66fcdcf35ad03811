"""Exploration: how often which action is taken, and what noise is added to it, by a schedule over steps."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numbered_module import NumberedModule, logits_of, numbered_envs
from piece_forms import OneByOne, OnTensors
from small_env import SmallEnv
from together import Together

from rollflow import Columns, ConnectorV2, EpsilonGreedy, MultiAgentRollout, RLModule, Rollout, SingleAgentEpisode
from rollflow.nodes import (
    ConnectorPipelineV2,
    GaussianNoise,
    LambdaConnector,
    Linear,
    NormalizeAndClipActions,
    Temperature,
)
from rollflow.stream import ConnectorError


def chosen(
    schedule: Any, logits: Any, explore: bool = True, step: int = 0, piece_type: Any = EpsilonGreedy, space: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    piece = piece_type(None, space or spaces.Discrete(len(logits[0])), schedule=schedule)
    count = len(logits)
    batch: dict[str, Any] = {
        "action_dist_inputs": np.array(logits),
        "actions": np.full((count, *piece.action_space.shape), 1),
        "action_logp": np.full(count, -5.0, np.float32),
    }
    shared = {"generator": torch.Generator().manual_seed(0), "step": step}
    batch = piece(rl_module=None, batch=batch, episodes=[], explore=explore, shared_data=shared)
    return batch["actions"], batch["action_logp"]


def test_a_line_goes_from_begin_to_end() -> None:
    schedule = Linear(1.0, 0.2, 8)
    assert [schedule(step) for step in (0, 2, 8, 100)] == pytest.approx([1.0, 0.8, 0.2, 0.2])


def test_without_epsilon_the_best_action_is_taken_for_certain() -> None:
    actions, logp = chosen(0, [[0.0, 3.0, 2.0], [9.0, 3.0, 2.0]])
    assert actions.tolist() == [1, 0]
    assert logp.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("ruled_out", [-np.inf, -1e9, float(np.finfo(np.float32).min)])
def test_frequencies_and_log_probabilities_are_those_of_epsilon_greedy(ruled_out: float) -> None:
    actions, logp = chosen(0.4, [[0.0, 3.0, ruled_out, 2.0]] * 30_000)
    shares = np.bincount(actions, minlength=4) / len(actions)
    # Best with 0.6, and 0.4 over the three that are allowed.
    wanted = [0.4 / 3, 0.6 + 0.4 / 3, 0.0, 0.4 / 3]
    np.testing.assert_allclose(shares, wanted, atol=0.01)
    np.testing.assert_allclose(np.exp(logp), np.array(wanted)[actions], rtol=1e-5)


def test_without_exploration_nothing_changes() -> None:
    actions, logp = chosen(1.0, [[0.0, 3.0, 2.0]] * 5, explore=False)
    assert (actions.tolist(), logp.tolist()) == ([1] * 5, [-5.0] * 5)
    batch = noisy(GaussianNoise(schedule=1.0), np.ones((4, 2), np.float32), explore=False)
    assert sorted(batch) == ["action_logp", "actions"]
    assert (batch["actions"] == 1).all()


def test_the_schedule_counts_steps() -> None:
    logits = [[0.0, 1.0]] * 20_000
    means = [float(chosen(Linear(1.0, 0.0, 10), logits, step=step)[0].mean()) for step in (0, 5, 10)]
    assert means == pytest.approx([0.5, 0.75, 1.0], abs=0.015)


@pytest.mark.parametrize(
    ("piece_type", "space", "told"),
    [
        (EpsilonGreedy, spaces.Box(-1, 1, (2,)), "is for one Discrete action"),
        (GaussianNoise, spaces.Discrete(3), r"is for one Box action .* the action space is Discrete\(3\)"),
    ],
)
def test_another_action_space_is_refused(piece_type: Any, space: Any, told: str) -> None:
    batch = {"action_dist_inputs": np.zeros((1, 4)), "actions": np.zeros(1)}
    with pytest.raises(ConnectorError, match=told):
        piece_type(None, space, schedule=0.1)(rl_module=None, batch=batch, episodes=[], explore=True)


def test_temperature_samples_the_softmax_of_what_is_divided_by_it() -> None:
    actions, logp = chosen(2.0, [[0.0, 2.0, -np.inf]] * 30_000, piece_type=Temperature)
    likelier = np.e / (1 + np.e)  # logits 0 and 1
    np.testing.assert_allclose(np.bincount(actions, minlength=3) / len(actions), [1 - likelier, likelier, 0], atol=0.01)
    np.testing.assert_allclose(np.exp(logp), np.where(actions == 1, likelier, 1 - likelier), rtol=1e-5)


@pytest.mark.parametrize(
    ("piece_type", "schedule", "expected"),
    [
        (EpsilonGreedy, -0.1, "from 0 to 1"),
        (EpsilonGreedy, 1.5, "from 0 to 1"),
        (Temperature, 0, "above 0"),
        (GaussianNoise, -0.1, "from 0 on"),
        (GaussianNoise, float("inf"), "from 0 on"),
    ],
)
def test_values_out_of_bounds_are_refused(piece_type: Any, schedule: float, expected: str) -> None:
    told = f"expected a function of steps, or a number {expected}"
    for wrong in (schedule, "often"):
        with pytest.raises(ValueError, match=f"schedule is '?{wrong}'?, {told}"):
            piece_type(schedule=wrong)
    told = f"the schedule's value at step 7 is {schedule}, expected a number {expected}"
    with pytest.raises(ConnectorError, match=told):
        piece_type(schedule=lambda step: schedule).value(7)


def noisy(piece: Any, actions: Any, explore: bool = True) -> dict[str, Any]:
    piece.set_input_spaces(None, spaces.Box(-1.0, 3.0, (2,)))
    batch = {"actions": actions, "action_logp": np.zeros(len(actions), np.float32)}
    shared = {"generator": torch.Generator().manual_seed(0), "step": 5}
    return piece(rl_module=None, batch=batch, episodes=[], explore=explore, shared_data=shared)  # type: ignore[no-any-return]


def test_gaussian_noise_has_the_deviation_of_the_schedule_and_stays_within_bounds() -> None:
    batch = noisy(GaussianNoise(schedule=Linear(1.0, 0.0, 10)), np.ones((20_000, 2), np.float32))
    actions = batch["actions"]
    assert actions.dtype == np.float32
    assert (actions.min(), actions.max()) == (pytest.approx(-1, abs=0.5), pytest.approx(3, abs=0.5))
    assert actions.mean(0) == pytest.approx([1, 1], abs=0.02)
    assert actions.std(0) == pytest.approx([0.5, 0.5], abs=0.02)  # half the way
    assert "action_logp" not in batch  # it would be that of another action
    bounded = noisy(GaussianNoise(schedule=100.0), np.ones((1_000, 2), np.float32))["actions"]
    assert set(np.unique(bounded).round(2)) >= {-1.0, 3.0}
    assert ((-1.0 <= bounded) & (bounded <= 3.0)).all()


each_place = pytest.mark.parametrize(
    ("where", "pieces"), [("inline", []), ("inline", [OneByOne()]), ("processes", []), ("rollouts", [])]
)


class Middle(RLModule):
    """Chooses 0, the middle of -1 to 1."""

    def setup(self) -> None:
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": torch.zeros(len(batch["obs"]), 1) + self.bias}


def fragments_in(where: Any, makers: Any, pieces: list[ConnectorV2], **options: Any) -> list[Any]:
    """The fragments of a rollout of one lane whose actions go through these pieces."""
    with Rollout(makers, lanes=1, where=where, seed=0, module_to_env_connector=lambda _: pieces, **options) as rollout:
        return list(rollout.fragments())


@each_place
def test_every_place_follows_the_schedule_by_itself(where: Any, pieces: list[ConnectorV2]) -> None:
    _, makers = numbered_envs(4, lengths=(3, 8))
    explores = EpsilonGreedy(schedule=Linear(1.0, 0.0, 10))
    options: Any = {"module": NumberedModule(), "fragment_length": 40, "num_fragments": 1}
    [fragment] = fragments_in(where, makers, [explores, *pieces], **options)
    actions = fragment.column(Columns.ACTIONS)
    best = logits_of(torch.tensor(fragment.column("seen")).float()).argmax(-1).numpy()
    assert (actions[10:] == best[10:]).all()
    assert (actions[:5] != best[:5]).any()
    assert (np.exp(fragment.column(Columns.ACTION_LOGP)[10:]) == 1).all()
    assert ((0 <= actions) & (actions < 7)).all()


@pytest.mark.parametrize(
    "make",
    [
        partial(EpsilonGreedy, schedule=0.5),
        partial(Temperature, schedule=2.0),
        partial(GaussianNoise, schedule=1.0),
        partial(NormalizeAndClipActions, normalize_actions=True, clip_actions=True),
        partial(NormalizeAndClipActions, normalize_actions=False, clip_actions=True),
    ],
    ids=lambda make: make.func.__name__,
)
def test_tensors_and_arrays_explore_alike(make: Any) -> None:
    is_discrete = make.func in (EpsilonGreedy, Temperature)
    compared, makers = OnTensors(make, bound=1e-6), [lambda: gym.make("Pendulum-v1", max_episode_steps=5)] * 3
    options: Any = {"module": NumberedModule() if is_discrete else Middle, "fragment_length": 20, "num_fragments": 1}
    fragments_in("inline", numbered_envs(3, lengths=(3, 8))[1] if is_discrete else makers, [compared], **options)
    assert compared.compared == 20


class Heater(SmallEnv):
    """Takes 300 to 500 kelvin, and pays what it takes."""

    action_space = spaces.Box(300, 500, (1,))
    length, truncates = 50, True

    def pay(self, action: Any) -> float:
        return float(action[0])


def heaters() -> Together:
    """A `Heater` for each of two agents."""
    return Together({"a": Heater(), "b": Heater()})


def scaled(noise: Any) -> list[ConnectorV2]:
    return [noise, NormalizeAndClipActions(normalize_actions=True, clip_actions=True)]


HEATED: Any = {"module": Middle, "num_envs": 4, "fragment_length": 500, "num_fragments": 1, "seed": 0}


@pytest.mark.parametrize("where", ["inline", "rollouts", "agents"])
def test_noise_is_in_the_scale_of_actions_that_are_scaled_afterwards(where: Any) -> None:

    def make(env: Any) -> list[ConnectorV2]:
        return scaled(GaussianNoise(schedule=0.1))

    if where == "agents":
        with MultiAgentRollout(heaters, module_to_env_connector=make, **HEATED) as agents:
            [batches] = agents.batches()
        [batch] = batches.values()
    else:
        with Rollout(Heater, where=where, module_to_env_connector=make, **HEATED) as rollout:
            [batch] = rollout.batches()
            # Means of 50 steps of 400 kelvin with a deviation of 10.
            returns = rollout.evaluate(episodes=20, explore=True).returns / 50
        assert returns.mean() == pytest.approx(400, abs=2)
        assert returns.std() == pytest.approx(10 / 50**0.5, rel=0.6)
    assert batch["rewards"].mean() == pytest.approx(400, abs=1)
    assert batch["rewards"].std() == pytest.approx(10, abs=0.5)
    assert batch["actions"].std() == pytest.approx(0.1, abs=0.005)
    torch.testing.assert_close(batch["rewards"], 400 + 100 * batch["actions"][:, 0], rtol=1e-5, atol=0)


def test_what_scales_is_looked_for_after_every_edit() -> None:
    noise = GaussianNoise(schedule=1.0)
    rollout = Rollout(Heater, module_to_env_connector=lambda env: scaled(noise), **HEATED)
    seen = [noise.is_normalized]
    rollout.module_to_env.remove("NormalizeAndClipActions")
    seen.append(noise.is_normalized)
    nested = ConnectorPipelineV2(connectors=[])
    rollout.module_to_env.insert_after("GaussianNoise", nested)
    nested.append(NormalizeAndClipActions(normalize_actions=True, clip_actions=False))
    seen.append(noise.is_normalized)
    rollout.close()
    assert seen == [True, False, True]


@pytest.mark.parametrize("chosen", ["Box", "Discrete"])
def test_exploration_is_of_what_the_module_chooses_in(chosen: str) -> None:
    class Pushes(Heater):
        action_space: Any = spaces.Dict({"push": spaces.Discrete(3) if chosen == "Discrete" else Heater.action_space})

        def step(self, action: Any) -> Any:
            return super().step(np.reshape(action["push"], -1))

    class Choice(Middle):
        def setup(self) -> None:
            super().setup()
            self.action_space = spaces.Discrete(3) if chosen == "Discrete" else spaces.Box(300, 320, (1,))

        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            if chosen == "Box":
                return {"actions": 310 + super()._forward(batch)["actions"]}
            return {"action_dist_inputs": torch.tensor([0.0, -1e9, 1.0]).expand(len(batch["obs"]), 3) + self.bias}

    as_dict = LambdaConnector(lambda batch: batch | {"actions_for_env": {"push": batch["actions"]}}, columnar=True)
    explores: Any = EpsilonGreedy(schedule=1.0) if chosen == "Discrete" else GaussianNoise(schedule=50.0)
    options = HEATED | {"module": Choice, "module_to_env_connector": lambda env: [explores, as_dict]}
    with Rollout(Pushes, **options) as rollout:
        [batch] = rollout.batches()
    rewards = batch["rewards"]
    assert (rewards.min(), rewards.max()) == ((0, 2) if chosen == "Discrete" else (300, 320))
    if chosen == "Discrete":
        assert rewards.unique().tolist() == [0, 2]
        assert rewards.mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("piece", [EpsilonGreedy, Temperature, GaussianNoise])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_exploration_behind_what_scales_is_refused(piece: Any, several: bool, nested: bool) -> None:
    def make(env: Any) -> list[ConnectorV2]:
        scales = NormalizeAndClipActions(normalize_actions=True, clip_actions=True)
        behind = piece(schedule=0.5)
        return [scales, ConnectorPipelineV2(connectors=[behind]) if nested else behind]

    kind: Any = MultiAgentRollout if several else Rollout
    expected = (
        f"{piece.__name__} stands behind NormalizeAndClipActions, so that the environments would get actions without "
        "it; expected it before"
    )
    with pytest.raises(ConnectorError, match=expected):
        kind(heaters if several else Heater, module_to_env_connector=make, **HEATED)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.uint8, 0, 255), (np.int8, -9, 9), (np.int64, -(2**63), 2**63 - 1)]
)
def test_noise_on_whole_numbers_is_rounded(dtype: Any, low: int, high: int) -> None:
    space = spaces.Box(low, high, (1,), dtype)
    piece = GaussianNoise(None, space, schedule=4.0)

    def moved(actions: Any) -> Any:
        episodes: Any = [SingleAgentEpisode(observations=[0.0])] * len(actions)
        generator = {"generator": torch.Generator().manual_seed(0)}
        return piece(rl_module=None, batch={"actions": actions}, episodes=episodes, explore=True, shared_data=generator)

    middle = moved(np.full((1000, 1), 5, dtype))
    if dtype is np.int64:  # where nothing is clipped
        by = middle["actions"].ravel() - 5
        assert abs(by.mean()) < 0.5  # 4 / sqrt(1000) = 0.13
        assert by.min() < -8
    ends = moved(np.array([[low], [high]] * 100, dtype))["actions"]
    assert all(action in space for action in ends)
    assert {low, high} <= set(ends.ravel().tolist())
