"""Hosts that are kept alive: which are started again, and when that is given up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from remote_rollouts import await_that

from rollflow.nodes.launch.on_hosts import HostKeeper
from rollflow.stream import EnvError

pytestmark = pytest.mark.wait_times(first_pause_s=0.001)


class Program:
    """A program that is a name alone, which a test has end as it likes."""

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log = name, log
        self.end: str | None = None

    def kill(self) -> None:
        assert self.end


class Launched:
    """A launcher of such programs; counts the starts of each.

    ends    how a program ends as soon as it is started; "": it does not
    """

    def __init__(self, *names: str, ends: str = "") -> None:
        self.names, self.ends = names, ends
        self.starts = dict.fromkeys(names, 0)
        self.programs: dict[str, Program] = {}  # the newest of each name
        self.told = ""  # what they wait for
        self.stopped: list[Program] = []
        self.fault: Exception | None = None

    def run(self, number: int, call: bytes) -> Program:
        assert call == b"call"
        name = self.names[number]
        self.starts[name] += 1
        self.programs[name] = program = Program(name, f"start {self.starts[name]}\nsee docs/index.md\n")
        program.end = self.ends or None
        return program

    def waits(self, running: list[int]) -> str:
        if self.fault is not None:
            raise self.fault
        return self.told if running == list(range(len(self.names))) else ""

    def stop(self, programs: list[Program]) -> None:
        self.stopped += programs


@contextmanager
def kept(launcher: Launched, **times: float) -> Iterator[HostKeeper]:
    keeper = HostKeeper(launcher, len(launcher.names), b"call", look_s=0.001, **times)  # type: ignore[arg-type]
    try:
        yield keeper
    finally:
        keeper.close()
    assert launcher.stopped == list(launcher.programs.values())
    assert "rollflow hosts" not in [thread.name for thread in threading.enumerate()]


def test_hosts_that_can_not_all_be_started_are_stopped() -> None:
    launcher = Launched("one")
    with pytest.raises(IndexError):
        HostKeeper(launcher, 2, b"call")  # type: ignore[arg-type]
    assert launcher.stopped == list(launcher.programs.values())


def test_a_host_that_fails_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    launcher = Launched("one", "other")
    with kept(launcher) as keeper:
        launcher.programs["one"].end = "was killed by SIGKILL"
        await_that(lambda: launcher.starts == {"one": 2, "other": 1})
        assert keeper.problems == ["host one was killed by SIGKILL: start 1"]
        keeper.check(is_first=True)
    assert "host one was killed by SIGKILL; it wrote:\nstart 1\n" in caplog.text


def test_a_host_that_has_been_told_goodbye_is_not() -> None:
    launcher = Launched("one", "other")
    with kept(launcher) as keeper:
        launcher.programs["one"].end = ""
        launcher.programs["other"].end = "exited with code 1"
        await_that(lambda: launcher.starts["other"] == 2)
        assert launcher.starts["one"] == 1
        assert keeper.problems == ["host other exited with code 1: start 1"]


def test_a_host_that_fails_twice_before_a_rollout_has_begun_says_that_all_will() -> None:
    launcher = Launched("one", "other")
    with kept(launcher) as keeper:
        for starts in (1, 2):
            await_that(lambda: launcher.starts["one"] == starts)  # noqa: B023
            keeper.check(is_first=True)
            launcher.programs["one"].end = "exited with code 1"
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
        launcher.told = "wait for room"
        await_that(lambda: "hosts are not there: wait for room\n" in caplog.text)
        assert keeper.problems == ["wait for room"]
        launcher.told = ""
        await_that(lambda: keeper.problems == [])


def test_a_launcher_that_fails_ends_the_rollout() -> None:
    launcher = Launched("one")
    with kept(launcher) as keeper:
        launcher.fault = ConnectionError("the engine is gone")
        with pytest.raises(EnvError, match="hosts can't be looked after: the engine is gone"):
            while True:
                keeper.check(is_first=False)
