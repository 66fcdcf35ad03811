"""Versions of a policy: which of them acts, and for which sessions."""

import threading
from time import monotonic
from typing import Any

import pytest
from held_envs import await_that
from served_policies import Echo, Held, Sums, Taking, policy_of

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


def test_a_new_version_takes_the_sessions_which_begin_anew(shelf: Shelf) -> None:
    front = Taking()
    shelf.put("pole", policy_of(Sums), "1")
    assert asked(shelf, front, "a", begins=True) == "1"
    shelf.put("pole", policy_of(Sums), "2")
    assert asked(shelf, front, "b", begins=True) == "2"
    shelf.submit("pole", front.request(1.0, "a"))
    error = front.take()["a"]
    assert isinstance(error, SessionLostError)
    assert "or a new version of the policy acts; expected 'begins': true" in str(error)
    assert asked(shelf, front, "a", begins=True) == "2"
    assert shelf.batcher("pole").version == "2"


def test_sessions_without_memory_go_on_with_a_new_version(shelf: Shelf) -> None:
    front = Taking()
    for version in ("1", "2"):
        shelf.put("pole", policy_of(Echo), version)
        assert asked(shelf, front, "a") == version


def test_what_waits_is_answered_by_the_version_that_it_came_to(shelf: Shelf) -> None:
    front, held = Taking(), Held(policy_of(Echo))
    shelf.put("pole", held, "1")
    shelf.submit("pole", front.request(1.0, "a"))
    held.begun.acquire()
    shelf.submit("pole", front.request(1.0, "b"))
    putting = threading.Thread(target=lambda: shelf.put("pole", policy_of(Echo), "2"))
    putting.start()
    await_that(lambda: shelf.batcher("pole").version == "2")
    held.go.release(2)
    putting.join()
    assert {session: version_of(each) for session, each in front.take(2).items()} == {"a": "1", "b": "1"}


def test_an_idle_session_is_forgotten() -> None:
    shelf, front = Shelf(BatchOptions(idle_after=60.0)), Taking()
    shelf.put("pole", policy_of(Sums), "1")
    assert asked(shelf, front, "a", begins=True) == "1"
    shelf.tidy(monotonic() + 50.0)
    assert asked(shelf, front, "a") == "1"
    shelf.tidy(monotonic() + 70.0)
    shelf.submit("pole", front.request(1.0, "a"))
    assert isinstance(front.take()["a"], SessionLostError)
    shelf.close()


def test_a_version_that_is_served_already_is_refused(shelf: Shelf) -> None:
    shelf.put("pole", policy_of(Echo), "1")
    with pytest.raises(ValueError, match="version '1' of policy 'pole' is served already"):
        shelf.put("pole", policy_of(Echo), "1")


@pytest.mark.parametrize(("name", "value"), [("max_batch", 0), ("max_wait", -0.1), ("max_waiting", 0)])
def test_options_that_would_hold_every_request_up_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, expected at least"):
        Shelf(BatchOptions(**{name: value}))
