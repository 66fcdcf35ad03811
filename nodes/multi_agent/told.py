"""What N dict environments told in one vector step, or as they were reset, with numbers in place of agents."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.multi_agent.agent_slots import AgentSlots
from rollflow.nodes.multi_agent.places import Places
from rollflow.stream.agent_share import ALL_AGENTS
from rollflow.stream.errors import EnvError
from rollflow.stream.tree import Tree

COMMON_INFO = "__common__"  # the key of infos that are no agent's; told to nobody

_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")
_FLAGS = ("terminateds", "truncateds")
_MAPPING_ERRORS = (AttributeError, KeyError, TypeError, ValueError)  # of what is no dict, or has unknown agents


class Ends(NamedTuple):
    """End flags of one kind that were set."""

    numbers: list[int]  # agents'
    envs: list[int]  # those of everybody in an environment


class Told(NamedTuple):
    """One vector step of all environments."""

    numbers: NDArray[np.int64]  # i64[K], ascending: who has an observation
    items: Sequence[Tree]  # K of them
    rewarded: NDArray[np.int64]  # i64[R]
    rewards: NDArray[np.float32]  # f32[R]
    terminated: Ends
    truncated: Ends
    infos: Sequence[Mapping[Any, Mapping[str, Any]]]  # per environment; () where all are empty


def told_by_steps(steps: Sequence[Any], slots: AgentSlots, places: Places) -> Told:
    """What `step` of every environment gave. Raises EnvError for what is not of its form, and for unknown agents."""
    numbers: list[int] = []
    items: list[Tree] = []
    rewarded: list[int] = []
    rewards: list[Any] = []
    terminated, truncated = Ends([], []), Ends([], [])
    infos: list[Any] = []
    is_telling = False
    try:
        for env, (observations, gains, terminateds, truncateds, more) in enumerate(steps):
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
            is_telling = is_telling or any(more.values())
    except _MAPPING_ERRORS as error:
        _refuse(steps, _NAMES, slots, places, error)
    return Told(
        *_ascending(numbers, items),
        np.array(rewarded, np.int64),
        _numbers(rewards, rewarded, places),
        terminated,
        truncated,
        _known(infos, slots, places) if is_telling else (),
    )


def told_by_resets(envs: Sequence[int], resets: Sequence[Any], slots: AgentSlots, places: Places) -> Told:
    """What `reset` of some environments gave. Raises EnvError as `told_by_steps`."""
    numbers: list[int] = []
    items: list[Tree] = []
    infos: list[Any] = []
    is_telling = False
    try:
        for env, (observations, more) in zip(envs, resets, strict=True):
            numbers.extend(map(slots.by_env[env].__getitem__, observations))
            items.extend(observations.values())
            infos.append(more)
            is_telling = is_telling or any(more.values())
    except _MAPPING_ERRORS as error:
        _refuse(resets, ("observations", "infos"), slots, places, error, envs)
    told = _known(infos, slots, places, envs) if is_telling else ()
    return Told(
        *_ascending(numbers, items), np.zeros(0, np.int64), np.zeros(0, np.float32), Ends([], []), Ends([], []), told
    )


def _add_ends(ends: Ends, flags: Mapping[Any, Any], env: int, number_of: Any) -> None:
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


def _numbers(rewards: list[Any], rewarded: list[int], places: Places) -> NDArray[np.float32]:
    """The rewards as an array. Raises EnvError for one that is no finite number."""
    values = _as_float32(rewards) if rewards else np.zeros(0, np.float32)
    # A sum of float32 can't grow beyond float64: it is finite where all are.
    if values is None or not np.isfinite(np.add.reduce(values, dtype=np.float64)):
        for number, reward in zip(rewarded, rewards, strict=True):
            value = _as_float32(reward)
            if value is None or value.ndim:
                raise EnvError(f"{places.of(number)}: its reward is {reward!r}, expected a number")
            if not np.isfinite(value):
                raise EnvError(f"{places.of(number)}: its reward is {reward!r}, expected a finite float32")
        values = np.array([float(reward) for reward in rewards], np.float32)
    return values


def _as_float32(numbers: Any) -> NDArray[np.float32] | None:
    """A number, or a list of numbers, as an array; None where they are no numbers."""
    try:
        values = np.array(numbers)
    except ValueError:
        return None
    if values.ndim > 1 or not np.can_cast(values.dtype, np.float32, "same_kind"):
        return None
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _known(
    infos: list[Any], slots: AgentSlots, places: Places, envs: Sequence[int] | None = None
) -> list[Mapping[Any, Mapping[str, Any]]]:
    """Infos without those that are no agent's. Raises EnvError for those of an unknown agent, and for no dicts."""
    told = []
    for env, more in zip(range(len(infos)) if envs is None else envs, infos, strict=True):
        if COMMON_INFO in more:
            more = {agent: info for agent, info in more.items() if agent != COMMON_INFO}
        for agent in more.keys() - slots.by_env[env].keys():
            raise _unknown(env, agent, "infos", slots, places)
        for agent, info in more.items():
            if type(info) is not dict and info and not isinstance(info, Mapping):
                raise EnvError(f"{places.of_agent(env, agent)}: its info is {info!r:.200}, expected a dict")
        told.append(more)
    return told


def _refuse(
    told: Sequence[Any],
    names: Sequence[str],
    slots: AgentSlots,
    places: Places,
    error: Exception,
    envs: Sequence[int] | None = None,
) -> NoReturn:
    """Raise EnvError for the first thing that is not as it should be; `error` is what it led to."""
    for env, each in zip(range(len(told)) if envs is None else envs, told, strict=True):
        if not isinstance(each, tuple) or len(each) != len(names):
            raise EnvError(f"{places.at(env)}: it gave {each!r}, expected a tuple of {', '.join(names)}") from None
        for name, values in zip(names, each, strict=True):
            if not isinstance(values, Mapping):
                raise EnvError(f"{places.at(env)}: its {name} are {values!r}, expected a dict by agents") from None
            for agent, value in values.items():
                if name in _FLAGS:
                    if np.ndim(value):
                        where = places.of_agent(env, agent)
                        raise EnvError(f"{where}: {name} says {value!r}, expected a bool") from None
                    if agent == ALL_AGENTS or not value:
                        continue
                if name != "infos" and agent not in slots.by_env[env]:
                    raise _unknown(env, agent, name, slots, places) from None
    raise error


def _unknown(env: int, agent: Any, name: str, slots: AgentSlots, places: Places) -> EnvError:
    return EnvError(
        f"{places.of_agent(env, agent)}: {name} has it, but it is not in 'possible_agents', {list(slots.by_env[env])}"
    )
