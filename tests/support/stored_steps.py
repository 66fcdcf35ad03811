"""Steps of fragments of one agent or several, to be held against those that were stored and read."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fragment_equality import chunks_of
from lost_agents import numbers
from serial_module import at_of

from rollflow import Fragment


def steps_in(fragments: Sequence[Any]) -> Counter[Any]:
    """Every step of an agent, with ids, its module and what that gave, and the ends that the environment has set."""
    found: Counter[Any] = Counter()
    for chunk in chunks_of(fragments):
        at = at_of(chunk.get_observations())
        outputs = [chunk.get_extra_model_outputs(name) for name in ("weight", "policy_version", "vf_preds")]
        whose = chunk.id_, chunk.multi_agent_episode_id, chunk.agent_id, chunk.module_id
        for i in range(len(chunk)):
            is_end = i == len(chunk) - 1 and "cut" not in chunk.custom_data
            flags = is_end and chunk.is_terminated, is_end and chunk.is_truncated
            values = chunk.get_actions(i), chunk.get_rewards(i), *(each[i] for each in outputs)
            found[*whose, chunk.t_started + i, numbers(at[i]), numbers(at[i + 1]), *map(float, values), *flags] += 1
    return found


def env_steps_of(fragment: Any) -> int:
    """Number of env steps in a fragment, by which a dataset counts."""
    return int(fragment.num_steps if isinstance(fragment, Fragment) else fragment.num_rows * fragment.num_envs)
