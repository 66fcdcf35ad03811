"""Next observations out of the episodes."""

from typing import Any

from rollflow.nodes.connectors.by_module import module_by_module
from rollflow.nodes.connectors.common.add_observations_from_episodes_to_batch import LAST_OBSERVATIONS
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.learner.train_steps import TrainSteps, is_in_list_form
from rollflow.stream.columns import Columns
from rollflow.stream.fragment_episodes import FragmentEpisodes


class AddNextObservationsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds `new_obs`, a tree of arrays `any[B, ...]`: the observation after every step, at an end the episode's last.

    Where a piece before has made the batch's `obs`, it is what that made of them: see `LAST_OBSERVATIONS`. A batch that
    has `new_obs` already stays as it is. Raises ConnectorError where `obs` and `new_obs` would be of different kinds.
    """

    columnar = True
    changes_episodes = False

    @module_by_module
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
        if Columns.NEXT_OBS in batch or not len(episodes):
            return batch
        steps, made = TrainSteps(episodes), (shared_data or {}).get(LAST_OBSERVATIONS)
        if isinstance(episodes, FragmentEpisodes) or Columns.OBS in batch or not is_in_list_form(batch):
            if len(steps):
                steps.put(batch, Columns.NEXT_OBS, steps.next_observations(batch, made))
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            following = episode.get_observations(slice(1, len(episode) + 1))
            self.add_n_batch_items(batch, Columns.NEXT_OBS, following, len(episode), episode)
        return batch
