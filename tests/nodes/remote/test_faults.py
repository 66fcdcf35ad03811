"""Hosts that are killed, frozen, cut off, or misbehave: every transition is accounted for, and the others go on."""

import gc
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doomed import Doomed, lives_of, rewards_by_slot
from numbered import NumberedEnv, NumberedModule
from remote_hosts import SHORT, BrokenWire, HostProcess, RawHost, hosting, listening

from rollflow.nodes import EnvHost, RemoteEnvs, Rollout
from rollflow.stream import EnvError, Fragment
from rollflow.stream.errors import WireError
from rollflow.stream.wire import Goodbye, Limits, Reset, Step, encode

HASTY = Limits(heartbeat_s=0.3, grace_s=0.5, handshake_s=2.0)


def makers(*slots: int, **options: Any) -> list[Any]:
    return [partial(NumberedEnv, slot, **options) for slot in slots]


def told(*slots: int, **options: Any) -> list[Any]:
    """The same for another process."""
    return [((slot,), options) for slot in slots]


def rollout_over(envs: RemoteEnvs, **options: Any) -> Rollout:
    return Rollout(envs, module=NumberedModule(), **{"fragment_length": 8, "seed": 0, **options})


def slots_of(fragments: list[Fragment]) -> set[int]:
    return set(rewards_by_slot(fragments))


def taken_until(fragments: Iterator[Fragment], enough: Callable[[list[Fragment]], bool]) -> list[Fragment]:
    taken: list[Fragment] = []
    while not enough(taken):
        taken.append(next(fragments))
    return taken


def check_laws(fragments: list[Fragment], lost: dict[str, int], slots_lost: int) -> None:
    """Steps of a life are there from the first on, without gap or repeat; chunks join; no more is lost than is told."""
    by_slot: dict[int, list[Any]] = {}
    for fragment in sorted(fragments, key=lambda fragment: (fragment.lane, fragment.sequence)):
        for chunk in fragment.episodes():
            by_slot.setdefault(int(chunk.get_observations(0)[0]), []).append(chunk)
    for steps in rewards_by_slot(fragments).values():
        lives_of(steps)
    for chunks in by_slot.values():
        for before, after in pairwise(chunks):
            assert (before.id_ == after.id_) == (not before.is_done)
            if before.id_ == after.id_:
                assert after.t_started == before.t_started + len(before)
        for chunk in chunks:
            observations = chunk.get_observations(slice(0, None))
            assert observations[:, 2].tolist() == list(range(chunk.t_started, chunk.t_started + len(chunk) + 1))
            np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), observations[:-1])
    assert set(lost) <= {"workers", "closed"}
    assert lost.get("workers", 0) <= slots_lost


@pytest.mark.parametrize("step", [0, 1, 21, 24, 30])
def test_a_host_that_is_killed_ends_its_own_episodes_and_no_others(step: int, tmp_path: Path) -> None:
    envs = listening(hosts=2, limits=HASTY)
    doomed = [((slot, tmp_path, "kill", step, 9), {"lengths": (100, 200)}) for slot in (0, 1)]
    victim = HostProcess(envs.addresses[0], doomed, name="victim", env=Doomed)
    try:
        with hosting(envs.addresses[0], makers(2, 3)), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: len(taken) > 12)
            rollout.drain()
            taken += list(fragments)
    finally:
        victim.end()
    check_laws(taken, rollout.lost, slots_lost=2)
    assert [rewards_by_slot(taken).get(slot, []) for slot in (0, 1)] == [list(range(1, step + 1))] * 2
    lost = [chunk.custom_data["lost"] for f in taken for chunk in f.episodes() if "lost" in chunk.custom_data]
    assert len(lost) == (2 if step % 8 else 0)  # what ended with a fragment has been handed out
    assert all("victim" in reason and "not back within 0.5 s" in reason for reason in lost)


def test_a_host_that_freezes_and_wakes_goes_on_where_it_was() -> None:
    envs = listening(limits=Limits(heartbeat_s=0.2, grace_s=30.0))
    host = HostProcess(envs.addresses[0], told(0, 1))
    try:
        with rollout_over(envs, num_fragments=40) as rollout:
            fragments = iter(rollout.fragments())
            taken = [next(fragments) for _ in range(3)]
            host.signal(signal.SIGSTOP)
            gateway = rollout.environments._gateway
            rest: list[Fragment] = []
            reader = threading.Thread(target=lambda: rest.extend(fragments))
            reader.start()
            while not any(each.lost_at is not None for each in gateway.hosts.values()):
                time.sleep(0.01)  # until it is taken for lost
            host.signal(signal.SIGCONT)
            reader.join()
            taken += rest
        assert rollout.lost == {}
    finally:
        host.end()
    with Rollout(makers(0, 1), module=NumberedModule(), fragment_length=8, seed=0, num_fragments=40) as inline:
        expected = list(inline.fragments())
    assert len(taken) == len(expected) == 40
    for mine, other in zip(taken, expected, strict=True):
        np.testing.assert_array_equal(mine.column("obs"), other.column("obs"))
        np.testing.assert_array_equal(mine.column("actions"), other.column("actions"))


