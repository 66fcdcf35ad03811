"""The command `rollflow` in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any


class Program(subprocess.Popen[str]):
    """A process whose streams are pipes as far as they are asked for."""

    stdout: IO[str]  # type: ignore[assignment]
    stderr: IO[str]  # type: ignore[assignment]


@contextmanager
def command(*arguments: Any, **options: Any) -> Iterator[Program]:
    """The command in a process, which `options` are for, killed when it is left."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from rollflow.cli.main import main; sys.exit(main())"
    words = [sys.executable, "-c", program, *map(str, arguments)]
    process = Program(words, text=True, **{"stderr": subprocess.PIPE, **options})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[Program, str]]:
    """`rollflow serve` in a process, and the address at which it listens."""
    where = () if "--http" in arguments else ("--http", "127.0.0.1:0")
    with command("serve", *arguments, *where, "--allow", "served_policies") as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* at (\S+)$", line):
                yield process, found[1]
                return
        raise AssertionError("".join(lines))
