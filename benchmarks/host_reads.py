"""Counter of reads from a device, which wait for all that it has been given to do; on the CPU none of them waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONS = frozenset(
    "cpu numpy __array__ tolist item is_nonzero __bool__ __int__ __float__ __index__ __complex__ __contains__".split()
)
OPERATIONS = frozenset(
    "_local_scalar_dense nonzero masked_select equal bincount _unique _unique2 unique_dim unique_consecutive".split()
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


class _Functions(TorchFunctionMode):
    """Counts calls that dispatch nothing on the CPU."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads, self.depth = reads, 0  # of calls whose own operations are not counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_read = name in FUNCTIONS or (name == "to" and "cpu" in [each for each in args[1:] if isinstance(each, str)])
        if is_read:
            self.reads.append(name)
        inside = is_read or name == "split"  # which makes a tensor of its sizes that stays here
        self.depth += inside
        try:
            result = func(*args, **kwargs)
        finally:
            self.depth -= inside
        if name == "to" and not is_read and result.device != args[0].device:
            self.reads.append(name)
        return result


class _Operations(TorchDispatchMode):
    """Counts operations, from whatever function they come."""

    def __init__(self, functions: _Functions) -> None:
        super().__init__()
        self._functions = functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._functions.depth and _is_read(name, args, kwargs or {}):
            self._functions.reads.append(name)
        return func(*args, **(kwargs or {}))


def _is_read(name: str, args: Any, kwargs: Any) -> bool:
    if name in _INDEXING:  # by a mask: how many there are has to be known
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "lift_fresh":  # values from the host: a copy from memory that is not pinned waits as well
        return args[0].ndim > 0 and args[0].numel() > 0
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and isinstance(args[-1], torch.Tensor)
    return name in OPERATIONS


@contextmanager
def counting_reads() -> Iterator[list[str]]:
    """The names of all functions and operations that read from a device, or copy to it from the host, and wait."""
    reads: list[str] = []
    functions = _Functions(reads)
    with functions, _Operations(functions):
        yield reads
