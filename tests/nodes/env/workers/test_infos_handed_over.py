"""Infos that other processes can't be given: plain values go there, the rest is left out with a line in the log."""

import enum
import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from numbered_agents import NumberedAgents
from remote_hosts import hosting, listening
from serial_module import SerialModule

from rollflow import MultiAgentRollout, RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import EnvHost, RandomModule, RolloutHost

REMOTE: dict[str, Any] = {"hosts": (RemoteEnvs, EnvHost), "rollouts on hosts": (RemoteRollouts, RolloutHost)}


class StepType(enum.IntEnum):
    """As dm_control has it in every info."""

    FIRST, MID, LAST = range(3)


class Name(enum.StrEnum):
    ARM = "arm"


SENT = {"discount": 1.0, "step_type": 1, "name": "arm", "of": [1, ("arm",)], "deep": {"kept": 2}}
GIVEN = {
    "discount": 1.0,
    "step_type": StepType.MID,
    "name": Name.ARM,
    "of": [StepType.MID, (Name.ARM,)],
    "deep": {"kept": 2, "set": {1, 2}},
    "big": 2**70,
    "simulator": object(),
    "objects": np.array([object()], object),
    "masked": np.ma.MaskedArray([1.0], [True]),
}


class Informs(gym.Env[Any, Any]):
    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(1, np.float32), dict(GIVEN)

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 3, False, dict(GIVEN)


def rollout_in(where: str, opened: ExitStack, makers: list[Any], **options: Any) -> Any:
    settings = {"fragment_length": 8, "num_fragments": 2, "seed": 0, **options}
    kind = MultiAgentRollout if isinstance(settings["module"], SerialModule) else Rollout
    if where not in REMOTE:
        return opened.enter_context(kind(makers, where=where, lanes=1, **settings))
    envs, host = listening(REMOTE[where][0]), REMOTE[where][1]
    more = {"module": settings["module"]} if host is RolloutHost else {}
    opened.enter_context(hosting(envs.addresses[0], makers, kind=host, **more))
    return opened.enter_context(kind(envs, **settings))


@pytest.mark.parametrize("where", ["processes", "rollouts", "hosts"])
def test_an_info_goes_to_other_processes_as_its_plain_values(where: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ExitStack() as opened:
        rollout = rollout_in(where, opened, [Informs, Informs], module=RandomModule)
        fragments = list(rollout.fragments())
    infos = [info for fragment in fragments for episode in fragment.episodes() for info in episode.get_infos()]
    assert len(infos) > 2 * 16
    assert all(info == SENT for info in infos)
    assert [type(infos[0][key]) for key in ("step_type", "name")] == [int, str]
    assert rollout.lost == {}
    told = [line for line in caplog.messages if "left out" in line]
    assert told
    assert any("slot 0: info['deep']['set'] is {1, 2}, of type set, can't be" in line for line in told)


class AgentsInform(NumberedAgents):
    def step(self, actions: Any) -> Any:
        return *super().step(actions)[:4], {"agent 1": dict(GIVEN)}


@pytest.mark.parametrize("where", ["processes", "rollouts", "hosts"])
def test_infos_of_agents_do_so_as_well(where: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    makers: list[Any] = [partial(NumberedAgents, 0, nested=0), partial(AgentsInform, 1, nested=0)]
    with ExitStack() as opened:
        rollout = rollout_in(where, opened, makers, module=SerialModule())
        fragments = list(rollout.fragments())
    infos = [
        info
        for fragment in fragments
        for episode in fragment.episodes()
        for agent in episode.agent_episodes.values()
        for info in agent.get_infos()
        if "discount" in info
    ]
    assert infos
    assert all(info == SENT for info in infos)
    told = [line for line in caplog.messages if "left out" in line]
    assert any("info['deep']['set'] is {1, 2}, of type set, can't be" in line for line in told)
    if where != "rollouts":
        assert any("environment 1, agent 'agent 1'" in line for line in told)
