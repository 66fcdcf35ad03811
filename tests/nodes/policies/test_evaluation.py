"""Evaluation of policies, and policies of rollouts that train."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from drawn_policies import ACTIONS, BOX, logged_rollout
from gymnasium import spaces
from small_env import SmallEnv

from rollflow import MeanStdFilter, Policy, Rollout
from rollflow.nodes import PrevActionsPrevRewards, RandomModule
from rollflow.nodes.env.stepping import SideBySide
from rollflow.nodes.policies.evaluation import Evaluation
from rollflow.stream import EnvError, PolicyError


class Counted(SmallEnv):
    """Its episodes last `always` steps, and give that number at each; or 1 in as many as its seed modulo 7 says."""

    observation_space = BOX
    action_space = ACTIONS["discrete"]

    def __init__(self, always: int | None = None) -> None:
        self.always = self.length = always

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.always is None:
            assert seed is not None
            self.length = seed % 7 + 1
        return super().reset(seed=seed)

    def pay(self, action: Any) -> float:
        return float(self.always or 1)


def counted_policy(**options: Any) -> Policy:
    """Policy that acts at random in `Counted`."""
    return Policy(RandomModule, observation_space=BOX, action_space=ACTIONS["discrete"], **options)


@pytest.mark.parametrize("num_envs", [1, 3, 50])
def test_every_episode_is_played_to_its_end_once(num_envs: int) -> None:
    one = counted_policy().evaluate(Counted, 20, num_envs=1)
    several = counted_policy().evaluate(Counted, 20, num_envs=num_envs)
    np.testing.assert_array_equal(one.returns, several.returns)
    np.testing.assert_array_equal(several.lengths, several.returns)
    assert len(set(several.lengths.tolist())) > 3


def test_the_mean_and_its_interval() -> None:
    evaluation = Evaluation(np.array([1.0, 2.0, 3.0, 4.0] * 25), np.full(100, 7))
    low, high = evaluation.interval
    assert evaluation.mean == 2.5
    assert 2.2 < low < 2.5 < high < 2.8  # 2.5 ± 1.96 * 1.124 / 10
    assert str(evaluation).startswith("mean return 2.50 (95 % confidence: ")
    assert Evaluation(np.array([3.0]), np.array([1])).deviation == 0.0


def test_an_evaluation_leaves_the_policys_sessions_and_filters_alone() -> None:
    pieces = [MeanStdFilter(), PrevActionsPrevRewards(n_prev_rewards=2)]
    policy = Policy(RandomModule, pieces, observation_space=BOX, action_space=ACTIONS["discrete"], learns=True)
    policy.act(np.ones(3, np.float32), session=0)
    policy.evaluate(Counted, 5)
    assert policy.sessions == (0,)
    assert policy.env_to_module["MeanStdFilter"].count == 1


class WithoutInfos(Counted):
    def reset(self, **options: Any) -> Any:
        return np.zeros(3, np.float32)


ONE = Counted(3)


@pytest.mark.parametrize(
    ("env", "options", "error", "told"),
    [
        ("CartPole-v1", {}, PolicyError, r"observation_space of .* but the policy was made for Box\(-2.0"),
        (lambda: 3, {}, PolicyError, "env gives 3, expected an id"),
        (ONE, {}, PolicyError, "env is Counted, expected env: an id, or a function that makes one"),
        (lambda: ONE, {}, EnvError, "the callable for slot 1 gave an environment that another slot has already"),
        (WithoutInfos, {}, EnvError, r"slot 0, episode 0: reset gave an array .*, expected a tuple"),
        *(
            (Counted, {name: wrong}, ValueError, f"^{name} is {wrong!r}, expected a whole number from 1 on$")
            for name, wrong in product(["episodes", "num_envs"], [0, "3"])
        ),
    ],
)
def test_what_can_not_be_evaluated_is_refused(env: Any, options: dict[str, Any], error: Any, told: str) -> None:
    with pytest.raises(error, match=told) as caught:
        counted_policy().evaluate(env, **options)
    assert type(caught.value) is error


def test_one_environment_plays_all_episodes_of_one_slot() -> None:
    assert counted_policy().evaluate(lambda: ONE, 4, num_envs=1).returns.tolist() == [9.0] * 4


class Faulty(Counted):
    """Its second step pays `reward`, or raises that error, or gives `answer`."""

    def __init__(self, reward: Any = 1.0, answer: Any = None) -> None:
        super().__init__(4)
        self.reward, self.answer = reward, answer

    def step(self, action: Any) -> Any:
        return super().step(action) if self.t != 1 or self.answer is None else self.answer

    def pay(self, action: Any) -> Any:
        if self.t == 2 and self.reward is OSError:
            raise OSError("broken")
        return self.reward if self.t == 2 else 1.0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"reward": float("nan")}, "slot 1, {}step 1: its reward is nan, expected a finite float32\nsee docs/"),
        ({"reward": 1e300}, r"slot 1, {}step 1: its reward is 1e\+300, expected a finite float32"),
        ({"reward": None}, "slot 1.*: its reward is None, expected one number"),
        ({"reward": OSError}, "broken\nslot 1(.|\n)*step 1"),
        (
            {"answer": (np.zeros(3, np.float32), 1.0, False, {})},
            "slot 1.*: step gave a tuple of 4, expected .* of 5: obs",
        ),
    ],
    ids=["nan", "infinite", "none", "raised", "four"],
)
@pytest.mark.parametrize("form", ["plain", "vector"])
def test_faults_of_environments_are_told_with_slot_and_step(fault: dict[str, Any], error: str, form: str) -> None:
    made = iter(range(3))

    def make() -> Faulty:
        return Faulty(**fault if next(made) == 1 else {})

    def make_vector() -> SideBySide:
        return SideBySide([make] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    env: Any = make if form == "plain" else make_vector
    place = "episode 1, " if form == "plain" else "vector "
    with pytest.raises((EnvError, OSError), match=error.replace("{}", place)) as caught:
        counted_policy().evaluate(env, 2)
    notes = caught.value.__notes__
    assert len([note for note in notes if "step 1" in note]) + str(caught.value).count("step 1") == 1


@pytest.mark.parametrize("whose", [counted_policy, lambda: Rollout("CartPole-v1")], ids=["policy", "rollout"])
def test_the_keyword_of_the_number_of_episodes_is_told(whose: Any) -> None:
    with pytest.raises(TypeError, match="env is 5, expected what makes environments: the number is episodes=5"):
        whose().evaluate(5)
    with pytest.raises(TypeError, match="'num_episodes', expected episodes=…; 'deterministic', expected explore=False"):
        whose().evaluate("CartPole-v1", num_episodes=5, deterministic=True)


def test_a_policy_of_a_rollout_has_the_weights_published_last(tmp_path: Path) -> None:
    with Rollout("CartPole-v1", fragment_length=8, num_fragments=3, seed=1) as rollout:
        for _ in rollout.fragments():
            for weight in rollout.module.parameters():
                weight.data.add_(0.5)
            rollout.publish(rollout.module.state_dict())
        policy = rollout.policy()
        rollout.save_policy(tmp_path / "p")
        evaluation = rollout.evaluate(episodes=2)
    loaded = Policy.load(tmp_path / "p")
    assert loaded.trained_on == {"environment": "CartPole-v1", "policy_version": 3, "steps": 24, "vector_steps": 24}
    assert len(evaluation.returns) == 2
    observation = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    assert policy.act(observation) == loaded.act(observation)
    torch.testing.assert_close(loaded.module.state_dict(), rollout.module.state_dict(), rtol=0, atol=0)


def test_a_policy_of_a_rollout_of_workers_has_what_their_filters_learnt(tmp_path: Path) -> None:
    options: Any = {"fragment_length": 16, "num_fragments": 3, "seed": 1}
    options["env_to_module_connector"] = lambda env: MeanStdFilter()
    rollout = Rollout("CartPole-v1", where="rollouts", num_envs=2, lanes=2, workers=2, **options)
    with rollout:
        list(rollout.fragments())
        rollout.save_policy(tmp_path / "p")
    count = Policy.load(tmp_path / "p").env_to_module["MeanStdFilter"].count
    assert count == rollout.env_to_module["MeanStdFilter"].count > 90


def test_environments_that_the_rollout_was_given_ready_made_are_asked_for() -> None:
    vector = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with pytest.raises(PolicyError, match="the rollout was given SyncVectorEnv, expected env: an id"):
        Rollout(vector).evaluate(episodes=1)
    _, rollout = logged_rollout("box", "discrete", "none", slots=1, seed=1)
    assert len(rollout.evaluate(Counted, 3).returns) == 3
    assert isinstance(rollout.policy(explore=True).action_space, spaces.Discrete)


class Pixel(Counted):
    """The plain form of an environment whose vectorized form has other spaces."""

    observation_space = gym.spaces.Box(0, 255, (2, 2), np.uint8)


def lasting(num_envs: int, mode: str = "SameStep") -> gym.vector.SyncVectorEnv:
    """The vectorized form: the episodes of slot i last i + 1 steps, and give that number at each."""
    makers = [partial(Counted, slot + 1) for slot in range(num_envs)]
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=gym.vector.AutoresetMode(mode))


gym.register("Pixel-v0", Pixel, vector_entry_point=lasting)
gym.register("VectorAlone-v0", vector_entry_point=lasting)


@pytest.mark.parametrize("env", ["Pixel-v0", "VectorAlone-v0", lasting])
@pytest.mark.parametrize("mode", ["SameStep", "NextStep", "Disabled"])
def test_an_evaluation_is_in_the_form_that_the_rollout_has(env: Any, mode: str) -> None:
    form: Any = {"env": env, "env_kwargs": {"mode": mode}}
    if callable(env):
        form = {"env": partial(env, 3, mode)}
    else:
        form["num_envs"] = 2
    with Rollout(module=RandomModule, fragment_length=4, seed=0, **form) as rollout:
        next(iter(rollout.fragments()))
        evaluation = rollout.evaluate(episodes=7, num_envs=3)
    # Slot i plays the episodes i, i + 3, i + 6.
    assert evaluation.lengths.tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert evaluation.returns.tolist() == [1.0, 4.0, 9.0, 1.0, 4.0, 9.0, 1.0]
