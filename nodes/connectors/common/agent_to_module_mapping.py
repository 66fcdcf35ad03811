"""From agents to modules: the batch by module ids."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, episode_key, is_keyed_by_episode
from rollflow.stream.errors import ConnectorError

DEFAULT_MODULE_ID = "default_policy"
"""The module of episodes that name none."""

MEMORIZED = "memorized_map_structure"
"""Where `shared_data` has, by module id, the keys of the items in the module's batch, in order."""


class AgentToModuleMapping(ConnectorV2):
    """Turns `column -> (episode id, agent id, module id) -> items` into `module id -> column -> items`, order kept.

        rl_module_specs               module id -> whatever describes the module; None: any module will do
        agent_to_module_mapping_fn    (agent id, episode) -> module id, for items whose key has no module id
        as_learner_connector          as in RLlib, which drops agents that need not act from a batch for acting alone

    Items of an episode without agents go to the module "default_policy". Whose items a module's batch has, and in
    which order, the same in every column, is kept in `shared_data["memorized_map_structure"]`: module id ->
    [(episode id, agent id), …], one for each key.

    Raises ConnectorError for columns that are no longer in list form, and for modules not in `rl_module_specs`.
    """

    columnar = False
    changes_episodes = False

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        rl_module_specs: Mapping[str, Any] | None = None,
        agent_to_module_mapping_fn: Callable[..., str] | None = None,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.rl_module_specs = rl_module_specs
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn
        self.as_learner_connector = as_learner_connector

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
        by_id = {episode_key(episode)[0]: episode for episode in episodes}
        modules: dict[tuple[Any, ...], str] = {}  # in the order in which the keys are first seen
        for column, data in batch.items():
            if not is_keyed_by_episode(data):
                raise ConnectorError(
                    f"column '{column}' is {type(data).__name__}, expected a dict from episodes to lists of items: "
                    "AgentToModuleMapping stands before BatchIndividualItems"
                )
            for key in data:
                if key not in modules:
                    episode_id, agent_id, module_id = (*key, None, None)[:3]
                    modules[key] = self._module(episode_id, agent_id, module_id, by_id)
        mapped: dict[str, dict[str, list[Any]]] = {}
        memorized: dict[str, list[tuple[Any, Any]]] = {}
        for key, module in modules.items():
            memorized.setdefault(module, []).append((*key, None)[:2])
            for column, data in batch.items():
                if key in data:
                    mapped.setdefault(module, {}).setdefault(column, []).extend(data[key])
        if shared_data is not None:
            shared_data[MEMORIZED] = memorized
        return mapped

    def _module(self, episode_id: Any, agent_id: Any, module_id: Any, by_id: Mapping[Any, Any]) -> str:
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
        return str(module)
