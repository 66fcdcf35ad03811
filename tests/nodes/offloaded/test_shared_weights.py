"""Weights go once to each machine: one of its hosts gets them whole, and the others read them in its memory."""

import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lane_clock import LaneClock
from leftovers import held_here, shared_mappings
from remote_hosts import BrokenWire, HostProcess, listening
from remote_rollouts import RawRollouts, await_that, makers, rollouts_on, told
from wide_module import WIDE_BYTES, NumberedModule, damage_third, wide_weights

from rollflow.nodes import RemoteRollouts, Rollout, RolloutHost
from rollflow.nodes.env.workers.lane_supervisor import LanePhase
from rollflow.nodes.modules.weights_codec import to_arrays
from rollflow.nodes.offloaded.shared_weights import WeightsFile, machine, read_weights
from rollflow.stream import Fragment
from rollflow.stream.wire import LaneGrant, Limits, Metrics, Turn, Weights, WeightsShared, encode

HOST, SHARES = "rollflow.nodes.offloaded.rollout_host", "rollflow.nodes.offloaded.weight_shares"
LITTLE = WIDE_BYTES // 4  # more than all else that goes to a few hosts in these tests


@pytest.fixture(autouse=True)
def nobody_is_given_up_for_being_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SHARES}._PATIENCE_S", 1e9)


def weights_of(version: int, module: str | None = None) -> Weights:
    return Weights(version, *to_arrays(wide_weights(version)), module=module)


# One file


@pytest.mark.parametrize("module", [None, "walker"])
def test_weights_in_a_file_are_read_as_they_are(module: str | None) -> None:
    with closing(WeightsFile(weights_of(7, module))) as file:
        found = read_weights(file.shared)
    assert found is not None
    assert (found.version, found.module, found.share, found.others) == (7, module, False, {})
    np.testing.assert_array_equal(found.tensors["wide"], np.full(WIDE_BYTES // 4, 7, np.float32))
    np.testing.assert_array_equal(found.tensors["weight"], np.float32(7))


def test_who_writes_to_what_was_read_changes_it_for_nobody_else() -> None:
    with closing(WeightsFile(weights_of(7))) as file:
        first, second = read_weights(file.shared), read_weights(file.shared)
        assert first is not None
        assert second is not None
        torch.from_numpy(first.tensors["wide"]).zero_()
        assert second.tensors["wide"].min() == 7
        assert read_weights(file.shared).tensors["wide"].min() == 7  # type: ignore[union-attr]


def test_a_file_can_not_be_changed() -> None:
    with closing(WeightsFile(weights_of(7))) as file:
        for change in (
            lambda fd: os.pwrite(fd, b"x", 0),
            lambda fd: os.ftruncate(fd, 8),
            lambda fd: os.ftruncate(fd, 1 << 30),
        ):
            with pytest.raises(OSError, match="not permitted") as caught:
                change(file.shared.descriptor)
            assert caught.value.errno == errno.EPERM


def test_what_was_read_is_there_when_the_file_is_closed_and_nothing_after_that() -> None:
    before = held_here()
    file = WeightsFile(weights_of(7))
    found = read_weights(file.shared)
    file.close()
    file.close()
    assert found is not None
    assert found.tensors["wide"].min() == 7
    assert shared_mappings() == 1
    assert read_weights(file.shared) is None
    del found, file
    assert held_here() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"mark": bytes(16)},
        {"version": 8},
        {"module": "walker"},
        {"size": 1 << 30},
        {"size": 64},
        {"descriptor": 0},
        {"descriptor": 1 << 40},
        {"process": 1 << 40},
        {"process": os.getppid()},
    ],
    ids=str,
)
def test_no_other_file_is_read(wrong: dict[str, Any]) -> None:
    before = held_here()
    with closing(WeightsFile(weights_of(7))) as file:
        assert read_weights(replace(file.shared, **wrong)) is None
    assert held_here() == before


