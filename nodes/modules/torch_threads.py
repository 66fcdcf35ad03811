"""Bound on the threads of torch's operations while a function runs."""

from collections.abc import Callable
from typing import TypeVar

import torch

A = TypeVar("A")
T = TypeVar("T")


def with_threads(count: int | None, function: Callable[[A], T]) -> Callable[[A], T]:
    """The function, run while torch uses `count` threads; afterwards it uses as many as before.

    count    None: the function itself, which leaves torch's number as it is

    On a busy processor, threads that wait for each other may take milliseconds for an operation of microseconds. One
    thread at a time may call the function.
    """
    if count is None:
        return function

    def run(argument: A) -> T:
        before = torch.get_num_threads()
        if count == before:
            return function(argument)
        torch.set_num_threads(count)
        try:
            return function(argument)
        finally:
            torch.set_num_threads(before)

    return run
