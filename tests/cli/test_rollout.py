"""`rollflow rollout` as a program: a rollout that feeds a trainer until one of them ends."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_errors import assert_one_line

from rollflow import TrainerStream
from rollflow.cli.main import main
from rollflow.stream.data.errors import RunError


@contextmanager
def command(*arguments: Any, cwd: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """`rollflow rollout` in a process, killed when it is left."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from rollflow.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "rollout", *map(str, arguments)], stderr=subprocess.PIPE, text=True, cwd=cwd
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stream(**options: Any) -> TrainerStream:
    return TrainerStream("tcp://127.0.0.1:0", **{"join_timeout": 60.0, **options})


@pytest.mark.slow
def test_the_trainer_gets_all_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open sesame\n")
    (tmp_path / "mine.py").write_text(
        "from rollflow.nodes import DefaultModule, FlattenObservations\n"
        "class Small(DefaultModule):\n"
        "    def __init__(self, obs, act):\n"
        "        super().__init__(obs, act, model_config={'fcnet_hiddens': [8]})\n"
        "def flat(env):\n"
        "    return FlattenObservations()\n"
    )
    with stream(secret="open sesame", yields="fragments") as trainer:
        arguments = ["--env", "CartPole-v1", "--num-envs", 4, "--lanes", 2, "--fragment-length", 8]
        arguments += ["--num-fragments", 3, "--module", "mine:Small", "--env-to-module", "mine:flat", "--seed", 1]
        arguments += ["--trainer", trainer.address, "--secret-file", tmp_path / "key", "--name", "worker-1"]
        arguments += ["--log", "csv:run.csv", "--log", "tensorboard:runs", "--log-every", 0.5, "--log-x", "updates"]
        arguments += ["--progress"]
        with command(*arguments, cwd=tmp_path) as process:
            fragments = []
            for fragment in trainer:
                assert trainer.handed[0].source == "worker-1"
                fragments.append((fragment.lane, fragment.sequence, fragment.num_rows))
            assert process.wait() == 0
            assert process.stderr is not None
            told = process.stderr.read()
    assert sorted(fragments) == [(lane, sequence, 8) for lane in (0, 1) for sequence in range(3)]
    assert (tmp_path / "run.csv").read_text().startswith("steps,updates,time,")
    assert len(list((tmp_path / "runs").glob("events.out.tfevents.*"))) == 1
    assert "\n3 of 3 updates in " in f"\n{told}"
    *_, conclusion, last = told.splitlines()
    assert conclusion.startswith(("held back by ", "all of them wait: "))
    assert last == "the rollout has ended"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inline", "processes", pytest.param("rollouts", marks=pytest.mark.slow)])
def test_several_agents_feed_a_trainer_as_one_does(where: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollflow.nodes import RandomModule\n"
        "modules = {'one': RandomModule, 'other': RandomModule}\n"
        "mapping = {'player_1': 'one', 'player_2': 'other'}\n"
    )
    with stream(yields="fragments") as trainer:
        arguments = ["--env", "pettingzoo.classic.tictactoe_v3:env", "--num-envs", 2, "--lanes", 2, "--where", where]
        arguments += ["--fragment-length", 8, "--num-fragments", 2, "--seed", 1, "--module", "mine:modules"]
        arguments += ["--agent-to-module", "mine:mapping", "--trainer", trainer.address]
        with command(*arguments, cwd=tmp_path) as process:
            fragments = list(trainer)
            assert process.wait() == 0
    assert sorted((each.lane, each.sequence) for each in fragments) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {module_id for each in fragments for module_id in each.module_ids} == {"one", "other"}


@pytest.mark.slow
def test_environments_may_step_in_processes_of_their_own() -> None:
    with stream(yields="fragments") as trainer:
        arguments = ["--env", "CartPole-v1", "--num-envs", 4, "--fragment-length", 8]
        arguments += ["--where", "processes", "--workers", 2]
        with command(*arguments, "--num-fragments", 1, "--trainer", trainer.address) as process:
            assert sum(fragment.num_rows for fragment in trainer) == 16
            assert process.wait() == 0


