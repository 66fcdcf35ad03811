"""Weights in memory that the hosts of one machine share: one gets them whole, and the others read its file.

The file has no name in any folder. It is opened by the numbers of a process and of the process' descriptor, which only
processes of the same user may do. It is sealed, so what was read of it once can't change. The system frees it when the
last process that has it open or mapped has ended, in whatever way.
"""

import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from rollflow.nodes.closing import closing_on_error
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.system import system_module
from rollflow.stream.wire import MARK_BYTES, Weights, WeightsShared, decode, encode

fcntl = system_module("fcntl")


@cache
def machine() -> str | None:
    """Name that is the same for processes that can read each other's files; None: this system has no such files.

    They are those of one user, since one start of a machine, in one container.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return None


class WeightsFile:
    """File in memory with the frame of one message of weights. Raises OSError where it can't be made.

    shared    message that says where it is
    """

    def __init__(self, weights: Weights) -> None:
        mark, size = os.urandom(MARK_BYTES), 0
        descriptor = os.memfd_create(_name(mark), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._closing = weakref.finalize(self, os.close, descriptor)
        with closing_on_error(self.close), open(descriptor, "wb", closefd=False) as file:
            file.writelines(encode(replace(weights, share=False)))
            file.flush()
            size = file.tell()
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        self.shared = WeightsShared(weights.version, os.getpid(), descriptor, size, mark, weights.module)

    def close(self) -> None:
        """Close the file: who has it open can still read it. A second call does nothing."""
        self._closing()


def read_weights(shared: WeightsShared) -> Weights | None:
    """The weights in the file of another process, tensors any[...] over its memory; None where they can't be read.

    The arrays may be written to: this process then has pages of its own.
    """
    path = f"/proc/{shared.process}/fd/{shared.descriptor}"
    with suppress(OSError, ValueError, WireError):  # it is gone, or of another size, or no file of weights
        if os.readlink(path) == f"/memfd:{_name(shared.mark)} (deleted)":
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
                    return None
                memory = mmap.mmap(descriptor, shared.size, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
            weights = decode(np.frombuffer(memory, np.uint8))
            if isinstance(weights, Weights) and (weights.version, weights.module) == (shared.version, shared.module):
                return weights
    return None


def _name(mark: bytes) -> str:
    return f"rollflow-weights-{mark.hex()}"


def _seals() -> int:
    return int(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
