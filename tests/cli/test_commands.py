"""The command `rollflow`, as a program: environments for another host, and what is told of wrong ones."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from command_errors import Says
from held_envs import await_file
from numbered_agents import NumberedAgents
from numbered_env import BreakingEnv, NumberedEnv
from pettingzoo.classic.tictactoe import tictactoe
from remote_hosts import listening, serving
from replayed import write_dataset
from serving_process import command

from rollflow import MultiAgentRollout, RemoteRollouts, Rollout
from rollflow.cli.main import main
from rollflow.nodes import EnvHost, FlattenObservations, RandomModule
from rollflow.nodes.env.remote.env_host import HostLane
from rollflow.stream.data.closing import closing_on_error
from rollflow.stream.data.errors import DatasetError, EnvError, page_on
from rollflow.stream.wire import Limits, Welcome
from rollflow.stream.wire.session import HostSession


@pytest.mark.slow
def test_a_rollout_over_hosts_that_were_started_by_the_command(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("open sesame\n")
    envs = listening(hosts=2, secret="open sesame")
    connect = ["--connect", str(envs.addresses[0]), "--secret-file", str(key)]
    with (
        command("env-host", "--env", "CartPole-v1", "--num-envs", "4", *connect) as one,
        command("env-host", "--env", "gymnasium.envs.classic_control.cartpole:CartPoleEnv", *connect) as other,
    ):
        with Rollout(envs, fragment_length=8, num_fragments=3) as rollout:
            assert rollout.environments.num_envs == 5
            fragments = list(rollout.fragments())
        assert (one.wait(), other.wait()) == (0, 0)
        assert "the rollout said goodbye: the rollout has ended" in one.stderr.read()
    assert len(fragments) == 9


@pytest.mark.slow
def test_a_rollout_of_several_agents_whose_rollouts_are_made_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollflow.nodes import FlattenObservations, LambdaConnector, RandomModule\n"
        "modules = {'one': RandomModule, 'other': RandomModule}\n"
        "mapping = {'player_1': 'one', 'player_2': 'other'}\n"
        "def flat(part):\n"
        "    return FlattenObservations()\n"
    )
    rollouts = RemoteRollouts.listen(f"unix:{tmp_path}/learner")
    host = ["rollout-host", "--env", "pettingzoo.classic.tictactoe_v3:env", "--num-envs", "4"]
    host += ["--lanes", "2", "--compile", "--name", "sim"]
    host += ["--connect", f"unix:{tmp_path}/learner", "--module", "mine:modules", "--agent-to-module", "mine:mapping"]
    with command(*host, "--env-to-module", "mine:flat", cwd=tmp_path) as process:
        acting: dict[str, Any] = {
            "module": {"one": RandomModule, "other": RandomModule},
            "agent_to_module_mapping_fn": {"player_1": "one", "player_2": "other"},
            "env_to_module_connector": lambda part: FlattenObservations(),
        }
        with MultiAgentRollout(rollouts, fragment_length=8, num_fragments=3, **acting) as rollout:
            assert "1 host: sim (" in rollout.explain()
            lanes = rollout.environments.num_lanes
            fragments = list(rollout.fragments())
        assert process.wait() == 0
    assert lanes == 2
    assert [fragment.num_rows for fragment in fragments] == [8] * 3 * lanes
    assert {module_id for fragment in fragments for module_id in fragment.module_ids} == {"one", "other"}


@pytest.mark.parametrize(
    ("words", "usage"),
    [("doctor 1 --fast", "doctor [-h] PID"), ("top --eve 2", "top [-h]"), ("policy check p --dev cpu", "policy [-h]")],
    ids=["doctor", "abbreviated", "abbreviated of an action"],
)
def test_an_unknown_option_is_told_with_the_known(words: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert f"usage: rollflow {usage}" in (error := capsys.readouterr().err)
    assert f"rollflow {words.split()[0]}: error: unrecognized arguments: --" in error


@pytest.mark.slow
def test_output_that_nobody_reads_ends_a_command_without_a_word(tmp_path: Path) -> None:
    with Rollout("CartPole-v1", num_envs=4, fragment_length=64, num_fragments=1, seed=0) as rollout:
        write_dataset(rollout.fragments(), tmp_path / "data")
    with command("dataset", "show", tmp_path / "data", stdout=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"rollflow {version('rollflow')}\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ["{note}"]),
        (OSError("no such folder"), 1, ["no such folder", "{note}"]),
        (EnvError("no such env").see("environment"), 1, ["no such env", "{note}", page_on("environment")]),
    ],
)
def test_what_closing_raised_as_well_is_printed(
    error: BaseException, status: int, said: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def close() -> None:
        raise DatasetError("47 steps are not in the dataset")

    def run(args: Any) -> None:
        with closing_on_error(close):
            raise error

    monkeypatch.setattr("rollflow.cli.check_host.run", run)
    assert main(["check-host", "unix:here"]) == status
    note = f"closing what was open raised as well: DatasetError: 47 steps are not in the dataset; {page_on('dataset')}"
    assert capsys.readouterr().err == "rollflow: " + "".join(f"{line.format(note=note)}\n" for line in said)


@pytest.mark.parametrize("words", ["--version", "top --help", "doctor --help"])
def test_commands_that_only_look_do_not_wait_for_torch(words: str) -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import atexit; from rollflow.cli.main import main; "
        "atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    run = subprocess.run([sys.executable, "-c", program, *words.split()], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.endswith("False\n")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_host_says_goodbye(number: int, status: int) -> None:
    envs = listening()
    with (
        command("env-host", "--env", "CartPole-v1", "--connect", str(envs.addresses[0])) as host,
        Rollout(envs, fragment_length=8, prefetch=1) as rollout,
    ):
        next(iter(rollout.fragments()))
        host.send_signal(number)
        assert host.wait() == status
        rollout.drain()
        list(rollout.fragments())


HANGS = """
import pathlib, threading
from gymnasium.envs.classic_control import CartPoleEnv

