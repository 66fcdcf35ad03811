"""Where the environments of a multi-agent rollout step."""

from collections.abc import Sequence
from typing import Any, Literal

from rollflow.nodes.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.multi_agent.workers.agent_processes import AgentProcesses
from rollflow.nodes.workers.worker_process import core_count

AgentWhere = Literal["inline", "processes"]


def agent_environments_for(
    where: AgentWhere,
    env: Any,
    *,
    num_envs: int | None,
    lanes: int | None,
    workers: int | None,
    step_timeout: float | None,
    reset_timeout: float | None,
    **options: Any,
) -> AgentEnvironments:
    """The node that steps the environments, in as many lanes as suit the place where nothing was said.

    Raises ValueError for another `where`, and for `workers` where there are none.
    """
    if where not in ("inline", "processes"):
        raise ValueError(f"where is {where!r}, expected 'inline' or 'processes'")
    if where == "inline":
        if workers is not None:
            raise ValueError(f"workers is {workers}, but where='inline' has none; expected 'processes'")
        return AgentEnvironments(env, num_envs=num_envs, lanes=lanes, **options)
    if lanes is None:
        slots = len(env) if isinstance(env, Sequence) and not isinstance(env, str) else num_envs or 1
        # One lane at the least steps while another is in the forward passes.
        lanes = min(slots, max(2, workers or core_count()))
    return AgentProcesses(
        env,
        num_envs=num_envs,
        lanes=lanes,
        workers=workers,
        step_timeout=step_timeout,
        reset_timeout=reset_timeout,
        **options,
    )
