"""The command `rollflow serve` in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command in a process of its own, and the address at which it listens."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from rollflow.cli.main import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        *arguments,
        *(() if "--http" in arguments else ("--http", "127.0.0.1:0")),
        "--allow",
        "served_policies",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving .* at (\S+)$", line):
                yield process, found[1]
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.communicate()
