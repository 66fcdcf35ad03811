"""Saved policies, which are folders."""

import argparse
from pathlib import Path
from typing import Any

from rollflow.cli import arguments
from rollflow.nodes.policies.artifact_files import ONNX, read_files
from rollflow.nodes.policies.space_text import space_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    show = actions.add_parser("show", help="print what a policy is; nothing of it is run")
    show.add_argument("path", type=Path)
    check = actions.add_parser("check", help="load a policy, and see that it does what it did when it was saved")
    check.add_argument("path", type=Path)
    arguments.add_allow(check)
    check.add_argument("--device", help="where forward passes are done")
    export = actions.add_parser("export", help="write a policy, its pieces included, for runtimes without rollflow")
    export.add_argument("path", type=Path)
    export.add_argument("--onnx", type=Path, required=True, metavar="FILE", help="an ONNX program (extra onnx)")
    arguments.add_allow(export)


def run(args: argparse.Namespace) -> None:
    """Do what the action says."""
    {"show": _show, "check": _check, "export": _export}[args.action](args)


def _show(args: argparse.Namespace) -> None:
    manifest, files = read_files(args.path)
    print(f"observations  {space_of(manifest['observation_space'], 'observation_space')}")
    print(f"actions       {space_of(manifest['action_space'], 'action_space')}")
    print(f"module        {manifest['module']['name']}")
    for name in ("env_to_module", "module_to_env"):
        print(f"{name} {' → '.join(_label(piece) for piece in manifest[name]['pieces'])}")
    for facts in ("trained_on", "versions"):
        print(f"{facts:<13} {', '.join(f'{name} {value}' for name, value in manifest[facts].items())}")
    print(f"format        {manifest['format']}, {sum(map(len, files.values()))} bytes of arrays")
    if ONNX in files:
        print(f"program       {ONNX}")


def _check(args: argparse.Namespace) -> None:
    from rollflow import Policy  # with torch, which the other commands do without

    policy = Policy.load(args.path, allow=args.allow, device=args.device)
    print(f"{policy!r} does what it did when it was saved")


def _export(args: argparse.Namespace) -> None:
    from rollflow import Policy

    Policy.load(args.path, allow=args.allow, explore=False).export_onnx(args.onnx)
    print(f"{args.onnx} has {args.onnx.stat().st_size} bytes, and takes the likeliest actions that {args.path} does")


def _label(piece: dict[str, Any]) -> str:
    name: str = piece["label"] or piece["name"]
    return name.removeprefix("rollflow.")
