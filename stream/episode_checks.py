"""What may be added to an episode: a step, or the chunk that follows it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollflow.stream.buffer import LookbackBuffer
from rollflow.stream.errors import EpisodeError, located
from rollflow.stream.tree import equal_trees

if TYPE_CHECKING:
    from rollflow.stream.episode import SingleAgentEpisode


def checked_step(
    episode: "SingleAgentEpisode",
    observation: Any,
    action: Any,
    reward: Any,
    extra_model_outputs: Mapping[str, Any] | None,
) -> tuple[dict[str, LookbackBuffer], list[tuple[LookbackBuffer, Any]]]:
    """The buffers of the extra outputs, and which value goes to the end of which buffer, all of them fitting.

    Raises EpisodeError and ColumnError as `add_env_step` says.
    """
    if episode.is_done:
        raise EpisodeError(f"episode '{episode.id_}': add_env_step after its end at step {episode.t}")
    if not episode.is_reset:
        raise EpisodeError(f"episode '{episode.id_}': add_env_step before add_env_reset")
    extra, known = extra_model_outputs or {}, episode.extra_model_outputs
    if (known or episode.rewards.total()) and extra.keys() != known.keys():
        raise EpisodeError(
            f"episode '{episode.id_}': extra_model_outputs {sorted(extra)} at step {episode.t}, expected those of the "
            f"steps before, {sorted(known)}"
        )
    outputs = known or {key: LookbackBuffer([], name=key) for key in extra}
    values = [
        (episode.observations, observation),
        (episode.actions, action),
        (episode.rewards, reward),
        *((outputs[key], value) for key, value in extra.items()),
    ]
    if episode.observations.is_numpy:
        with located(f"episode '{episode.id_}'"):
            for buffer, value in values:
                buffer.in_form([value])
    return outputs, values


def check_joinable(head: "SingleAgentEpisode", tail: "SingleAgentEpisode") -> None:
    """Raise EpisodeError unless `tail` is the chunk of the same episode that begins where `head` ends."""
    if tail.id_ != head.id_:
        raise EpisodeError(f"episode '{head.id_}' can't be joined by a chunk of another, '{tail.id_}'")
    if head.is_done:
        raise EpisodeError(f"episode '{head.id_}': concat_episode after its end at step {head.t}")
    if tail.t_started != head.t:
        raise EpisodeError(
            f"episode '{head.id_}' ends at step {head.t}, but the chunk to join begins at step {tail.t_started}"
        )
    if not head.is_reset or not tail.is_reset:
        raise EpisodeError(f"episode '{head.id_}': concat_episode before add_env_reset, on one side or both")
    if not equal_trees(head.get_observations(-1), tail.get_observations(0)):
        raise EpisodeError(
            f"episode '{head.id_}': its last observation at step {head.t} is not the first of the chunk to join"
        )
    head.validate()
    tail.validate()