class Hangs(CartPoleEnv):
    def step(self, action):
        pathlib.Path("hangs").touch()
        threading.Event().wait()
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_host_at_once(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    envs = listening(RemoteRollouts)
    options = ["--env", "hangs:Hangs", "--connect", str(envs.addresses[0]), "--grace", "600"]
    with command("rollout-host", *options, cwd=tmp_path) as host, Rollout(envs, fragment_length=8, prefetch=1):
        await_file(tmp_path / "hangs")
        host.send_signal(signal.SIGTERM)
        while "0 of 1 lanes are done, still at something: 0" not in host.stderr.readline():
            assert host.poll() is None
        host.send_signal(signal.SIGTERM)
        assert host.wait() == 143


@contextmanager
def served(host: EnvHost, tmp_path: Path, **protection: Any) -> Iterator[str]:
    """A host that listens, in a thread."""
    with host, serving(host, f"unix:{tmp_path}/host", **protection) as address:
        yield address


def test_a_secret_in_a_variable_is_taken_away_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "open sesame\n")
    with served(EnvHost("CartPole-v1"), tmp_path, secret="open sesame") as address:
        assert main(["check-host", address, "--secret-env", "KEY"]) == 0
        assert "KEY" not in os.environ
        assert main(["check-host", address, "--secret-env", "KEY"]) == 1
    error = capsys.readouterr().err
    assert error == "rollflow: --secret-env KEY: no such variable, or an empty one, expected a secret\n"


class ResendingHost(EnvHost):
    """Sends the answer to the step under way at once after a reconnection, and again once it is asked for again."""

    resent = 0

    def _welcomed(self, welcome: Welcome) -> None:
        if not welcome.resumed:
            return
        assert self._welcomed_peer is not None
        while self._busy_lanes():
            sleep(0.001)
        for grant in welcome.lanes:
            request = self._session._lanes[grant.lane].request
            if request is not None and request.number > grant.number:
                answer = self._session.answer_to(request)
                self._welcomed_peer.connection._send(answer, answer.lane)
                self.resent += 1


@pytest.mark.parametrize("env", ["CartPole-v1", tictactoe.env])
@pytest.mark.parametrize("kind", [EnvHost, ResendingHost])
def test_our_own_host_passes_every_check_also_where_it_sends_an_answer_again_after_a_reconnection(
    kind: type[EnvHost], env: Any, tmp_path: Path, shown: Says
) -> None:
    (tmp_path / "key").write_text("open sesame")
    host = kind(env, num_envs=3, lanes=2)
    with served(host, tmp_path, secret="open sesame") as address:
        *told, last = shown("check-host", address, "--secret-file", f"{tmp_path}/key").splitlines()
    assert last == "all is well"
    assert len(told) >= 15
    assert all(line.startswith("ok ") for line in told)
    assert getattr(host, "resent", 1) == 1


class Forgetful(NumberedEnv):
    """Takes no seed."""

    lives = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Forgetful.lives += 1
        super().reset(seed=Forgetful.lives, options=options)
        return self._observation(), {}


class SecondSeedRaises(NumberedEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert seed != 2
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize(
    ("envs", "told"),
    [
        ([lambda: Forgetful(0)], "it gave something else at step"),
        ([lambda: BreakingEnv(0)], "it failed at step 2: RuntimeError: it broke"),
        (lambda: NumberedAgents(0), "it gave something else at step"),  # they number their episodes
        ([lambda: SecondSeedRaises(0)], "expected rows for each of lanes [10], whose requests came in one piece"),
    ],
)
def test_wrong_environments_are_found(envs: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(EnvHost(envs), tmp_path) as address:
        assert main(["check-host", address]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("breaks", "told"),
    [(False, "the second time, expected the same"), (True, "than without the break, expected the same")],
)
def test_a_host_that_steps_twice_is_found_out(
    breaks: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps again where a request comes again, or where a request comes again after a break alone."""
    take, begin = HostSession.take, HostSession.begin
    broken: set[HostSession] = set()

    def begins(self: HostSession, welcome: Any, hello: Any) -> None:
        begin(self, welcome, hello)
        if welcome.resumed:
            broken.add(self)

    def takes_again(self: HostSession, request: Any) -> bool:
        taken = take(self, request)
        if taken or (breaks and self not in broken):
            return taken
        broken.discard(self)
        lane = self._lane(request.lane)
        lane.request, lane.answer = request, None
        return True

    monkeypatch.setattr(HostSession, "begin", begins)
    monkeypatch.setattr(HostSession, "take", takes_again)
    with served(EnvHost([lambda: NumberedEnv(0, lengths=(50, 60))]), tmp_path) as address:
        assert main(["check-host", address]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    released, answer = threading.Event(), HostLane.answer

    def answers_late(self: HostLane, request: Any) -> Any:
        released.wait()
        return answer(self, request)

    monkeypatch.setattr(HostLane, "answer", answers_late)
    with served(EnvHost([lambda: NumberedEnv(0)]), tmp_path, limits=Limits(handshake_s=0.1)) as address:
        assert main(["check-host", address, "--timeout", "0.2"]) == 1
        released.set()
    assert "it sent nothing for 0.2 s, expected rows for reset 1" in capsys.readouterr().out