@pytest.mark.slow
def test_a_connection_cut_a_thousand_times_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.nodes.remote.env_host._FIRST_RETRY_S", 0.001)
    rng = random.Random(0)
    envs = listening()
    wire = BrokenWire(envs.addresses[0], lambda: rng.randrange(1, 4000))
    logging.getLogger("rollflow").setLevel(logging.ERROR)
    try:
        with hosting(wire.address, makers(0, 1, 2), lanes=2), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            taken = taken_until(fragments, lambda taken: wire.cuts >= 1000)
            rollout.drain()
            taken += list(fragments)
    finally:
        wire.close()
        logging.getLogger("rollflow").setLevel(logging.NOTSET)
    check_laws(taken, rollout.lost, slots_lost=3)
    assert rollout.lost.get("workers", 0) <= 3


def test_a_gateway_that_is_killed_and_started_again_gets_its_hosts_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from numbered import NumberedModule\n"
        "from rollflow.nodes import RemoteEnvs, Rollout\n"
        f"with Rollout(RemoteEnvs.listen({address!r}), module=NumberedModule(), fragment_length=8) as rollout:\n"
        "    for fragment in rollout.fragments():\n"
        "        print(fragment.sequence, flush=True)\n"
    )
    with hosting(address, makers(0, 1)):
        first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        while int(first.stdout.readline()) < 3:
            pass
        first.kill()
        first.communicate()
        with rollout_over(RemoteEnvs.listen(address), num_fragments=4) as rollout:
            taken = list(rollout.fragments())
    assert rollout.lost == {}
    for steps in rewards_by_slot(taken).values():
        assert steps == list(range(steps[0], steps[0] + 32))


MISBEHAVIOUR: dict[str, tuple[Callable[[RawHost], None], str]] = {
    "a NaN reward": (
        lambda raw: raw.send(raw.rows(raw.next_of(Step), rewards=np.array([0.0, np.nan]))),
        "step 2 of lane 1: the reward of slot 1 is nan, expected a finite number",
    ),
    "a wrong shape": (
        lambda raw: raw.send(raw.rows(raw.next_of(Step), obs=np.zeros((2, 4), np.int64))),
        r"step 2 of lane 1: obs is .*, expected",
    ),
    "another dtype": (
        lambda raw: raw.send(raw.rows(raw.next_of(Step), obs=np.zeros((2, 3), np.float64))),
        r"step 2 of lane 1: obs is .*, expected",
    ),
    "two GB": (
        lambda raw: raw.sock.sendall((2 << 30).to_bytes(4, "little")),
        "frame of 2147483648 bytes, expected at most",
    ),
    "noise": (lambda raw: raw.sock.sendall(b"GET / HTTP/1.1\r\n\r\n"), "frame of .* bytes, expected"),
    "an answer to nothing": (
        lambda raw: raw.send(raw.rows(Step(1, 99, None))),
        "rows 99 of lane 1: nothing above number",
    ),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_host_that_breaks_the_protocol_is_told_so_and_leaves(name: str) -> None:
    misbehave, expected = MISBEHAVIOUR[name]
    envs = listening(hosts=1)
    with hosting(envs.addresses[0], makers(0, 1)), rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0])
        raw.answer(raw.next_of(Reset))
        misbehave(raw)
        with pytest.raises(WireError, match=expected):
            raise raw.refusal()
        taken += [next(fragments) for _ in range(5)]
        rollout.drain()
        taken += list(fragments)
    check_laws([f for f in taken if f.lane == 0], rollout.lost, slots_lost=2)
    assert len(rewards_by_slot(taken)[1]) > 30


