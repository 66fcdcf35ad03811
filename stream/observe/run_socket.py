"""Run socket: through it a run gives snapshots of itself; and the folder in which all runs have theirs."""

import json
import logging
import os
import secrets
import select
import socket
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.system import process_memory

logger = logging.getLogger(__name__)

_SEND_S = 1.0  # that an asker has to take a snapshot
_PAUSE_S = 0.25  # until it is tried again whether there are descriptors for a connection
_TRIES = 5  # to open a socket in a folder that others remove when they end

Snapshot = Callable[[], dict[str, Any]]
FOLDER = "ROLLFLOW_RUNS"
"""Variable that names another folder; empty: runs have no sockets."""
ANSWER_S = 2.0
SUFFIX = ".sock"
_MOST = 1 << 26  # bytes of a snapshot


class RunSocket:
    """Socket in the run folder. Who connects gets one snapshot as JSON, and the connection ends.

    snapshot    method that gives what the run says of itself; called in a thread of the socket, and held weakly

    The thread waits until somebody asks. It answers while the run's own thread hangs in a call. A run without a socket,
    if none could be made, runs all the same.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = weakref.WeakMethod(snapshot)
        self._thread: threading.Thread | None = None
        self._end: Callable[[], object] | None = None

    def start(self) -> None:
        """Open the socket, and start the thread."""
        folder = run_folder()
        if folder is None or self._end is not None:
            return
        try:
            listening, path = _opened(folder)
        except OSError as error:
            logger.debug("the run has no socket to be looked at: %s", error)
            return
        stopping, stop = socket.socketpair()
        arguments = (listening, stopping, self._snapshot, time.time())
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
    """A socket that listens, and its path. Raises OSError if none can be made there."""
    for _ in range(_TRIES):
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        with suppress(FileNotFoundError):  # another run has ended just now, and removed the folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(folder)
            return _listening(path), path
    raise FileNotFoundError(f"{folder} is removed again and again")


def _listening(path: Path) -> socket.socket:
    """A socket that gets its name when it listens already."""
    listening, fresh = socket.socket(socket.AF_UNIX), path.with_suffix(".new")
    with closing_on_error(listening.close):
        listening.bind(str(fresh))
        fresh.chmod(0o600)
        listening.listen()
        listening.setblocking(False)
        fresh.rename(path)
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
                asking.settimeout(_SEND_S)
                asking.sendall(_answer(snapshot(), began))


def _answer(snapshot: Snapshot | None, began: float) -> bytes:
    """What an asker gets; a run that can't say more says what its process is."""
    now = time.time()
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "command": " ".join(sys.argv),
        "began": began,
        "time": now,
        "memory_bytes": process_memory()[1] or None,
    }
    try:
        return json.dumps(found | ({} if snapshot is None else snapshot())).encode()
    except Exception as error:  # it changes while it is read, or has a value that JSON has not
        return json.dumps(found | {"error": f"{type(error).__name__}: {error}"}).encode()


def run_folder() -> Path | None:
    """The folder; None: runs are to have no sockets.

    It lies below XDG_RUNTIME_DIR, or else in the folder of temporary files. Nothing is made.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    named = os.environ.get(FOLDER)
    if named is not None:
        return Path(named).absolute() if named else None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "rollflow-runs"
    return Path(tempfile.gettempdir()) / f"rollflow-runs-{os.getuid()}"


def snapshots() -> list[dict[str, Any]]:
    """A snapshot of every run of this user on this machine, oldest process first; see `snapshot_at`.

    Sockets of processes that were killed are removed. Raises OSError for a folder that is not this user's alone.
    """
    folder = run_folder()
    if folder is None or not folder.exists():
        return []
    _check_own(folder)
    paths = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (_pid_of(path), path.name))
    found = [_snapshot_or_none(path) for path in paths]
    return [each for each in found if each is not None]


def snapshot_at(path: Path) -> dict[str, Any]:
    """The snapshot that the run behind a socket gives of itself.

    A run whose process does not answer in time, since it is stopped or never lets the interpreter go, has only `path`,
    `pid` and `error`. Raises OSError if there is no run.
    """
    data = bytearray()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_S)
        try:
            asking.connect(str(path))
            while len(data) < _MOST and (more := asking.recv(1 << 16)):
                data += more
            found: dict[str, Any] = json.loads(data)
        except TimeoutError:
            found = {"pid": _pid_of(path), "error": f"no answer in {ANSWER_S:g} s: its process is stopped, or held up"}
        except ValueError:  # it ended within its answer
            raise ConnectionResetError(f"{path} has ended") from None
    return {**found, "path": str(path)}


def _snapshot_or_none(path: Path) -> dict[str, Any] | None:
    """The snapshot of a run; None: it has ended, and a socket that it has left is removed."""
    try:
        found = snapshot_at(path)
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # a socket has its name only while somebody listens
        return None
    except OSError:
        return None
    if "error" in found and not _is_alive(found["pid"]):  # a process that it has forked holds its socket
        path.unlink(missing_ok=True)
        return None
    return found


def _pid_of(path: Path) -> int:
    digits = path.name.partition("-")[0]
    return int(digits) if digits.isdigit() else 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # it has ended, and its number may be that of another user's process now
        return False
    return True


def _check_own(folder: Path) -> None:
    """Raise OSError if others could write into the folder, or read it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone, expected a folder of mode 700")
