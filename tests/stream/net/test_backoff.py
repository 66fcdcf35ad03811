"""Pauses before something is tried again."""

from rollflow.stream.net.backoff import pause_s


def test_every_failure_doubles_the_pause_up_to_the_longest() -> None:
    assert [pause_s(failures, 1.0) for failures in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_what_has_failed_forever_is_still_tried_again() -> None:
    assert pause_s(10_000, 30.0) == 30.0
