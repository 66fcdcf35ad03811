"""Episodes of several agents through the default pipelines, to their modules and back."""

from typing import Any

import numpy as np
import pytest
import torch
from drawn_plays import ACTIONS, OBSERVATIONS, all_played, modules, played
from drawn_turns import Told, turns
from gymnasium import spaces
from hypothesis import given, settings, strategies as st
from piece_forms import call
from property_examples import examples

from rollflow import MultiAgentEpisode, SingleAgentEpisode, nodes
from rollflow.nodes import AgentToModuleMapping, EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.connectors.common.batches import BatchIndividualItems, NumpyToTensor
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.module_to_env.action_pieces import ModuleToAgentUnmapping, UnBatchToIndividualItems
from rollflow.stream import ConnectorError, ModuleError


@given(tolds=st.lists(turns(), min_size=1, max_size=3), stateful=st.booleans())
@settings(max_examples=examples(40))
def test_every_agent_that_is_to_act_gets_its_modules_action_back(tolds: list[Told], stateful: bool) -> None:
    """Actions, other outputs and states follow from what each agent sees; module "m" may be stateful."""
    episodes, options = all_played(tolds), {"stateful": stateful, "multi_agent": True}
    call_it: Any = {"rl_module": modules(m=stateful), "episodes": episodes, "explore": True, "shared_data": {}}
    outputs: dict[str, Any] = {}
    for module, columns in EnvToModulePipeline.default(OBSERVATIONS, ACTIONS, **options)(**call_it).items():
        seen = columns["obs"]
        outputs[module] = {"actions": seen[..., 1].long() % 3, "seen": seen}
        if stateful and module == "m":
            outputs[module]["state_out"] = {"h": seen[:, 0]}
    made = ModuleToEnvPipeline.default(OBSERVATIONS, ACTIONS, **options)(batch=outputs, **call_it)
    assert len(made["actions"]) == len(made["actions_for_env"]) == len(episodes)
    for place, episode in enumerate(episodes):
        acting = {agent_id: episode.agent_episodes[agent_id] for agent_id in episode.get_agents_to_act()}
        assert made["actions"][place].keys() == made["actions_for_env"][place].keys() == acting.keys()
        for agent_id, agent in acting.items():
            observation = agent.get_observations(-1)
            assert made["actions"][place][agent_id] == made["actions_for_env"][place][agent_id] == observation[1] % 3
            np.testing.assert_array_equal(made["seen"][place][agent_id], observation)
            if stateful and agent.module_id == "m":
                np.testing.assert_array_equal(made["state_out"][place][agent_id]["h"], observation)


def acted(outputs: dict[str, Any], episodes: list[Any], rl_module: Any = None, **given_: Any) -> Any:
    """Return the actions for agents "a" and "b" that come of outputs of modules "m" and "n"."""
    shared = {"memorized_map_structure": {"m": [("e", "a")], "n": [("e", "b")]}}
    pipeline = ModuleToEnvPipeline.default(OBSERVATIONS, given_.pop("space", ACTIONS), multi_agent=True, **given_)
    given: Any = {"episodes": episodes, "explore": False, "shared_data": shared}
    return pipeline(rl_module=rl_module or modules(), batch=outputs, **given)


def both() -> MultiAgentEpisode:
    told = Told()
    told.reset(["a", "b"])
    return played(told)  # type: ignore[no-any-return]


def test_an_agent_that_has_to_act_and_has_no_action_is_named() -> None:
    told = "column 'actions' has no item for agent 'b' of episode 'e' at env step 0, slot 0"
    with pytest.raises(ConnectorError, match=told):
        acted({"m": {"actions": np.array([1])}}, [both()])
    with pytest.raises(ConnectorError, match=r"1 items for \('e', 'a', 'm'\), expected one for an agent of: other"):
        episode = both()
        episode.id_ = "other"
        acted({"m": {"actions": np.array([1])}, "n": {"actions": np.array([1])}}, [episode])


