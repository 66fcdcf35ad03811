"""The clock of another process is known here to within half of the shortest round trip."""

import numpy as np
from hypothesis import given, strategies as st

from rollflow.stream.traces.clock_alignment import ClockAlignment, RoundTrip

WAYS = st.tuples(st.integers(0, 10**8), st.integers(0, 10**8), st.integers(0, 10**6))  # there, back, at work there
OFFSETS = st.integers(-(10**15), 10**15)  # days


def trip_of(asked: int, ways: tuple[int, int, int], offset: int) -> RoundTrip:
    """A round trip whose ways take so long, to a clock that is behind the one here by an offset."""
    there, back, work = ways
    came = asked + there - offset
    return RoundTrip(asked, came, came + work, asked + there + work + back)


def test_both_ways_of_equal_length_give_the_very_offset() -> None:
    trip = RoundTrip(asked=1000, came=60_100, sent=60_300, heard=1400)
    assert (trip.offset_ns, trip.uncertainty_ns) == (-59_000, 100)
    alignment = ClockAlignment()
    assert not alignment.is_known
    alignment.take(trip)
    np.testing.assert_array_equal(alignment.here(np.array([60_100, 60_300])), [1100, 1300])


@given(OFFSETS, WAYS)
def test_an_offset_is_wrong_by_half_of_its_round_trip_at_most(offset: int, ways: tuple[int, int, int]) -> None:
    trip = trip_of(10**9, ways, offset)
    assert abs(trip.offset_ns - offset) <= trip.uncertainty_ns
    assert trip.uncertainty_ns <= (ways[0] + ways[1] + 1) // 2 + 1


@given(OFFSETS, st.lists(WAYS, min_size=1, max_size=8))
def test_the_shortest_of_round_trips_that_follow_each_other_counts(
    offset: int, found: list[tuple[int, int, int]]
) -> None:
    alignment, now = ClockAlignment(), 10**9
    trips = []
    for ways in found:
        trips.append(trip_of(now, ways, offset))
        alignment.take(trips[-1])
        now = trips[-1].heard + 1
    drifted = 10**-5 * (now - trips[0].asked)
    assert alignment.uncertainty_ns(now) <= min(trip.uncertainty_ns for trip in trips) + drifted + 1
    assert abs(alignment.offset_ns - offset) <= alignment.uncertainty_ns(now)


def test_a_short_round_trip_counts_for_less_as_the_clocks_drift_apart() -> None:
    alignment = ClockAlignment()
    alignment.take(trip_of(0, (10, 10, 0), 5))
    alignment.take(trip_of(10**6, (100, 300, 0), 5))
    assert alignment.offset_ns == 5  # a millisecond later
    assert alignment.uncertainty_ns(10**9 + 20) == 10 + 10_000
    alignment.take(trip_of(10**9, (100, 300, 0), 5))
    assert alignment.offset_ns == 105  # a second later it may have drifted by more than a longer round trip says
