"""How many hosts there are to be: by what the hosts are at, and not back and forth."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.nodes.launch.scaling import WINDOW_S, Decision, HostRange, HostScaler, wanted

WIDE = HostRange(4, 1, 100)


@pytest.mark.parametrize(
    ("busy", "here", "started", "number"),
    [
        (1.0, 4, 4, 6),  # half as many again
        (0.9, 1, 1, 2),
        (1.0, 80, 80, 100),  # as many as there may be
        (1.0, 3, 4, 4),  # one is yet to come
        (0.89, 4, 4, 4),
        (0.61, 4, 4, 4),
        (0.6, 8, 8, 6),  # of which each is at work for 0.8 of the time
        (0.1, 8, 8, 1),
        (0.0, 8, 8, 1),  # as few as there may be
        (0.6, 4, 8, 3),  # those that are yet to come are not needed either
    ],
)
def test_the_number_follows_from_what_hosts_are_at(busy: float, here: int, started: int, number: int) -> None:
    assert wanted(busy, here, started, WIDE) == number


@given(demand=st.floats(0.0, 200.0), first=st.integers(1, 100))
def test_a_demand_that_stays_the_same_is_met_without_going_back_and_forth(demand: float, first: int) -> None:
    numbers = [first]
    for _ in range(20):
        busy = min(1.0, demand / numbers[-1])
        numbers.append(wanted(busy, numbers[-1], numbers[-1], WIDE))
    assert numbers[-1] == numbers[-2]  # it has come to rest
    changes = [after > before for before, after in pairwise(numbers) if after != before]
    assert len(set(changes)) <= 1
    assert numbers[-1] == 100 or demand < 0.9 * numbers[-1]  # nothing holds the run back, or there may be no more


class Looks:
    """Looks at hosts that are all here, one for each second, after a window that says that all is well."""

    def __init__(self, hosts: HostRange) -> None:
        self._scaler, self.started, self.now = HostScaler(hosts), hosts.first, 0.0
        self._scaler.look(self.now, 0.7, self.started, self.started)
        assert self.windows(0.7, 1) == []

    def windows(self, busy: float | None, count: int) -> list[Decision]:
        """The decisions in so many windows."""
        found = []
        for _ in range(round(count * WINDOW_S)):
            self.now += 1.0
            decision = self._scaler.look(self.now, busy, self.started, self.started)
            if decision is not None:
                self.started = decision.num_hosts
                found.append(decision)
        return found


def test_one_window_decides_nothing() -> None:
    looks = Looks(WIDE)
    assert looks.windows(1.0, 1) == []
    assert looks.windows(0.7, 1) == []
    assert looks.windows(1.0, 1) == []
    reason = "in the last 5.0 s hosts were at work for 100% of the time: they hold the run back"
    assert looks.windows(1.0, 1) == [Decision(6, reason)]


def test_fewer_hosts_are_slower_decided_on_than_more() -> None:
    looks = Looks(WIDE)
    assert looks.windows(0.2, 2) == []
    reason = (
        "in the last 5.0 s hosts were at work for 20% of the time: whoever takes their fragments holds the run back"
    )
    assert looks.windows(0.2, 1) == [Decision(1, reason)]
    assert looks.windows(0.2, 9) == []


def test_what_windows_say_in_turn_decides_nothing() -> None:
    looks = Looks(WIDE)
    for _ in range(5):
        assert looks.windows(1.0, 1) == []
        assert looks.windows(0.2, 1) == []


def test_while_nobody_is_there_nothing_is_decided_and_what_was_seen_before_counts_no_more() -> None:
    looks = Looks(WIDE)
    assert looks.windows(1.0, 1) == []
    assert looks.windows(None, 5) == []
    assert looks.windows(1.0, 1) == []
    [(number, reason)] = looks.windows(1.0, 2)
    assert number == 6
    assert reason.startswith("in the last 5.0 s ")


@pytest.mark.parametrize(
    ("given_numbers", "found"),
    [
        ((None, None, None), (1, 1, 1)),
        ((3, None, None), (3, 3, 3)),
        ((None, 4, 256), (4, 4, 256)),
        ((None, None, 8), (1, 1, 8)),
        ((5, 2, None), (5, 2, 5)),
    ],
)
def test_numbers_that_are_left_out_follow_from_the_others(
    given_numbers: tuple[int | None, ...], found: tuple[int, int, int]
) -> None:
    assert HostRange.of(*given_numbers) == found


@pytest.mark.parametrize("given_numbers", [(1, 2, 3), (4, 2, 3), (None, 5, 3)])
def test_numbers_that_are_in_no_order_are_refused(given_numbers: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected min_hosts <= num_hosts <= max_hosts"):
        HostRange.of(*given_numbers)
