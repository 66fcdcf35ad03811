"""Agents in a list of episodes: each one's own episode, the key of its items in a batch, its part of a space."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError
from rollflow.stream.multi_agent_episode import MultiAgentEpisode

Episodes = Sequence[SingleAgentEpisode | MultiAgentEpisode]


def episode_key(episode: SingleAgentEpisode) -> tuple[Any, ...]:
    """The key of an episode's items in a batch in list form."""
    if episode.agent_id is None and episode.module_id is None:
        return (episode.id_,)
    return (episode.multi_agent_episode_id, episode.agent_id, episode.module_id)


def is_keyed_by_episode(data: Any) -> bool:
    """Whether a column is in list form, `(episode id, …) -> [items]`, and no tree of arrays."""
    return (
        isinstance(data, dict)
        and bool(data)
        and all(isinstance(key, tuple) and isinstance(items, list) for key, items in data.items())
    )


def single_agent_episodes(episodes: Episodes, stepped_only: bool) -> Iterator[SingleAgentEpisode]:
    """Every single-agent episode, and in its place every multi-agent one's agents', in the order they came in.

    stepped_only    without the agents that have no observation at their episode's last env step
    """
    for episode in episodes:
        if isinstance(episode, MultiAgentEpisode):
            chosen = episode.get_agents_that_stepped() if stepped_only else episode.agent_ids
            yield from (each for agent_id, each in episode.agent_episodes.items() if agent_id in chosen)
        else:
            yield episode


def paired_with_items(
    episodes: Sequence[SingleAgentEpisode], items: list[Any] | Mapping[tuple[Any, ...], list[Any]]
) -> Iterator[tuple[SingleAgentEpisode, Any]]:
    """Each episode with its item: see `ConnectorV2.single_agent_episode_iterator`."""
    if not isinstance(items, Mapping):
        if len(items) != len(episodes):
            raise ValueError(
                f"zip_with_batch_column has {len(items)} items, expected one for each of {len(episodes)} episodes"
            )
        yield from zip(episodes, items, strict=True)
        return
    taken: dict[tuple[Any, ...], int] = {}
    for episode in episodes:
        key = episode_key(episode)
        theirs, place = items.get(key, []), taken.get(key, 0)
        if place >= len(theirs):
            raise ValueError(
                f"zip_with_batch_column has {len(theirs)} items for episode {key}, expected one for each time "
                f"it is in the list of episodes; keys: {list(items)}"
            )
        taken[key] = place + 1
        yield episode, theirs[place]


def space_of_agent(space: Any, agent_id: Any) -> Any:
    """An agent's part of a Dict space by agent ids; any other space is everybody's."""
    if agent_id is not None and isinstance(space, spaces.Dict) and agent_id in space.spaces:
        return space.spaces[agent_id]
    return space


def space_by_agents(
    observation_space: gym.Space[Any], action_space: Any, made: Callable[[gym.Space[Any], Any, Any], gym.Space[Any]]
) -> gym.Space[Any]:
    """The Dict space, by agent ids, of what is made of each agent's part: `made(observations, actions, agent id)`.

    Raises ConnectorError for an observation space that is no Dict.
    """
    if not isinstance(observation_space, spaces.Dict):
        raise ConnectorError(
            f"multi_agent=True and an observation space {observation_space}, expected a Dict by agent ids; in a "
            "MultiAgentRollout, whose pieces see each agent by itself, multi_agent is to be left out"
        )
    return spaces.Dict(
        {
            agent_id: made(part, space_of_agent(action_space, agent_id), agent_id)
            for agent_id, part in observation_space.spaces.items()
        }
    )


def id_in_keys(episode: SingleAgentEpisode | MultiAgentEpisode) -> Any:
    """The id that the keys of an episode's items begin with."""
    return episode.id_ if isinstance(episode, MultiAgentEpisode) else episode_key(episode)[0]
