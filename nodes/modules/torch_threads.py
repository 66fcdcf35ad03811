"""Bound on the threads of torch's operations while a block runs."""

import torch


class TorchThreads:
    """Context manager in which torch uses `count` threads; afterwards it uses as many as before.

    count    None: leave torch's number as it is

    On a busy processor, threads that wait for each other may take milliseconds for an operation of microseconds. One
    thread at a time may enter.
    """

    __slots__ = ("_before", "count")

    def __init__(self, count: int | None) -> None:
        self.count = count
        self._before = 0

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self.count is not None and self.count != self._before:
            torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        if self.count is not None and self.count != self._before:
            torch.set_num_threads(self._before)
