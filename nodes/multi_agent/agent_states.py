"""Who takes part in N environments' episodes: who has come, who waits for an answer, who has ended, who must act."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.multi_agent.agent_slots import AgentSlots
from rollflow.nodes.multi_agent.places import Places
from rollflow.nodes.multi_agent.told import Ends, Told
from rollflow.stream.errors import EnvError


class Ended(NamedTuple):
    """What ended with a vector step."""

    terminateds: NDArray[np.bool_]  # bool[count]: agents, by number
    truncateds: NDArray[np.bool_]  # bool[count]
    envs: NDArray[np.int64]  # i64[E], ascending
    truncated: NDArray[np.bool_]  # bool[E]: whether the environment's episode was, and not terminated


class AgentStates:
    """The state of every agent, by number.

    acting    i64[K], ascending: who has an observation and must act on it
    """

    def __init__(self, slots: AgentSlots, places: Places) -> None:
        self._slots = slots
        self._places = places
        self._has_come = np.zeros(slots.count, np.bool_)  # it has had an observation in its environment's episode
        self._hangs = np.zeros(slots.count, np.bool_)  # it has acted since its last observation
        self._has_ended = np.zeros(slots.count, np.bool_)
        self.acting: NDArray[np.int64] = np.zeros(0, np.int64)

    def reset(self, envs: NDArray[np.int64], told: Told) -> None:
        """Begin episodes in `envs` with the observations in `told`. Raises EnvError where nobody is to act."""
        numbers = self._slots.of_env[envs]
        for state in (self._has_come, self._hangs, self._has_ended):
            state[numbers] = False
        self._has_come[told.numbers] = True
        self._check_acting(told.numbers, np.setdiff1d(np.arange(self._slots.num_envs), envs))
        others = self.acting if len(envs) < self._slots.num_envs else self.acting[:0]
        self.acting = np.sort(np.concatenate([others, told.numbers]))

    def step(self, told: Told) -> Ended:
        """Take a vector step in which all of `acting` have acted; who must act then leaves out `Ended.envs`.

        Raises EnvError for what comes to an agent that has ended, and for a truncated one without a last observation.
        """
        seen = told.numbers
        self._refuse_ended(seen, "it has an observation")
        self._refuse_ended(told.rewarded, "it has a reward")
        self._hangs[self.acting] = True
        self._hangs[seen] = False
        self._has_come[seen] = True
        if not any((*told.terminated, *told.truncated)):
            self.acting = seen
            if len(seen) < self._slots.count:
                self._check_acting(seen)
            return Ended(self._nobody(), self._nobody(), np.zeros(0, np.int64), np.zeros(0, np.bool_))
        live = self._has_come & ~self._has_ended
        terminateds, truncateds = self._flags(told.terminated) & live, self._flags(told.truncated) & live
        self._check_truncated(truncateds & self._hangs)
        for ends in (told.terminated, told.truncated):
            self._has_ended[ends.numbers] = True
        self._has_ended |= terminateds | truncateds
        envs = self._ended_envs()
        self.acting = seen[~(self._has_ended[seen] | np.isin(self._slots.envs[seen], envs))]
        self._check_acting(self.acting, envs)
        return Ended(terminateds, truncateds, envs, self._truncated(envs, told, terminateds))

    def _nobody(self) -> NDArray[np.bool_]:
        return np.zeros(self._slots.count, np.bool_)

    def _flags(self, ends: Ends) -> NDArray[np.bool_]:
        flags: NDArray[np.bool_] = self._nobody()
        flags[ends.numbers] = True
        flags[self._slots.of_env[ends.envs]] = True
        return flags

    def _ended_envs(self) -> NDArray[np.int64]:
        """Environments whose last agent has ended, as all do by "__all__"."""
        live: NDArray[np.bool_] = self._has_come & ~self._has_ended
        return np.flatnonzero(np.logical_not(np.any(live[self._slots.of_env], axis=1)))

    def _truncated(self, envs: NDArray[np.int64], told: Told, terminateds: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[E]: whether "__all__" were truncated, or without "__all__", all of the last agents."""
        by_last = ~terminateds[self._slots.of_env[envs]].any(axis=1)
        of_all = np.isin(envs, told.truncated.envs)
        truncated: NDArray[np.bool_] = ~np.isin(envs, told.terminated.envs) & (of_all | by_last)
        return truncated

    def _check_truncated(self, lost: NDArray[np.bool_]) -> None:
        if lost.any():
            raise EnvError(
                f"{self._places.of(int(np.argmax(lost)))}: it is truncated after an action without an observation, "
                "expected its last one"
            )

    def _refuse_ended(self, numbers: NDArray[np.int64], what: str) -> None:
        ended = self._has_ended[numbers]
        if ended.any():
            raise EnvError(f"{self._places.of(int(numbers[np.argmax(ended)]))}: {what}, but has ended before")

    def _check_acting(self, acting: NDArray[np.int64], others: NDArray[np.int64] | None = None) -> None:
        """Raise EnvError for an environment in which nobody acts and which is not one of the `others`."""
        counts = np.bincount(self._slots.envs[acting], minlength=self._slots.num_envs)
        if others is not None:
            counts[others] = 1
        if not counts.all():
            raise EnvError(
                f"{self._places.at(int(np.argmin(counts)))}: its episode goes on, but no agent has an observation to "
                "act on"
            )
