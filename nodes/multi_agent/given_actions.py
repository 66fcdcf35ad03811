"""Actions of the agents that act, as dicts for their environments."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.nodes.multi_agent.agent_slots import AgentSlots
from rollflow.nodes.multi_agent.places import Places
from rollflow.stream.errors import EnvError
from rollflow.stream.multi_agent.vector_step import Actions
from rollflow.stream.tree import Tree


def given_actions(
    actions: Actions, acting: Sequence[NDArray[np.int64] | None], slots: AgentSlots, places: Places
) -> list[dict[Any, Any]]:
    """One dict per environment, agent -> action.

    `acting` has, per part, the slots of those that must act; None: all. Raises EnvError where others are given, or not
    as many actions.
    """
    if len(actions) != len(slots.parts):
        raise EnvError(f"got actions for {len(actions)} parts, expected {len(slots.parts)}")
    given: list[dict[Any, Any]] = [{} for _ in range(slots.num_envs)]
    for part, ((chosen, tree), expected) in enumerate(zip(actions, acting, strict=True)):
        size = len(slots.parts[part].agents) * slots.num_envs
        if chosen is not expected:
            _check_chosen(chosen, expected, size, slots.bounds[part], places)
        count = size if expected is None else len(expected)
        if count:
            _give(given, _items(tree, count, slots, part), expected, slots, part)
    return given


def _give(
    given: list[dict[Any, Any]], items: Sequence[Any], acting: NDArray[np.int64] | None, slots: AgentSlots, part: int
) -> None:
    agents = slots.parts[part].agents
    size = len(agents)
    if acting is None:
        for env, own in enumerate(given):
            own.update(zip(agents, items[env * size : (env + 1) * size], strict=True))
        return
    envs, ids = np.divmod(acting, size)
    for env, place, item in zip(envs.tolist(), ids.tolist(), items, strict=True):
        given[env][agents[place]] = item


def _items(tree: Tree, count: int, slots: AgentSlots, part: int) -> Sequence[Any]:
    """The actions one by one."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    for leaf in leaves:
        if np.shape(leaf)[:1] != (count,):
            raise EnvError(
                f"actions of shape {np.shape(leaf)} for agents {', '.join(map(repr, slots.parts[part].agents))}, "
                f"expected {count}, one for each that acts"
            )
    if isinstance(tree, np.ndarray):
        return list(tree)
    return [spec.unflatten(item) for item in zip(*leaves, strict=True)]


def _check_chosen(
    chosen: NDArray[np.int64] | None, acting: NDArray[np.int64] | None, size: int, first: int, places: Places
) -> None:
    everybody = np.arange(size)
    given = everybody if chosen is None else np.asarray(chosen)
    expected = everybody if acting is None else acting
    if np.array_equal(given, expected):
        return
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise EnvError(f"the slots of the agents that act are {chosen!r}, expected i64[K]")
    for slot in np.setdiff1d(given, expected).tolist():
        if not 0 <= slot < size:
            raise EnvError(f"an action for agent slot {slot}, expected less than {size}")
        raise EnvError(f"{places.of(first + slot)}: it was given an action, but has no observation to act on")
    for slot in np.setdiff1d(expected, given).tolist():
        raise EnvError(f"{places.of(first + slot)}: it must act, but was given no action")
    raise EnvError("the slots of the agents that act are not in ascending order, expected each once")
