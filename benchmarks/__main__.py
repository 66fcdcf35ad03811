"""All benchmarks: python -m benchmarks [--quick] [--only name,name] [--plots FOLDER]"""

import sys
from importlib import import_module

import torch

from benchmarks.pairs import FULL, QUICK, Record, show

PROGRAMS = (
    "cartpole",
    "overhead",
    "pixels",
    "two_cores",
    "stragglers",
    "connector",
    "beside_peers",
    "memory",
    "scaling",
)


def main() -> None:
    """Run the programs one after the other, and show all figures at the end."""
    torch.set_num_threads(1)
    wanted = sys.argv[sys.argv.index("--only") + 1].split(",") if "--only" in sys.argv else PROGRAMS
    unknown = set(wanted) - set(PROGRAMS)
    if unknown:
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}; expected {', '.join(PROGRAMS)}")
    records: list[Record] = []
    for name in wanted:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        records += import_module(f"benchmarks.{name}").measure(QUICK if "--quick" in sys.argv else FULL)
    show(records)


if __name__ == "__main__":
    main()
