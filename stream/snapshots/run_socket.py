"""RunSocket: the Unix socket through which a run gives snapshots of itself."""

import json
import logging
import mmap
import os
import secrets
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollflow.stream.snapshots.run_folder import ASK_TRACE, SUFFIX, make, run_folder

logger = logging.getLogger(__name__)

_SEND_S = 1.0  # that an asker has to take a snapshot, or a part of a trace
_ASK_S = 0.2  # that an asker has to say what it wants
_PAUSE_S = 0.25  # until it is tried again whether there are descriptors for a connection
_TRIES = 5  # to open a socket in a folder that others remove when they end

Snapshot = Callable[[], dict[str, Any]]
Serve = Callable[[socket.socket], None]


class RunSocket:
    """Socket in the run folder. Who connects gets one snapshot as JSON, and the connection ends.

    began       time when the run began, in seconds since 1970
    snapshot    method that gives what the run says of itself; called in a thread of the socket, and held weakly
    trace       method that sends a trace over a connection, and closes it. It is called where the other end has said
                `ASK_TRACE`, and held weakly, too. None: there are snapshots alone

    The thread waits until somebody asks. It answers while the run's own thread hangs in a call. A run without a socket,
    where none could be made, runs all the same.
    """

    def __init__(self, snapshot: Snapshot, trace: Serve | None = None) -> None:
        self._snapshot = weakref.WeakMethod(snapshot)
        self._trace = None if trace is None else weakref.WeakMethod(trace)
        self._thread: threading.Thread | None = None
        self._end: Callable[[], object] | None = None
        self.began = 0.0

    def start(self) -> None:
        """Open the socket, and start the thread."""
        self.began = self.began or time.time()
        folder = run_folder()
        if folder is None or self._end is not None:
            return
        try:
            listening, path = _opened(folder)
        except OSError as error:
            logger.debug("the run has no socket to be looked at: %s", error)
            return
        stopping, stop = socket.socketpair()
        arguments = (listening, stopping, self._snapshot, self._trace, self.began)
        self._thread = threading.Thread(target=_serve, args=arguments, name="rollflow snapshots", daemon=True)
        self._end = weakref.finalize(self, _ended, stop, path, os.getpid())
        self._thread.start()

    def stop(self) -> None:
        """Remove the socket, and end the thread; again does nothing. From any thread."""
        if self._end is None or self._thread is None:
            return
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _SEND_S)


def _opened(folder: Path) -> tuple[socket.socket, Path]:
    """A socket that listens, and its path. Raises OSError where none can be made there."""
    for _ in range(_TRIES):
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        with suppress(FileNotFoundError):  # another run has ended just now, and removed the folder
            make(folder)
            return _listening(path), path
    raise FileNotFoundError(f"{folder} is removed again and again")


def _listening(path: Path) -> socket.socket:
    """A socket that gets its name when it listens already."""
    listening, fresh = socket.socket(socket.AF_UNIX), path.with_suffix(".new")
    try:
        listening.bind(str(fresh))
        fresh.chmod(0o600)
        listening.listen()
        listening.setblocking(False)
        fresh.rename(path)
    except BaseException:
        listening.close()
        raise
    return listening


def _ended(stop: socket.socket, path: Path, pid: int) -> None:
    """Have a socket's thread end. In a process that was forked the socket is its parent's."""
    is_ours = os.getpid() == pid
    if is_ours:
        with suppress(OSError):  # its thread may have ended
            stop.shutdown(socket.SHUT_RDWR)  # a process that was forked has it open as well
    stop.close()
    if is_ours:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other runs have theirs there
            path.parent.rmdir()


def _serve(
    listening: socket.socket,
    stopping: socket.socket,
    snapshot: "weakref.WeakMethod[Snapshot]",
    trace: "weakref.WeakMethod[Serve] | None",
    began: float,
) -> None:
    with listening, stopping:
        poll, pausing = select.poll(), select.poll()
        poll.register(stopping, select.POLLIN)
        pausing.register(stopping, select.POLLIN)
        poll.register(listening, select.POLLIN)
        while all(fd != stopping.fileno() for fd, _ in poll.poll()):
            try:
                asking, _ = listening.accept()
            except OSError:
                pausing.poll(_PAUSE_S * 1e3)
                continue
            with asking, suppress(OSError):  # who asks may be gone
                serve = trace() if trace is not None and _wants_trace(asking) else None
                asking.settimeout(_SEND_S)
                if serve is None:
                    asking.sendall(_answer(snapshot(), began))
                else:
                    serve(asking.dup())


def _wants_trace(asking: socket.socket) -> bool:
    asking.settimeout(_ASK_S)
    try:
        return asking.recv(len(ASK_TRACE)) == ASK_TRACE
    except TimeoutError:
        return False


def _answer(snapshot: Snapshot | None, began: float) -> bytes:
    """What an asker gets; a run that can't say more says what its process is."""
    now = time.time()
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "command": " ".join(sys.argv),
        "began": began,
        "time": now,
        "memory_bytes": _resident_bytes(),
    }
    try:
        return json.dumps(found | ({} if snapshot is None else snapshot())).encode()
    except Exception as error:  # it changes while it is read, or has a value that JSON has not
        return json.dumps(found | {"error": f"{type(error).__name__}: {error}"}).encode()


def _resident_bytes() -> int | None:
    """Memory of this process, as the system counts it; None: it does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None