@contextmanager
def made_by_hand(*content: Any, is_sealed: bool = True) -> Iterator[WeightsShared]:
    """A file of the right name with something else in it."""
    mark, data = bytes(range(16)), b"".join(content)
    descriptor = os.memfd_create(f"rollflow-weights-{mark.hex()}", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, data)
        if is_sealed:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        yield WeightsShared(7, os.getpid(), descriptor, len(data), mark)
    finally:
        os.close(descriptor)


def test_a_file_that_could_change_or_holds_something_else_is_not_read() -> None:
    with made_by_hand(*encode(weights_of(7))) as whole:
        assert read_weights(whole) is not None
    with made_by_hand(*encode(weights_of(7)), is_sealed=False) as changeable:
        assert read_weights(changeable) is None
    for content in ([bytes(64)], encode(Metrics({"a": 1})), [b"\xff" * 64], [b"".join(encode(weights_of(7)))[:4096]]):
        with made_by_hand(*content) as other:
            assert read_weights(other) is None


# Hosts of one machine


@contextmanager
def rollout_with(
    stack: ExitStack,
    hosts: int,
    *,
    compression: Any = None,
    cuts: Callable[[], int | None] = lambda: None,
    **options: Any,
) -> Iterator[tuple[Rollout, list[BrokenWire]]]:
    """A rollout, and hosts that `stack` has in threads, each behind a wire of its own that counts; none is late."""
    envs = listening(RemoteRollouts, hosts=hosts, compression=compression)
    wires = [BrokenWire(envs.addresses[0], cuts) for _ in range(hosts)]
    for slot, wire in enumerate(wires):
        stack.callback(wire.close)
        stack.enter_context(rollouts_on(wire.address, makers(slot), module=NumberedModule()))
    settings = {"module": NumberedModule(), "fragment_length": 4, "seed": 0, "step_timeout": None, **options}
    with Rollout(envs, **settings) as rollout:
        yield rollout, wires


def check_weights(fragments: list[Fragment]) -> None:
    """Every step was done with all weights of the version that it names, and a lane's versions only grow."""
    newest: dict[int, int] = {}
    for fragment in fragments:
        versions = fragment.column("policy_version")
        for name in ("weight", "least", "most"):
            np.testing.assert_array_equal(fragment.column(name), versions)
        rows = [newest.get(fragment.lane, 0), *versions[:, 0].tolist()]
        assert rows == sorted(rows)
        newest[fragment.lane] = rows[-1]


def play(rollout: Rollout, hosts: int, versions: range) -> None:
    """Have each host make a fragment with each of these versions, in which the next one is published."""
    fragments = iter(rollout.fragments())
    for version in versions:
        taken = [next(fragments) for _ in range(hosts)]
        assert {fragment.policy_version for fragment in taken} == {version}
        check_weights(taken)
        if version != versions[-1]:
            rollout.publish(wide_weights(version + 1))


def given_by(wires: list[BrokenWire]) -> int:
    """Bytes that hosts were sent."""
    return sum(wire.given for wire in wires)


def test_each_version_goes_to_a_machine_once_and_every_host_acts_with_it() -> None:
    before = held_here()
    with ExitStack() as stack, rollout_with(stack, 3) as (rollout, wires):
        play(rollout, 3, range(5))
        assert 5 * WIDE_BYTES < given_by(wires) < 5 * WIDE_BYTES + LITTLE
    del rollout, wires, stack
    assert held_here() == before


@pytest.mark.parametrize("shares", [True, False])
def test_compressed_weights_take_less_room_on_the_way_and_every_host_acts_with_them(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shares:
        monkeypatch.setattr(f"{HOST}.machine", lambda: None)
    with ExitStack() as stack, rollout_with(stack, 3, compression="zstd") as (rollout, wires):
        play(rollout, 3, range(5))
        assert given_by(wires) < LITTLE


def test_compressed_weights_are_whole_whatever_connections_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HOST}.machine", lambda: None)
    lengths = iter(range(4_000, 16_000, 750))
    with (
        ExitStack() as stack,
        rollout_with(stack, 2, compression="zstd", cuts=lambda: next(lengths, None), prefetch=1) as (rollout, wires),
    ):
        fragments, taken = iter(rollout.fragments()), list[Fragment]()
        for version in range(1, 61):
            rollout.publish(wide_weights(version))
            taken.append(next(fragments))
        while {fragment.lane for fragment in taken if fragment.policy_version == 60} != {0, 1}:
            taken.append(next(fragments))
        assert sum(wire.cuts for wire in wires) > 3
    check_weights(taken)


