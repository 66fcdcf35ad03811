"""Several policies and versions: which of them acts, and when an older one is over."""

from time import monotonic
from typing import Any

import pytest
from served_policies import Echo, Sums, Taking, policy_of

from rollflow.policy.serving import BatchOptions
from rollflow.policy.serving.request import Acted, Outcome, SessionLostError
from rollflow.policy.serving.shelf import Shelf


def version_of(outcome: Outcome) -> str:
    """The version that has chosen."""
    assert isinstance(outcome, Acted), outcome
    return outcome.version


def asked(shelf: Shelf, front: Taking, session: object, *, begins: bool = False) -> str:
    """The version that answers a request."""
    shelf.submit("pole", front.request(1.0, session, begins=begins))
    return version_of(front.take()[session])


def test_a_session_stays_with_its_version_until_it_begins_anew(shelf: Shelf) -> None:
    front = Taking()
    shelf.put("pole", policy_of(Sums), "1")
    assert asked(shelf, front, "a", begins=True) == "1"
    shelf.put("pole", policy_of(Sums), "2")
    assert asked(shelf, front, "a") == "1"
    assert asked(shelf, front, "b", begins=True) == "2"
    shelf.tidy()
    assert list(shelf.versions("pole")) == ["1", "2"]
    assert asked(shelf, front, "a", begins=True) == "2"
    shelf.tidy()
    assert list(shelf.versions("pole")) == ["2"]


def test_a_version_without_memory_is_over_at_once(shelf: Shelf) -> None:
    front = Taking()
    shelf.put("pole", policy_of(Echo), "1")
    assert asked(shelf, front, "a") == "1"
    shelf.put("pole", policy_of(Echo), "2")
    shelf.tidy()
    assert asked(shelf, front, "a") == "2"
    assert list(shelf.versions("pole")) == ["2"]


def test_an_idle_session_of_the_newest_version_is_forgotten() -> None:
    shelf, front = Shelf(BatchOptions(idle_after=60.0)), Taking()
    shelf.put("pole", policy_of(Sums), "1")
    assert asked(shelf, front, "a", begins=True) == "1"
    shelf.tidy(monotonic() + 50.0)
    assert asked(shelf, front, "a") == "1"
    shelf.tidy(monotonic() + 70.0)
    assert list(shelf.versions("pole")) == ["1"]
    shelf.submit("pole", front.request(1.0, "a"))
    assert isinstance(front.take()["a"], SessionLostError)
    shelf.close()


def test_a_version_that_is_served_already_is_refused(shelf: Shelf) -> None:
    for version in ("1", "2"):
        shelf.put("pole", policy_of(Echo), version)
    with pytest.raises(ValueError, match="version '1' of policy 'pole' is served already"):
        shelf.put("pole", policy_of(Echo), "1")


@pytest.mark.parametrize(("name", "value"), [("max_batch", 0), ("max_wait", -0.1), ("max_waiting", 0)])
def test_options_that_would_hold_every_request_up_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, expected at least"):
        Shelf(BatchOptions(**{name: value}))
