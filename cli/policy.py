"""`rollflow policy`: saved policies are shown, checked, compared, adapted to other environments, exported."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym

from rollflow.cli import arguments
from rollflow.nodes.policies.artifact_files import ONNX, PROGRAMS, differences, read_files
from rollflow.nodes.policies.space_text import space_of


def add_to(commands: Any) -> None:
    """Add the command, with its own commands, to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "policy",
        help="show, check, compare, adapt or export saved policies",
        description="Saved policies: folders or .zip files.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print what a policy is; nothing of it is run")
    show.add_argument("path", type=Path)
    show.set_defaults(run=_show)
    check = actions.add_parser("check", help="load a policy, and see that it does what it did when it was saved")
    check.add_argument("path", type=Path)
    arguments.add_allow(check)
    check.add_argument("--device", help="where forward passes are done")
    check.set_defaults(run=_check)
    diff = actions.add_parser("diff", help="print what two policies differ in; then status 1")
    diff.add_argument("left", type=Path)
    diff.add_argument("right", type=Path)
    diff.set_defaults(run=_diff)
    _add_adapt(actions)
    export = actions.add_parser("export", help="write a policy, its pieces included, for runtimes without rollflow")
    export.add_argument("path", type=Path)
    export.add_argument("--onnx", type=Path, required=True, metavar="FILE", help="an ONNX program (extra onnx)")
    arguments.add_allow(export)
    export.set_defaults(run=_export)


def _show(args: argparse.Namespace) -> int:
    manifest, files = read_files(args.path)
    print(f"observations  {space_of(manifest['observation_space'], 'observation_space')}")
    print(f"actions       {space_of(manifest['action_space'], 'action_space')}")
    print(f"module        {manifest['module']['name']}")
    for name in ("env_to_module", "module_to_env"):
        print(f"{name} {' → '.join(_label(piece) for piece in manifest[name]['pieces'])}")
    for facts in ("trained_on", "versions"):
        print(f"{facts:<13} {', '.join(f'{name} {value}' for name, value in manifest[facts].items())}")
    print(f"format        {manifest['format']}, {sum(map(len, files.values()))} bytes of arrays")
    programs = [name for name in (PROGRAMS, ONNX) if name in files]
    if programs:
        print(f"programs      {', '.join(programs)}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from rollflow import Policy  # with torch, which the other commands do without

    policy = Policy.load(args.path, allow=args.allow, device=args.device)
    print(f"{policy!r} does what it did when it was saved")
    return 0


def _export(args: argparse.Namespace) -> int:
    from rollflow import Policy

    Policy.load(args.path, allow=args.allow, explore=False).export_onnx(args.onnx)
    print(f"{args.onnx} has {args.onnx.stat().st_size} bytes, and takes the likeliest actions that {args.path} does")
    return 0


def _diff(args: argparse.Namespace) -> int:
    lines = differences(args.left, args.right)
    print("\n".join(lines) if lines else "the policies are the same")
    return min(len(lines), 1)


def _label(piece: dict[str, Any]) -> str:
    name: str = piece["label"] or piece["name"]
    return name.removeprefix("rollflow.")


def _add_adapt(actions: Any) -> None:
    """Add `adapt` to the commands of `rollflow policy`."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "adapt",
        help="make a policy act in an environment with other spaces",
        description="Make a policy act in an environment with other spaces. Fields that are the same in both need no "
        "option; all others that do not match are listed. A field is a path such as observation[4] or action['turn'].",
    )
    parser.add_argument("path", type=Path, help="the saved policy")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--env", metavar="ID", help=arguments.ENV_HELP)
    where.add_argument(
        "--spaces",
        type=Path,
        metavar="PATH",
        help="a saved policy of that environment",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="where the new policy is saved")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="FIELD=FROM[,FACTOR,OFFSET]",
        help="where a field that the policy observes, or that the environment takes of an action, comes from: a field "
        "of the other side's, or a number to fill it with",
    )
    arguments.add_allow(parser)
    parser.set_defaults(run=_adapt)


def _adapt(args: argparse.Namespace) -> int:
    from rollflow import Policy

    fields = dict(map(_field_of, args.field))
    spaces = _spaces_in(args.spaces) if args.env is None else _spaces_of(args.env)
    Policy.load(args.path, allow=args.allow).adapted(spaces, fields=fields).save(args.out)
    print(f"{args.out} acts in {args.env or args.spaces} as {args.path} does")
    return 0


def _spaces_in(path: Path) -> SimpleNamespace:
    """The spaces of a saved policy."""
    record, _ = read_files(path)
    return SimpleNamespace(**{name: space_of(record[name], name) for name in ("observation_space", "action_space")})


def _spaces_of(name: str) -> SimpleNamespace:
    made = arguments.environment_of(name)
    try:
        env = gym.make(made) if isinstance(made, str) else made()
    except gym.error.Error as error:
        raise ValueError(f"--env {name}: {error}") from error
    try:
        return SimpleNamespace(observation_space=env.observation_space, action_space=env.action_space)
    except AttributeError as error:
        raise ValueError(f"--env {name}: {error}, expected a gymnasium environment") from None
    finally:
        env.close()


def _field_of(text: str) -> tuple[str, float | str | tuple[str, float, float]]:
    """A field, and where it comes from."""
    field, _, origin = text.rpartition("=")
    parts = origin.split(",")
    if field and origin and len(parts) in (1, 3):
        try:
            return field, float(origin) if len(parts) == 1 else (parts[0], float(parts[1]), float(parts[2]))
        except ValueError:
            if len(parts) == 1:
                return field, origin
    raise ValueError(f"--field {text!r}, expected FIELD=FROM, such as observation[0]=observation[2], or speed=0.0")
