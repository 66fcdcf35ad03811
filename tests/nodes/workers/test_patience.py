"""Deadlines of lanes: the next one, and who is late with what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.nodes.workers import deadlines as module
from rollflow.nodes.workers.patience import Patience

EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "reset", "end", "wait"]), st.integers(0, 4), st.integers(0, 5)), max_size=30
)


@given(step=st.none() | st.integers(0, 9), reset=st.none() | st.integers(0, 9), events=EVENTS)
def test_the_next_deadline_and_the_late_ones_are_those_of_a_plain_list(
    step: int | None, reset: int | None, events: list[tuple[str, int, int]]
) -> None:
    now, expected = 100.0, dict[int, tuple[float, str]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "monotonic", lambda: now)
        patience = Patience(step, reset)
        for event, lane, seconds in events:
            if event == "wait":
                now += seconds
            elif event == "end":
                patience.end(lane)
                expected.pop(lane, None)
            else:
                patience.begin(lane, resets=event == "reset")
                timeout = step if event == "step" else reset
                expected.pop(lane, None)
                if timeout is not None:
                    more = ", the resets after ended episodes included" if event == "step" else ""
                    expected[lane] = now + timeout, f"no answer to a {event} within {timeout} s{more}"
            deadlines = [deadline for deadline, _ in expected.values()]
            assert patience.left == (max(0.0, min(deadlines) - now) if deadlines else None)
            assert patience.overdue() == {lane: told for lane, (deadline, told) in expected.items() if deadline <= now}
