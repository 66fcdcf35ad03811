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
    rewards: NDArray[Any]  # number[R]
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
    try:
        for env, (observations, more) in zip(envs, resets, strict=True):
            numbers.extend(map(slots.by_env[env].__getitem__, observations))
            items.extend(observations.values())
            infos.append(more or {})
    except _MAPPING_ERRORS as error:
        _refuse(resets, ("observations", "infos"), slots, places, error, envs)
    nobody = np.zeros(0, np.int64)
    told = _known(infos, slots, places, envs) if any(any(more.values()) for more in infos) else ()
    return Told(*_ascending(numbers, items), nobody, nobody, Ends([], []), Ends([], []), told)


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


def _numbers(rewards: list[Any], rewarded: list[int], places: Places) -> NDArray[Any]:
    """The rewards as an array `number[R]`. Raises EnvError for one that is no finite number."""
    if not rewards:
        return np.zeros(0)
    try:
        values = np.array(rewards)
        fits = values.ndim == 1 and np.can_cast(values.dtype, np.float32, "same_kind")
        if fits and np.isfinite(np.add.reduce(values.astype(np.float32), dtype=np.float64)):
            return values
    except ValueError:
        pass
    for number, reward in zip(rewarded, rewards, strict=True):
        value = np.asarray(reward)
        if value.ndim or not np.can_cast(value.dtype, np.float32, "same_kind"):
            raise EnvError(f"{places.of(number)}: its reward is {reward!r}, expected a number")
        with np.errstate(over="ignore"):
            if not np.isfinite(value.astype(np.float32)):
                raise EnvError(f"{places.of(number)}: its reward is {reward!r}, expected a finite float32")
    return np.array([float(reward) for reward in rewards])


def _known(
    infos: list[Any], slots: AgentSlots, places: Places, envs: Sequence[int] | None = None
) -> list[Mapping[Any, Mapping[str, Any]]]:
    """Infos without those that are no agent's. Raises EnvError for those of an unknown agent."""
    told = []
    for env, more in zip(range(len(infos)) if envs is None else envs, infos, strict=True):
        if COMMON_INFO in more:
            more = {agent: info for agent, info in more.items() if agent != COMMON_INFO}
        for agent in more.keys() - slots.by_env[env].keys():
            raise _unknown(env, agent, "infos", slots, places)
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
    """Raise EnvError for the first thing that is not as it should be."""
    for env, each in zip(range(len(told)) if envs is None else envs, told, strict=True):
        if not isinstance(each, tuple) or len(each) != len(names):
            raise EnvError(f"{places.at(env)}: it gave {each!r}, expected a tuple of {', '.join(names)}") from None
        for name, values in zip(names, each, strict=True):
            if not isinstance(values, Mapping) and not (name == "infos" and values is None):
                raise EnvError(f"{places.at(env)}: its {name} are {values!r}, expected a dict by agents") from None
            for agent, value in (values or {}).items():
                is_flag = name in ("terminateds", "truncateds")
                if agent not in slots.by_env[env] and not (is_flag and (agent == ALL_AGENTS or not value)):
                    if not (name == "infos" and agent == COMMON_INFO):
                        raise _unknown(env, agent, name, slots, places) from None
                if is_flag and np.ndim(value):
                    raise EnvError(f"{places.of_agent(env, agent)}: {name} says {value!r}, expected a bool") from None
    raise error


def _unknown(env: int, agent: Any, name: str, slots: AgentSlots, places: Places) -> EnvError:
    return EnvError(
        f"{places.of_agent(env, agent)}: {name} has it, but it is not in 'possible_agents', {list(slots.by_env[env])}"
    )
