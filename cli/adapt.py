"""`rollflow policy adapt`: a saved policy acts in an environment with other spaces."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.cli import arguments
from rollflow.nodes.policies.artifact_files import read_files
from rollflow.nodes.policies.space_text import space_of
from rollflow.stream.data.errors import PolicyError


class Spaces(NamedTuple):
    """The spaces of an environment."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


def add_to(actions: Any) -> None:
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
        help="a saved policy of that environment, or a JSON file with observation_space and action_space as in "
        "policy.json",
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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from rollflow.policy import Policy

    fields = dict(map(_field_of, args.field))
    spaces = _spaces_in(args.spaces) if args.env is None else _spaces_of(args.env)
    Policy.load(args.path, allow=args.allow).adapted(spaces, fields=fields).save(args.out)
    print(f"{args.out} acts in {args.env or args.spaces} as {args.path} does")
    return 0


def _spaces_in(path: Path) -> Spaces:
    """The spaces of a saved policy, or of a JSON file. Raises PolicyError where there are none."""
    if path.suffix == ".json":
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise PolicyError(f"{path}: {error}, expected a JSON file") from error
    else:
        record, _ = read_files(path)
    names = ("observation_space", "action_space")
    if not isinstance(record, dict) or not record.keys() >= set(names):
        raise PolicyError(f"{path} has no {' and '.join(names)}, expected their descriptions")
    return Spaces(*(space_of(record[name], name) for name in names))


def _spaces_of(name: str) -> Spaces:
    made = arguments.environment_of(name)
    try:
        env = gym.make(made) if isinstance(made, str) else made()
    except gym.error.Error as error:
        raise ValueError(f"--env {name}: {error}") from error
    try:
        return Spaces(env.observation_space, env.action_space)
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