def test_logits_that_are_no_numbers_are_told_by_agent() -> None:
    logits = {"m": torch.zeros(1, 3), "n": torch.tensor([[0.0, float("nan"), 0.0]])}
    outputs: Any = {module: {"action_dist_inputs": each} for module, each in logits.items()}
    with pytest.raises(ModuleError, match="is NaN in lane 0, vector step unknown, agent 'b' of episode 'e'"):
        acted(outputs, [both()])


def test_a_module_that_names_no_distribution_gets_that_of_its_agents_space() -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1.0, 1.0, (2,))})
    outputs: Any = {"m": {"action_dist_inputs": torch.tensor([[0.0, 1.0]])}}
    outputs["n"] = {"action_dist_inputs": torch.tensor([[0.25, 7.0, 0.0, 0.0]])}
    made = acted(outputs, [both()], {"m": object(), "n": object()}, space=space)
    assert made["actions"][0]["a"] == 1
    assert made["actions"][0]["b"].tolist() == [0.25, 7.0]
    assert made["actions_for_env"][0]["b"].tolist() == [0.25, 1.0]
    assert made["actions_for_env"][0]["a"] == 1


def test_a_module_that_there_is_not_is_told() -> None:
    outputs: Any = {"m": {"action_dist_inputs": torch.zeros(1, 3)}, "n": {"action_dist_inputs": torch.zeros(1, 3)}}
    with pytest.raises(ConnectorError, match="agents are mapped to module 'n', expected one of: m"):
        acted(outputs, [both()], {"m": modules()["m"]})


def test_a_single_agent_beside_several_gets_its_item_as_it_is() -> None:
    single = SingleAgentEpisode("x", observations=[np.zeros(2, np.float32)])
    batch: Any = {"actions": {("e", "a", "m"): [1], ("x",): [5], ("e", "b", "n"): [2]}, "lane": np.arange(2)}
    made = nodes.ListifyDataForVectorEnv()(rl_module=None, batch=batch, episodes=[single, both()])
    assert made["actions"] == [5, {"a": 1, "b": 2}]
    assert isinstance(made["lane"], np.ndarray)
    with pytest.raises(ConnectorError, match="no item for episode 'x' at step 0, slot 0, expected one"):
        batch = {"actions": {("e", "a", "m"): [1], ("e", "b", "n"): [2]}}
        nodes.ListifyDataForVectorEnv()(rl_module=None, batch=batch, episodes=[single, both()])


# A batch's phases: by episode, by module, as arrays, as tensors, and back again


def agent_episode(episode_id: str, agent_id: str, module_id: str | None, observation: Any) -> SingleAgentEpisode:
    ids: Any = {"agent_id": agent_id, "module_id": module_id, "multi_agent_episode_id": episode_id}
    return SingleAgentEpisode(observations=[observation], len_lookback_buffer=0, **ids)


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


def test_a_function_maps_agents_that_have_no_module_yet_and_is_given_their_episode() -> None:
    named = lambda agent_id, episode: f"{agent_id} of {episode.multi_agent_episode_id}"  # noqa: E731
    batch = {"obs": {("f", "a", None): [1], ("e", "b", "n"): [2]}}
    mapped = call(AgentToModuleMapping(agent_to_module_mapping_fn=named), batch, EPISODES)
    assert mapped == {"a of f": {"obs": [1]}, "n": {"obs": [2]}}


def test_modules_that_there_are_not_and_columns_in_another_form_are_refused() -> None:
    with pytest.raises(ConnectorError, match="agent 'a' of episode 'e' is mapped to module 'm', expected one of: n"):
        call(AgentToModuleMapping(rl_module_specs={"n": None}), {"obs": {("e", "a", "m"): [1]}})
    with pytest.raises(ConnectorError, match="column 'obs' is ndarray, expected a dict from episodes to lists"):
        call(AgentToModuleMapping(), {"obs": np.arange(3)})
    with pytest.raises(ConnectorError, match="'obs' is ndarray, expected a module's columns, a dict"):
        call(ModuleToAgentUnmapping(), {"obs": np.arange(3)})
    with pytest.raises(ConnectorError, match="column 'obs' of module 'm' is ndarray, expected a dict"):
        call(ModuleToAgentUnmapping(), {"m": {"obs": np.arange(3)}})
