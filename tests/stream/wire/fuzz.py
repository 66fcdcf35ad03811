"""Feed the decoder and both ends with streams that are nearly right, by hand, for as long as wanted.

    PYTHONPATH=tests/support python tests/stream/wire/fuzz.py --inputs 100000 --seed 1
    PYTHONPATH=tests/support python tests/stream/wire/fuzz.py --atheris [arguments of libFuzzer]

What fails is written to `regressions/`, where the tests find it again.
"""

import argparse
import hashlib
import importlib
import resource
import sys
from pathlib import Path
from time import perf_counter

from wire_fuzzing import FRAMES, Fuzzed, Mutator

REGRESSIONS = Path(__file__).parent / "regressions"
MOST_GROWTH = 64 << 10  # KiB of resident memory, after the first tenth of the inputs


def resident() -> int:
    """KiB, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def take(fuzzed: Fuzzed, data: bytes) -> None:
    """Feed one input; keep it where it fails."""
    try:
        fuzzed.take(data)
    except BaseException:
        REGRESSIONS.mkdir(exist_ok=True)
        path = REGRESSIONS / f"{hashlib.sha256(data).hexdigest()[:16]}.hex"
        path.write_text(data.hex() + "\n")
        sys.stdout.write(f"failed: {path}\n")
        raise


def run(inputs: int, seed: int) -> Fuzzed:
    """Feed so many inputs of our own. Raises AssertionError where memory grew."""
    fuzzed, mutator = Fuzzed(), Mutator(seed)
    before = 0
    for index in range(inputs):
        take(fuzzed, mutator.input())
        if index == inputs // 10:
            before = resident()
    assert resident() - before < MOST_GROWTH, f"resident memory grew from {before} to {resident()} KiB"
    return fuzzed


def run_atheris(arguments: list[str]) -> None:
    """Let atheris make the inputs, guided by what they reach, until it is stopped."""
    atheris = importlib.import_module("atheris")
    fuzzed = Fuzzed()
    atheris.instrument_all()
    corpus = REGRESSIONS.parent / ".corpus"
    corpus.mkdir(exist_ok=True)
    for index, frame in enumerate(FRAMES):
        (corpus / str(index)).write_bytes(bytes([index, 0]) + frame)
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], lambda data: take(fuzzed, data))
    atheris.Fuzz()


def main() -> None:
    """Read the command line, feed, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="needs the package of that name")
    given, rest = parser.parse_known_args()
    if given.atheris:
        run_atheris(rest)
        return
    began = perf_counter()
    fuzzed = run(given.inputs, given.seed)
    took = perf_counter() - began
    counts = ", ".join(f"{name} {count}" for name, count in fuzzed.counts.most_common())
    sys.stdout.write(
        f"seed {given.seed}: {fuzzed.inputs} inputs in {took:.0f} s, the longest {fuzzed.longest_s * 1e3:.0f} ms, "
        f"{resident() >> 10} MiB\n{counts}\n"
    )


if __name__ == "__main__":
    main()
