"""Start of the hosts that a rollout runs on, where `where` names a place for them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gymnasium.envs.registration import EnvSpec

from rollflow.nodes.env.remote.remote_envs import RemoteHosts
from rollflow.nodes.launch.import_path import import_path
from rollflow.nodes.launch.on_hosts import OnHosts
from rollflow.nodes.rollout.options import EnvOptions, ForwardOptions
from rollflow.stream.data.errors import EnvError, ModuleError

# Argument of a rollout -> option of a host.
_OPTIONS = {
    "env_to_module_connector": "--env-to-module",
    "module_to_env_connector": "--module-to-env",
    "joint_connector": "--joint",
    "agent_to_module_mapping_fn": "--agent-to-module",
}


def with_hosts(
    env: Any, envs: EnvOptions, forward: ForwardOptions, module: Any, makers: Mapping[str, Any]
) -> tuple[Any, EnvOptions, ForwardOptions]:
    """The environments on hosts that are started here, with the options that are left; else all as it was given.

    module    one, or a mapping of them by id
    makers    functions that hosts are given as well, by the argument that they were given as; None: there is none

    Raises EnvError, ModuleError or ValueError for what hosts can't be given.
    """
    if not isinstance(envs.where, OnHosts) or isinstance(env, RemoteHosts):
        return env, envs, forward
    hosts = envs.where.start(_command(env, envs, forward, module, makers))
    here = replace(envs, where="inline", num_envs=None, lanes=None)
    return hosts, here, replace(forward, device=None, compiled=False)


def _command(env: Any, envs: EnvOptions, forward: ForwardOptions, module: Any, makers: Mapping[str, Any]) -> list[str]:
    """The command of a host, but for the address that it dials."""
    if isinstance(env, EnvSpec):
        raise EnvError(
            f"env_kwargs of '{env.id}' can't be given to hosts that are started; expected env: a function of a module, "
            "which makes the environment with them"
        ).see("started hosts")
    command = ["rollflow", "rollout-host", "--env", env if isinstance(env, str) else import_path(env, "env")]
    numbers = {"--num-envs": envs.num_envs, "--lanes": envs.lanes, "--device": forward.device}
    if isinstance(forward.compiled, Mapping):
        raise ValueError(f"compile_forward is {forward.compiled!r}, expected True or False: hosts take no options")
    for option, number in numbers.items():
        command += [] if number is None else [option, str(number)]
    command += _modules(module)
    for argument, maker in makers.items():
        command += [] if maker is None else [_OPTIONS[argument], import_path(maker, argument)]
    return [*command, "--compile"] if forward.compiled else command


def _modules(module: Any) -> list[str]:
    """The options that name modules, one or several by id."""
    if not isinstance(module, Mapping):
        return [] if module is None else ["--module", _module_path(module, "module")]
    paths = {each: "" if one is None else _module_path(one, f"module[{each!r}]") for each, one in module.items()}
    return [part for each, path in paths.items() for part in ("--module", f"{each}={path}")]


def _module_path(module: Any, argument: str) -> str:
    if not isinstance(module, type) and not inspect.isfunction(module):
        raise ModuleError(
            f"{argument} is a {type(module).__name__} that is made already, and hosts make their own; expected its "
            "class, or a function of (observation space, action space): rollout.module is what is trained"
        ).see("started hosts")
    return import_path(module, argument)
