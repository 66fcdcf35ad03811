"""Environments with several agents through the default pipelines, by a loop written by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from drawn_plays import ACTIONS, OBSERVATIONS, modules, played
from drawn_turns import Told
from gymnasium import spaces
from hypothesis import given, settings, strategies as st
from piece_forms import call
from property_examples import examples

from rollflow import MultiAgentEpisode, SingleAgentEpisode, nodes
from rollflow.nodes import AgentToModuleMapping, EnvToModulePipeline, LearnerConnectorPipeline, ModuleToEnvPipeline
from rollflow.nodes.connectors.common.batch_individual_items import BatchIndividualItems
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.common.tensors import NumpyToTensor
from rollflow.nodes.connectors.module_to_env.individual_items import ModuleToAgentUnmapping, UnBatchToIndividualItems
from rollflow.stream import ConnectorError, ModuleError

SEEN = spaces.Dict(dict.fromkeys(["even", "odd", "late"], spaces.Box(0, 999, (1,), np.float32)))
DONE = spaces.Dict({"even": spaces.Box(-1, 1, (1,)), "odd": spaces.Discrete(999), "late": spaces.Box(-1, 1, (1,))})
MODULES = {"even": "boxes", "odd": "numbers", "late": "boxes"}


class Turns:
    """Two agents act in turns, a third one comes later and acts always; what they see is a number of its own each time.

    It refuses actions of any but those whose turn it is.
    """

    def __init__(self, first: int, length: int) -> None:
        self.seen, self.length, self.acted = first, length, []

    def reset(self) -> dict[str, Any]:
        self.t = 0
        return self._observe(["even"])

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
        assert actions.keys() == self.observed.keys(), "the agents whose turn it is act, and no others"
        self.acted += [(self.observed[agent_id], action) for agent_id, action in actions.items()]
        self.t += 1
        turn = ["even" if self.t % 2 == 0 else "odd", *(["late"] if self.t > 1 else [])]
        return self._observe(turn), dict.fromkeys(actions, 1.0), {"__all__": self.t >= self.length}

    def _observe(self, agent_ids: list[str]) -> dict[str, Any]:
        self.observed = {}
        for agent_id in agent_ids:
            self.seen += 1
            self.observed[agent_id] = self.seen
        return {agent_id: np.array([number], np.float32) for agent_id, number in self.observed.items()}


class Numbers:
    """Chooses what it sees, as a whole number."""

    framework = "torch"

    def __call__(self, batch: Any) -> Any:
        return {"actions": batch["obs"][:, 0].long()}


class Boxes(Numbers):
    """Chooses a hundredth of what it sees, some of it out of bounds; it has a state: how often it was asked."""

    def is_stateful(self) -> bool:
        return True

    def get_initial_state(self) -> Any:
        return {"asked": np.zeros(1, np.float32)}

    def __call__(self, batch: Any) -> Any:
        assert batch["obs"].shape[1:] == (1, 1), "there is a time axis"
        asked = batch["state_in"]["asked"] + 1
        return {"actions": batch["obs"] / 100, "state_out": {"asked": asked}, "asked": asked[:, None]}


class Loop:
    """Environments, episodes, and what stands between them."""

    def __init__(self, lengths: list[int]) -> None:
        self.envs = [Turns(100 * place, length) for place, length in enumerate(lengths)]
        self.modules = {"boxes": Boxes(), "numbers": Numbers()}
        options: Any = {"stateful": True, "multi_agent": True}
        self.env_to_module = EnvToModulePipeline.default(SEEN, DONE, **options)
        self.module_to_env = ModuleToEnvPipeline.default(SEEN, DONE, **options)
        self.episodes = [self.begun(place) for place in range(len(lengths))]
        self.ended: list[MultiAgentEpisode] = []

    def begun(self, place: int) -> MultiAgentEpisode:
        episode = MultiAgentEpisode(
            observation_space=SEEN, action_space=DONE, agent_to_module_mapping_fn=lambda agent_id, _: MODULES[agent_id]
        )
        episode.add_env_reset(observations=self.envs[place].reset())
        return episode

    def step(self) -> dict[str, Any]:
        """One env step of all; returns the batch that the modules saw."""
        shared: dict[str, Any] = {}
        call: Any = {"rl_module": self.modules, "episodes": self.episodes, "explore": True, "shared_data": shared}
        batch = self.env_to_module(**call)
        seen = {module: columns["obs"].flatten().tolist() for module, columns in batch.items()}
        outputs = {module: self.modules[module](columns) for module, columns in batch.items()}
        made = self.module_to_env(batch=outputs, **call)
        for place, env in enumerate(self.envs):
            observations, rewards, ends = env.step(made["actions_for_env"][place])
            extra = [name for name in ("state_out", "asked") if name in made]
            agents = made["actions"][place]
            self.episodes[place].add_env_step(
                observations,
                agents,
                rewards,
                terminateds=ends,
                extra_model_outputs={
                    each: {name: made[name][place][each] for name in extra if each in made[name][place]}
                    for each in agents
                },
            )
            if self.episodes[place].is_done:
                self.ended.append(self.episodes[place])
                self.episodes[place] = self.begun(place)
        return seen


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), steps=st.integers(1, 12))
@settings(max_examples=examples(25))
def test_every_agent_whose_turn_it_is_gets_its_modules_action_back(lengths: list[int], steps: int) -> None:
    loop = Loop(lengths)
    for _ in range(steps):
        expected: dict[str, list[int]] = {}
        for env in loop.envs:
            for agent_id, number in env.observed.items():
                expected.setdefault(MODULES[agent_id], []).append(number)
        assert loop.step() == expected
    for env in loop.envs:
        for number, action in env.acted:
            assert action == number if np.ndim(action) == 0 else action == pytest.approx(min(number / 100, 1.0))
    check_states(loop)


def check_states(loop: Loop) -> None:
    for episode in [*loop.ended, *loop.episodes]:
        for each in episode.agent_episodes.values():
            assert each.is_numpy is False
            if each.module_id == "boxes":
                asked = [int(item[0]) for item in each.get_extra_model_outputs("asked")] if len(each) else []
                assert asked == list(range(1, len(each) + 1)), "each agent has a state of its own"


def test_what_the_loop_has_made_becomes_train_batches() -> None:
    loop = Loop([4, 4])
    for _ in range(4):
        loop.step()
    learner = LearnerConnectorPipeline.default(SEEN, DONE, stateful=True, multi_agent=True)
    batch = learner(rl_module=loop.modules, episodes=loop.ended)
    # "even" sees 1, 4, 8 and acts at 0 and 2; "odd" sees 2, 6 and acts at 1 and 3; "late" sees 5, 7, 9 from 2 on.
    assert batch["numbers"]["obs"].flatten().tolist() == [2, 5, 102, 105]
    assert batch["numbers"]["actions"].tolist() == [2, 5, 102, 105]
    assert batch["numbers"].keys().isdisjoint(["seq_lens", "state_in", "loss_mask"])
    assert batch["boxes"]["seq_lens"].tolist() == [2, 2, 2, 2]
    assert batch["boxes"]["obs"][:, :2, 0].tolist() == [[1, 3], [4, 6], [101, 103], [104, 106]]
    assert batch["boxes"]["state_in"]["asked"].flatten().tolist() == [0, 0, 0, 0]


def test_nobodys_turn_is_no_step_for_any_module() -> None:
    loop = Loop([3])
    loop.episodes[0] = MultiAgentEpisode("quiet")
    loop.episodes[0].add_env_reset(observations={})
    shared: dict[str, Any] = {}
    call: Any = {"rl_module": loop.modules, "episodes": loop.episodes, "explore": True, "shared_data": shared}
    assert loop.env_to_module(**call) == {}
    assert loop.module_to_env(batch={}, **call) == {"actions": [{}], "actions_for_env": [{}]}


def test_agents_that_are_done_do_not_act() -> None:
    told = Told()
    told.reset(["a", "b"])
    told.go_on({"a": (True, False, True, "terminated"), "b": (True, False, True, "")})
    batch = EnvToModulePipeline.default(OBSERVATIONS, ACTIONS, multi_agent=True)(
        rl_module=modules(), episodes=[played(told)], explore=True
    )
    assert batch.keys() == {"n"}


def acted(outputs: dict[str, Any], episodes: list[Any], rl_module: Any = None, **given_: Any) -> Any:
    """Return the actions for agents "a" and "b" that come of outputs of modules "m" and "n"."""
    shared = {"memorized_map_structure": {"m": [("e", "a")], "n": [("e", "b")]}}
    pipeline = ModuleToEnvPipeline.default(OBSERVATIONS, given_.pop("space", ACTIONS), multi_agent=True, **given_)
    return pipeline(
        rl_module=rl_module or modules(), batch=outputs, episodes=episodes, explore=False, shared_data=shared
    )


def both() -> MultiAgentEpisode:
    told = Told()
    told.reset(["a", "b"])
    return played(told)  # type: ignore[no-any-return]


def test_an_agent_that_has_to_act_and_has_no_action_is_named() -> None:
    with pytest.raises(
        ConnectorError, match="column 'actions' has no item for agent 'b' of episode 'e' at env step 0, slot 0"
    ):
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
