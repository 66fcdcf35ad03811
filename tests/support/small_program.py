"""A program of an installation that a test makes up: it starts at once, and does as its first argument says."""

import os
import signal
import sys
from pathlib import Path

NAME = "small-program"


def install(folder: Path) -> None:
    """Have the folder, which is to be searched for modules, be an installation of the program."""
    record = folder / "small_program-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: small-program\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[console_scripts]\n{NAME} = small_program:main\n")


def main() -> int | None:
    """Say what it was given, and then do as it is told."""
    sys.stdout.write(f"{sys.argv[1:]} {os.environ['ROLLFLOW_SECRET']}\n")
    match sys.argv[1]:
        case "fail":
            sys.exit("it broke")
        case "wait":
            sys.stdout.write("waits\n")
            signal.pause()
        case "stay":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sys.stdout.write("stays\n")
            signal.pause()
            signal.pause()
    return None
