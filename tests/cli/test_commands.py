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
from command_errors import assert_one_line
from held_envs import await_file
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv
from pettingzoo.classic.tictactoe import tictactoe
from remote_hosts import listening, serving

from rollflow import DatasetSink, MultiAgentRollout, RemoteRollouts, Rollout
from rollflow.cli.main import main
from rollflow.nodes import DefaultModule, EnvHost, FlattenObservations, RandomModule
from rollflow.nodes.env.remote.host_lane import HostLane
from rollflow.stream.data.errors import EnvError
from rollflow.stream.wire import Limits, Welcome


@contextmanager
def command(*arguments: str, cwd: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """The command in a process, killed when it is left."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from rollflow.cli.main import main; sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True, cwd=cwd)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


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
        assert one.stderr is not None
        assert "the rollout said goodbye: the rollout has ended" in one.stderr.read()
    assert len(fragments) == 9


@pytest.mark.slow
def test_a_rollout_of_several_agents_over_a_host_that_was_started_by_the_command() -> None:
    envs = listening()
    env = ["--env", "pettingzoo.classic.tictactoe_v3:env", "--num-envs", "3"]
    with command("env-host", *env, "--connect", str(envs.addresses[0])) as host:
        with MultiAgentRollout(envs, module=RandomModule, fragment_length=8, num_fragments=3) as rollout:
            assert (rollout.environments.num_lanes, rollout.environments.num_envs) == (2, 3)
            assert rollout.environments.parts[0].agents == ("player_1", "player_2")
            fragments = list(rollout.fragments())
        assert host.wait() == 0
    assert len(fragments) == 6


@pytest.mark.slow
def test_a_rollout_whose_rollouts_are_made_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollflow.nodes import DefaultModule, FlattenObservations\n"
        "def small(obs, act):\n"
        "    return DefaultModule(obs, act, model_config={'fcnet_hiddens': [8]})\n"
        "def flat(env):\n"
        "    return FlattenObservations()\n"
    )
    rollouts = RemoteRollouts.listen(f"unix:{tmp_path}/learner")
    host = ["rollout-host", "--env", "CartPole-v1", "--num-envs", "4", "--connect", f"unix:{tmp_path}/learner"]
    host += ["--module", "mine:small", "--env-to-module", "mine:flat"]
    with command(*host, cwd=tmp_path) as process:
        with Rollout(
            rollouts,
            module=lambda obs, act: DefaultModule(obs, act, model_config={"fcnet_hiddens": [8]}),
            env_to_module_connector=lambda env: FlattenObservations(),
            fragment_length=8,
            num_fragments=3,
        ) as rollout:
            fragments = list(rollout.fragments())
        assert process.wait() == 0
    assert [fragment.num_rows for fragment in fragments] == [8] * 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--num-envs", "4"], ["--num-envs", "4", "--lanes", "2", "--compile"]], ids=len)
def test_a_rollout_of_several_agents_whose_rollouts_are_made_by_the_command(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollflow.nodes import FlattenObservations, LambdaConnector, RandomModule\n"
        "modules = {'one': RandomModule, 'other': RandomModule}\n"
        "mapping = {'player_1': 'one', 'player_2': 'other'}\n"
        "def flat(part):\n"
        "    return FlattenObservations()\n"
    )
    rollouts = RemoteRollouts.listen(f"unix:{tmp_path}/learner")
    host = ["rollout-host", "--env", "pettingzoo.classic.tictactoe_v3:env", *options, "--name", "sim"]
    host += ["--connect", f"unix:{tmp_path}/learner", "--module", "mine:modules", "--agent-to-module", "mine:mapping"]
    with command(*host, "--env-to-module", "mine:flat", cwd=tmp_path) as process:
        with MultiAgentRollout(
            rollouts,
            module={"one": RandomModule, "other": RandomModule},
            agent_to_module_mapping_fn={"player_1": "one", "player_2": "other"},
            env_to_module_connector=lambda part: FlattenObservations(),
            fragment_length=8,
            num_fragments=3,
        ) as rollout:
            assert "1 host: sim (" in rollout.explain()
            lanes = rollout.environments.num_lanes
            fragments = list(rollout.fragments())
        assert process.wait() == 0
    assert lanes == (2 if "--lanes" in options else 1)
    assert [fragment.num_rows for fragment in fragments] == [8] * 3 * lanes
    assert {module_id for fragment in fragments for module_id in fragment.module_ids} == {"one", "other"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--agent-to-module", "json:nothing"], "--agent-to-module json:nothing: no such callable, expected"),
        (["--joint", "nowhere:piece"], "--joint nowhere:piece: No module named 'nowhere'"),
        (["--env", "CartPole-v1", "--agent-to-module", "json:loads"], "agent_to_module_mapping_fn is for environments"),
        (["--env", "CartPole-v1", "--joint", "json:loads"], "joint_connector is for environments with several agents"),
    ],
)
def test_what_a_host_of_several_agents_can_not_do_is_said_in_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = ["--env", "pettingzoo.classic.tictactoe.tictactoe:env"]
    assert main(["rollout-host", *env, "--connect", "unix:/x", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rollflow: ")
    assert told in error
    assert error.count("\n") == 1


def test_an_unknown_option_is_said_with_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "1", "--fast"])
    assert ended.value.code == 2
    assert "usage: rollflow doctor [-h] PID" in (error := capsys.readouterr().err)
    assert "rollflow doctor: error: unrecognized arguments: --fast" in error


@pytest.mark.slow
def test_output_that_nobody_reads_ends_a_command_without_a_word(tmp_path: Path) -> None:
    with Rollout("CartPole-v1", num_envs=4, fragment_length=64, num_fragments=1, seed=0) as rollout:
        with DatasetSink(tmp_path / "data") as sink:
            for fragment in rollout.fragments():
                sink(fragment)
    command = [sys.executable, "-m", "rollflow.cli.main", "dataset", "show", str(tmp_path / "data")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE
    process.stderr.close()


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"rollflow {version('rollflow')}\n"


@pytest.mark.parametrize("command", ["--version", "top --help", "doctor --help"])
def test_commands_that_only_look_do_not_wait_for_torch(command: str) -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import atexit; from rollflow.cli.main import main; "
        "atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *command.split()], stdout=subprocess.PIPE, text=True, check=True
    )
    assert run.stdout.endswith("False\n")


@pytest.mark.slow
def test_a_host_without_the_rollouts_module_says_so(tmp_path: Path) -> None:
    rollouts = RemoteRollouts.listen(f"unix:{tmp_path}/learner")
    with command("rollout-host", "--env", "CartPole-v1", "--connect", f"unix:{tmp_path}/learner") as process:
        with Rollout(rollouts, module=lambda obs, act: Mine(obs, act), fragment_length=8) as rollout:
            rollout.environments.carrier.join_timeout = 0.0  # type: ignore[attr-defined]  # nobody else is waited for
            with pytest.raises(EnvError, match=r"module is Mine, and host .* was given none, expected the same"):
                next(iter(rollout.fragments()))
        assert process.wait() == 1
        assert process.stderr is not None
        assert "rollflow: the rollout's module is Mine" in process.stderr.read()


class Mine(DefaultModule):
    """One that a host does not have."""


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
    with (
        command("rollout-host", *options, cwd=tmp_path) as host,
        Rollout(envs, fragment_length=8, prefetch=1),
    ):
        await_file(tmp_path / "hangs")
        host.send_signal(signal.SIGTERM)
        assert host.stderr is not None
        while "0 of 1 lanes are done, still at something: 0" not in host.stderr.readline():
            assert host.poll() is None
        host.send_signal(signal.SIGTERM)
        assert host.wait() == 143


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--env", "NoSuch-v0", "--connect", "tcp://127.0.0.1:1"], "environment 'NoSuch-v0' can't be made"),
        (["--env", "nosuch.module:Env", "--connect", "tcp://127.0.0.1:1"], "No module named 'nosuch'"),
        (["--env", "CartPole-v1", "--connect", "127.0.0.1:1"], "expected 'tcp://host:port'"),
        (["--env", "CartPole-v1", "--connect", "tcp://example.org:1"], "without a secret, expected one"),
        (["--env", "CartPole-v1", "--connect", "tcp://127.0.0.1:1", "--retry", "0"], "not reached for 0 s"),
        (["--env", "CartPole-v1", "--listen", "tcp://127.0.0.1:1"], "can't listen on tcp://127.0.0.1:1"),
        (["--env", "CartPole-v1", "--connect", "unix:/x", "--secret-file", "/nowhere"], "No such file"),
        (["--env", "CartPole-v1", "--connect", "unix:/x", "--tls-ca", "a"], "--tls-ca without --tls, expected both"),
        (["--env", "CartPole-v1", "--listen", "unix:/x", "--tls"], "expected --tls-cert as well"),
        (["--env", "CartPole-v1", "--connect", "unix:/x", "--num-envs", "0"], "num_envs is 0"),
        (["--env", "CartPole-v1", "--connect", "unix:/x", "--grace", "-1"], "--grace is -1, expected seconds from 0"),
        (["--env", "CartPole-v1", "--connect", "unix:/x", "--grace", "nan"], "--grace is nan, expected seconds from 0"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0 and "can't listen" in told:
        arguments[-1] = "tcp://192.0.2.1:1"  # which is nobody's here
        told = "without a secret"
    assert main(["env-host", *arguments]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert_one_line(error)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--module", "nosuch.module:Policy"], "--module nosuch.module:Policy: No module named 'nosuch'"),
        (["--module", "json:Policy"], "--module json:Policy: no such callable, expected package.module:callable"),
        (["--module", "a=json:Policy"], "--module a= json:Policy: no such callable, expected package.module:callable"),
        (["--module", "json:loads", "--module", "b="], "--module json:loads: expected another ID= before each"),
        (["--module", "a=", "--module", "a="], "--module a=: expected another ID= before each of several"),
        (["--module", "json:loads", "--module", "json:loads"], "--module json:loads --module json:loads: expected ID="),
        (["--env-to-module", "json"], "--env-to-module json: no such callable, expected package.module:callable"),
        (["--env", "NoSuch-v0"], "environment 'NoSuch-v0' can't be made"),
    ],
)
def test_a_rollout_host_says_as_well_what_can_not_be_done(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout-host", "--env", "CartPole-v1", "--connect", "unix:/x", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"rollflow: {told}")


@contextmanager
def served(host: EnvHost, tmp_path: Path) -> Iterator[str]:
    """A host that listens, in a thread."""
    with host, serving(host, f"unix:{tmp_path}/host") as address:
        yield address


def test_our_own_host_passes_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("open sesame")
    with served(EnvHost("CartPole-v1", num_envs=3, lanes=2, secret="open sesame"), tmp_path) as address:
        assert main(["check-host", address, "--secret-file", f"{tmp_path}/key"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "all is well"
    assert len(told) == 19
    assert all(line.startswith("ok ") for line in told[:-1])


def test_a_secret_in_a_variable_is_taken_away_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "open sesame\n")
    with served(EnvHost("CartPole-v1", secret="open sesame"), tmp_path) as address:
        assert main(["check-host", address, "--secret-env", "KEY"]) == 0
        assert "KEY" not in os.environ
        assert main(["check-host", address, "--secret-env", "KEY"]) == 1
    error = capsys.readouterr().err
    assert error == "rollflow: --secret-env KEY: no such variable, or an empty one, expected a secret\n"


def test_our_own_host_of_several_agents_passes_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(EnvHost(tictactoe.env, num_envs=3, lanes=2), tmp_path) as address:
        assert main(["check-host", address]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == ["ok     Fails a step in which nobody acts, and can be reset then", "all is well"]


class ResendingHost(EnvHost):
    """Sends the answer to the step under way at once after a reconnection, and again once it is asked for again."""

    resent = 0

    def _welcomed(self, welcome: Welcome) -> None:
        if not welcome.resumed:
            return
        assert self._welcomed_peer is not None
        while self._work.busy:
            sleep(0.001)
        for grant in welcome.lanes:
            request = self._work.session._lanes[grant.lane].request
            if request is not None and request.number > grant.number:
                answer = self._work.session.answer_to(request)
                self._welcomed_peer.connection._send(answer, answer.lane)
                self.resent += 1


@pytest.mark.parametrize("env", ["CartPole-v1", tictactoe.env])
def test_a_host_that_sends_an_answer_again_after_a_reconnection_passes_every_check(
    env: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ResendingHost(env, num_envs=3, lanes=2)
    with served(host, tmp_path) as address:
        assert main(["check-host", address]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all is well"
    assert host.resent == 1


def test_environments_of_several_agents_that_number_their_episodes_are_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(EnvHost(lambda: NumberedAgents(0)), tmp_path) as address:
        assert main(["check-host", address]) == 1
    assert "it gave something else at step" in capsys.readouterr().out


class Forgetful(NumberedEnv):
    """Takes no seed."""

    lives = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Forgetful.lives += 1
        super().reset(seed=Forgetful.lives, options=options)
        return self._observation(), {}


class Raising(NumberedEnv):
    def step(self, action: Any) -> Any:
        raise RuntimeError("it broke")


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (Forgetful, "it gave something else at step"),
        (Raising, "it failed at step 2: RuntimeError: it broke"),
    ],
)
def test_wrong_environments_are_found_out(
    env: type[NumberedEnv], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(EnvHost([lambda: env(0)]), tmp_path) as address:
        assert main(["check-host", address]) == 1
    assert told in capsys.readouterr().out


def test_a_host_that_steps_twice_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollflow.stream.wire.session import HostSession, TakenRequest

    take = HostSession.take

    def takes_again(self: HostSession, request: Any) -> TakenRequest:
        taken = take(self, request)
        if taken is TakenRequest.AGAIN:
            lane = self._lane(request.lane)
            lane.request, lane.answer = request, None
            return TakenRequest.NEW
        return taken

    monkeypatch.setattr(HostSession, "take", takes_again)
    with served(EnvHost([lambda: NumberedEnv(0)]), tmp_path) as address:
        assert main(["check-host", address]) == 1
    assert "the second time, expected the same" in capsys.readouterr().out


def test_a_host_that_steps_again_after_a_break_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollflow.stream.wire.session import HostSession, TakenRequest

    take, begin = HostSession.take, HostSession.begin
    broken: set[HostSession] = set()

    def begins(self: HostSession, welcome: Any, hello: Any) -> None:
        begin(self, welcome, hello)
        if welcome.resumed:
            broken.add(self)

    def takes_again(self: HostSession, request: Any) -> TakenRequest:
        taken = take(self, request)
        if taken is TakenRequest.NEW or self not in broken:
            return taken
        broken.discard(self)
        lane = self._lane(request.lane)
        lane.request, lane.answer = request, None
        return TakenRequest.NEW

    monkeypatch.setattr(HostSession, "begin", begins)
    monkeypatch.setattr(HostSession, "take", takes_again)
    with served(EnvHost([lambda: NumberedEnv(0, lengths=(50, 60))]), tmp_path) as address:
        assert main(["check-host", address]) == 1
    assert "than without the break, expected the same" in capsys.readouterr().out


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    released, answer = threading.Event(), HostLane.answer

    def answers_late(self: HostLane, request: Any) -> Any:
        released.wait()
        return answer(self, request)

    monkeypatch.setattr(HostLane, "answer", answers_late)
    with served(EnvHost([lambda: NumberedEnv(0)], limits=Limits(handshake_s=0.1)), tmp_path) as address:
        assert main(["check-host", address, "--timeout", "0.2"]) == 1
        released.set()
    assert "it sent nothing for 0.2 s, expected rows for reset 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_host_that_dials_is_checked_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix:{tmp_path}/gateway"
    with EnvHost("CartPole-v1") as host:

        def dial() -> None:
            while not host._is_stopped:
                try:
                    host.connect(address)
                except Exception:  # it is refused many a time
                    continue

        thread = threading.Thread(target=dial)
        thread.start()
        assert main(["check-host", "--listen", address]) == 0
        host.stop()
        thread.join()
    assert "all is well" in capsys.readouterr().out
