"""How many threads torch's operations take, for a while."""

import torch


class TorchThreads:
    """`with threads:` torch uses so many threads, and afterwards as many as before; one thread's at a time.

    count    None: as many as it is set to

    Where the processor has other work as well, threads that wait for each other may take milliseconds for an operation
    of microseconds.
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
