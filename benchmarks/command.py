"""What every program here does when it is run by itself."""

import sys
from collections.abc import Callable

import torch

from benchmarks.pairs import FULL, QUICK, Record, Sizes, show


def run(measure: Callable[[Sizes], list[Record]]) -> None:
    """Measure, with one torch thread, and show it; `--quick` measures less."""
    torch.set_num_threads(1)
    show(measure(QUICK if "--quick" in sys.argv else FULL))