def test_half_a_frame_and_silence_is_a_lost_host() -> None:
    envs = listening(limits=HASTY)
    with hosting(envs.addresses[0], makers(0, 1)), rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0])
        raw.answer(raw.next_of(Reset))
        for _ in range(3):
            raw.answer(raw.next_of(Step))
        frame = b"".join(encode(raw.rows(raw.next_of(Step))))
        raw.sock.sendall(frame[: len(frame) // 2])
        taken += taken_until(fragments, lambda more: any(f.losses for f in more))
        rollout.drain()
        taken += list(fragments)
        raw.sock.close()
    reasons = {loss.reason for f in taken for loss in f.losses}
    assert any("raw" in reason and "silent for" in reason for reason in reasons)
    check_laws([f for f in taken if f.lane == 0], rollout.lost, slots_lost=4)


def test_a_stranger_who_says_nothing_is_shown_the_door() -> None:
    envs = listening(limits=HASTY)
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        with socket.create_connection((envs.addresses[0].host, envs.addresses[0].port)) as stranger:
            stranger.settimeout(10)
            next(fragments)
            assert b"the handshake is not over after 2 s" in b"".join(iter(lambda: stranger.recv(4096), b""))
        next(fragments)


def test_a_wrong_secret_is_told_to_both_and_nobody_else_notices(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(secret="right")
    with hosting(envs.addresses[0], makers(0), secret="right"), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        with EnvHost(makers(1), secret="wrong") as stranger, pytest.raises(WireError, match="has another secret"):
            stranger.connect(str(envs.addresses[0]))
        with EnvHost(makers(1)) as stranger, pytest.raises(WireError, match="the gateway asks for a secret"):
            stranger.connect(str(envs.addresses[0]))
        next(fragments)
    assert "has another secret" in caplog.text


def test_another_version_and_other_spaces_are_refused_by_name() -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        next(iter(rollout.fragments()))
        with pytest.raises(WireError, match=r"hello.versions is 2 to 3, expected some with 1"):
            raise RawHost(envs.addresses[0], versions=(2, 3)).refusal()
        with (
            EnvHost("CartPole-v1") as other,
            pytest.raises(WireError, match=r"hello.observation_space is .*, expected"),
        ):
            other.connect(str(envs.addresses[0]))


def test_a_hung_simulator_is_named_and_its_episode_ended() -> None:
    hangs, go_on = threading.Event(), threading.Event()

    class Hanging(NumberedEnv):
        def step(self, action: Any) -> Any:
            if self.life == 20 and not go_on.is_set():
                hangs.set()
                go_on.wait()
            return super().step(action)

    def release(rollout: Rollout) -> None:
        while not rollout.lost:
            time.sleep(0.01)  # until the step is given up
        go_on.set()

    envs = listening()
    hanging = partial(Hanging, 0, lengths=(50, 60))
    with (
        hosting(envs.addresses[0], [hanging, *makers(1)], lanes=2, name="sim"),
        rollout_over(envs, step_timeout=0.3) as rollout,
    ):
        releasing = threading.Thread(target=release, args=(rollout,))
        releasing.start()
        fragments = iter(rollout.fragments())
        taken = taken_until(fragments, lambda taken: hangs.is_set() and len(taken) > 12)
        rollout.drain()
        taken += list(fragments)
    releasing.join()
    lost = [chunk.custom_data["lost"] for f in taken for chunk in f.episodes() if "lost" in chunk.custom_data]
    assert lost
    assert "host sim (tcp://127.0.0.1:" in lost[0]
    assert "lane 0, slot 0: no answer to a step within 0.3 s" in lost[0]
    others = [f for f in taken if slots_of([f]) <= {1}]
    check_laws(others, rollout.lost, slots_lost=2)


def test_an_environment_that_raises_is_made_again_and_says_why() -> None:
    class Breaking(NumberedEnv):
        broken = False

        def step(self, action: Any) -> Any:
            if self.life == 10 and not Breaking.broken:
                Breaking.broken = True
                raise RuntimeError("it broke")
            return super().step(action)

    envs = listening()
    with hosting(envs.addresses[0], [partial(Breaking, 0, lengths=(50, 60))]), rollout_over(envs) as rollout:
        fragments = iter(rollout.fragments())
        taken = taken_until(fragments, lambda taken: sum(f.num_steps for f in taken) > 40)
    lost = [chunk.custom_data["lost"] for f in taken for chunk in f.episodes() if "lost" in chunk.custom_data]
    assert len(lost) == 1
    assert "RuntimeError: it broke (slot 0)" in lost[0]
    check_laws(taken, rollout.lost, slots_lost=1 + 16)


def test_hosts_join_and_leave_while_the_rollout_runs(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(limits=HASTY)
    with rollout_over_first(envs, makers(0)) as (rollout, first):
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        with hosting(envs.addresses[0], makers(1, 2), lanes=2):
            taken += taken_until(fragments, lambda more: slots_of(more) >= {0, 1, 2})
        taken += taken_until(fragments, lambda more: len(more) > 20 and slots_of(more[-5:]) == {0})
        first.stop()
        with hosting(envs.addresses[0], makers(3)):  # no host is left, until this one comes
            taken += taken_until(fragments, lambda more: 3 in slots_of(more))
            rollout.drain()
            taken += list(fragments)
    assert sorted({f.lane for f in taken}) == [0, 1, 2, 3]
    check_laws(taken, rollout.lost, slots_lost=3)
    assert "said goodbye: the host was stopped" in caplog.text


class rollout_over_first:
    """A rollout and its first host, which may be stopped while the rollout goes on."""

    def __init__(self, envs: RemoteEnvs, envs_of_host: list[Any]) -> None:
        self.hosting = hosting(envs.addresses[0], envs_of_host)
        self.envs = envs

    def __enter__(self) -> tuple[Rollout, EnvHost]:
        host = self.hosting.__enter__()
        self.rollout = rollout_over(self.envs)
        return self.rollout.__enter__(), host

    def __exit__(self, *raised: Any) -> None:
        self.rollout.__exit__(*raised)
        self.hosting.__exit__(*raised)


def test_a_rollout_whose_hosts_have_all_left_says_why() -> None:
    envs = listening(join_timeout=1.0)
    with rollout_over_first(envs, makers(0)) as (rollout, host):
        fragments = iter(rollout.fragments())
        next(fragments)
        host.stop()
        with pytest.raises(EnvError, match=r"every host has left and none came within 1 s: host .*: said goodbye"):
            list(fragments)


def test_a_rollout_without_hosts_says_where_it_waited() -> None:
    envs = listening(join_timeout=0.5, secret="right")
    stranger = RawHost(envs.addresses[0], secret=b"wrong")
    refused = threading.Thread(target=stranger.refusal)
    refused.start()
    with pytest.raises(
        EnvError, match=r"0 of 1 hosts came within 0.5 s, listening on tcp://127.0.0.1:\d+; .*has another secret"
    ):
        Rollout(envs)
    refused.join()
    with pytest.raises(EnvError, match=r"0 of 1 hosts came within 0.3 s, dialling tcp://127.0.0.1:1; .*refused"):
        Rollout(RemoteEnvs.connect("tcp://127.0.0.1:1", join_timeout=0.3))


def test_a_host_that_finds_no_gateway_gives_up_and_says_so() -> None:
    with (
        EnvHost(makers(0)) as host,
        pytest.raises(WireError, match=r"gateway tcp://127.0.0.1:1 not reached for 0.2 s: "),
    ):
        host.connect("tcp://127.0.0.1:1", retry_s=0.2)


def test_goodbyes_leave_nothing_behind() -> None:
    before = set(threading.enumerate())
    envs = listening()
    raw: list[RawHost] = []
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        next(iter(rollout.fragments()))
        raw.append(RawHost(envs.addresses[0]))
        raw[0].next_of(Reset)
        reader = threading.Thread(target=lambda: raw.append(raw[0].next_of(Goodbye)))
        reader.start()
    reader.join()
    raw[0].sock.close()
    assert raw[1].reason == "the rollout has ended"  # type: ignore[attr-defined]
    assert set(threading.enumerate()) == before


def test_a_rollout_that_is_never_entered_leaves_nothing_behind() -> None:
    before, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    envs = listening()
    raw = RawHost(envs.addresses[0])

    def greet_until_hung_up() -> None:
        while raw.next_event() is not None:
            pass

    greeting = threading.Thread(target=greet_until_hung_up)
    greeting.start()
    rollout = rollout_over(envs)
    del rollout, envs
    gc.collect()
    greeting.join()
    raw.sock.close()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RemoteEnvs.listen("tcp://0.0.0.0:0"), "without a secret, expected one, or a loopback address"),
        (lambda: RemoteEnvs.listen("udp://127.0.0.1:1"), "expected 'tcp://host:port'"),
        (lambda: RemoteEnvs.listen(), "no address to listen on"),
        (lambda: RemoteEnvs.connect([]), "no address to dial"),
        (lambda: RemoteEnvs.listen("tcp://127.0.0.1:0", hosts=0), "hosts is 0"),
        (lambda: RemoteEnvs.listen("unix:/nowhere/at/all"), "can't listen on unix:/nowhere/at/all: No such file"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises((ValueError, EnvError, WireError), match=told):
        make()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"where": "threads"}, "where is 'threads', but remote environments are where their hosts are"),
        ({"num_envs": 3}, "num_envs is 3 and lanes is None, expected neither: hosts say how many"),
        ({"max_batch": 1}, "max_batch is 1, expected at least 2"),
    ],
)
def test_a_rollout_that_can_not_be_made_lets_its_hosts_go(options: dict[str, Any], told: str) -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0, 1)), pytest.raises((ValueError, EnvError), match=told):
        Rollout(envs, **options)


def test_remote_environments_are_for_one_rollout() -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)):
        with rollout_over(envs, num_fragments=1) as rollout:
            list(rollout.fragments())
        with pytest.raises(EnvError, match="have been given to a rollout already"):
            Rollout(envs)


def test_limits_of_hosts_are_kept() -> None:
    envs = listening(max_hosts=1, limits=SHORT)
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        next(iter(rollout.fragments()))
        with EnvHost(makers(1)) as other, pytest.raises(WireError, match="1 hosts are here already, expected no more"):
            other.connect(str(envs.addresses[0]), retry_s=0.0)
