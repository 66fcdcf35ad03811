"""Where the environments of a multi-agent rollout step."""

from collections.abc import Sequence
from typing import Any, Literal

from rollflow.nodes.multi_agent.agent_environments import AgentEnvironments
from rollflow.nodes.multi_agent.remote.remote_agent_environments import RemoteAgentEnvironments
from rollflow.nodes.multi_agent.workers.agent_processes import AgentProcesses
from rollflow.nodes.remote.remote_envs import RemoteEnvs, RemoteHosts
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
    timeouts: dict[str, Any] = {"step_timeout": step_timeout, "reset_timeout": reset_timeout}
    if isinstance(env, RemoteHosts):
        _check_remote(env, where, workers)
        return RemoteAgentEnvironments(env, num_envs=num_envs, lanes=lanes, **timeouts, **options)
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
    return AgentProcesses(env, num_envs=num_envs, lanes=lanes, workers=workers, **timeouts, **options)


def _check_remote(env: RemoteHosts, where: AgentWhere, workers: int | None) -> None:
    """Raise ValueError, and be done with the hosts, where they can't be worked with."""
    told = ""
    if not isinstance(env, RemoteEnvs):
        told = (
            f"env is a {type(env).__name__}, but whole rollouts on other hosts are for one agent; expected a RemoteEnvs"
        )
    elif where != "inline" or workers is not None:
        given = f"where is {where!r}" if where != "inline" else f"workers is {workers}"
        told = f"{given}, but remote environments are where their hosts are; leave it out"
    if told:
        env.close()
        raise ValueError(told)
