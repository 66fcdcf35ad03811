"""Lane of one environment that steps itself: what its program logs, as resets and steps of a vector environment."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rollflow.stream.data.errors import EnvError
from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, map_tree, tree_at


@dataclass(slots=True, eq=False)
class Logged:
    """An observation that a program has logged.

    observation    any[...] in the space
    reward         for the action before
    infos          that came with it
    ended          whether the episode is over, and whether it was cut off; None: it wants an action
    action         that was chosen for it; None: none yet
    """

    observation: Tree
    reward: float = 0.0
    infos: Mapping[str, Any] = field(default_factory=dict)
    ended: tuple[bool, bool] | None = None
    action: Tree = None
    has_action: bool = False


class EpisodeLane(VectorEnv[Any, Any, Any]):
    """A vector environment with one slot, whose episodes a program plays in its own time.

    The lane's thread calls `reset` and `step`, which wait for the program; the program calls `ask` and `finish`. Where
    nobody wants the rest of an episode any more, since the rollout was started anew, what is left of it is another
    episode.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  # gymnasium reads it from the class

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.num_envs = 1
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space, self.action_space = batch_space(observation_space, 1), batch_space(action_space, 1)
        self._row = row_of(observation_space, 1)
        self._logged: deque[Logged] = deque()
        self._has_logged = False
        self._asking: Logged | None = None  # that `reset` or `step` gave last, and that has no action yet
        self._is_waiting = False  # the lane's thread, for what is logged next
        self._is_over = False  # the episode that `step` gave last
        self._error: Exception | None = None
        self._changed = threading.Condition()

    # For the program

    def ask(self, logged: Logged, timeout: float | None) -> Tree:
        """The action for an observation. Raises EnvError in the end, and TimeoutError after so many seconds."""
        with self._changed:
            self._log(logged)
            if not self._changed.wait_for(lambda: logged.has_action or self._error is not None, timeout):
                raise TimeoutError(f"no action has come within {timeout:g} s")
            if not logged.has_action:
                raise self._raised()
            return logged.action

    def finish(self, logged: Logged) -> None:
        """Log the last observation of an episode; waits for nothing."""
        with self._changed:
            self._log(logged)

    def wait_until_sent(self, until: float) -> bool:
        """Wait until the rollout wants more than was logged, so that it has all of it; False: it was too late."""
        with self._changed:
            while (self._logged or self._asking is not None or not self._is_waiting) and self._has_logged:
                if self._error is not None or not self._changed.wait(max(0.0, until - monotonic())):
                    return False
            return True

    def end(self, error: Exception) -> None:
        """Have all that waits, and all that comes, raise this; the lane's thread is let go."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # For the lane's thread

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Tree, Any]:
        """The first observation of the next episode, once the program has logged it."""
        with self._changed:
            self._is_over = False
            while self._asking is None:
                logged = self._next()
                if logged.ended is None:  # the end of an episode that nobody wants any more says nothing
                    self._asking = logged
            return self._observed(self._asking), SlotInfos([self._asking.infos])

    def step(self, actions: Tree) -> Any:
        """Give the program its action; the next observation, once that is logged."""
        with self._changed:
            if self._is_over:
                observation, infos = self.reset()
                return observation, np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.bool_), infos
            if self._asking is not None:
                self._asking.action, self._asking.has_action = tree_at(map_tree(np.array, actions), 0), True
                self._changed.notify_all()
            logged = self._next()
            self._asking, self._is_over = (logged, False) if logged.ended is None else (None, True)
            terminated, truncated = logged.ended or (False, False)
            flags = np.array([terminated], np.bool_), np.array([truncated], np.bool_)
            return self._observed(logged), np.array([logged.reward]), *flags, SlotInfos([logged.infos])

    def close(self, **kwargs: Any) -> None:
        """Let the thread go."""
        self.end(EnvError("this environment is closed"))

    # Inside

    def _log(self, logged: Logged) -> None:
        if self._error is not None:
            raise self._raised()
        self._logged.append(logged)
        self._has_logged = True
        self._changed.notify_all()

    def _raised(self) -> Exception:
        assert self._error is not None
        return type(self._error)(str(self._error))

    def _next(self) -> Logged:
        """What was logged next; where there will be nothing more, something that nobody takes."""
        self._is_waiting = True
        self._changed.notify_all()
        self._changed.wait_for(lambda: bool(self._logged) or self._error is not None)
        self._is_waiting = False
        return self._logged.popleft() if self._logged else Logged(tree_at(self._row, 0))

    def _observed(self, logged: Logged) -> Tree:
        return map_tree(lambda like, leaf: np.asarray(leaf, like.dtype)[None], self._row, logged.observation)
