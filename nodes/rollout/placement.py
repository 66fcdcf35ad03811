"""Placement: where the environments of a rollout step, and all the rest with them."""

import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from gymnasium.envs.registration import EnvSpec

from rollflow.nodes.device.environments import DeviceEnvironments
from rollflow.nodes.device.torch_envs import TorchEnvs
from rollflow.nodes.env.env_source import EnvSource, count_of, is_ready
from rollflow.nodes.env.environments import Environments, EnvKind
from rollflow.nodes.env.multi_agent_env import MultiAgentVectorEnv
from rollflow.nodes.env.remote.remote_environments import RemoteEnvironments
from rollflow.nodes.env.remote.remote_envs import RemoteEnvs, RemoteHosts, RemoteRollouts
from rollflow.nodes.env.workers.process_environments import ProcessEnvironments
from rollflow.nodes.env.workers.ready_processes import ReadyProcesses
from rollflow.nodes.env.workers.ready_slots import ReadySlots, ReadyThreads
from rollflow.nodes.env.workers.thread_node import ThreadEnvironments
from rollflow.nodes.env.workers.worker_process import core_count
from rollflow.nodes.launch.on_hosts import OnHosts
from rollflow.nodes.offloaded.hosted_rollouts import HostedRollouts
from rollflow.nodes.offloaded.rollout_processes import RolloutProcesses
from rollflow.nodes.rollout.options import RolloutOptions, Timeouts, Where
from rollflow.nodes.rollout.race import race, trial_of, workers_in
from rollflow.nodes.rollout.schedule import ReplayedEnvironments, ReplayedRun
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import EnvError, ModuleError, shown

logger = logging.getLogger(__name__)

# Place -> node that steps environments there.
NODES: dict[str, Callable[..., Any]] = {
    "inline": Environments,
    "threads": ThreadEnvironments,
    "processes": ProcessEnvironments,
    "rollouts": RolloutProcesses,
    "RemoteEnvs": RemoteEnvironments,
    "RemoteRollouts": HostedRollouts,
}

# The same where slots step each on its own, and those that are ready have a pass together.
READY_NODES: dict[str, Callable[..., Any]] = {"threads": ReadyThreads, "processes": ReadyProcesses}


def place(
    env: EnvSource | RemoteHosts, options: RolloutOptions, *, rollout: type, kind: EnvKind
) -> tuple[Any, str, RolloutOptions]:
    """The node that steps the environments, under `where="auto"` why it is where it is, else "", and what is left.

    rollout    class of the rollout

    What is left are the options, without those that hosts were given which are started here. Raises EnvError,
    ModuleError or ValueError for options that don't go with the place, and what making environments raises.
    """
    reason = ""
    if isinstance(options.where, OnHosts) and not isinstance(env, RemoteHosts):
        env = options.where.start(_options_of_hosts(env, options, kind))
        options = replace(
            options,
            where="inline",
            num_envs=None,
            lanes=None,
            device=None,
            forward=replace(options.forward, compile=False),
        )
    if options.where == "auto" and not isinstance(env, RemoteHosts) and not _tensors_in(env):
        options, reason = _chosen_place(env, options, kind, rollout)
    if isinstance(env, RemoteRollouts):
        with closing_on_error(env.close):
            options.check_offloaded(is_remote=True)
    elif options.where == "rollouts":
        options.check_offloaded(is_remote=False)
    environments = _environments_for(env, options, kind)
    if isinstance(environments, ReadySlots):  # which gathers slots itself
        options = replace(options, forward=replace(options.forward, max_batch=None, max_wait=0.0))
    return environments, reason, options


def _environments_for(env: Any, asked: RolloutOptions, kind: EnvKind) -> Any:
    """The node that steps the environments, in as many lanes as suit the place where `lanes` is None.

    Raises ValueError for another `where`, for `workers` if there are none, and for a list of seeds if hosts say
    how many slots there are.
    """
    where, lanes, workers = asked.where, asked.lanes, asked.workers
    options: dict[str, Any] = {"num_envs": asked.num_envs, "fragment_length": asked.fragment_length, "seed": asked.seed}
    if isinstance(env, RemoteHosts):
        with closing_on_error(env.close):
            _check_remote(asked)
        made = NODES["RemoteEnvs" if isinstance(env, RemoteEnvs) else "RemoteRollouts"]
        return made(env, kind=kind, lanes=lanes, **asked.timeouts.keywords(), **options)
    if are_tensors := _tensors_in(env):
        _check_tensors(are_tensors, asked, kind)
    if not isinstance(where, str) or where not in get_args(Where):
        raise ValueError(f"where is {where!r}, expected {', '.join(map(repr, get_args(Where)))}")
    if workers is not None and where not in ("processes", "rollouts"):
        raise ValueError(f"workers is {workers}, but where='{where}' has none; expected 'processes' or 'rollouts'")
    options["slot_seeds"] = asked.slot_seeds
    if asked.autoreset_mode is not None:
        options["autoreset_mode"] = asked.autoreset_mode
    if where in ("processes", "rollouts"):
        options["workers"] = workers
    if where != "inline":
        options |= asked.timeouts.keywords()
    elif asked.timeouts != Timeouts() and not asked.debug:
        logger.warning("%s is not used with where='inline', where nothing can end a step", asked.timeouts)
    if _are_apart(env, asked, kind):
        options |= {"lanes": 1, "max_wait": asked.forward.max_wait}
        if where == "threads":  # torch's own threads and compilers would stay on the core
            options["may_share_core"] = asked.forward.threads == 1 and not asked.forward.compile
        return READY_NODES[where](env, kind=kind, **options)
    if lanes is None and where != "inline" and not _is_made(env, kind):
        # One lane of processes at the least steps while another is in the forward pass.
        most = {"threads": sys.maxsize, "processes": max(2, workers or core_count())}
        lanes = min(count_of(env, asked.num_envs), most.get(where, workers or core_count()))
    node: Any = DeviceEnvironments if are_tensors else NODES[where]
    if isinstance(asked.schedule, ReplayedRun):
        node = partial(ReplayedEnvironments, replay=asked.schedule)
    return node(env, kind=kind, lanes=lanes, **options)


