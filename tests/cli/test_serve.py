"""`rollflow serve`: saved policies answer, take what is saved anew, and end."""

import signal
from pathlib import Path

import pytest
from served_policies import Echo, Sums, policy_of
from serving_process import serving

from rollflow import PolicyClient


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_saved_policies_are_served_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    policy_of(Echo, 1.0).save(tmp_path / "echo")
    policy_of(Sums, 2.0).save(tmp_path / "sums")
    (tmp_path / "key").write_text("correct horse\n")
    served = (str(tmp_path / "echo"), f"adds={tmp_path / 'sums'}", "--secret-file", str(tmp_path / "key"))
    with serving(*served) as (process, url):
        with PolicyClient(url, secret="correct horse", policy="adds", timeout=30.0) as client:
            assert [client.act([3, 0]).tolist() for _ in range(2)] == [[3.0, 2.0], [6.0, 2.0]]
            assert client.act([3, 0], policy="echo").tolist() == [3.0, 1.0]
            policy_of(Echo, 5.0).save(tmp_path / "echo")
            while client.act([3, 0], policy="echo").tolist() != [3.0, 5.0]:  # pytest's limit of time ends it
                pass
            assert client.act([3, 0]).tolist() == [9.0, 2.0]
        process.send_signal(number)
        assert process.wait(30) == 128 + number