def test_a_host_whose_weights_are_damaged_on_the_way_gets_them_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage_third(monkeypatch)
    with ExitStack() as stack, rollout_with(stack, 1, compression="zstd") as (rollout, _):
        play(rollout, 1, range(6))
    assert "packed weights, version 2: their checksum is" in caplog.text


def test_a_host_without_the_package_gets_weights_as_they_are_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"{HOST}.available", list)
    with ExitStack() as stack, rollout_with(stack, 1, compression="zstd") as (rollout, wires):
        play(rollout, 1, range(2))
        assert given_by(wires) > 2 * WIDE_BYTES
    assert "can't decompress: it gets weights as they are" in caplog.text


def test_few_weights_go_whole_to_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SHARES}._LEAST_BYTES", 2 * WIDE_BYTES)
    with ExitStack() as stack, rollout_with(stack, 2) as (rollout, wires):
        play(rollout, 2, range(3))
        assert min(wire.given for wire in wires) > 3 * WIDE_BYTES


@pytest.mark.parametrize("name", [None, "{}"], ids=["none", "another"])
def test_hosts_that_name_no_machine_or_others_get_weights_whole(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count()
    monkeypatch.setattr(f"{HOST}.machine", lambda: None if name is None else name.format(next(numbers)))
    with ExitStack() as stack, rollout_with(stack, 2) as (rollout, wires):
        play(rollout, 2, range(2))
        assert min(wire.given for wire in wires) > 2 * WIDE_BYTES


def test_hosts_that_can_not_read_get_weights_whole_and_ask_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fail(shared: WeightsShared) -> None:
        asked.append(shared.version)

    monkeypatch.setattr(f"{HOST}.read_weights", fail)
    with ExitStack() as stack, rollout_with(stack, 3) as (rollout, wires):
        play(rollout, 3, range(6))
        assert min(wire.given for wire in wires) > 6 * WIDE_BYTES
        assert given_by(wires) < 18 * WIDE_BYTES + LITTLE
    assert len(asked) <= 3 * 2 * 3


def test_a_host_that_can_make_no_file_leaves_it_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[WeightsFile] = []

    class Scarce(WeightsFile):
        def __init__(self, weights: Weights) -> None:
            made.append(self)
            if len(made) == 1:
                raise OSError(errno.EMFILE, "too many open files")
            super().__init__(weights)

    monkeypatch.setattr(f"{HOST}.WeightsFile", Scarce)
    with ExitStack() as stack, rollout_with(stack, 3) as (rollout, wires):
        play(rollout, 3, range(4))
        assert 5 * WIDE_BYTES < given_by(wires) < 5 * WIDE_BYTES + LITTLE  # the first version went twice


def test_versions_that_are_published_faster_than_they_are_shared_starve_nobody() -> None:
    with ExitStack() as stack, rollout_with(stack, 3, prefetch=2) as (rollout, _):
        fragments = iter(rollout.fragments())
        taken: list[Fragment] = []
        for version in range(1, 60):
            rollout.publish(wide_weights(version))
            taken.append(next(fragments))
        while {fragment.lane for fragment in taken if fragment.policy_version == 59} != {0, 1, 2}:
            taken.append(next(fragments))
    check_weights(taken)


def test_a_host_whose_weights_come_by_another_is_not_held_up_by_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SHARES}._PATIENCE_S", 0.05)
    envs = listening(RemoteRollouts)
    with (
        rollouts_on(envs.addresses[0], makers(0), module=NumberedModule()),
        Rollout(envs, module=NumberedModule(), fragment_length=4, seed=0, prefetch=1) as rollout,
        closing(RawRollouts(envs.addresses[0], module=NumberedModule(), machine=machine())) as silent,
    ):
        fragments, taken = iter(rollout.fragments()), []
        turn = silent.next_turn_beside(fragments, taken)
        assert isinstance(turn, Turn)  # it has the first weights, was asked to share them, and says nothing
        rollout.publish(wide_weights(1))
        while not taken or taken[-1].policy_version != 1:
            taken.append(next(fragments))
    check_weights(taken)


