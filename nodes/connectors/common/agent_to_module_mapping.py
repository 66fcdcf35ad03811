"""From agents to modules: the batch by module ids."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rollflow.nodes.connectors.agents import id_in_keys, is_keyed_by_episode
from rollflow.nodes.connectors.common.batch_individual_items import num_rows_of
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.errors import ConnectorError
from rollflow.stream.multi_agent_episode import DEFAULT_MODULE_ID as DEFAULT_MODULE_ID
from rollflow.stream.multi_agent_episode import MultiAgentEpisode

MEMORIZED = "memorized_map_structure"
"""Where `shared_data` has, by module id, the keys of the items in the module's batch, in order."""


class AgentToModuleMapping(ConnectorV2):
    """Turns `column -> (episode id, agent id, module id) -> items` into `module id -> column -> items`, order kept.

        rl_module_specs               module id -> whatever describes the module; None: any module will do
        agent_to_module_mapping_fn    (agent id, episode) -> module id, for items whose key has no module id; spaces
                                      that are Dicts by agent ids become Dicts by module ids with it, and it is asked
                                      for these with None in the place of an episode
        as_learner_connector          whether the batch is for training. While acting, the items of agents that need
                                      not act are left out: of those that are done, or did not step

    Agents and modules without any item are left out. Items of an episode without agents go to the module
    "default_policy". Whose items a module's batch has, and in which order, the same in every column, is kept in
    `shared_data["memorized_map_structure"]`: module id -> [(episode id, agent id), …], one for each key.

    Raises ConnectorError for columns that are no longer in list form, and for modules not in `rl_module_specs`.
    """

    columnar = False
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        rl_module_specs: Mapping[Any, Any] | None = None,
        agent_to_module_mapping_fn: Callable[..., Any] | None = None,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.rl_module_specs = rl_module_specs
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn
        self.as_learner_connector = as_learner_connector

    def recompute_output_observation_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        return self._by_modules(input_observation_space)

    def recompute_output_action_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        return self._by_modules(input_action_space)

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        by_id = {id_in_keys(episode): episode for episode in episodes}
        to_act: dict[Any, set[Any]] = {}
        if not self.as_learner_connector:
            joint = (episode for episode in episodes if isinstance(episode, MultiAgentEpisode))
            to_act = {episode.id_: episode.get_agents_to_act() for episode in joint}
        modules: dict[tuple[Any, ...], Any] = {}  # in the order in which the keys are first seen
        for column, data in batch.items():
            if not is_keyed_by_episode(data):
                raise ConnectorError(
                    f"column '{column}' is {type(data).__name__}, expected a dict from episodes to lists of items: "
                    "AgentToModuleMapping stands before BatchIndividualItems"
                )
            for key in data:
                if key not in modules and any(map(num_rows_of, data[key])):
                    episode_id, agent_id, module_id = (*key, None, None)[:3]
                    if agent_id is not None and agent_id not in to_act.get(episode_id, {agent_id}):
                        continue
                    modules[key] = self._module(episode_id, agent_id, module_id, by_id)
        mapped: dict[Any, dict[str, list[Any]]] = {}
        memorized: dict[Any, list[tuple[Any, Any]]] = {}
        for key, module in modules.items():
            memorized.setdefault(module, []).append((*key, None)[:2])
            for column, data in batch.items():
                if key in data:
                    mapped.setdefault(module, {}).setdefault(column, []).extend(data[key])
        if shared_data is not None:
            shared_data[MEMORIZED] = memorized
        return mapped

    def _module(self, episode_id: Any, agent_id: Any, module_id: Any, by_id: Mapping[Any, Any]) -> Any:
        module = module_id
        if module is None and agent_id is not None and self.agent_to_module_mapping_fn is not None:
            module = self.agent_to_module_mapping_fn(agent_id, by_id.get(episode_id))
        if module is None:
            module = DEFAULT_MODULE_ID
        if self.rl_module_specs is not None and module not in self.rl_module_specs:
            raise ConnectorError(
                f"agent '{agent_id}' of episode '{episode_id}' is mapped to module '{module}', expected one of: "
                f"{', '.join(map(str, self.rl_module_specs))}"
            )
        return module

    def _by_modules(self, space: gym.Space[Any]) -> gym.Space[Any]:
        """The space of each module: that of the last of its agents."""
        choose, specs = self.agent_to_module_mapping_fn, self.rl_module_specs
        if choose is None or not isinstance(space, spaces.Dict) or (specs and specs.keys() == space.spaces.keys()):
            return space
        return spaces.Dict({choose(agent_id, None): part for agent_id, part in space.spaces.items()})
