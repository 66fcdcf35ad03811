"""Infos that other processes can't be given: plain values go there, the rest is left out with a line in the log."""

import enum
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
from numbered_agents import NumberedAgents
from places import rollout_at
from serial_module import SerialModule
from small_env import SmallEnv

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule


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


class Informs(SmallEnv):
    length = 3

    def tell(self) -> dict[str, Any]:
        return dict(GIVEN)


class AgentsInform(NumberedAgents):
    def step(self, actions: Any) -> Any:
        return *super().step(actions)[:4], {"agent 1": dict(GIVEN)}


MAKERS: dict[str, list[Any]] = {
    "one agent": [Informs, Informs],
    "several agents": [partial(NumberedAgents, 0, nested=0), partial(AgentsInform, 1, nested=0)],
}


@pytest.mark.parametrize("place", ["processes", "rollouts", "hosts"])
@pytest.mark.parametrize("agents", MAKERS)
def test_an_info_goes_elsewhere_as_its_plain_values(agents: str, place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    has_several = agents == "several agents"
    kind, module = (MultiAgentRollout, SerialModule()) if has_several else (Rollout, RandomModule)
    options: Any = {"fragment_length": 8, "num_fragments": 2, "seed": 0}
    with rollout_at(place, MAKERS[agents], kind=kind, acts={"module": module}, envs={"lanes": 1}, **options) as made:
        with made as rollout:
            fragments = list(rollout.fragments())
    infos = [
        info
        for fragment in fragments
        for episode in fragment.episodes()
        for own in (episode.agent_episodes.values() if has_several else [episode])
        for info in own.get_infos()
        if "discount" in info or not has_several
    ]
    assert has_several or len(infos) > 2 * 16
    assert infos
    assert all(info == SENT for info in infos)
    assert [type(infos[0][key]) for key in ("step_type", "name")] == [int, str]
    assert rollout.lost == {}
    lines = [line for line in caplog.messages if "left out" in line]
    assert any("info['deep']['set'] is {1, 2}, of type set, can't be" in line for line in lines)
    if not (has_several and place == "rollouts"):
        told = "environment 1, agent 'agent 1': info" if has_several else "slot 0: info"
        assert any(told in line for line in lines)
