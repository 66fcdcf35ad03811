"""Checked values of one vector step of N dict environments, or of their resets, with numbers in place of agents."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.env.vector_env_errors import number_of
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.tree import Tree
from rollflow.stream.episodes.agent_step import ALL_AGENTS
from rollflow.stream.multi_agent.agent_states import AgentNumbers

COMMON_INFO = "__common__"  # the key of infos that are no agent's; told to nobody

_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")
_FLAGS = ("terminateds", "truncateds")
_MAPPING_ERRORS = (AttributeError, KeyError, TypeError, ValueError)  # of what is no dict, or has unknown agents


class EndFlags(NamedTuple):
    """End flags of one kind that were set."""

    numbers: list[int]  # agents'
    envs: list[int]  # those of everybody in an environment


class StepValues(NamedTuple):
    """One vector step of all environments."""

    numbers: NDArray[np.int64]  # i64[K], ascending: who has an observation
    items: Sequence[Tree]  # K of them
    rewarded: NDArray[np.int64]  # i64[R]
    rewards: NDArray[np.float32]  # f32[R]
    terminated: EndFlags
    truncated: EndFlags
    infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # per environment; () where all are empty


def reset_values(envs: Sequence[int], resets: Sequence[Any], slots: AgentNumbers) -> StepValues:
    """Values that `reset` of some environments gave. Raises EnvError as `step_values` does."""
    try:
        steps: list[tuple[Any, ...]] = [(observations, {}, {}, {}, infos) for observations, infos in resets]
    except (TypeError, ValueError) as error:
        _refuse_form(envs, resets, ("observations", "infos"), slots)
        raise error
    return step_values(steps, slots, envs)


def step_values(steps: Sequence[Any], slots: AgentNumbers, envs: Sequence[int] | None = None) -> StepValues:
    """Values that `step` of every environment gave, or of `envs`.

    Raises EnvError for other forms, and for unknown agents.
    """
    numbers: list[int] = []
    items: list[Tree] = []
    rewarded: list[int] = []
    rewards: list[Any] = []
    terminated, truncated = EndFlags([], []), EndFlags([], [])
    infos: list[Any] = []
    has_infos = False
    envs = range(slots.num_envs) if envs is None else envs
    try:
        for env, (observations, gains, terminateds, truncateds, more) in zip(envs, steps, strict=True):
            number_of = slots.by_env[env].__getitem__
            numbers.extend(map(number_of, observations))
            items.extend(observations.values())
            rewarded.extend(map(number_of, gains))
            rewards.extend(gains.values())
            if any(terminateds.values()):
                _add_ends(terminated, terminateds, env, number_of)
            if any(truncateds.values()):
                _add_ends(truncated, truncateds, env, number_of)
            infos.append(more)
            has_infos = has_infos or any(more.values())
    except _MAPPING_ERRORS as error:
        _refuse_form(envs, steps, _NAMES, slots)
        _refuse_values(envs, steps, slots)
        raise error
    return StepValues(
        *_ascending(numbers, items),
        np.array(rewarded, np.int64),
        _numbers(rewards, rewarded, slots),
        terminated,
        truncated,
        _checked_infos(infos, slots, envs) if has_infos else (),
    )


def _add_ends(ends: EndFlags, flags: Mapping[Any, Any], env: int, number_of: Any) -> None:
    for agent, is_set in flags.items():
        if not is_set:
            continue
        if agent == ALL_AGENTS:
            ends.envs.append(env)
        else:
            ends.numbers.append(number_of(agent))


def _ascending(numbers: list[int], items: list[Tree]) -> tuple[NDArray[np.int64], list[Tree]]:
    ordered = np.array(numbers, np.int64)
    if len(ordered) > 1 and (ordered[1:] < ordered[:-1]).any():
        order = np.argsort(ordered)
        return ordered[order], [items[place] for place in order.tolist()]
    return ordered, items


def _numbers(rewards: list[Any], rewarded: list[int], slots: AgentNumbers) -> NDArray[np.float32]:
    """The rewards as an array. Raises EnvError for one that is no finite number."""
    values = _as_float32(rewards) if rewards else np.zeros(0, np.float32)
    # A sum of float32 can't grow beyond float64: it is finite where all are.
    if values is None or not np.isfinite(np.add.reduce(values, dtype=np.float64)):
        floats = [number_of(reward) for reward in rewards]
        for number, reward, value in zip(rewarded, rewards, floats, strict=True):
            if value is None:
                raise EnvError(f"{slots.named(number)}: its reward is {shown(reward)}, expected a number")
            with np.errstate(over="ignore"):
                if not np.isfinite(np.float32(value)):
                    raise EnvError(f"{slots.named(number)}: its reward is {shown(reward)}, expected a finite float32")
        values = np.array(floats, np.float32)
    return values


def _as_float32(numbers: list[Any]) -> NDArray[np.float32] | None:
    """Numbers as an array f32[R]; None if one of them is no plain number."""
    try:
        values = np.array(numbers)
    except (TypeError, ValueError, RuntimeError):
        return None
    if values.ndim > 1 or not np.can_cast(values.dtype, np.float32, "same_kind"):
        return None
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _checked_infos(
    infos: list[Any], slots: AgentNumbers, envs: Sequence[int]
) -> Sequence[Mapping[Any, Mapping[str, Any]]]:
    """Infos without those that are no agent's. Raises EnvError as `check_infos`."""
    if any(COMMON_INFO in each for each in infos):
        infos = [{agent: info for agent, info in each.items() if agent != COMMON_INFO} for each in infos]
    check_infos(infos, slots, envs, "infos")
    return infos


