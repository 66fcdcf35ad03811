"""Bound on the threads of torch's operations while a function runs."""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import torch

Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class TorchThreads:
    """Runs functions while torch uses `count` threads; afterwards it uses as many as before.

    count    None: leave torch's number as it is

    On a busy processor, threads that wait for each other may take milliseconds for an operation of microseconds. One
    thread at a time may run a function.
    """

    __slots__ = ("count",)

    def __init__(self, count: int | None) -> None:
        self.count = count

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call the function."""
        count = self.count
        if count is None or count == (before := torch.get_num_threads()):
            return function(*args)
        torch.set_num_threads(count)
        try:
            return function(*args)
        finally:
            torch.set_num_threads(before)
