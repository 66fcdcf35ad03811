"""The command `rollflow serve`: a saved policy answers, takes what is saved anew, and ends when it is told to."""

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_errors import assert_one_line
from served_policies import Echo, Sums, policy_of
from serving_process import serving

from rollflow import PolicyClient
from rollflow.cli.main import main


@pytest.mark.slow
def test_saved_policies_are_served_to_a_client_that_knows_the_secret(tmp_path: Path) -> None:
    policy_of(Echo, 1.0).save(tmp_path / "echo")
    policy_of(Sums, 2.0).save(tmp_path / "sums")
    (tmp_path / "key").write_text("correct horse\n")
    protected = ("--secret-file", str(tmp_path / "key"))
    with serving(str(tmp_path / "echo"), str(tmp_path / "sums"), *protected) as (process, url):
        with PolicyClient(url, secret="correct horse", policy="sums", timeout=30.0) as client:
            assert [client.act([3, 0]).tolist() for _ in range(2)] == [[3.0, 2.0], [6.0, 2.0]]
            policy_of(Echo, 5.0).save(tmp_path / "echo")
            while client.act([3, 0], policy="echo").tolist() != [3.0, 5.0]:  # pytest's limit of time ends it
                pass
            assert client.act([3, 0]).tolist() == [9.0, 2.0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def act(url: str, name: str, **fields: Any) -> Any:
    """What the server answers to a request."""
    return httpx.post(f"{url}/v1/policies/{name}/act", json=fields).json()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_saved_policies_are_served_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    policy_of(Echo, 1.0).save(tmp_path / "echo")
    policy_of(Sums, 2.0).save(tmp_path / "sums.zip")
    with serving(str(tmp_path / "echo"), f"adds={tmp_path / 'sums.zip'}") as (process, url):
        assert act(url, "echo", observation=[3, 0])["action"] == [3.0, 1.0]
        for expected, begins in [(3.0, True), (6.0, False)]:
            assert act(url, "adds", observation=[3, 0], session=1, begins=begins)["action"] == [expected, 2.0]
        policy_of(Echo, 5.0).save(tmp_path / "echo")
        while act(url, "echo", observation=[3, 0])["action"] != [3.0, 5.0]:  # pytest's limit of time ends it
            pass
        process.send_signal(number)
        assert process.wait(30) == 128 + number


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["=x"], "policy '=x', expected PATH or NAME=PATH"),
        (["{echo}", "--canary", "echo={echo}"], "expected NAME=PATH:SHARE"),
        (["{echo}", "--http", "0.0.0.0:0"], "without a secret, expected one"),
        (["{echo}", "--http", "here"], "expected 'host:port' for HTTP"),
    ],
)
def test_what_can_not_be_served_is_said_in_a_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy_of(Echo).save(tmp_path / "echo")
    named = [argument.replace("{echo}", str(tmp_path / "echo")) for argument in arguments]
    assert main(["serve", *named, "--allow", "served_policies"]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert_one_line(error)
