"""`rollflow policy adapt`: a saved policy acts in an environment with other spaces."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from rollflow.cli import arguments
from rollflow.nodes.policies.artifact_files import read_files
from rollflow.nodes.policies.space_text import space_of
from rollflow.stream.data.errors import PolicyError

_FIELD = "a field is a path such as observation[4] or action['turn'], or a key such as turn"


class Spaces(NamedTuple):
    """The spaces of an environment."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]


def add_to(actions: Any) -> None:
    """Add `adapt` to the commands of `rollflow policy`."""
    parser: argparse.ArgumentParser = actions.add_parser(
        "adapt",
        help="make a policy act in an environment with other spaces",
        description="Make a policy act in an environment with other spaces. What came, went, or is in another order or "
        f"type is matched where the spaces say how; the rest is refused with the options that settle it; {_FIELD}.",
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
        "--take",
        action="append",
        default=[],
        metavar="[FIELD=]FROM,…",
        help="where a field comes from: a field, or for each number of a vector its place; _ for one that --fill has",
    )
    parser.add_argument("--fill", action="append", default=[], metavar="FIELD=NUMBER", help="the value of a field")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="FIELD", help="numbers stay as they are, though bounds differ"
    )
    parser.add_argument(
        "--scale", action="append", default=[], metavar="FIELD", help="numbers go from the one's bounds to the other's"
    )
    arguments.add_allow(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from rollflow.nodes.connectors.adapting.matching import Choices, UnsettledFields
    from rollflow.nodes.connectors.alpha.signatures import compare_signatures
    from rollflow.policy import Policy

    choices = Choices(dict(map(_taken, args.take)), dict(map(_filled, args.fill)), args.keep, args.scale)
    spaces = spaces_in(args.spaces) if args.env is None else _spaces_of(args.env)
    policy = Policy.load(args.path, allow=args.allow)
    try:
        adapted = policy.adapted(spaces, choices=choices)
    except UnsettledFields as error:
        print(f"rollflow: {error.text(_option)}", file=sys.stderr)
        if all(question.answers for question in error.questions):
            options = dict.fromkeys(_option(question.answers[0]) for question in error.questions)
            print(f"the first answers together: {' '.join(options)}", file=sys.stderr)
        return 1
    adapted.save(args.out)
    print(compare_signatures(policy, spaces))
    print(f"{args.out} acts in {args.env or args.spaces} as {args.path} does")
    return 0


def spaces_in(path: Path) -> Spaces:
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


def _taken(text: str) -> tuple[str, list[int | str | None]]:
    field, equals, origins = text.rpartition("=")
    parts = origins.split(",")
    if not all(parts) or (equals and not field):
        raise ValueError(f"--take {text!r}, expected FIELD=FROM, such as speed=velocity, or places such as 0,1,3")
    taken = [None if part == "_" else int(part) if part.isdigit() else part for part in parts]
    return field or "observation", taken


def _filled(text: str) -> tuple[str, float]:
    field, _, value = text.rpartition("=")
    try:
        if not field:
            raise ValueError
        return field, float(value)
    except ValueError:
        raise ValueError(f"--fill {text!r}, expected FIELD=NUMBER, such as speed=0.0") from None


def _option(answer: tuple[str, str, Any]) -> str:
    """An answer as an option of this command."""
    option, name, value = answer
    if option == "take":
        origins = ",".join("_" if each is None else str(each) for each in value)
        name = origins if name == "observation" else f"{name}={origins}"
    elif option == "fill":
        name = f"{name}={value:g}"
    return f"--{option} {shlex.quote(name)}"
