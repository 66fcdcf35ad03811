"""All benchmarks: python -m benchmarks [--quick] [--only name,name] [--plots FOLDER]

With --quick all of it takes less than ten minutes on two cores: what has not begun when six are over is left out, and
named at the end.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic

import torch

from benchmarks.pairs import FULL, QUICK, Record, show, tell

PROGRAMS = (
    "cartpole",
    "overhead",
    "sources",
    "on_device",
    "seeing",
    "pixels",
    "two_cores",
    "stragglers",
    "placement",
    "connector",
    "multi_agent",
    "serving",
    "remote",
    "cluster",
    "many_hosts",
    "many_rollout_hosts",
    "transport",
    "beside_peers",
    "replay",
    "datasets",
    "memory",
    "scaling",
)

QUICK_BEGIN_S = 360.0  # after which nothing more is begun


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the programs one after the other, and show all figures at the end; one that fails does not end the others."""
    told = _told(arguments)
    torch.set_num_threads(1)
    records: list[Record] = []
    failed: list[str] = []
    left_out: list[str] = []
    begun = monotonic()
    for name in told.only:
        if told.quick and monotonic() - begun > QUICK_BEGIN_S:
            left_out.append(name)
            continue
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        options = {"plots": told.plots} if name == "scaling" else {}
        began = monotonic()
        try:
            measured = import_module(f"benchmarks.{name}").measure(QUICK if told.quick else FULL, **options)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        print(f"{name} took {monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        tell(measured)
        records += measured
    show(records)
    if left_out:
        print(f"left out, {QUICK_BEGIN_S:g} s were over: {', '.join(left_out)}", file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _told(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure less, in less than ten minutes")
    parser.add_argument("--only", type=_names, default=PROGRAMS, metavar="NAME,NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where to put the plots of scaling")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PROGRAMS)):
        raise argparse.ArgumentTypeError(f"no such benchmark: {', '.join(unknown)}; expected {', '.join(PROGRAMS)}")
    return names


if __name__ == "__main__":
    main()
