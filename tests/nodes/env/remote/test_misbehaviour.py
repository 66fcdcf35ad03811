"""Hosts and strangers that break the protocol: they are told so, and the others go on."""

import socket
from collections.abc import Callable

import numpy as np
import pytest
from ending_envs import rewards_by_slot
from remote_hosts import RawHost, hosting, listening
from remote_rollouts import HASTY, check_laws, makers, reset_of, rollout_over, taken_until

from rollflow.nodes import EnvHost
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Refused, Step, encode

MISBEHAVIOUR: dict[str, tuple[Callable[[RawHost], None], str]] = {
    "a NaN reward": (
        lambda raw: raw.send(raw.rows(raw.next_of(Step), rewards=np.array([0.0, np.nan]))),
        "step 2 of lane 1: the reward of slot 1 is nan, expected a finite number",
    ),
    "noise": (lambda raw: raw.sock.sendall(b"GET / HTTP/1.1\r\n\r\n"), "frame of .* bytes, expected"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_host_that_breaks_the_protocol_is_told_so_and_leaves(name: str) -> None:
    misbehave, expected = MISBEHAVIOUR[name]
    envs = listening(hosts=1)
    with hosting(envs.addresses[0], makers(0, 1)), rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0])
        raw.answer(reset_of(raw, fragments, taken))
        misbehave(raw)
        with pytest.raises(WireError, match=expected):
            raise raw.refusal()
        taken += [next(fragments) for _ in range(5)]
        rollout.drain()
        taken += list(fragments)
    check_laws([f for f in taken if f.lane == 0], rollout.lost, slots_lost=2)
    assert len(rewards_by_slot(taken)[1]) > 30


@pytest.mark.slow
def test_half_a_frame_and_silence_is_a_lost_host() -> None:
    envs = listening(limits=HASTY)
    with hosting(envs.addresses[0], makers(0, 1)), rollout_over(envs, prefetch=2) as rollout:
        fragments = iter(rollout.fragments())
        taken = [next(fragments)]
        raw = RawHost(envs.addresses[0])
        raw.answer(reset_of(raw, fragments, taken))
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


@pytest.mark.slow
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


def test_what_a_stranger_says_is_no_line_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening()
    with hosting(envs.addresses[0], makers(0)), rollout_over(envs, prefetch=1) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        raw = RawHost(envs.addresses[0])
        raw.send(Refused("x", "bad\nhost trusted has joined\x1b[31m" + "z" * 1000))
        while "bad" not in caplog.text:
            next(fragments)
        raw.sock.close()
    [line] = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 500


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
