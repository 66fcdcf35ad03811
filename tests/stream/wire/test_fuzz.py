"""Whatever an end is fed, it takes or refuses; and what once was found stays found."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from wire_fuzzing import ENDS, Fuzzed, Mutator

from rollflow.stream.wire.codec.message import KINDS

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.hex"))


@given(st.integers(0, 2**32))
def test_streams_that_are_nearly_right_are_taken_or_refused(seed: int) -> None:
    fuzzed, mutator = Fuzzed(), Mutator(seed)
    for _ in range(10):
        fuzzed.take(mutator.input())


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    Fuzzed().take(data)


@pytest.mark.parametrize("number", range(len(ENDS)))
def test_every_end_takes_the_streams_that_are_right(number: int) -> None:
    fuzzed = Fuzzed()
    for stream in ENDS[number][1]:
        fuzzed.take(bytes([number, 7]) + stream)
    assert fuzzed.counts
    assert set(fuzzed.counts) <= {*KINDS, "secret"}  # which is what the example of a refusal says


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_was_found_once_is_not_found_again(path: Path) -> None:
    Fuzzed().take(bytes.fromhex(path.read_text()))
