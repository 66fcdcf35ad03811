"""What a sink asks of a rollout, whether that has one agent or several."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.episode_returns import EpisodeReturns
from rollflow.nodes.multi_agent.agent_returns import AgentReturns
from rollflow.nodes.multi_agent.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.policy_weights import shapes_of
from rollflow.nodes.rollout import Rollout
from rollflow.sinks.trainer.by_module import joined_weights, parted_weights
from rollflow.stream.columns import Columns
from rollflow.stream.errors import ModuleError
from rollflow.stream.fragment import Fragment
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.space_codec import describe_space
from rollflow.stream.wire.handshake import MOST_NUMBER

AnyRollout = Rollout | MultiAgentRollout


def check_rollout(rollout: object) -> None:
    """Raise ValueError for what is none."""
    if not isinstance(rollout, AnyRollout):
        raise ValueError(f"rollout is {rollout!r:.100}, expected a Rollout or a MultiAgentRollout")


class Described(NamedTuple):
    """A rollout's part of a `Hello`.

    slots       environments of each lane
    spaces      of one environment: its observations and its actions, described
    metadata    what a trainer makes batches by, and compares weights with
    """

    slots: tuple[int, ...]
    spaces: tuple[dict[str, Any], dict[str, Any]]
    metadata: dict[str, Any]


def described(rollout: AnyRollout, ids: Sequence[str] | None) -> Described:
    """What there is to say of a rollout now; `ids` as `claimed_ids` gave them."""
    environments = rollout.environments
    if isinstance(rollout, MultiAgentRollout):
        spaces = _spaces_of(environments.parts)
        seen, stateful = [spaces[0]], False
        weights = joined_weights({module_id: rollout.module[module_id].state_dict() for module_id in ids or ()})
    else:
        spaces = describe_space(environments.observation_space), describe_space(environments.action_space)
        seen = [describe_space(space) for space in seen_in(rollout)]
        stateful, weights = is_stateful(rollout.module), rollout.module.state_dict()
    metadata = {
        "has_fixed_lanes": environments.has_fixed_lanes,
        "spaces": seen,
        "is_stateful": stateful,
        "is_by_module": isinstance(rollout, MultiAgentRollout),
        "module": type(rollout.module).__name__,
        "weights": {name: list(shape) for name, shape in shapes_of(weights).items()},
        "version": version_of(rollout),
        "seed": rollout.seed if rollout.seed < MOST_NUMBER else None,
    }
    return Described(tuple(env.num_envs for env in environments.envs) or (1,), spaces, metadata)


def seen_in(rollout: Rollout) -> list[gym.Space[Any]]:
    """The spaces that a fragment's observations may be in; once it runs, its pipelines stay as they are."""
    return [rollout.environments.observation_space, *rollout.env_to_module.observation_spaces]


def claimed_ids(rollout: AnyRollout) -> tuple[str, ...] | None:
    """Have several modules stay whose weights the trainer is to publish: their ids; None where there is one module.

    Raises ModuleError for ids that are no strings.
    """
    if not isinstance(rollout, MultiAgentRollout):
        return None
    trained = [module_id for module_id in rollout.module if rollout.learner.trains(module_id)]
    if not all(isinstance(module_id, str) for module_id in trained):
        raise ModuleError(f"module ids are {trained}, expected strings where a trainer elsewhere gets their batches")
    ids = tuple(module_id for module_id in trained if shapes_of(rollout.module[module_id].state_dict()))
    rollout.be_published_elsewhere(ids)
    return ids


def version_of(rollout: AnyRollout) -> int:
    """The policy version that it acts with; of several modules that of the trainer's weights."""
    return rollout.version_elsewhere if isinstance(rollout, MultiAgentRollout) else rollout.policy_version


def returns_for(rollout: AnyRollout) -> EpisodeReturns | AgentReturns:
    """What adds up the episodes of its fragments, beside its own."""
    if isinstance(rollout, MultiAgentRollout):
        return AgentReturns(rollout.module.__contains__)
    return EpisodeReturns()


def newest_version(fragment: Fragment | MultiAgentFragment, ids: Sequence[str] | None) -> int | None:
    """The policy version of the newest weights that acted in a fragment, of `ids` where there are several modules.

    None: none of them did.
    """
    if isinstance(fragment, Fragment):
        return int(fragment.column(Columns.POLICY_VERSION)[-1, 0]) if fragment.num_rows else None
    acted = [fragment.of_module(module_id) for module_id in ids or () if module_id in fragment.module_ids]
    versions = [part.gather(Columns.POLICY_VERSION) for part in acted]
    return max((int(each.max()) for each in versions if len(each)), default=None)


def publish_as(rollout: AnyRollout, version: int, weights: Mapping[str, Any], ids: Sequence[str] | None) -> bool:
    """Have it act with weights that came under a version; False: they are not newer than its own.

    Raises ModuleError where they are not those of its modules, of `ids` where it has several.
    """
    if isinstance(rollout, MultiAgentRollout):
        return rollout.publish_as(version, parted_weights(weights, ids or ()))
    return rollout.publish_as(version, weights)


def _spaces_of(parts: tuple[AgentPart, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Agent id, as text -> its space."""
    of = {str(agent): part for part in parts for agent in part.agents}
    seen = gym.spaces.Dict({agent: part.observation_space for agent, part in of.items()})
    done = gym.spaces.Dict({agent: part.action_space for agent, part in of.items()})
    return describe_space(seen), describe_space(done)
