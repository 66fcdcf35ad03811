"""Hosts that are kept alive: which are started again, and when that is given up."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from remote_rollouts import await_that

from rollflow.nodes.launch import host_keeper, scaling
from rollflow.nodes.launch.host_keeper import HostKeeper
from rollflow.nodes.launch.launcher import Handle
from rollflow.nodes.launch.scaling import HostRange, HostScaler
from rollflow.stream import EnvError


class Launched:
    """A launcher whose programs are names alone, which a test has end as it likes; counts the starts of each.

    ends    how a program ends as soon as it is started; "": it does not
    """

    def __init__(self, *names: str, ends: str = "") -> None:
        self.starts = {Handle(name): 1 for name in names}
        self.running = set(self.starts)
        self.ends = ends
        self.is_stopped = False
        self.added = 0
        self.fault: Exception | None = None
        for handle in self.starts if ends else ():
            self.end(handle, ends)

    def end(self, handle: Handle, how: str) -> None:
        """Have a program end."""
        handle.end = how
        self.running.discard(handle)

    def start(self, n: int, command: Sequence[str], secret: str, resources: Mapping[str, float]) -> list[Handle]:
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

    def scale(self, n: int) -> list[Handle]:
        running = [handle for handle in self.starts if handle in self.running][:n]
        self.starts, self.running = {handle: self.starts[handle] for handle in running}, set(running)
        while len(self.starts) < n:
            self.added += 1
            handle = Handle(f"added {self.added}")
            self.starts[handle] = 1
            self.running.add(handle)
        return list(self.starts)

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keeper, "LOOK_S", 0.001)
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.001)


@contextmanager
def kept(launcher: Launched, scaler: HostScaler | None = None) -> Iterator[HostKeeper]:
    keeper = HostKeeper(launcher, list(launcher.starts), scaler)
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


def test_what_becomes_of_each_host_is_said() -> None:
    launcher = Launched("one", "other", "third")
    one, other, third = launcher.starts
    with kept(launcher) as keeper:
        launcher.end(one, "")
        await_that(lambda: keeper.states["one"] == "has ended")
        assert keeper.states["other"].startswith("runs for ")
        assert not keeper.is_done
        launcher.end(other, "was killed by SIGKILL")
        await_that(lambda: launcher.starts[other] == 2)
        for handle in (other, third):
            launcher.end(handle, "")
        await_that(lambda: keeper.is_done)
        assert keeper.states == dict.fromkeys(["one", "other", "third"], "has ended")


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


def test_a_host_that_ran_for_long_may_fail_as_often_as_one_that_never_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keeper, "_FORGIVEN_S", 0.0)
    launcher = Launched("one", ends="exited with code 3")
    with kept(launcher) as keeper:
        await_that(lambda: list(launcher.starts.values()) > [9])
        keeper.check(is_first=True)


def test_what_hosts_wait_for_is_said_once_for_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_WORD_S", 0.0)
    launcher = Launched("one", "other")
    with kept(launcher) as keeper:
        for handle in launcher.starts:
            handle.waits = "wait for room"
        await_that(lambda: "hosts are not there: wait for room\n" in caplog.text)
        assert keeper.problems == ["wait for room"]
        for handle in launcher.starts:
            handle.waits = ""
        assert keeper.problems == []


def test_there_are_more_hosts_where_they_hold_the_run_back_and_fewer_where_they_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "WINDOW_S", 0.02)
    launcher = Launched("one")
    busy = 1.0
    with kept(launcher, HostScaler(HostRange(1, 1, 3))) as keeper:
        keeper.begin(lambda: (len(launcher.starts), busy))
        await_that(lambda: len(launcher.starts) == 3)
        assert "1 hosts are to be 2: in the last 0.0 s hosts were at work for 100% of the time" in caplog.text
        [first, *_, third] = launcher.starts
        launcher.end(third, "was killed by SIGKILL")
        await_that(lambda: launcher.starts[third] == 2)
        busy = 0.0
        await_that(lambda: list(launcher.starts) == [first])
        assert "3 hosts are to be 1: " in caplog.text


def test_others_take_the_place_of_hosts_that_are_given_up_where_more_are_to_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "WINDOW_S", 0.02)
    launcher = Launched("one", "other")
    _, other = launcher.starts
    with kept(launcher, HostScaler(HostRange(2, 1, 2))) as keeper:
        keeper.begin(lambda: (len(launcher.running), 1.0))
        while "is given up" not in caplog.text:
            await_that(lambda: other in launcher.running or "is given up" in caplog.text)
            launcher.end(other, "exited with code 3")
        await_that(lambda: [handle.name for handle in launcher.starts] == ["one", "added 1"])
        assert "1 hosts are to be 2: " in caplog.text
        await_that(lambda: keeper.states.keys() == {"one", "added 1"})


def test_a_launcher_that_fails_ends_the_rollout() -> None:
    launcher = Launched("one")
    with kept(launcher) as keeper:
        launcher.fault = ConnectionError("the engine is gone")
        with pytest.raises(EnvError, match="hosts can't be looked after: the engine is gone"):
            while True:
                keeper.check(is_first=False)
