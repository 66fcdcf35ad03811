"""Run folder: where this user's runs on this machine have their sockets."""

import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "ROLLFLOW_RUNS"
"""Variable that names another folder; empty: runs have no sockets."""

ANSWER_S = 2.0
SUFFIX = ".sock"
ASK_TRACE = b"trace\n"  # what an asker says to get a trace; one that says nothing gets a snapshot
_MOST = 1 << 26  # bytes of a snapshot
_END_S = 10.0  # that a run has to end a trace
_LOOK_S = 0.1  # between two looks at whether a trace is over


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


def make(folder: Path) -> None:
    """Make the folder where it is missing. Raises OSError where others could write into it, or read it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(folder)


def snapshots(folder: Path | None = None) -> list[dict[str, Any]]:
    """A snapshot of every run of this user on this machine, oldest process first; see `snapshot_at`.

    folder    None: `run_folder()`

    Sockets of processes that were killed are removed. Raises OSError for a folder that is not this user's alone.
    """
    folder = folder or run_folder()
    if folder is None or not folder.exists():
        return []
    _check_own(folder)
    paths = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (_pid_of(path), path.name))
    found = [_snapshot_or_none(path) for path in paths]
    return [each for each in found if each is not None]


def snapshot_at(path: Path) -> dict[str, Any]:
    """The snapshot that the run behind a socket gives of itself.

    A run whose process does not answer in time, since it is stopped or never lets the interpreter go, has only `path`,
    `pid` and `error`. Raises OSError where there is no run.
    """
    data = bytearray()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_S)
        try:
            asking.connect(str(path))
            asking.shutdown(socket.SHUT_WR)  # it has nothing to say
            while len(data) < _MOST and (more := asking.recv(1 << 16)):
                data += more
            found: dict[str, Any] = json.loads(data)
        except TimeoutError:
            found = {"pid": _pid_of(path), "error": f"no answer in {ANSWER_S:g} s: its process is stopped, or held up"}
        except ValueError:  # it ended within its answer
            raise ConnectionResetError(f"{path} has ended") from None
    return {**found, "path": str(path)}


def trace_at(path: Path, over: Callable[[], bool]) -> Iterator[bytes]:
    """Pieces of the trace that the run behind a socket makes, from now until `over` says so or the run ends.

    Raises OSError where there is no run, or it gives no trace.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ANSWER_S)
        asking.connect(str(path))
        asking.sendall(ASK_TRACE)
        data = asking.recv(1 << 16)
        if not data.startswith(b"["):  # nothing, or a snapshot of who does not know better
            raise ConnectionRefusedError(f"{path} gives no trace: it is being traced already, or has none to give")
        yield data
        asking.settimeout(_LOOK_S)
        has_said = False
        while True:
            if not has_said and over():
                has_said = True
                asking.shutdown(socket.SHUT_WR)
                asking.settimeout(_END_S)
            try:
                data = asking.recv(1 << 16)
            except TimeoutError:
                if has_said:
                    raise
                continue
            if not data:
                return
            yield data


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
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone, expected a folder of mode 700")
