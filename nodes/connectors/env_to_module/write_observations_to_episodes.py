"""Observations out of the batch back into the episodes."""

from typing import Any

from rollflow.nodes.connectors.agents import is_keyed_by_episode, space_of_agent
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ConnectorError
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.tree import leaves_of, map_tree


class WriteObservationsToEpisodes(ConnectorV2):
    """Writes the batch's `obs` into the episodes, each item over its episode's last observation.

    What pieces before it did to the batch then lasts. Of several agents the space is a Dict by agent ids, or the same
    for all. Raises ConnectorError, a ValueError, for a batch without `obs`,
    and where that has not one item for each episode.
    """

    columnar = True
    changes_episodes = True

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
        if Columns.OBS not in batch:
            raise ConnectorError(
                f"WriteObservationsToEpisodes: the batch has no column '{Columns.OBS}'; columns: "
                f"{', '.join(batch) or 'none'}; does it stand behind AddObservationsFromEpisodesToBatch?"
            )
        observations = batch[Columns.OBS]
        in_items = isinstance(observations, list) or is_keyed_by_episode(observations)
        if isinstance(episodes, LaneEpisodes) and not in_items:
            episodes.set_observations(observations)
            return batch
        if not in_items:
            count = len(leaves_of(observations)[0])
            observations = [map_tree(lambda leaf, i=i: leaf[i], observations) for i in range(count)]
        count = len(observations) if isinstance(observations, list) else sum(map(len, observations.values()))
        expected = len(list(self.single_agent_episode_iterator(episodes)))
        if count != expected:
            raise ConnectorError(
                f"{self.name}: column '{Columns.OBS}' has {count} items, expected {expected}: one for each episode, "
                "or for each agent that has an observation at its env step"
            )
        pairs = list(self.single_agent_episode_iterator(episodes, zip_with_batch_column=observations))
        for episode, observation in pairs:
            episode.set_observations(new_data=observation, at_indices=-1)
            if self.observation_space is not None:
                episode.observation_space = space_of_agent(self.observation_space, episode.agent_id)
        return batch
