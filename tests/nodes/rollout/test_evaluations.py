"""Evaluations beside a rollout."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv

from rollflow import MultiAgentRollout, Policy, Rollout
from rollflow.nodes.policies.policy import save_all
from rollflow.stream import PolicyError, RunError

pytestmark = pytest.mark.slow  # processes play
NUMBERED = partial(NumberedEnv, 0)
OPTIONS: dict[str, Any] = {"num_envs": 2, "fragment_length": 10, "seed": 0}


def play_and_wait(rollout: Any, evaluations: Any) -> None:
    """Go through a rollout's batches, each once the evaluation before it has ended."""
    for _ in rollout.batches():
        evaluations.wait()


class Breaks(gym.Wrapper[Any, Any, Any, Any]):
    """Gives an observation that is in no space."""

    def reset(self, **options: Any) -> Any:
        return np.zeros(3, np.float32), {}


def test_the_newest_weights_are_evaluated_and_the_best_policy_is_kept(tmp_path: Path) -> None:
    versions = []
    with Rollout("CartPole-v1", num_fragments=8, **OPTIONS) as rollout:
        evaluations = rollout.evaluate_every(40, episodes=3, best=tmp_path / "best")
        for _ in rollout.batches():
            evaluations.wait()
            rollout.publish({name: value.mul(-1.5) for name, value in rollout.module.state_dict().items()})
            versions.append(rollout.evaluate(episodes=3).returns)
    steps = [each.steps for each in evaluations.done]
    assert steps == sorted(steps)
    assert [each // 40 for each in steps] == list(range(1, len(steps) + 1))
    for each in evaluations.done:
        assert isinstance(each.version, int)
        np.testing.assert_array_equal(each.found.returns, versions[each.version - 1])  # type: ignore[union-attr]
    best = max(evaluations.done, key=lambda each: each.mean)
    kept = Policy.load(tmp_path / "best")
    assert kept.trained_on["mean_return"] == best.mean
    assert kept.trained_on["policy_version"] == best.version
    assert kept.evaluate("CartPole-v1", 3).mean == best.mean


def test_a_better_policy_of_an_earlier_run_stays(tmp_path: Path) -> None:
    with Rollout("CartPole-v1", num_fragments=3, **OPTIONS) as rollout:
        policy = rollout.policy()
        policy.trained_on["mean_return"] = 1e6
        save_all({tmp_path: policy})
        evaluations = rollout.evaluate_every(20, episodes=2, best=tmp_path)
        play_and_wait(rollout, evaluations)
    assert evaluations.done
    assert Policy.load(tmp_path).trained_on["mean_return"] == 1e6


def test_a_folder_of_something_else_is_refused_before_the_run(tmp_path: Path) -> None:
    with Rollout("Acrobot-v1", **OPTIONS) as rollout:
        rollout.save_policy(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with Rollout("CartPole-v1", **OPTIONS) as rollout:
        for name, text in (
            ("other", "was trained in Acrobot-v1, and this one is in CartPole-v1"),
            ("file", "something"),
        ):
            with pytest.raises(PolicyError, match=text):
                rollout.evaluate_every(20, best=tmp_path / name)


def test_an_evaluation_stays_when_its_policy_can_not_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Rollout("CartPole-v1", num_fragments=2, **OPTIONS) as rollout:
        evaluations = rollout.evaluate_every(20, episodes=2, best=tmp_path / "best")
        (tmp_path / "best").write_text("")
        for _ in rollout.batches():
            evaluations.wait()
    assert evaluations.done
    assert repr(evaluations) == f"<Evaluations every 20 steps: {len(evaluations.done)} done>"
    assert "can't be saved: there is something else at" in caplog.text


def test_agents_are_evaluated_together(tmp_path: Path) -> None:
    agents, log = partial(NumberedAgents, 0, nested=0), f"jsonl:{tmp_path / 'log'}"
    with MultiAgentRollout(agents, num_fragments=3, log=log, **OPTIONS) as rollout:
        evaluations = rollout.evaluate_every(20, episodes=2, seed=4, best=tmp_path / "best")
        play_and_wait(rollout, evaluations)
        expected = rollout.evaluate(episodes=2, seed=4)
    [*_, last] = evaluations.done
    assert last.found.keys() == expected.keys()  # type: ignore[union-attr]
    for agent, each in expected.items():
        np.testing.assert_array_equal(last.found[agent].returns, each.returns)  # type: ignore[index]
        assert f'"eval/return/{agent}"' in (tmp_path / "log").read_text()
    assert {Policy.load(folder).trained_on["mean_return"] for folder in (tmp_path / "best").iterdir()} == {
        max(each.mean for each in evaluations.done)
    }


def test_an_evaluation_that_fails_is_told_and_the_rollout_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Rollout(NUMBERED, num_fragments=3, **OPTIONS) as rollout:
        evaluations = rollout.evaluate_every(20, env=lambda: Breaks(NumberedEnv(0)))
        play_and_wait(rollout, evaluations)
    assert not evaluations.done
    assert "evaluation at 20 steps failed: ColumnError" in caplog.text
    assert "expected observations in Box" in caplog.text


def test_an_evaluation_under_way_ends_with_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    with Rollout(NUMBERED, num_fragments=2, **OPTIONS) as rollout:
        evaluations = rollout.evaluate_every(20, episodes=10**6)
        for _ in rollout.batches():
            pass
    assert not evaluations.done
    assert "was broken off by the end of the rollout" in caplog.text


def test_a_wrong_keyword_is_refused() -> None:
    with Rollout(NUMBERED, **OPTIONS) as rollout:
        with pytest.raises(TypeError, match="evaluate_every got"):
            rollout.evaluate_every(20, nums_envs=3)
        with pytest.raises(ValueError, match="steps is 0"):
            rollout.evaluate_every(0)
    with pytest.raises(RunError, match="the rollout is closed"):
        rollout.evaluate_every(20)