def test_a_host_that_begins_anew_keeps_no_file_of_the_session_before() -> None:
    with RolloutHost(makers(0), module=NumberedModule()) as host:
        host._files[None] = file = WeightsFile(weights_of(50))
        host._welcomed(SimpleNamespace(resumed=False, lanes=[LaneGrant(0, 1, 0, 0)]))  # type: ignore[arg-type]
        assert host._files == {}
        assert read_weights(file.shared) is None


def test_a_host_that_waits_for_another_s_weights_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LaneClock(monkeypatch)
    envs = listening(RemoteRollouts)
    with (
        rollouts_on(envs.addresses[0], makers(0), module=NumberedModule()),
        Rollout(
            envs, module=NumberedModule(), fragment_length=4, seed=0, prefetch=1, step_timeout=1e3, reset_timeout=1e3
        ) as rollout,
        ThreadPoolExecutor(1) as pool,
    ):
        with closing(RawRollouts(envs.addresses[0], module=NumberedModule(), machine=machine())) as silent:
            fragments, taken = iter(rollout.fragments()), []
            silent.next_turn_beside(fragments, taken)  # it is asked to share the first weights
            rollout.publish(wide_weights(1))
            equipment, status = rollout.environments._equipment, rollout.environments.carrier.lanes[0].status

            def play() -> None:
                while not taken or taken[-1].policy_version != 1:
                    taken.append(next(fragments))

            playing = pool.submit(play)
            await_that(lambda: [host.session.lanes[0] for host in equipment.held_up] == [0])

            def has_its_time() -> bool:
                clock.go_on(rollout, 0.0)  # a clock that jumps in the middle of a look finds it late until the next one
                return clock.left(rollout, 0) == 1000.0 and status.phase is LanePhase.STEPPING

            for _ in range(3):
                clock.go_on(rollout, 1001.0)
                await_that(has_its_time)
        playing.result()
        assert equipment.held_up == []
    check_weights(taken)


def test_the_patience_with_a_silent_host_is_a_part_of_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    LaneClock(monkeypatch)  # stands still: no lane is late
    envs = listening(RemoteRollouts)
    with (
        rollouts_on(envs.addresses[0], makers(0), module=NumberedModule()),
        Rollout(
            envs, module=NumberedModule(), fragment_length=4, seed=0, prefetch=1, step_timeout=0.2, reset_timeout=None
        ) as rollout,
        closing(RawRollouts(envs.addresses[0], module=NumberedModule(), machine=machine())) as silent,
    ):
        fragments, taken = iter(rollout.fragments()), []
        silent.next_turn_beside(fragments, taken)
        rollout.publish(wide_weights(1))
        while not taken or taken[-1].policy_version != 1:
            taken.append(next(fragments))
    check_weights(taken)


class Noting(RawRollouts):
    """A host made by hand that notes the kinds of what it is sent."""

    def __init__(self, address: Any) -> None:
        self.kinds: list[str] = []
        super().__init__(address, module=NumberedModule(), machine=machine())

    def next_event(self) -> Any:
        event = super().next_event()
        self.kinds.append(event.kind)
        return event


