"""Log lines while a connection is awaited: they are repeated, and one says that it is back."""

import re
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from remote_hosts import BrokenWire, dialled_host, hosting, listening
from remote_rollouts import await_that, makers, rollout_over, rollouts_on, slots_of, taken_until

from rollflow import RemoteEnvs, RemoteRollouts, Rollout
from rollflow.stream import EnvError
from rollflow.stream.net.backoff import waiting
from rollflow.stream.wire import Limits

pytestmark = pytest.mark.wait_times(first_word_s=0.02, first_pause_s=0.01, host_pause_s=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RemoteEnvs, RemoteRollouts])
def test_both_ends_say_that_they_wait_and_that_the_connection_is_back(
    kind: type[RemoteEnvs] | type[RemoteRollouts], caplog: pytest.LogCaptureFixture
) -> None:
    envs = listening(kind)
    wire = BrokenWire(envs.addresses[0], lambda: None)
    gateway = f"gateway {wire.address}"
    host_on = hosting if kind is RemoteEnvs else rollouts_on
    try:
        with host_on(wire.address, makers(0), name="sim"), rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            next(fragments)
            wire.go_down()
            await_that(lambda: len(re.findall(r"host sim \(.*\) is lost since \d+ s", caplog.text)) >= 3)
            await_that(lambda: len(re.findall(rf"waiting for \d+ s: {gateway}: ", caplog.text)) >= 3)
            wire.is_down = False
            taken_until(fragments, lambda taken: len(taken) > 3)
    finally:
        wire.close()
    assert re.search(r"host sim \(.*\) is lost: .*; it has 30 s to come back", caplog.text)
    assert re.search(r"is lost since \d+ s: .*; waited for \d+ s more \(Limits\.grace_s\)", caplog.text)
    assert re.search(r"host sim \(.*\) is connected again after \d+\.\d s", caplog.text)
    assert re.search(rf"{gateway}: connected again after \d+\.\d s", caplog.text)


def test_a_host_that_listens_says_that_its_gateway_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dialled_host(f"unix:{tmp_path}/host", makers(0)):
        envs = RemoteEnvs.connect(f"unix:{tmp_path}/host", limits=Limits(heartbeat_s=5.0))
        with rollout_over(envs) as rollout:
            fragments = iter(rollout.fragments())
            next(fragments)
            gateway = rollout.environments.gateway
            [host] = gateway.hosts.values()
            gateway._loop.peer_of(host.connection).transport._sock.shutdown(2)
            taken_until(fragments, lambda taken: len(taken) > 3)
    assert "a Unix socket: the gateway is connected again" in caplog.text
    assert "is connected again after" in caplog.text


@pytest.mark.slow
def test_a_rollout_says_whom_it_waits_for_and_who_has_joined(caplog: pytest.LogCaptureFixture) -> None:
    envs = listening()

    def lines() -> list[str]:
        found: list[str] = re.findall(r"0 of 1 hosts are here: hosts are awaited.* \d+ s more \(join_t", caplog.text)
        return found

    first = hosting(envs.addresses[0], makers(0), name="first")
    clock = partial(next, count(0.0, 0.005))
    with waiting(clock=clock), pytest.raises(EnvError, match=r"0 of 1 hosts came within 0\.5 s"):
        Rollout(listening(join_timeout=0.5))
    assert len(lines()) == 4  # after 0.02 s, and at intervals that double
    host = first.__enter__()
    with rollout_over(envs) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        host.stop()
        await_that(lambda: not rollout.environments.gateway.hosts)  # else there is a lane all the time
        with hosting(envs.addresses[0], makers(1), name="second"):
            taken_until(fragments, lambda taken: 1 in slots_of(taken))
    first.__exit__(None, None, None)
    assert "no lane is left: hosts are awaited for 60 s more (join_timeout), listening on" in caplog.text
    assert re.search(r"host second \(.*\) has joined: there are lanes again", caplog.text)
