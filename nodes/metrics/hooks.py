"""Hooks: functions that a rollout calls with its train batches, finished episodes and published policy versions."""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rollflow.nodes.metrics.episode_returns import FinishedEpisode

C = TypeVar("C", bound=Callable[..., Any])
V = TypeVar("V")


class Hooks:
    """Functions to be called by a rollout. What one of them raises, the call or the loop raises that it is called in.

    returns    counts the episodes: an `EpisodeWindow` that is called with every fragment
    """

    def __init__(self, returns: Any) -> None:
        self._returns = returns
        self._ended: deque[FinishedEpisode] = deque()
        self._functions: dict[str, list[Callable[[Any], Any]]] = {"batch": [], "episode": [], "publish": []}

    def add(self, kind: str, function: C) -> C:
        """Have a function be called from now on with every "batch", "episode" or "publish"; the function."""
        if not callable(function):
            raise TypeError(f"on_{kind} got {function!r}, expected a function that takes one argument")
        self._functions[kind].append(function)
        if kind == "episode":
            self._returns.on_finished = self._ended.append
        return function

    def tell_episodes(self) -> None:
        """Call functions with the episodes that have ended meanwhile, each once."""
        while self._ended:
            self.tell("episode", self._ended.popleft())

    def tell(self, kind: str, value: V) -> V:
        """Call functions of a kind with a value, such as a "batch", which is returned."""
        for function in self._functions[kind]:
            function(value)
        return value

    def tell_if_new(self, version: Any, *, is_new: bool) -> bool:
        """Call functions with a version, or module id -> version, that is new, and return whether it is."""
        if is_new:
            self.tell("publish", version)
        return is_new


class Hooked:
    """What has hooks: a function can be given by a call, or by a decorator such as `@rollout.on_episode`.

    Several functions of one kind are called in the order in which they came.
    """

    hooks: Hooks

    def on_batch(self, function: C) -> C:
        """Call a function with every train batch of a loop over `batches()`, before the loop gets it."""
        return self.hooks.add("batch", function)

    def on_episode(self, function: C) -> C:
        """Call a function with each `FinishedEpisode`, before the loop gets the fragment, or the batch, that ends it.

        In a graph it is called as the fragment leaves the rollout.
        """
        return self.hooks.add("episode", function)

    def on_publish(self, function: C) -> C:
        """Call a function with each policy version that is published, in the thread that publishes it.

        Of several modules it gets a dict, module id -> version.
        """
        return self.hooks.add("publish", function)
