"""A batch's phases: by episode, by module, as arrays, as tensors, and back again."""

from typing import Any

import numpy as np
import pytest
import torch

from rollflow import ConnectorV2, SingleAgentEpisode
from rollflow.nodes import AgentToModuleMapping
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.tensors import NumpyToTensor
from rollflow.nodes.connectors.module_to_env.individual_items import ModuleToAgentUnmapping, UnBatchToIndividualItems
from rollflow.stream import ConnectorError


class Torch:
    framework = "torch"


def call(piece: ConnectorV2, batch: dict[str, Any], episodes: Any = (), **kwargs: Any) -> dict[str, Any]:
    return piece(**{"rl_module": Torch(), "batch": batch, "episodes": episodes, **kwargs})


def agent_episode(episode_id: str, agent_id: str, module_id: str | None, observation: Any) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        observations=[observation],
        agent_id=agent_id,
        module_id=module_id,
        multi_agent_episode_id=episode_id,
        len_lookback_buffer=0,
    )


EPISODES = [agent_episode("e", "a", "m", 1), agent_episode("e", "b", "n", 2), agent_episode("f", "a", "m", 3)]


def test_a_batch_goes_through_all_of_its_phases() -> None:
    shared: dict[str, Any] = {}
    batch = call(AddObservationsFromEpisodesToBatch(), {}, EPISODES)
    assert batch == {"obs": {("e", "a", "m"): [1], ("e", "b", "n"): [2], ("f", "a", "m"): [3]}}
    batch = call(AgentToModuleMapping(), batch, EPISODES, shared_data=shared)
    assert batch == {"m": {"obs": [1, 3]}, "n": {"obs": [2]}}
    assert shared["memorized_map_structure"] == {"m": [("e", "a"), ("f", "a")], "n": [("e", "b")]}
    batch = call(BatchIndividualItems(multi_agent=True), batch, EPISODES, shared_data=shared)
    assert isinstance(batch["m"]["obs"], np.ndarray)
    batch = call(NumpyToTensor(), batch, EPISODES)
    assert {module: columns["obs"].tolist() for module, columns in batch.items()} == {"m": [1, 3], "n": [2]}
    assert torch.is_tensor(batch["m"]["obs"])


def test_the_modules_outputs_find_their_way_back_to_the_agents() -> None:
    shared = {"memorized_map_structure": {"m": [("e", "a"), ("f", "a")], "n": [("e", "b")]}}
    outputs = {"m": {"actions": np.array([10, 30])}, "n": {"actions": np.array([20])}}
    batch = call(UnBatchToIndividualItems(), outputs, EPISODES, shared_data=shared)
    assert batch["m"]["actions"] == {("e", "a", "m"): [10], ("f", "a", "m"): [30]}
    batch = call(ModuleToAgentUnmapping(), batch, EPISODES, shared_data=shared)
    assert batch == {"actions": {("e", "a", "m"): [10], ("f", "a", "m"): [30], ("e", "b", "n"): [20]}}


def test_episodes_without_agents_are_the_default_modules() -> None:
    shared: dict[str, Any] = {}
    batch = call(AgentToModuleMapping(), {"obs": {("e",): [1, 2]}}, shared_data=shared)
    assert batch == {"default_policy": {"obs": [1, 2]}}
    assert shared["memorized_map_structure"] == {"default_policy": [("e", None)]}
    outputs = {"default_policy": {"actions": np.array([3])}}
    assert call(UnBatchToIndividualItems(), outputs, shared_data=shared)["default_policy"] == {"actions": {("e",): [3]}}


def test_all_columns_of_a_module_have_one_order() -> None:
    one, two, three = ("e", "a", "m"), ("e", "b", "m"), ("f", "a", "m")
    shared: dict[str, Any] = {}
    batch = {"obs": {two: [2], one: [1]}, "rewards": {one: [10], three: [30], two: [20]}}
    assert call(AgentToModuleMapping(), batch, shared_data=shared) == {"m": {"obs": [2, 1], "rewards": [20, 10, 30]}}
    assert shared["memorized_map_structure"] == {"m": [("e", "b"), ("e", "a"), ("f", "a")]}


def test_a_mapping_function_is_given_the_agents_episode() -> None:
    piece = AgentToModuleMapping(agent_to_module_mapping_fn=lambda agent_id, episode: episode.multi_agent_episode_id)
    assert call(piece, {"obs": {("f", "a", None): [1]}}, EPISODES) == {"f": {"obs": [1]}}


def test_a_function_maps_agents_that_have_no_module_yet() -> None:
    piece = AgentToModuleMapping(agent_to_module_mapping_fn=lambda agent_id, episode: f"module of {agent_id}")
    assert call(piece, {"obs": {("e", "a", None): [1], ("e", "b", "n"): [2]}}) == {
        "module of a": {"obs": [1]},
        "n": {"obs": [2]},
    }


def test_modules_that_there_are_not_and_columns_in_another_form_are_refused() -> None:
    with pytest.raises(ConnectorError, match="agent 'a' of episode 'e' is mapped to module 'm', expected one of: n"):
        call(AgentToModuleMapping(rl_module_specs={"n": None}), {"obs": {("e", "a", "m"): [1]}})
    with pytest.raises(ConnectorError, match="column 'obs' is ndarray, expected a dict from episodes to lists"):
        call(AgentToModuleMapping(), {"obs": np.arange(3)})
    with pytest.raises(ConnectorError, match="'obs' is ndarray, expected a module's columns, a dict"):
        call(ModuleToAgentUnmapping(), {"obs": np.arange(3)})
    with pytest.raises(ConnectorError, match="column 'obs' of module 'm' is ndarray, expected a dict"):
        call(ModuleToAgentUnmapping(), {"m": {"obs": np.arange(3)}})
