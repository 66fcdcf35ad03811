"""Schedules go by the run's vector steps: after a loss, on hosts that join, in policies, and in a run that goes on."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from places import rollout_at
from remote_hosts import hosting, listening
from remote_rollouts import HASTY, taken_until
from small_env import SmallEnv
from together import Together

from rollflow import EpsilonGreedy, MultiAgentRollout, Policy, RemoteEnvs, RemoteRollouts, RLModule, Rollout
from rollflow.nodes import RolloutHost
from rollflow.stream import RunError

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)

ACTIONS, LENGTH, LAST = 4, 7, 25  # of an episode; steps of a first life that is fated


class Ends(SmallEnv):
    """Rewards action 2; comes to its fate in a step of its first life, which a folder's file remembers."""

    action_space = spaces.Discrete(ACTIONS)
    length, truncates = LENGTH, True

    def __init__(self, folder: Path | None = None, fate: str = "") -> None:
        self.fate, self.made = fate, 0
        if folder is not None and (folder / "life").exists():
            self.fate = ""
        elif folder is not None:
            (folder / "life").touch()

    def pay(self, action: Any) -> float:
        if self.fate and self.made == LAST:
            if self.fate == "raise":
                raise RuntimeError("it broke")
            os.kill(os.getpid(), signal.SIGKILL)
        self.made += 1
        return float(action == 2)


class Two(RLModule):
    """Prefers action 2."""

    def setup(self) -> None:
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        values = torch.zeros(len(batch["obs"]), ACTIONS)
        values[:, 2] = 1.0
        return {"action_dist_inputs": values + self.bias}


def by_steps(step: int) -> float:
    """An epsilon that names its step."""
    return (step + 1) / 1000


def random_until_20(step: int) -> float:
    return float(step < 20)


def steps_of(logp: Any, actions: Any) -> list[int]:
    """The steps at which `by_steps` gave epsilon, by the log-probabilities of the choices."""
    chance = np.exp(np.asarray(logp, np.float64))
    epsilon = np.where(np.asarray(actions) == 2, (1 - chance) * ACTIONS / (ACTIONS - 1), chance * ACTIONS)
    return [int(step) for step in (epsilon * 1000).round() - 1]


def explores(env: Any, schedule: Any = by_steps) -> EpsilonGreedy:
    return EpsilonGreedy(schedule=schedule)


ACTS: Any = {"module": Two, "module_to_env_connector": explores}
OPTIONS: Any = {**ACTS, "fragment_length": 10, "seed": 0}


def steps_of_lane(fragments: list[Any], lane: int = 0) -> list[int]:
    of_lane = [fragment for fragment in fragments if fragment.lane == lane]
    columns = [(each.column("action_logp")[:, 0], each.column("actions")[:, 0]) for each in of_lane]
    return [step for column in columns for step in steps_of(*column)]


@pytest.mark.parametrize(
    ("place", "fate"), [("inline", ""), ("processes", "kill"), ("rollouts", "kill"), ("hosted rollouts", "raise")]
)
def test_a_lane_that_begins_anew_goes_on_where_the_run_is(place: str, fate: str, tmp_path: Path) -> None:
    makers = [partial(Ends, tmp_path, fate)]
    with rollout_at(place, makers, acts=ACTS, fragment_length=10, num_fragments=5, seed=0) as rollout, rollout:
        fragments = list(rollout.fragments())
    assert bool(fate) == any(fragment.losses for fragment in fragments)
    steps = steps_of_lane(fragments)
    assert steps == list(range(sum(fragment.num_rows for fragment in fragments)))
    assert rollout.environments.vector_steps == len(steps)


@pytest.mark.parametrize("where", ["inline", "rollouts"])
def test_so_does_one_of_several_agents(where: Any, tmp_path: Path) -> None:
    fate = "" if where == "inline" else "kill"

    def two() -> Together:
        return Together({"a": Ends(tmp_path, fate), "b": Ends()})

    with MultiAgentRollout(two, num_envs=1, where=where, num_fragments=4, **OPTIONS) as rollout:
        fragments = list(rollout.fragments())
    for agent in ("a", "b"):
        alone = [each.agent_episodes[agent] for fragment in fragments for each in fragment.episodes()]
        logp, actions = (
            np.concatenate([each.get_extra_model_outputs("action_logp") for each in alone]),
            np.concatenate([each.get_actions() for each in alone]),
        )
        assert steps_of(logp, actions) == list(range(40))
    assert rollout.policy("a").trained_on["vector_steps"] == 40


@pytest.mark.parametrize("kind", [RemoteEnvs, RemoteRollouts])
def test_a_host_that_comes_in_anothers_place_begins_where_the_run_is(kind: Any) -> None:
    envs = listening(kind, limits=HASTY)
    of_rollouts = {"kind": RolloutHost, **ACTS}
    options: Any = of_rollouts if kind is RemoteRollouts else {}
    first = hosting(envs.addresses[0], [Ends], **options)
    host = first.__enter__()
    with Rollout(envs, **OPTIONS) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments) for _ in range(3)]
        host.stop()
        with hosting(envs.addresses[0], [Ends], **options):
            taken += taken_until(fragments, lambda more: any(each.lane == 1 for each in more))
    first.__exit__(None, None, None)
    made = sum(fragment.num_rows for fragment in taken if fragment.lane == 0)
    assert made >= 30
    assert steps_of_lane(taken) == list(range(made))
    assert steps_of_lane(taken, 1) == list(range(made, made + 10))


@pytest.mark.parametrize("where", ["inline", "rollouts"])
def test_policies_stand_at_the_step_of_the_run(where: Any, tmp_path: Path) -> None:
    options = OPTIONS | {"module_to_env_connector": partial(explores, schedule=random_until_20)}
    with Rollout(Ends, num_envs=2, lanes=1, where=where, num_fragments=2, **options) as rollout:
        early = rollout.evaluate(episodes=20, explore=True).mean
        fragments = list(rollout.fragments())
        assert (np.concatenate([each.column("actions") for each in fragments]) != 2).mean() > 0.5
        # All 7 rewards of each episode: from step 20 on no action is random.
        assert rollout.evaluate(episodes=20, explore=True).returns.tolist() == [LENGTH] * 20
        assert early < 0.5 * LENGTH
        rollout.save_policy(tmp_path / "policy", explore=True)
    loaded = Policy.load(tmp_path / "policy", allow=[__name__])
    assert loaded.trained_on["vector_steps"] == 20
    seen = np.zeros((50, 1), np.float32)
    assert [set(loaded.act_batch(seen).tolist()) for _ in range(3)] == [{2}] * 3
    assert loaded.evaluate(Ends, 5).mean == LENGTH


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_a_run_goes_on_with_the_steps_of_another(where: Any) -> None:
    rollout = Rollout(Ends, num_envs=1, where=where, num_fragments=2, **OPTIONS)
    assert rollout.environments.vector_steps == 0
    rollout.environments.begin_at(300)
    assert rollout.environments.vector_steps == 300
    with rollout:
        assert steps_of_lane(list(rollout.fragments())) == list(range(300, 320))
        assert rollout.environments.vector_steps == 320
        with pytest.raises(RunError, match="the run was to begin at step 7, but it runs already"):
            rollout.environments.begin_at(7)


@pytest.mark.parametrize("steps", [-1, 1.5, "1"])
def test_steps_that_are_none_are_refused(steps: Any) -> None:
    rollout = Rollout(Ends, num_envs=1, **OPTIONS)
    with pytest.raises(ValueError, match="vector_steps is"):
        rollout.environments.begin_at(steps)
    assert rollout.environments.vector_steps == 0
    rollout.close()