@pytest.mark.slow
def test_it_ends_when_the_trainer_says_goodbye() -> None:
    with ExitStack() as stack:
        with stream() as trainer:
            arguments = ["--env", "CartPole-v1", "--fragment-length", 8, "--trainer", trainer.address]
            process = stack.enter_context(command(*arguments))
            next(iter(trainer))
        assert process.wait() == 0
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "the trainer said goodbye: the trainer has ended"


@pytest.mark.slow
def test_one_that_is_interrupted_waits_for_a_trainer_no_longer_than_it_is_told_to() -> None:
    with ExitStack() as stack:
        with pytest.raises(KeyError), stream() as trainer:
            arguments = ["--env", "CartPole-v1", "--fragment-length", 8, "--trainer", trainer.address, "--linger", 0.1]
            process = stack.enter_context(command(*arguments))
            next(iter(trainer))
            raise KeyError  # so that the rollout waits for another one
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr is not None
        assert "interrupted, and there has been no trainer for 0.1 s" in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_rollout_hands_over_what_was_under_way_and_says_goodbye(number: int, status: int) -> None:
    arguments = ["--env", "CartPole-v1", "--fragment-length", 1 << 20]
    with stream(yields="fragments") as trainer, ThreadPoolExecutor() as threads:
        with command(*arguments, "--trainer", trainer.address) as process:
            rows = threads.submit(lambda: [fragment.num_rows for fragment in trainer])
            assert process.stderr is not None
            assert any("has taken this rollout in" in line for line in process.stderr)
            process.send_signal(number)
            assert sum(rows.result()) < 1 << 20  # cut short
            assert process.wait() == status
            assert "interrupted: " in process.stderr.read()


@pytest.mark.slow
def test_a_second_interrupt_waits_for_no_trainer() -> None:
    with ExitStack() as stack:
        with stream(yields="fragments") as trainer:
            arguments = ["--env", "CartPole-v1", "--fragment-length", 8, "--trainer", trainer.address]
            process = stack.enter_context(command(*arguments))
            next(iter(trainer))  # and no more
            assert process.stderr is not None
            process.send_signal(signal.SIGINT)
            assert any("interrupted: " in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--env", "NoSuch-v0"], "environment 'NoSuch-v0' can't be made"),
        (["--module", "json:Policy"], "--module json:Policy: no such callable, expected package.module:callable"),
        (["--trainer", "127.0.0.1:1"], "expected 'tcp://host:port'"),
        (["--trainer", "tcp://example.org:1"], "without a secret, expected one"),
        (["--secret-file", "/nowhere"], "--secret-file /nowhere: No such file or directory, expected a file of text"),
        (["--module", "inspect:formatargvalues"], "module is formatargvalues, which takes (args, varargs, "),
        (["--num-envs", "0"], "num_envs is 0"),
        (["--agent-to-module", "json:loads"], "agent_to_module_mapping_fn is for environments with several agents"),
        (["--joint", "json:loads"], "joint_connector is for environments with several agents"),
        (["--workers", "2"], "workers is 2, but where='inline' has none"),
        (["--max-frame", "0"], "--max-frame is 0, expected 1 to 4095"),
    ],
)
def test_what_can_not_be_done_is_said_in_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "--env", "CartPole-v1", "--trainer", "unix:/x", *arguments]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert_one_line(error)


@pytest.mark.slow
def test_another_secret_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open barley\n")
    with stream(secret="open sesame", join_timeout=0) as trainer:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(trainer))  # from now on it takes them in
        arguments = ["--trainer", trainer.address, "--secret-file", tmp_path / "key"]
        with command("--env", "CartPole-v1", *arguments) as process:
            assert process.wait() == 1
            assert process.stderr is not None
            *_, line, page = process.stderr.read().splitlines()
            assert line.startswith("rollflow: ")
            assert page == "see docs/how_to/secure_connections.md#a-secret"
