"""`rollflow replay-host`: a replay in a process of its own, and what is told of wrong arguments."""

import signal
from pathlib import Path

import pytest
from feeding_rollouts import feeding
from serving_process import command

from rollflow import Replay
from rollflow.sinks import ReplayClient, SamplesPerInsert


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
        "from rollflow import Replay\n"
        "from rollflow.sinks import Newest\n"
        "def made():\n"
        "    return Replay(512, sampler=Newest(), batch_size=3)\n"
    )
    where = ["--rollouts", f"unix:{tmp_path}/rollouts", "--trainers", f"unix:{tmp_path}/trainers"]
    with command("replay-host", *where, "--replay", "mine:made", cwd=tmp_path) as host:
        with ReplayClient(f"unix:{tmp_path}/trainers") as client:
            with feeding(f"unix:{tmp_path}/rollouts", [0], num_fragments=2) as running:
                pass
            assert client.sample()["rewards"].tolist() == [running.rollout.num_steps - each for each in range(3)]
        host.terminate()
        assert host.wait(60) == 128 + signal.SIGTERM