def test_a_host_that_comes_later_is_told_where_the_newest_lie_and_sent_none() -> None:
    with ExitStack() as stack, rollout_with(stack, 2, prefetch=1) as (rollout, _):
        fragments, taken = iter(rollout.fragments()), [next(iter(rollout.fragments()))]
        rollout.publish(wide_weights(1))
        while {fragment.lane for fragment in taken if fragment.policy_version == 1} != {0, 1}:
            taken.append(next(fragments))
        [address] = rollout.environments.carrier.gateway._envs.addresses
        with closing(Noting(address)) as host:
            turn = host.next_turn_beside(fragments, taken)
            assert host.kinds == ["welcome", "settings", "shared", "turn"]
            np.testing.assert_array_equal(host.made(turn).columns["most"][-4:], 1)


# Processes


class Processes:
    """A rollout, and hosts in processes of their own, each behind a wire that counts; a lane is on each."""

    def __init__(self, count: int, stack: ExitStack) -> None:
        envs = listening(RemoteRollouts, hosts=count, limits=Limits(heartbeat_s=60.0, grace_s=0.2))
        self.wires = [BrokenWire(envs.addresses[0], lambda: None) for _ in range(count)]
        self.hosts: list[HostProcess] = []
        for slot, wire in enumerate(self.wires):
            stack.callback(wire.close)
            host = HostProcess(wire.address, told(slot), name=str(slot), kind=RolloutHost, module="wide_module")
            stack.callback(host.end)
            self.hosts.append(host)
        rollout = Rollout(envs, module=NumberedModule(), fragment_length=4, seed=0, step_timeout=None)
        self.rollout = stack.enter_context(rollout)
        self.left = count
        self._fragments = iter(self.rollout.fragments())

    def play(self, version: int) -> None:
        """Publish a version, and have every host that is left make a fragment with it."""
        self.rollout.publish(wide_weights(version))
        taken = [next(self._fragments) for _ in range(self.left)]
        assert [fragment.policy_version for fragment in taken] == [version] * self.left
        check_weights(taken)

    def sharing(self) -> int:
        """The number of the host that gets the weights whole."""
        [share] = self.rollout.environments._equipment._shares._shares.values()
        return int(share.stock.host.session.hello.name)

    def signal(self, host: int, number: int) -> None:
        self.hosts[host].signal(number)

    @property
    def given(self) -> int:
        """Bytes that hosts were sent."""
        return given_by(self.wires)


@pytest.mark.slow
def test_processes_share_weights_whichever_of_them_is_killed() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        run = Processes(4, stack)
        for version in range(1, 4):
            run.play(version)
        assert 3 * WIDE_BYTES < run.given < 3 * WIDE_BYTES + LITTLE
        # The host that has shared them all dies between two versions.
        run.signal(run.sharing(), signal.SIGKILL)
        run.left, given = 3, run.given
        run.play(4)
        assert run.given < given + 2 * WIDE_BYTES + LITTLE
        # Another dies with weights that the others wait for: all stand still until it is known which.
        for host in range(4):
            run.signal(host, signal.SIGSTOP)
        run.left, given, before = 2, run.given, [wire.given for wire in run.wires]
        playing = pool.submit(run.play, 5)
        grown: list[bool] = []

        def is_sent() -> bool:
            grown[:] = [wire.given > had + WIDE_BYTES for wire, had in zip(run.wires, before, strict=True)]
            return any(grown)

        await_that(is_sent)
        for host, has_weights in enumerate(grown):
            run.signal(host, signal.SIGKILL if has_weights else signal.SIGCONT)
        playing.result()
        assert run.given < given + 2 * WIDE_BYTES + LITTLE
        run.play(6)
        assert run.given < given + 3 * WIDE_BYTES + LITTLE
        # Files of earlier versions are gone.
        left = [host.process.pid for host in run.hosts if host.process.poll() is None]
        assert len({name for pid in left for name in weights_open_in(pid)}) == 1
    assert weights_open_in(os.getpid()) == []


def weights_open_in(pid: int) -> list[str]:
    """Return the files of weights that a process has open."""
    links = [str(os.readlink(each)) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]
    return [link for link in links if "rollflow-weights" in link]
