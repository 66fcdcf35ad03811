"""What every program here does when it is run by itself."""

import argparse
import sys
from collections.abc import Callable

import torch

from benchmarks.pairs import FULL, QUICK, Record, Sizes, show, tell


def run(measure: Callable[[Sizes], list[Record]]) -> None:
    """Measure, with one torch thread, and show it; `--quick` measures less."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="measure less")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    records = measure(QUICK if quick else FULL)
    tell(records)
    show(records)
