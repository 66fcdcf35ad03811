"""A program that is there at once, and does as its first word says."""

import signal
import sys
from functools import partial

import cloudpickle


def call_of(*words: str) -> bytes:
    """The pickled call of a program."""
    made: bytes = cloudpickle.dumps(partial(do, words))
    return made


def do(words: tuple[str, ...], name: str) -> None:
    """Say what it was given, and then do as it is told."""
    sys.stdout.write(f"{list(words)} {name}\n")
    match words[0]:
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