def _are_apart(env: Any, asked: RolloutOptions, kind: EnvKind) -> bool:
    """True if each slot is to step on its own, in one lane: see `Forward`."""
    how, is_one = asked.forward, asked.lanes is None and not (kind.has_several or _is_made(env, kind))
    most = how.max_batch if asked.where in READY_NODES and is_one else None
    return most is not None and count_of(env, asked.num_envs) <= most


def _is_made(env: Any, kind: EnvKind) -> bool:
    """True if vector environments are given, rather than what makes environments."""
    return isinstance(env, MultiAgentVectorEnv) if kind.has_several else is_ready(env)


def _tensors_in(env: Any) -> str:
    """The name of the class of a `TorchEnvs`, or of the first one in a list; "": there is none."""
    given = env if isinstance(env, list | tuple) else (env,)
    return next((type(each).__name__ for each in given if isinstance(each, TorchEnvs)), "")


def _check_tensors(name: str, options: RolloutOptions, kind: EnvKind) -> None:
    """Raise EnvError for what a `TorchEnvs` can't be given."""
    if options.where != "inline":
        raise EnvError(f"where is {options.where!r}, but a {name} steps in the loop's thread; leave it out")
    if kind.has_several:
        raise EnvError(f"a {name} has one agent in each environment, expected it in a Rollout")


def _check_remote(options: RolloutOptions) -> None:
    """Raise ValueError for what environments on hosts can't be given."""
    if options.where != "inline" or options.workers is not None:
        argument = f"where is '{options.where}'" if options.where != "inline" else f"workers is {options.workers}"
        raise ValueError(f"{argument}, but remote environments are where their hosts are; leave it out")
    if options.slot_seeds is not None:
        raise ValueError(
            f"seed is a list of {len(options.slot_seeds)}, but hosts say how many environments they have, and come and "
            "go; expected one whole number, which the seeds of all of them follow from"
        )
    if options.autoreset_mode is not None:
        raise ValueError(
            f"autoreset_mode is {options.autoreset_mode!r}, but remote environments are made by their hosts; "
            "expected it to be given to each EnvHost or RolloutHost"
        )


def _chosen_place(env: Any, options: RolloutOptions, kind: EnvKind, rollout: type) -> tuple[RolloutOptions, str]:
    """The options with the place that is fastest, and why; inline if that can't be measured."""
    here = replace(options, where="inline", workers=None)
    if _is_made(env, kind):
        return here, "where='inline': these vector environments are here already"
    try:
        result = race(env, options, trial_of(rollout, options))
    except Exception as error:  # an argument that can't be worked with is refused by the rollout itself
        return here, f"where='inline': nothing could be measured: {type(error).__name__}: {error}"
    if not result.rates:
        return here, f"where='inline': nothing could be measured; {result}"
    where: Any = result.fastest
    workers = workers_in(where, options)
    unused = f"; workers={options.workers} is not used" if workers != options.workers else ""
    return replace(options, where=where, workers=workers), f"where='{where}': {result}{unused}"


def _options_of_hosts(env: Any, options: RolloutOptions, kind: EnvKind) -> dict[str, Any]:
    """Keywords of the `RolloutHost` of each host. Raises EnvError or ModuleError for what hosts can't be given."""
    makers = env if isinstance(env, Sequence) and not isinstance(env, str) else [env]
    wrong = [each for each in makers if not isinstance(each, str | EnvSpec) and not callable(each)]
    if wrong or _is_made(env, kind):
        made = "made already, and" if _is_made(env, kind) or hasattr(wrong[0], "step") else "but"
        raise EnvError(
            f"env is {shown(env)}, {made} hosts make their own; expected a callable that makes it, an id, or a list of "
            "those"
        ).see("started hosts")
    module = options.module
    for module_id, each in (module if isinstance(module, Mapping) else {None: module}).items():
        if each is not None and not isinstance(each, type) and not inspect.isfunction(each):
            argument = "module" if module_id is None else f"module[{module_id!r}]"
            raise ModuleError(
                f"{argument} is a {type(each).__name__} that is made already, and hosts make their own; expected its "
                "class, or a function of (observation space, action space): rollout.module is what is trained"
            ).see("started hosts")
    names = ("num_envs", "lanes", "device", "module", "env_to_module_connector", "module_to_env_connector")
    of_agents = ("joint_connector", "agent_to_module_mapping_fn")
    given = {name: getattr(options, name) for name in (*names, *of_agents)}
    return {"env": env, "compile_forward": options.forward.compile, **given}
