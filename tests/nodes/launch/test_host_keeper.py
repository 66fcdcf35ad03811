"""Hosts that are kept alive: which are started again, and when that is given up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from remote_rollouts import await_that

from rollflow.nodes.launch.on_hosts import HostKeeper
from rollflow.nodes.launch.process_launcher import Handle
from rollflow.stream import EnvError

pytestmark = pytest.mark.wait_times(first_pause_s=0.001)


class Launched:
    """A launcher whose programs are names alone, which a test has end as it likes; counts the starts of each.

    ends    how a program ends as soon as it is started; "": it does not
    """

    def __init__(self, *names: str, ends: str = "") -> None:
        self.starts = {Handle(name): 1 for name in names}
        self.running = set(self.starts)
        self.ends = ends
        self.is_stopped = False
        self.fault: Exception | None = None
        for handle in self.starts if ends else ():
            self.end(handle, ends)

    def end(self, handle: Handle, how: str) -> None:
        """Have a program end."""
        handle.end = how
        self.running.discard(handle)

    def start(self, n: int, call: bytes) -> list[Handle]:
        return list(self.starts)

    def alive(self) -> list[Handle]:
        if self.fault is not None:
            raise self.fault
        return list(self.running)

    def logs(self, handle: Handle) -> str:
        return f"start {self.starts[handle]}\nsee docs/index.md\n"

    def restart(self, handle: Handle) -> None:
        self.starts[handle] += 1
        handle.end = ""
        self.running.add(handle)
        if self.ends:
            self.end(handle, self.ends)

    def stop(self) -> None:
        self.is_stopped = True


@contextmanager
def kept(launcher: Launched, **times: float) -> Iterator[HostKeeper]:
    keeper = HostKeeper(launcher, list(launcher.starts), look_s=0.001, **times)
    try:
        yield keeper
    finally:
        keeper.close()
    assert launcher.is_stopped
    assert "rollflow hosts" not in [thread.name for thread in threading.enumerate()]


def test_a_host_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    launcher = Launched("one", "other")
    one, other = launcher.starts
    with kept(launcher) as keeper:
        launcher.end(one, "was killed by SIGKILL")
        await_that(lambda: launcher.starts == {one: 2, other: 1})
        assert keeper.problems == ["host one was killed by SIGKILL: start 1"]
        keeper.check(is_first=True)
    assert "host one was killed by SIGKILL; it wrote:\nstart 1\n" in caplog.text


def test_a_host_that_has_been_told_goodbye_is_not() -> None:
    launcher = Launched("one", "other")
    one, other = launcher.starts
    with kept(launcher) as keeper:
        launcher.end(one, "")
        launcher.end(other, "exited with code 1")
        await_that(lambda: launcher.starts[other] == 2)
        assert launcher.starts[one] == 1
        assert keeper.problems == ["host other exited with code 1: start 1"]


def test_a_host_that_fails_twice_before_a_rollout_has_begun_says_that_all_will() -> None:
    launcher = Launched("one", "other")
    with kept(launcher) as keeper:
        for starts in (1, 2):
            [one, _] = launcher.starts
            await_that(lambda: launcher.starts[one] == starts)  # noqa: B023
            keeper.check(is_first=True)
            launcher.end(one, "exited with code 1")
        await_that(lambda: keeper.problems == ["host one exited with code 1: start 2"])
        with pytest.raises(EnvError, match="hosts fail again and again: host one exited with code 1: start 2"):
            keeper.check(is_first=True)
        keeper.check(is_first=False)


def test_hosts_that_fail_again_and_again_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    launcher = Launched("one", ends="exited with code 3")
    with kept(launcher) as keeper:
        await_that(lambda: "is given up" in caplog.text)
        with pytest.raises(EnvError, match="hosts fail again and again: host one exited with code 3: start 6"):
            keeper.check(is_first=False)
    assert list(launcher.starts.values()) == [6]


def test_a_host_that_ran_for_long_may_fail_as_often_as_one_that_never_did() -> None:
    launcher = Launched("one", ends="exited with code 3")
    with kept(launcher, forgiven_s=0.0) as keeper:
        await_that(lambda: list(launcher.starts.values()) > [9])
        keeper.check(is_first=True)


@pytest.mark.wait_times(first_word_s=0.0)
def test_what_hosts_wait_for_is_said_once_for_all(caplog: pytest.LogCaptureFixture) -> None:
    launcher = Launched("one", "other")
    with kept(launcher) as keeper:
        for handle in launcher.starts:
            handle.waits = "wait for room"
        await_that(lambda: "hosts are not there: wait for room\n" in caplog.text)
        assert keeper.problems == ["wait for room"]
        for handle in launcher.starts:
            handle.waits = ""
        assert keeper.problems == []


def test_a_launcher_that_fails_ends_the_rollout() -> None:
    launcher = Launched("one")
    with kept(launcher) as keeper:
        launcher.fault = ConnectionError("the engine is gone")
        with pytest.raises(EnvError, match="hosts can't be looked after: the engine is gone"):
            while True:
                keeper.check(is_first=False)
