"""One more step at the end of every episode, for pieces that need the value of the last observation."""

from typing import Any

import numpy as np

from rollflow.nodes.connectors.agents import single_agent_episodes
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.multi_agent_episode import MultiAgentEpisode
from rollflow.stream.sealed_episode import SealedEpisode

STEP_ADDED = "_added_loss_mask_for_valid_episode_ts"
"""Where `shared_data` says that every episode has one step that it did not take."""


class AddOneTsToEpisodesAndTruncate(ConnectorV2):
    """Gives every chunk one more step, and ends it there: truncated, unless it was done.

    The step repeats the last observation, info, action and extra outputs, with reward 0. Added are

        loss_mask                  bool[B]  False at the added step
        terminateds, truncateds    bool[B]  True at the last real step of an episode that had ended so

    where B counts the added steps. Columns that the batch has already stay as they are. Episodes are extended in
    place, those of the agents of a multi-agent episode each by itself: that has then nothing to say of env steps any
    more. A read-only one makes way, in the list, for a copy. One without a step has nothing to repeat, and stays as it
    is. Raises ConnectorError where a read-only episode is in no list.
    """

    columnar = False
    replaces_episodes = True
    # It does extend them; but the flag asks a rollout for its ended episodes' last observations, and no rollout's
    # ongoing episode can take this piece's step.
    changes_episodes = False

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
        there = set(batch)
        if shared_data is not None:
            shared_data[STEP_ADDED] = True
        sealed = [place for place, episode in enumerate(episodes) if _is_sealed(episode)]
        if sealed and not isinstance(episodes, list):
            raise ConnectorError(
                f"{self.name} puts copies in the place of read-only episodes, but they come as "
                f"{type(episodes).__name__}, expected a list"
            )
        if isinstance(episodes, list):
            for place in sealed:
                made = MultiAgentEpisode if isinstance(episodes[place], MultiAgentEpisode) else SingleAgentEpisode
                episodes[place] = made.from_state(episodes[place].get_state())
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            steps = len(episode)
            last = np.arange(steps + 1 if steps else 0) == steps - 1
            columns = {
                Columns.LOSS_MASK: np.arange(len(last)) < steps,
                Columns.TERMINATEDS: last & episode.is_terminated,
                Columns.TRUNCATEDS: last & episode.is_truncated,
            }
            if steps:
                _extend(episode)
            for column, items in columns.items():
                if column not in there:
                    self.add_n_batch_items(batch, column, items, len(items), episode)
        return batch


def _is_sealed(episode: SingleAgentEpisode | MultiAgentEpisode) -> bool:
    return any(isinstance(each, SealedEpisode) for each in single_agent_episodes([episode], stepped_only=False))


def _extend(episode: SingleAgentEpisode) -> None:
    terminated, truncated = episode.is_terminated, episode.is_truncated
    # An episode that is done takes no step; add_env_step sets both anew.
    episode.is_terminated = episode.is_truncated = False
    episode.add_env_step(
        episode.get_observations(-1),
        episode.get_actions(-1),
        0.0,
        episode.get_infos(-1),
        terminated=terminated,
        truncated=truncated or not terminated,
        extra_model_outputs={key: episode.get_extra_model_outputs(key, -1) for key in episode.extra_model_outputs},
    )
