"""`rollflow replay-host`: a replay in a process of its own, and what is told of wrong arguments."""

import signal
import sys
from pathlib import Path

import pytest
from command_errors import assert_one_line
from feeding_rollouts import feeding
from killable_trainer import forked

from rollflow import Replay
from rollflow.cli.main import main
from rollflow.sinks import Newest, Prioritized, ReplayClient, SamplesPerInsert


def _command(arguments: list[str]) -> None:
    sys.exit(main(arguments))


@pytest.mark.slow
def test_a_host_writes_a_checkpoint_when_it_is_told_to_end_and_goes_on_from_it(tmp_path: Path) -> None:
    where = ["--rollouts", f"unix:{tmp_path}/rollouts", "--trainers", f"unix:{tmp_path}/trainers"]
    kept = ["--capacity", "512", "--ratio", "2", "--min-size", "16", "--batch-size", "8", "--prioritized"]
    saved = ["--checkpoint", f"{tmp_path}/replay", "--every", "0.1"]
    made = 0
    for times in (1, 2):
        host = forked().Process(target=_command, args=(["replay-host", *where, *kept, *saved],))
        host.start()
        try:
            with ReplayClient(f"unix:{tmp_path}/trainers") as client:
                with feeding(f"unix:{tmp_path}/rollouts", [times], num_fragments=2, seed=times) as running:
                    assert client.sample()["weights"].shape == (8,)
                report = client.report()
            host.terminate()
            host.join(60)
        finally:
            host.kill()
        assert host.exitcode == 128 + signal.SIGTERM
        made += running.rollout.num_steps
        assert (report.inserted, report.sampled) == (made, 8 * times)
    again = Replay(512, sampler=Prioritized(), rate=SamplesPerInsert(2.0, 16), batch_size=8)
    again.load(tmp_path / "replay")
    assert len(again) == made


def made() -> Replay:
    return Replay(512, sampler=Newest(), batch_size=3)


@pytest.mark.slow
def test_a_replay_of_ones_own_is_served_until_the_command_is_told_to_end(tmp_path: Path) -> None:
    where = ["--rollouts", f"unix:{tmp_path}/rollouts", "--trainers", f"unix:{tmp_path}/trainers"]
    host = forked().Process(target=_command, args=(["replay-host", *where, "--replay", f"{__name__}:made"],))
    host.start()
    try:
        with ReplayClient(f"unix:{tmp_path}/trainers") as client:
            with feeding(f"unix:{tmp_path}/rollouts", [0], num_fragments=2) as running:
                pass
            assert client.sample()["rewards"].tolist() == [running.rollout.num_steps - each for each in range(3)]
        host.terminate()
        host.join(60)
    finally:
        host.kill()
    assert host.exitcode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--min-size", "5"], "expected --ratio as well"),
        (["--ratio", "0"], "ratio is 0.0, expected a number above 0"),
        (["--ratio", "1", "--min-size", "200000"], "nothing could ever be sampled"),
        (["--replay", "collections:OrderedDict"], "has made a OrderedDict, expected a Replay"),
        (["--replay", "a:b", "--seed", "0", "--batch-size", "8"], "expected it without --batch-size, --seed"),
        (["--replay", "nowhere:made"], "No module named 'nowhere'"),
        (["--checkpoint", "/nowhere/replay"], "expected a path in a folder that is there"),
        (["--checkpoint", __file__], "expected a replay's checkpoint"),
        (["--every", "0"], "every is 0.0, expected seconds"),
        (["--trainers", "tcp://0.0.0.0:1"], "secret"),
        (["--trainers", "unix:/nowhere/socket"], "/nowhere/socket"),
        (["--rollouts", "unix:/nowhere/socket"], "/nowhere/socket"),
        (["--tls"], "expected --tls-cert as well"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    where = ["--rollouts", f"unix:{tmp_path}/rollouts", "--trainers", f"unix:{tmp_path}/trainers"]
    assert main(["replay-host", *where, *arguments]) == 1
    told = capsys.readouterr().err
    assert_one_line(told)
    assert error in told
