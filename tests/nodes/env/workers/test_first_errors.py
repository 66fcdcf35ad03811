"""Environments that raise in every lane before they have made a step: that is no accident, and the run ends at once."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ending_agent_envs import DoomedAgents
from ending_envs import Doomed
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import hosting, listening
from serial_module import SerialModule

from rollflow import MultiAgentRollout, Rollout
from rollflow.stream import EnvError

TOLD = r"the environments of every lane raised before they had made a step: lane 0: .*; lane 1: RuntimeError: it broke"


@pytest.fixture(autouse=True)
def _lanes_are_made_again_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a second try would not come within the test's time."""
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 1000.0)
    monkeypatch.setattr("rollflow.nodes.env.workers.lane_supervisor._LONGEST_DELAY_S", 1000.0)


def first_of(makers: list[Any], **options: Any) -> Any:
    with Rollout(makers, module=NumberedModule(), fragment_length=4, seed=0, **options) as rollout:
        return next(iter(rollout.fragments()))


class NeverReset(NumberedEnv):
    def reset(self, **kwargs: Any) -> Any:
        raise RuntimeError("it broke")


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_first_step_that_raises_in_every_lane_is_reported_at_once(where: Any, tmp_path: Path) -> None:
    makers = [partial(Doomed, slot, tmp_path, "raise", 0, 100) for slot in range(2)]
    with pytest.raises(EnvError, match=TOLD) as raised:
        first_of(makers, lanes=2, where=where)
    assert [Doomed.lives(tmp_path, slot) for slot in range(2)] == [[0], [0]]
    assert any("lane 0, in a worker process:\nTraceback" in note for note in raised.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_first_reset_that_raises_in_every_lane_is_reported_at_once(where: Any) -> None:
    with pytest.raises(EnvError, match=TOLD):
        first_of([partial(NeverReset, slot) for slot in range(2)], lanes=2, where=where)


def test_agents_environments_that_raise_at_first_are_reported_at_once(tmp_path: Path) -> None:
    makers = [partial(DoomedAgents, slot, tmp_path, fate="raise", step=0, lives=100, nested=0) for slot in range(2)]
    with MultiAgentRollout(makers, module=SerialModule(), lanes=2, where="processes", seed=0) as rollout:
        with pytest.raises(EnvError, match=TOLD):
            next(iter(rollout.fragments()))


def test_hosts_environments_that_raise_in_their_first_step_are_reported_at_once(tmp_path: Path) -> None:
    envs = listening()
    makers = [partial(Doomed, slot, tmp_path, "raise", 0, 100) for slot in range(2)]
    with hosting(envs.addresses[0], makers, lanes=2, name="sim"), pytest.raises(EnvError, match=TOLD) as raised:
        first_of(envs)
    assert [Doomed.lives(tmp_path, slot) for slot in range(2)] == [[0], [0]]
    [note] = [note for note in raised.value.__notes__ if note.startswith("lane 0, on host sim (tcp://127.0.0.1:")]
    assert "RuntimeError: it broke" in note


def test_hosts_environments_that_raise_in_their_first_reset_are_reported_at_once() -> None:
    envs = listening()
    makers = [partial(NeverReset, slot) for slot in range(2)]
    with hosting(envs.addresses[0], makers, lanes=2), pytest.raises(EnvError, match=TOLD):
        first_of(envs)


def test_hosts_agents_that_raise_at_first_are_reported_at_once(tmp_path: Path) -> None:
    envs = listening()
    makers = [partial(DoomedAgents, slot, tmp_path, fate="raise", step=0, lives=100, nested=0) for slot in range(2)]
    with hosting(envs.addresses[0], makers, lanes=2), pytest.raises(EnvError, match=TOLD):
        with MultiAgentRollout(envs, module=SerialModule(), seed=0) as rollout:
            next(iter(rollout.fragments()))


def test_where_another_host_goes_on_it_is_an_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.0)
    envs = listening(hosts=2)
    with (
        hosting(envs.addresses[0], [partial(Doomed, 0, tmp_path, "raise", 0, 2)]),
        hosting(envs.addresses[0], [partial(NumberedEnv, 1)]),
        Rollout(envs, module=NumberedModule(), fragment_length=4, num_fragments=2, seed=0) as rollout,
    ):
        assert {fragment.lane for fragment in rollout.fragments()} == {0, 1}
    assert len(Doomed.lives(tmp_path, 0)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
@pytest.mark.parametrize("step", [0, 2])
def test_where_another_lane_goes_on_it_is_an_accident(
    where: Any, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.0)
    makers = [partial(Doomed, slot, tmp_path, "raise", step, slot) for slot in range(2)]
    options: Any = {"fragment_length": 4, "num_fragments": 2, "module": NumberedModule(), "seed": 0}
    with Rollout(makers, lanes=2, where=where, **options) as rollout:
        fragments = list(rollout.fragments())
    assert {fragment.lane for fragment in fragments} == {0, 1}
    assert len(Doomed.lives(tmp_path, 1)) == 2


class Vectors(NumberedEnv):
    """Gives rewards of one number and of two by turns."""

    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, np.ones(1 + self.slot % 2), *others


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_vectors_for_rewards_are_refused_at_once(where: Any) -> None:
    with pytest.raises(EnvError, match=r"slot 1: its reward is an array float64\[2\], expected one number"):
        first_of([partial(Vectors, slot) for slot in range(4)], lanes=2, where=where)
