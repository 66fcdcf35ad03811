"""Warnings for observations outside their space: once in a run, wherever the environments step."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from remote_hosts import hosting, listening
from sloppy_envs import SPACE, Sloppy, Zeros, fragments_of, sloppy_agents

from rollflow import MultiAgentRollout, RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost
from rollflow.nodes.env.observation_check import CHECKED_STEPS, Deviations, ObservationCheck, ObservationRows
from rollflow.stream import EnvError

DTYPE = "observation['near'] is float64, expected float32 as in its space: it is cast"
BOUNDS = "observation['near'][1] is 7.0, expected -1.0 to 1.0: it is outside its space"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log's lines on observations, those on dtypes first."""
    name = "rollflow.nodes.env.observation_check"
    told = [record.getMessage() for record in caplog.records if record.name == name]
    return sorted(told, key=lambda text: "outside its space" in text)


def test_a_later_step_is_seen_as_well(caplog: pytest.LogCaptureFixture) -> None:
    fragments_of(partial(Sloppy, late=True), lanes=1)
    _, bounds = said(caplog)
    assert bounds.startswith(f"lane 0, slot 0, vector step 3: {BOUNDS}")
    assert 3 in CHECKED_STEPS


class OfFloats(gym.vector.VectorWrapper):
    """A vector environment that gives float64 for float32, in the second slot beyond its space."""

    def reset(self, **kwargs: Any) -> Any:
        observations, infos = self.env.reset(**kwargs)
        return self._sloppy(observations), infos

    def step(self, actions: Any) -> Any:
        observations, *others = self.env.step(actions)
        return self._sloppy(observations), *others

    def _sloppy(self, observations: Any) -> Any:
        return {"near": observations["near"] + np.array([[0.0], [7.0]]), "door": observations["door"]}


class Careless(Sloppy):
    """Its observations are not in their space; its `truncated` and its infos are None."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, _ = super().step(action)
        return observation, reward, terminated, None, None


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_whatever_deviates_is_said_once(where: Any, caplog: pytest.LogCaptureFixture) -> None:
    fragments_of([partial(Sloppy, False), Careless] * 2, lanes=2, where=where)
    logged = said(caplog)
    assert len(logged) == 4
    for text in (
        DTYPE,
        BOUNDS,
        "slot 1, its first step: truncated is None, expected a bool: it is recorded as False",
        "slot 1, its first step: info is None, expected a dict: it is recorded as an empty one",
    ):
        [told] = [each for each in logged if text in each]
        assert told.startswith(("lane 0, slot 1, ", "lane 1, slot 1, "))
        assert told.endswith(" (said once per run)")


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_vector_environment_of_ones_own_is_seen_as_well(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    vector = SyncVectorEnv([partial(Sloppy, False)] * 2, autoreset_mode=mode)
    fragments_of(OfFloats(vector))
    dtype, bounds = said(caplog)
    assert dtype.startswith(f"lane 0, slot 0, the first reset: {DTYPE}")
    assert bounds.startswith("lane 0, slot 1, the first reset: observation['near'][0] is 7.0, expected -1.0 to 1.0")


@pytest.mark.parametrize("where", ["inline", "threads", "processes"])
def test_agents_are_named(where: Any, caplog: pytest.LogCaptureFixture) -> None:
    fragments_of(sloppy_agents, kind=MultiAgentRollout, num_envs=2, lanes=2, where=where)
    dtype, bounds = said(caplog)
    assert f"reset, agent 'b': {DTYPE}" in dtype
    assert f"env step 0, agent 'b': {BOUNDS}" in bounds
    assert all(told.startswith(("environment 0, ", "environment 1, ")) for told in (dtype, bounds))


@pytest.mark.parametrize(
    ("env", "kind", "agent"), [(Sloppy, Rollout, ""), (sloppy_agents, MultiAgentRollout, ", agent 'b'")]
)
def test_of_hosts_that_step_the_rollout_sees_the_values_and_the_host_the_dtypes(
    env: Any, kind: Any, agent: str, caplog: pytest.LogCaptureFixture
) -> None:
    envs = listening(RemoteEnvs)
    with hosting(envs.addresses[0], [env] * 2, lanes=2):
        fragments_of(envs, kind=kind)
    [seen_here] = [told for told in said(caplog) if f"vector step 0{agent}: " in told]
    assert BOUNDS in seen_here
    assert sum(DTYPE in told for told in said(caplog)) == 1


def test_of_hosts_that_do_rollouts_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(RemoteRollouts)
    with hosting(envs.addresses[0], [Sloppy] * 2, kind=RolloutHost, lanes=2, module=Zeros(), name="far away"):
        fragments_of(envs)
    dtype, bounds = said(caplog)
    assert DTYPE in dtype
    assert BOUNDS in bounds
    assert dtype.startswith("host far away (tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("space", "row", "told"),
    [
        (spaces.Discrete(3, start=2), np.array([2, 5]), "1: observation is 5, expected 2 to 4"),
        (spaces.MultiDiscrete([2, 3]), np.array([[1, 2], [2, 0]]), "1: observation[0] is 2, expected 0 to 1"),
        (spaces.MultiBinary(2), np.array([[0, 1], [0, 2]], np.int8), "1: observation[1] is 2, expected 0 to 1"),
        (spaces.Box(0, 1, (), np.float32), np.array([0.5, np.nan], np.float32), "1: observation is nan, expected 0.0"),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), np.array([[np.inf]], np.float32), ""),
        (spaces.Box(0, 1, (1,), np.float32), np.array([[1 + 1e-12]]), "0: observation is float64, expected float32"),
        (spaces.Box(0, 1, (1,), np.float32), np.array([[1]], np.uint8), ""),
        (spaces.Box(0, 9, (1,), np.float32), np.array([[1]], np.int64), "0: observation is int64, expected float32"),
        (spaces.Box(0, 1, (1,), np.float32), np.zeros((2, 4), np.float32), ""),
        (SPACE, np.zeros(2), ""),
    ],
)
def test_what_is_outside_a_space(space: Any, row: Any, told: str) -> None:
    deviations = Deviations(is_logged=False)
    ObservationCheck(space, deviations).rows(row, str)
    texts = [text for _, text in deviations.take()]
    assert len(texts) == bool(told)
    assert "".join(texts).startswith(told)
    assert deviations.take() == []


def test_lists_and_numbers_of_python_have_no_dtype_of_their_own() -> None:
    deviations = Deviations(is_logged=False)
    check = ObservationCheck(SPACE, deviations)
    check.items([{"near": [0.5, 0.5, 0.5], "door": 1}, {"near": [0.5, 0.5, 1.5], "door": 1}], str)
    assert [kind for kind, _ in deviations.take()] == ["bounds"]


def test_whole_numbers_that_their_space_does_not_hold_are_refused() -> None:
    rows = ObservationRows(gym.spaces.Box(-128, 127, (1,), np.int8))
    assert rows([[3], [-4]], str).tolist() == [[3], [-4]]
    with pytest.raises(EnvError, match=r"^1: an observation that is not in its space: .*got 300"):
        rows([[3], [300]], str)