def check_infos(infos: Sequence[Any], slots: AgentNumbers, envs: Sequence[int], name: str) -> None:
    """Raise EnvError for infos of `envs` that are no dicts by agents, of an unknown agent, and for no dicts."""
    for env, by_agent in zip(envs, infos, strict=True):
        if not isinstance(by_agent, Mapping):
            raise _no_dict(env, by_agent, name, slots)
        for agent, info in by_agent.items():
            if agent not in slots.by_env[env]:
                raise _unknown(env, agent, name, slots)
            if type(info) is not dict and info and not isinstance(info, Mapping):
                raise EnvError(f"{slots.agent_named(env, agent)}: its info is {shown(info)}, expected a dict")


def _refuse_form(envs: Sequence[int], answers: Sequence[Any], names: Sequence[str], slots: AgentNumbers) -> None:
    """Raise EnvError for the first answer that is no tuple of these."""
    for env, answer in zip(envs, answers, strict=True):
        if not isinstance(answer, tuple) or len(answer) != len(names):
            text = f"{slots.env_named(env)}: it gave {shown(answer)}, expected a tuple of {', '.join(names)}"
            raise EnvError(text) from None


def _refuse_values(envs: Sequence[int], steps: Sequence[Any], slots: AgentNumbers) -> None:
    """Raise EnvError for the first value that is not as it should be."""
    for env, each in zip(envs, steps, strict=True):
        for name, values in zip(_NAMES, each, strict=True):
            if not isinstance(values, Mapping):
                raise _no_dict(env, values, name, slots) from None
            for agent, value in values.items():
                if name in _FLAGS:
                    if np.ndim(value):
                        where = slots.agent_named(env, agent)
                        raise EnvError(f"{where}: {name} says {shown(value)}, expected a bool") from None
                    if agent == ALL_AGENTS or not value:
                        continue
                if name != "infos" and agent not in slots.by_env[env]:
                    raise _unknown(env, agent, name, slots) from None


def _no_dict(env: int, values: Any, name: str, slots: AgentNumbers) -> EnvError:
    return EnvError(f"{slots.env_named(env)}: its {name} are {shown(values)}, expected a dict by agents")


def _unknown(env: int, agent: Any, name: str, slots: AgentNumbers) -> EnvError:
    return EnvError(
        f"{slots.agent_named(env, agent)}: {name} has it, but it is not in 'possible_agents', {list(slots.by_env[env])}"
    )
