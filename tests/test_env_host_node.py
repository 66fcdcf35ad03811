"""The host in JavaScript, against a real gateway: its physics is gymnasium's, and nothing is lost on the way."""

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fragment_equality import assert_alike, in_time
from node_example import folder as folder, node as node
from remote_hosts import BrokenWire, listening

from rollflow import Fragment, RemoteEnvs, Rollout

CARTPOLE: Any = gym.make("CartPole-v1").unwrapped
SECRET = "correct horse battery staple"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    return path


class Host:
    """A host in a process of its own."""

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        command = ["node", folder / "env_host.js", "--name", "javascript", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def next_line(self) -> str:
        """The next that it says."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self) -> tuple[int, str]:
        """Wait for its end: its exit status, and what it has said since."""
        said = self.process.communicate(timeout=30)[1]
        return self.process.returncode, said


@contextmanager
def hosting(folder: Path, *arguments: str | Path) -> Iterator[Host]:
    host = Host(folder, *arguments)
    try:
        yield host
    finally:
        host.process.kill()
        host.process.communicate()


def fragments_of(envs: RemoteEnvs, **options: Any) -> list[Fragment]:
    settings = {"fragment_length": 32, "num_fragments": 6, "seed": 0, **options}
    with Rollout(envs, **settings) as rollout:
        fragments = list(rollout.fragments())
    assert rollout.lost == {}
    return in_time(fragments)


def stepped_by_gymnasium(state: Any, action: int) -> tuple[Any, bool]:
    CARTPOLE.reset()
    CARTPOLE.state = tuple(state)
    terminated = CARTPOLE.step(action)[2]
    return CARTPOLE.state, terminated


def check_cartpole(fragments: list[Fragment], slots: int) -> None:
    """Every step is gymnasium's, and the chunks of each slot join."""
    ends = 0
    for lane in {fragment.lane for fragment in fragments}:
        chunks = [list(fragment.episodes()) for fragment in fragments if fragment.lane == lane]
        for before, after in pairwise(chunks):
            still_open = {chunk.id_ for chunk in before if not chunk.is_done}
            assert still_open == {chunk.id_ for chunk in after if chunk.t_started > 0}
            assert sum(map(len, after)) == 32 * slots
        lasts: dict[str, Any] = {}
        for chunk in (chunk for fragment in chunks for chunk in fragment):
            observations, actions = chunk.get_observations(slice(0, None)), chunk.get_actions()
            if chunk.t_started == 0:
                assert np.abs(observations[0]).max() <= 0.05
            else:
                end, last = lasts.pop(chunk.id_)
                assert chunk.t_started == end
                np.testing.assert_array_equal(observations[0], last)
            lasts[chunk.id_] = chunk.t_started + len(chunk), observations[-1]
            assert list(chunk.get_rewards()) == [1.0] * len(chunk)
            for number, action in enumerate(actions, start=1):
                state, terminated = stepped_by_gymnasium(observations[number - 1].astype(float), int(action))
                np.testing.assert_allclose(observations[number], state, atol=1e-5, rtol=1e-5)
                assert terminated == (chunk.is_terminated and number == len(actions))
            ends += chunk.is_done
    assert ends >= 2 * slots


@pytest.mark.slow
def test_its_own_tests_pass(folder: Path) -> None:
    ran = subprocess.run(["node", "--test", "tests/"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout
    assert "# fail 0" in ran.stdout
    assert "# pass 0" not in ran.stdout


@pytest.mark.slow
def test_a_rollout_over_it_is_cartpole_and_ends_it(folder: Path, key: Path) -> None:
    envs = listening(secret=SECRET)
    arguments = ("--connect", str(envs.addresses[0]), "--secret-file", key, "--num-envs", "6", "--lanes", "2")
    with hosting(folder, *arguments) as host:
        check_cartpole(fragments_of(envs), slots=3)
        status, said = host.end()
    assert (status, said) == (0, "javascript: welcome\njavascript: goodbye: the rollout has ended\n")


@pytest.mark.slow
def test_it_can_be_dialled(folder: Path, key: Path) -> None:
    with hosting(folder, "--listen", "tcp://127.0.0.1:0", "--secret-file", key) as host:
        address = host.next_line().removeprefix("javascript: listening on ").strip()
        check_cartpole(fragments_of(RemoteEnvs.connect(address, secret=SECRET)), slots=2)
        assert host.end()[0] == 0


def test_it_dials_a_unix_socket(folder: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    with hosting(folder, "--connect", address, "--num-envs", "3", "--lanes", "1"):
        check_cartpole(fragments_of(RemoteEnvs.listen(address)), slots=3)


@pytest.mark.slow
def test_connections_that_are_cut_lose_nothing(folder: Path, key: Path) -> None:
    def fragments_over(drawn: Callable[[], int | None]) -> tuple[list[Fragment], int]:
        envs = listening(secret=SECRET)
        wire = BrokenWire(envs.addresses[0], drawn)
        try:
            with hosting(folder, "--connect", wire.address, "--secret-file", key) as host:
                fragments = fragments_of(envs)
                status, said = host.end()
        finally:
            wire.close()
        assert status == 0
        assert ("welcome back" in said) == bool(wire.cuts)
        return fragments, wire.cuts

    rng = random.Random(0)
    uncut, _ = fragments_over(lambda: None)
    cut, cuts = fragments_over(lambda: rng.randrange(1, 20_000))
    assert cuts >= 5
    assert_alike(cut, uncut)


@pytest.mark.slow
def test_it_says_why_it_is_refused_and_ends(folder: Path, key: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another")
    envs = listening(secret=SECRET, hosts=1)
    address = str(envs.addresses[0])
    with hosting(folder, "--connect", address, "--secret-file", key), Rollout(envs, fragment_length=8) as rollout:
        next(iter(rollout.fragments()))
        for arguments, reason in (
            (("--secret-file", wrong), "another secret"),
            ((), "the gateway has a secret, this host has none"),
        ):
            with hosting(folder, "--connect", address, *arguments) as stranger:
                status, said = stranger.end()
            assert status == 1
            assert said.startswith("javascript: refused (secret): ")
            assert reason in said


@pytest.mark.slow
def test_it_stops_with_a_goodbye(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    envs = listening(hosts=2)
    arguments = ("--connect", str(envs.addresses[0]), "--num-envs", "1", "--lanes", "1")
    with hosting(folder, *arguments) as stopped, hosting(folder, *arguments) as staying:
        with Rollout(envs, fragment_length=8) as rollout:
            fragments = iter(rollout.fragments())
            next(fragments)
            stopped.process.terminate()
            assert stopped.end()[0] == 0
            while "said goodbye: the host was stopped" not in caplog.text:
                next(fragments)
        assert staying.end()[0] == 0


@pytest.mark.slow
def test_what_it_is_started_with_is_checked(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for arguments, told in (
        ((), "expected either --connect or --listen"),
        (("--connect", "127.0.0.1:7010"), "'127.0.0.1:7010' is no address"),
        (("--connect", "unix:x", "--lanes", "5"), "4 environments in 5 lanes"),
        (("--listen", "tcp://0.0.0.0:0"), "without a secret"),
        (("--connect", "unix:x", "--secret-file", tmp_path / "empty"), "is empty"),
    ):
        with hosting(folder, *arguments) as host:
            status, said = host.end()
        assert status == 2
        assert told in said
        assert "usage: node env_host.js" in said
