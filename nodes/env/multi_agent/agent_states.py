"""States of agents in N environments' episodes: come, waiting for an answer, ended, to act; and their actions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optree
from numpy.typing import NDArray

from rollflow.nodes.env.multi_agent.agent_slots import AgentSlots
from rollflow.nodes.env.multi_agent.step_validation import EndFlags, StepValues
from rollflow.stream.data.errors import EnvError, shown
from rollflow.stream.data.tree import Tree
from rollflow.stream.multi_agent.agent_part import Actions


class StepEnds(NamedTuple):
    """Ends of agents and of episodes with a vector step."""

    terminateds: NDArray[np.bool_]  # bool[count]: agents, by number
    truncateds: NDArray[np.bool_]  # bool[count]
    envs: NDArray[np.int64]  # i64[E], ascending
    truncated: NDArray[np.bool_]  # bool[E]: whether the environment's episode was, and not terminated


class AgentStates:
    """The state of every agent, by number.

    acting    i64[K], ascending: who has an observation and must act on it
    """

    def __init__(self, slots: AgentSlots) -> None:
        self._slots = slots
        self._has_come = np.zeros(slots.count, np.bool_)  # it has had an observation in its environment's episode
        self._hangs = np.zeros(slots.count, np.bool_)  # it has acted since its last observation
        self._has_ended = np.zeros(slots.count, np.bool_)
        self.acting: NDArray[np.int64] = np.zeros(0, np.int64)

    def reset(self, envs: NDArray[np.int64], values: StepValues) -> None:
        """Begin episodes in `envs` with the observations in `values`. Raises EnvError where nobody is to act."""
        numbers = self._slots.of_env[envs]
        for state in (self._has_come, self._hangs, self._has_ended):
            state[numbers] = False
        self._has_come[values.numbers] = True
        self._check_acting(values.numbers, np.setdiff1d(np.arange(self._slots.num_envs), envs))
        others = self.acting if len(envs) < self._slots.num_envs else self.acting[:0]
        self.acting = np.sort(np.concatenate([others, values.numbers]))

    def step(self, values: StepValues) -> StepEnds:
        """Take a vector step in which all of `acting` have acted; who must act then leaves out `StepEnds.envs`.

        Raises EnvError for what comes to an agent that has ended, and for a truncated one without a last observation.
        """
        seen = values.numbers
        self._refuse_ended(seen, "it has an observation")
        self._refuse_ended(values.rewarded, "it has a reward")
        self._hangs[self.acting] = True
        self._hangs[seen] = False
        self._has_come[seen] = True
        if not any((*values.terminated, *values.truncated)):
            self.acting = seen
            if len(seen) < self._slots.count:
                self._check_acting(seen)
            return StepEnds(self._nobody(), self._nobody(), np.zeros(0, np.int64), np.zeros(0, np.bool_))
        live = self._has_come & ~self._has_ended
        terminateds, truncateds = self._flags(values.terminated) & live, self._flags(values.truncated) & live
        self._check_truncated(truncateds & self._hangs)
        for ends in (values.terminated, values.truncated):
            self._has_ended[ends.numbers] = True
        self._has_ended |= terminateds | truncateds
        still: NDArray[np.bool_] = self._has_come & ~self._has_ended
        envs = np.flatnonzero(~still[self._slots.of_env].any(axis=1))  # whose last agent has ended, as all by "__all__"
        self.acting = seen[~(self._has_ended[seen] | np.isin(self._slots.envs[seen], envs))]
        self._check_acting(self.acting, envs)
        return StepEnds(terminateds, truncateds, envs, self._truncated(envs, values, terminateds))

    def _nobody(self) -> NDArray[np.bool_]:
        return np.zeros(self._slots.count, np.bool_)

    def _flags(self, ends: EndFlags) -> NDArray[np.bool_]:
        flags: NDArray[np.bool_] = self._nobody()
        flags[ends.numbers] = True
        flags[self._slots.of_env[ends.envs]] = True
        return flags

    def _truncated(
        self, envs: NDArray[np.int64], values: StepValues, terminateds: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """bool[E]: whether "__all__" were truncated, or without "__all__", all of the last agents."""
        by_last = ~terminateds[self._slots.of_env[envs]].any(axis=1)
        of_all = np.isin(envs, values.truncated.envs)
        truncated: NDArray[np.bool_] = ~np.isin(envs, values.terminated.envs) & (of_all | by_last)
        return truncated

    def _check_truncated(self, lost: NDArray[np.bool_]) -> None:
        if lost.any():
            raise EnvError(
                f"{self._slots.named(int(np.argmax(lost)))}: it is truncated after an action without an observation, "
                "expected its last one"
            )

    def _refuse_ended(self, numbers: NDArray[np.int64], what: str) -> None:
        ended = self._has_ended[numbers]
        if ended.any():
            raise EnvError(f"{self._slots.named(int(numbers[np.argmax(ended)]))}: {what}, but has ended before")

    def _check_acting(self, acting: NDArray[np.int64], others: NDArray[np.int64] | None = None) -> None:
        """Raise EnvError for an environment in which nobody acts and which is not one of the `others`."""
        counts = np.bincount(self._slots.envs[acting], minlength=self._slots.num_envs)
        if others is not None:
            counts[others] = 1
        if not counts.all():
            where = self._slots.env_named(int(np.argmin(counts)))
            raise EnvError(f"{where}: its episode goes on, but no agent has an observation to act on")


def actions_by_env(
    actions: Actions, acting: Sequence[NDArray[np.int64] | None], slots: AgentSlots
) -> list[dict[Any, Any]]:
    """One dict per environment, agent -> action.

    `acting` has, per part, the slots of those that must act; None: all. Raises EnvError where others are given, or not
    as many actions.
    """
    if len(actions) != len(slots.parts):
        raise EnvError(f"got actions for {len(actions)} parts, expected {len(slots.parts)}")
    by_env: list[dict[Any, Any]] = [{} for _ in range(slots.num_envs)]
    for part, ((chosen, tree), expected) in enumerate(zip(actions, acting, strict=True)):
        if chosen is not expected:
            _check_chosen(chosen, expected, slots, part)
        count = slots.bounds[part + 1] - slots.bounds[part] if expected is None else len(expected)
        if count:
            _add(by_env, _items(tree, count, slots, part), expected, slots, part)
    return by_env


def _add(
    by_env: list[dict[Any, Any]], items: Sequence[Any], acting: NDArray[np.int64] | None, slots: AgentSlots, part: int
) -> None:
    agents = slots.parts[part].agents
    size = len(agents)
    if acting is None:
        for env, own in enumerate(by_env):
            own.update(zip(agents, items[env * size : (env + 1) * size], strict=True))
        return
    envs, ids = np.divmod(acting, size)
    for env, place, item in zip(envs.tolist(), ids.tolist(), items, strict=True):
        by_env[env][agents[place]] = item


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
    chosen: NDArray[np.int64] | None, acting: NDArray[np.int64] | None, slots: AgentSlots, part: int
) -> None:
    first, stop = slots.bounds[part : part + 2]
    everybody = np.arange(stop - first)
    acted = everybody if chosen is None else np.asarray(chosen)
    expected = everybody if acting is None else acting
    if np.array_equal(acted, expected):
        return
    if acted.ndim != 1 or (acted.size and acted.dtype.kind not in "iu"):
        raise EnvError(f"the slots of the agents that act are {shown(chosen)}, expected i64[K]")
    for slot in np.setdiff1d(acted, expected).tolist():
        if not 0 <= slot < len(everybody):
            raise EnvError(f"an action for agent slot {slot}, expected less than {len(everybody)}")
        raise EnvError(f"{slots.named(first + slot)}: it was given an action, but has no observation to act on")
    for slot in np.setdiff1d(expected, acted).tolist():
        raise EnvError(f"{slots.named(first + slot)}: it must act, but was given no action")
    raise EnvError("the slots of the agents that act are not in ascending order, expected each once")
