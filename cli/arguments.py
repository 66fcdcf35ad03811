"""Arguments that several commands have, and the objects that they stand for."""

import argparse
import importlib
import os
import ssl
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from rollflow.stream.wire import Limits

ENV_HELP = "an environment's id, or package.module:callable that makes one"
OF_AGENTS = ("agent_to_module_mapping_fn", "joint_connector")
_OBJECTS = {  # option -> argument of a rollout that is given what it names
    "env-to-module": "env_to_module_connector",
    "module-to-env": "module_to_env_connector",
    "agent-to-module": "agent_to_module_mapping_fn",
    "joint": "joint_connector",
}


def add_allow(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names packages whose classes a saved policy may have."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_allowed,
        metavar="PACKAGE",
        help="import classes of this package, also from the current folder",
    )


def _allowed(package: str) -> str:
    _look_here()
    return package


def add_secret(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add the arguments that `secret_of` reads."""
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--secret-file", type=Path, metavar="FILE", help=meaning)
    secret.add_argument("--secret-env", metavar="VARIABLE", help="the same, in a variable of the environment")


def secret_of(args: argparse.Namespace) -> str | None:
    """The secret in the file, or in the variable, which is taken away: environments that a host starts see none.

    Raises ValueError if it can't be read, or is empty.
    """
    variable, file = args.secret_env, args.secret_file
    if variable is not None:
        taken = os.environ.pop(variable, "").strip()
        if not taken:
            raise ValueError(f"--secret-env {variable}: no such variable, or an empty one, expected a secret")
        return taken
    if file is None:
        return None
    try:
        secret: str = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--secret-file {file}: {problem}, expected a file of text") from error
    if not secret:
        raise ValueError(f"--secret-file {file} is empty, expected a secret")
    return secret


def tls_of(args: argparse.Namespace, *, listens: bool) -> ssl.SSLContext | None:
    """The context that the arguments ask for; None: no TLS. Raises ValueError and OSError if they make none.

    listens    whether this side waits for the other one
    """
    files = {"tls-ca": args.tls_ca, "tls-cert": args.tls_cert, "tls-key": args.tls_key}
    given = {name: file for name, file in files.items() if file is not None}
    if not args.tls:
        for name in given:
            raise ValueError(f"--{name} without --tls, expected both")
        return None
    if listens and args.tls_cert is None:
        raise ValueError("--tls with --listen, expected --tls-cert as well")
    for name, file in given.items():
        if not Path(file).is_file():
            raise ValueError(f"--{name} {file}: there is no such file")
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH if listens else ssl.Purpose.SERVER_AUTH, cafile=args.tls_ca
    )
    if listens and args.tls_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    if args.tls_cert is not None:
        try:
            context.load_cert_chain(args.tls_cert, args.tls_key)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(
                f"--tls-cert {args.tls_cert} with --tls-key {args.tls_key}: {error}; expected PEM files that match"
            ) from error
    return context


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a connection with another process, which `link_of` reads."""
    add_secret(parser, "the secret that both sides must know")
    add = parser.add_argument
    add("--tls", action="store_true", help="encrypt; the other side's certificate is checked")
    add("--tls-ca", metavar="FILE", help="whose certificates are good; without it, the system's")
    add("--tls-cert", metavar="FILE", help="this side's certificate, and maybe its key")
    add("--tls-key", metavar="FILE", help="its key, where it is in a file of its own")
    add("--max-frame", type=int, default=1024, metavar="MIB", help="the largest message that is taken, in MiB (1024)")


def link_of(args: argparse.Namespace, *, listens: bool) -> dict[str, Any]:
    """The keywords `secret`, `tls` and `limits` that the arguments ask for.

    Raises as `secret_of` and `tls_of`, and ValueError for a size that no message can have.
    """
    secret, tls = secret_of(args), tls_of(args, listens=listens)
    if not 1 <= args.max_frame < 4096:
        raise ValueError(f"--max-frame is {args.max_frame}, expected 1 to 4095")
    limits = Limits(max_frame=args.max_frame << 20)
    limits = replace(limits, undelivered=max(limits.undelivered, 2 * limits.max_frame))
    return {"secret": secret, "tls": tls, "limits": limits}


def add_acting(parser: argparse.ArgumentParser, *, otherwise: str, several: str = "") -> None:
    """Add the arguments that say how actions are computed.

    otherwise    the module without `--module`, for the help text
    several      what else the callable may be, for the help text
    """
    parser.add_argument(
        "--module",
        action="append",
        metavar="[ID=]PACKAGE.MODULE:CALLABLE",
        help=f"makes the module of (observation space, action space){several} ({otherwise})",
    )
    for name, argument in _OBJECTS.items():
        where = "with several agents: " if argument in OF_AGENTS else ""
        parser.add_argument(
            f"--{name}", metavar="PACKAGE.MODULE:NAME", help=f"{where}what the rollout is given as {argument}"
        )
    parser.add_argument("--compile", action="store_true", help="forward passes by torch.compile")
    parser.add_argument("--device", help="where forward passes are done (where the module is)")


def acting_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of a rollout for the arguments of `add_acting`, those `OF_AGENTS` among them.

    Raises ValueError if they name what is not there.
    """
    return {
        "module": _module_of(args.module or ()),
        **{
            argument: object_of(getattr(args, name.replace("-", "_")), f"--{name}")
            for name, argument in _OBJECTS.items()
        },
        "compile_forward": args.compile,
        "device": args.device,
    }


def _module_of(named: Sequence[str]) -> Any:
    """The module that `--module` names, or a dict of those that it names by id; `ID=` alone is a default one."""
    if not any("=" in each for each in named):
        if len(named) > 1:
            raise ValueError(f"--module {' --module '.join(named)}: expected ID= before each of several")
        return object_of(named[0], "--module") if named else None
    modules = {}
    for each in named:
        module_id, _, name = each.rpartition("=")
        if not module_id or module_id in modules:
            raise ValueError(f"--module {each}: expected another ID= before each of several")
        modules[module_id] = object_of(name or None, f"--module {module_id}=")
    return modules


def print_checks(checks: Iterable[tuple[Any, str | None]]) -> int:
    """Print what was checked, with what is wrong with it, if anything is; the exit status."""
    wrong = 0
    for name, fault in checks:
        print(f"{'ok   ' if fault is None else 'WRONG'}  {name}", flush=True)
        if fault is not None:
            wrong += 1
            print(f"       {fault}", flush=True)
    print("all is well" if not wrong else f"{wrong} wrong")
    return min(wrong, 1)


def environment_of(name: str) -> Any:
    """The environment that `--env` names: a callable of a module, or an id, which may begin with a module as well."""
    module, _, attribute = name.partition(":")
    if not attribute:
        return name
    made = getattr(_imported(module, f"--env {name}"), attribute, None)
    if callable(made):
        return made
    if attribute not in gym.registry:
        raise ValueError(f"--env {name}: {module} has no callable {attribute}, and there is no environment of that id")
    return name


def object_of(name: str | None, option: str) -> Any:
    """The callable, or dict, that an option names as package.module:name. Raises ValueError if there is none."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    made = getattr(_imported(module, f"{option} {name}"), attribute, None) if attribute else None
    if not callable(made) and not isinstance(made, dict):
        raise ValueError(f"{option} {name}: no such callable, expected package.module:callable")
    return made


def _look_here() -> None:
    """Have modules of the current folder be found, as `python -m` does."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _imported(module: str, where: str) -> Any:
    _look_here()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{where}: {error}") from error
