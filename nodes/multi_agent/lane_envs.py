"""The environments of one lane, out of callables that make them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollflow.nodes.closing import closing_on_error
from rollflow.nodes.multi_agent.array_envs import ArrayEnvs
from rollflow.nodes.multi_agent.array_vector import MultiAgentVectorEnv
from rollflow.nodes.multi_agent.dict_vector import MultiAgentEnvs, made_by

LaneEnvs = MultiAgentEnvs | ArrayEnvs


def lane_envs(makers: Sequence[Callable[[], Any]], *, first_env: int = 0) -> LaneEnvs:
    """Environments that step together: one callable's `MultiAgentVectorEnv`, or a dict environment of each callable.

    first_env    the number of the first of them, in errors

    Raises EnvError where they can't be stepped together.
    """
    if len(makers) != 1:
        return MultiAgentEnvs(makers, first_env=first_env)
    env = made_by(makers[0], first_env)
    if not isinstance(env, MultiAgentVectorEnv):
        return MultiAgentEnvs([partial(_given, env)], first_env=first_env)
    with closing_on_error(env.close):
        return ArrayEnvs(env, first_env=first_env)


def _given(env: Any) -> Any:
    return env
