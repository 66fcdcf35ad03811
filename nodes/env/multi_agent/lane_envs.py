"""Environments with several agents, out of callables that make them: those of one lane, or the first to look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.env.multi_agent.array_vector import ArrayEnvs, MultiAgentVectorEnv
from rollflow.nodes.env.multi_agent.dict_vector import MultiAgentEnvs, made_by
from rollflow.nodes.env.observation_check import Deviations
from rollflow.nodes.env.stepping import close_failed

LaneEnvs = MultiAgentEnvs | ArrayEnvs


@dataclass(frozen=True, slots=True)
class AgentLaneMaker:
    """Makes the environments of one lane.

    makers       callables: one that makes a `MultiAgentVectorEnv`, or one for each dict environment; or a vector
                 environment that a user has made
    first_env    the number of the first
    """

    makers: Sequence[Any] | MultiAgentVectorEnv
    first_env: int

    @property
    def can_travel(self) -> bool:
        """True if the environments are yet to be made."""
        return not isinstance(self.makers, MultiAgentVectorEnv)

    def lane_env(self, deviations: Deviations) -> LaneEnvs:
        """The environments as a lane takes them: arrays, or a dict environment of each callable.

        Raises EnvError where they can't be stepped together.
        """
        options: Any = {"first_env": self.first_env, "deviations": deviations}
        if isinstance(self.makers, MultiAgentVectorEnv):
            return ArrayEnvs(self.makers, **options)
        if len(self.makers) != 1:
            return MultiAgentEnvs(self.makers, **options)
        env = made_by(self.makers[0], self.first_env)
        if not isinstance(env, MultiAgentVectorEnv):
            return MultiAgentEnvs([lambda: env], **options)
        with closing_on_error(env.close):
            return ArrayEnvs(env, **options)


class EnvMaker:
    """A callable that makes environments, the first of which has been made already.

    Leave it by `with`: one that nobody has asked for is closed.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._first: list[Any] = [made_by(make, 0)]

    @property
    def is_vector(self) -> bool:
        """True if it is many environments with several agents each."""
        return isinstance(self._first[0], MultiAgentVectorEnv)

    @property
    def has_several(self) -> bool:
        """True if the environment has several agents."""
        env = self._first[0]
        return hasattr(env, "possible_agents") or (hasattr(env, "agents") and not isinstance(env, gym.Env))

    def __call__(self) -> Any:
        """The one that is there, once; then new ones."""
        return self._first.pop() if self._first else self._make()

    def __enter__(self) -> "EnvMaker":
        return self

    def __exit__(self, *_: object) -> None:
        for env in self._first:
            close_failed(env)


def first_made(env: Any) -> EnvMaker | None:
    """The first environment of what a user gives, made; None where these are no callables."""
    makers = list(env) if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    is_ready = isinstance(env, MultiAgentVectorEnv) or any(isinstance(each, VectorEnv) for each in makers)
    if is_ready or not makers or not all(callable(each) and not isinstance(each, str) for each in makers):
        return None
    return EnvMaker(makers[0])


def with_first(env: Any, first: EnvMaker) -> Any:
    """The callables `env`, with `first` in place of the first one: it has made its environment already."""
    return [first, *list(env)[1:]] if isinstance(env, Sequence) else first
