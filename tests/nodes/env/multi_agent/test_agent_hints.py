"""Refusals that name what was meant where one agent and several are easily mistaken."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from numbered_agents import NumberedAgents

from rollflow import GeneralAdvantageEstimation, MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule
from rollflow.stream.data.errors import EnvError, ModuleError

ENV: Callable[[], Any] = partial(NumberedAgents, 0, agents=2)


def test_environments_with_several_agents_are_not_for_a_rollout_of_one() -> None:
    with pytest.raises(EnvError, match=r"slot 0 gave .* several agents; .* there is MultiAgentRollout"):
        Rollout(ENV)


def test_weights_are_published_by_module_ids() -> None:
    rollout = MultiAgentRollout(ENV, module={"agent 0": None, "agent 1": None}, seed=0)
    with pytest.raises(ModuleError, match=r"no module '.*weight' to publish .* expected module id -> state_dict\(\)"):
        rollout.publish(rollout.module["agent 0"].state_dict())


def test_a_batch_that_fails_names_its_module_and_how_to_leave_it_out() -> None:
    advantages = {"learner_connector": lambda obs_space, act_space: GeneralAdvantageEstimation()}
    settings: dict[str, Any] = {"module": {"chance": RandomModule, "default_policy": None}, "num_fragments": 1}
    settings |= {"agent_to_module_mapping_fn": {"agent 0": "chance", "agent 1": "default_policy"}, "seed": 0}
    with MultiAgentRollout(ENV, **settings, **advantages) as rollout, pytest.raises(ModuleError) as raised:
        list(rollout.batches())
    assert any("module 'chance'" in note and "modules_to_train" in note for note in raised.value.__notes__)
    with MultiAgentRollout(ENV, **settings, **advantages, modules_to_train=["default_policy"]) as rollout:
        assert [list(batches) for batches in rollout.batches()] == [["default_policy"]]
