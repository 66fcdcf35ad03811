"""Whether environments that a user gives have several agents each: one that is made tells."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.dict_vector import made_by
from rollflow.nodes.stepping import close_failed


class FirstMade:
    """A callable that makes environments, the first of which has been made already.

    Leave it by `with`: one that nobody has asked for is closed.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._first: list[Any] = [made_by(make, 0)]

    @property
    def is_vector(self) -> bool:
        """Whether it is many environments with several agents each."""
        return isinstance(self._first[0], MultiAgentVectorEnv)

    @property
    def has_several(self) -> bool:
        """Whether the environment has several agents."""
        env = self._first[0]
        return hasattr(env, "possible_agents") or (hasattr(env, "agents") and not isinstance(env, gym.Env))

    def __call__(self) -> Any:
        """The one that is there, once; then new ones."""
        return self._first.pop() if self._first else self._make()

    def __enter__(self) -> "FirstMade":
        return self

    def __exit__(self, *_: object) -> None:
        for env in self._first:
            close_failed(env)


def first_made(env: Any) -> FirstMade | None:
    """The first environment of what a user gives, made; None where these are no callables."""
    makers = list(env) if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    is_ready = isinstance(env, MultiAgentVectorEnv) or any(isinstance(each, VectorEnv) for each in makers)
    if is_ready or not makers or not all(callable(each) and not isinstance(each, str) for each in makers):
        return None
    return FirstMade(makers[0])


def with_first(env: Any, first: FirstMade) -> Any:
    """The same callables, of which the first one has made its environment already."""
    return [first, *list(env)[1:]] if isinstance(env, Sequence) else first
