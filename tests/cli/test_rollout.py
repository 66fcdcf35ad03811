"""`rollflow rollout` and `rollflow replay-host` as programs: each goes on until it is told to end."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from feeding_rollouts import feeding
from serving_process import command

from rollflow import Replay, TrainerStream
from rollflow.sinks import ReplayClient, SamplesPerInsert


def stream(**options: Any) -> TrainerStream:
    return TrainerStream("tcp://127.0.0.1:0", **options)


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
        arguments += ["--log", "jsonl:run.jsonl", "--log", "tensorboard:runs"]
        arguments += ["--progress"]
        with command("rollout", *arguments, cwd=tmp_path) as process:
            fragments = []
            for fragment in trainer:
                assert trainer.handed[0].source == "worker-1"
                fragments.append((fragment.lane, fragment.sequence, fragment.num_rows))
            assert process.wait() == 0
            told = process.stderr.read()
    assert sorted(fragments) == [(lane, sequence, 8) for lane in (0, 1) for sequence in range(3)]
    assert (tmp_path / "run.jsonl").read_text().startswith('{"steps": ')
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
        with command("rollout", *arguments, cwd=tmp_path) as process:
            fragments = list(trainer)
            assert process.wait() == 0
    assert sorted((each.lane, each.sequence) for each in fragments) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {module_id for each in fragments for module_id in each.module_ids} == {"one", "other"}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_rollout_hands_over_what_was_under_way_and_says_goodbye(number: int, status: int) -> None:
    arguments = ["--env", "CartPole-v1", "--fragment-length", 1 << 20]
    with stream(yields="fragments") as trainer, ThreadPoolExecutor() as threads:
        with command("rollout", *arguments, "--trainer", trainer.address) as process:
            rows = threads.submit(lambda: [fragment.num_rows for fragment in trainer])
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
            process = stack.enter_context(command("rollout", *arguments))
            next(iter(trainer))  # and no more
            process.send_signal(signal.SIGINT)
            assert any("interrupted: " in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130


@pytest.mark.slow
def test_a_host_writes_a_checkpoint_when_it_is_told_to_end_and_goes_on_from_it(tmp_path: Path) -> None:
    where = ["--rollouts", f"unix:{tmp_path}/rollouts", "--trainers", f"unix:{tmp_path}/trainers"]
    kept = ["--capacity", "512", "--ratio", "2", "--min-size", "16", "--batch-size", "8"]
    saved = ["--checkpoint", f"{tmp_path}/replay", "--every", "0.1"]
    made = 0
    for times in (1, 2):
        with command("replay-host", *where, *kept, *saved) as host:
            with ReplayClient(f"unix:{tmp_path}/trainers") as client:
                with feeding(f"unix:{tmp_path}/rollouts", [times], num_fragments=2, seed=times) as running:
                    assert client.sample()["rewards"].shape == (8,)
                report = client.report()
            host.terminate()
            assert host.wait(60) == 128 + signal.SIGTERM
        made += running.rollout.num_steps
        assert (report.inserted, report.sampled) == (made, 8 * times)
    again = Replay(512, rate=SamplesPerInsert(2.0, 16), batch_size=8)
    again.load(tmp_path / "replay")
    assert len(again) == made


@pytest.mark.slow
def test_a_replay_of_ones_own_is_served_until_the_command_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollflow import Replay\ndef made():\n    return Replay(512, batch_size=3)\n"
    )
    where = ["--rollouts", f"unix:{tmp_path}/rollouts", "--trainers", f"unix:{tmp_path}/trainers"]
    with command("replay-host", *where, "--replay", "mine:made", cwd=tmp_path) as host:
        with ReplayClient(f"unix:{tmp_path}/trainers") as client:
            with feeding(f"unix:{tmp_path}/rollouts", [0], num_fragments=2) as running:
                pass
            assert client.report().inserted == running.rollout.num_steps
            assert client.sample()["rewards"].shape == (3,)
        host.terminate()
        assert host.wait(60) == 128 + signal.SIGTERM
