"""Where a rollout's environments step, and all the rest with them."""

from functools import partial
from typing import Any, Literal

from rollflow.nodes.choice import WORTH_EXPECTED, WORTH_MADE, Asked, Choice, close, expected, fastest, refusals, told
from rollflow.nodes.env_source import EnvSource, count_of, is_ready
from rollflow.nodes.environments import Environments
from rollflow.nodes.probe import Trial, generators_kept, probe
from rollflow.nodes.race import is_worth_while, race
from rollflow.nodes.remote.hosted_rollouts import HostedRollouts
from rollflow.nodes.remote.remote_environments import RemoteEnvironments
from rollflow.nodes.remote.remote_envs import RemoteEnvs, RemoteHosts
from rollflow.nodes.workers.process_environments import ProcessEnvironments
from rollflow.nodes.workers.rollout_processes import RolloutProcesses
from rollflow.nodes.workers.thread_environments import ThreadEnvironments
from rollflow.nodes.workers.worker_process import core_count

Where = Literal["inline", "threads", "processes", "rollouts", "auto"]


def environments_for(
    where: Where,
    env: EnvSource | RemoteHosts,
    *,
    num_envs: int | None,
    lanes: int | None,
    workers: int | None,
    step_timeout: float | None,
    reset_timeout: float | None,
    **options: Any,
) -> Environments:
    """The node that steps the environments, in as many lanes as suit the place where nothing was said.

    Raises ValueError for another `where`, and for `workers` where there are none.
    """
    if isinstance(env, RemoteHosts) and where != "inline":
        env.close()
        raise ValueError(f"where is '{where}', but remote environments are where their hosts are; leave it out")
    if where not in ("inline", "threads", "processes", "rollouts"):
        raise ValueError(f"where is {where!r}, expected 'inline', 'threads', 'processes', 'rollouts' or 'auto'")
    if workers is not None and where not in ("processes", "rollouts"):
        raise ValueError(f"workers is {workers}, but where='{where}' has none; expected 'processes' or 'rollouts'")
    options |= {"num_envs": num_envs}
    timeouts: dict[str, Any] = {"step_timeout": step_timeout, "reset_timeout": reset_timeout}
    if isinstance(env, RemoteHosts):
        made = RemoteEnvironments if isinstance(env, RemoteEnvs) else HostedRollouts
        return made(env, lanes=lanes, **timeouts, **options)
    if where == "inline":
        return Environments(env, lanes=lanes, **options)
    slots = count_of(env, num_envs)
    if where == "threads":
        lanes = slots if lanes is None and not is_ready(env) else lanes
        return ThreadEnvironments(env, lanes=lanes, **timeouts, **options)
    if where == "rollouts":
        lanes = min(slots, workers or core_count()) if lanes is None else lanes
        return RolloutProcesses(env, lanes=lanes, workers=workers, **timeouts, **options)
    if lanes is None:
        # One lane at the least steps while another is in the forward pass.
        lanes = min(slots, max(2, workers or core_count()))
    return ProcessEnvironments(env, lanes=lanes, workers=workers, **timeouts, **options)


def placed(
    env: EnvSource, num_envs: int | None, asked: Asked, trial: Trial
) -> tuple[Where, int | None, int | None, str]:
    """For `where="auto"`: where to go, with how many lanes and workers, and why; inline if that can't be measured.

    trial    makes an inline Rollout of some environments, to be tried
    """
    if is_ready(env):
        return "inline", asked.lanes, None, "where='inline': these vector environments are here already"
    try:
        with generators_kept():
            choice, why = _chosen(env, num_envs, asked, trial)
    except Exception as error:  # an argument that can't be worked with is refused by the rollout itself
        why = f"where='inline': nothing could be measured: {type(error).__name__}: {error}"
        return "inline", asked.lanes, None, why
    return choice.where, choice.lanes, choice.workers, why


def _chosen(env: EnvSource, num_envs: int | None, asked: Asked, trial: Trial) -> tuple[Choice, str]:
    """The choice, and why: by what its parts take, and by a try where that leaves several."""
    cores = core_count()
    measured, ruled_out = probe(env, num_envs, trial, parts=asked.lanes or asked.workers or cores, device=asked.device)
    ruled_out = refusals(asked) | ruled_out
    choices = expected(measured, asked, cores, ruled_out)
    seen, tried = {"expected steps/s": choices}, close(choices)
    if is_worth_while(tried, measured):
        passes: dict[str, Any] = {name: getattr(asked, name) for name in ("max_batch", "max_wait", "forward_in_thread")}
        whole = partial(trial, env, num_envs=num_envs, prefetch=asked.prefetch, **passes)
        made, failed = race(tried, whole, measured.slots, asked)
        tried, ruled_out = made or choices[:1], ruled_out | failed
        seen["made steps/s"] = made
    best = fastest(tried, WORTH_MADE if "made steps/s" in seen else WORTH_EXPECTED)
    return best, told(best, measured, seen, asked, ruled_out)
