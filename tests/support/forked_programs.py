"""Programs that begin with rollflow imported, as forks of one process: for tests that run many of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_SERVER = """
import atexit, gc, importlib, json, os, runpy, sys, threading, traceback
import gymnasium, rollflow.cli

for package in ("rollflow", "rollflow.nodes", "rollflow.sinks", "rollflow.stream", "rollflow.policy"):
    imported = importlib.import_module(package)
    for name in imported.__all__:  # of which each is imported when it is asked for
        getattr(imported, name)
for command in os.listdir(os.path.dirname(rollflow.cli.__file__)):
    if command.endswith(".py"):
        importlib.import_module(f"rollflow.cli.{command[:-3]}")
gc.freeze()
for line in sys.stdin:
    folder, told, path, *arguments = json.loads(line)
    if os.fork() == 0:
        break
else:
    sys.exit()
if program := os.fork():
    _, status = os.waitpid(program, 0)
    with open(f"{told}/part", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
    os.rename(f"{told}/part", f"{told}/status")
    os._exit(0)
os.chdir(folder)
for number, name in ((0, os.devnull), (1, f"{told}/out"), (2, f"{told}/errors")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
with open(f"{told}/pid", "w") as file:
    file.write(str(os.getpid()))
sys.stdin, sys.argv, sys.path[0] = open(os.devnull), [path, *arguments], os.path.dirname(path)
status = 0
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else bool(ended.code)
except BaseException:
    traceback.print_exc()
    status = 1
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(status)  # without taking apart all that was imported, which takes as long as many programs
"""


class Ended(NamedTuple):
    """How a program ended: its exit status, and what it printed."""

    status: int
    out: str
    errors: str


class Program:
    """A program that runs, until the block ends."""

    def __init__(self, told: Path) -> None:
        self._told = told

    def __enter__(self) -> "Program":
        return self

    def wait(self, longest_s: float) -> Ended:
        """Wait for its end. Raises TimeoutError when it does not come."""
        until = time.monotonic() + longest_s
        while not (self._told / "status").exists():
            if time.monotonic() > until:
                raise TimeoutError(f"it has not ended in {longest_s:g} s:\n{(self._told / 'errors').read_text()}")
            time.sleep(0.01)
        status, out, errors = ((self._told / name).read_text() for name in ("status", "out", "errors"))
        return Ended(int(status), out, errors)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not (self._told / "status").exists() and (self._told / "pid").exists():
            os.kill(int((self._told / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(self._told, ignore_errors=True)


class Programs:
    """The process that all are forks of."""

    def __init__(self) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # with the command `rollflow`
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, text=True, env=os.environ | {"PATH": path}
        )

    def start(self, folder: Path, path: Path, *arguments: str) -> Program:
        """Start a script in a folder."""
        told = Path(tempfile.mkdtemp())
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), str(told), str(path), *arguments]) + "\n")
        self.process.stdin.flush()
        return Program(told)
