"""`rollflow top tcp://…`: the runs of a process elsewhere, through the port that it has anyway."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_errors import assert_one_line
from feeding_rollouts import fed, trainer
from numbered_module import NumberedEnv, NumberedModule
from raw_looker import RawLooker
from remote_hosts import hosting

from rollflow.cli.main import main
from rollflow.nodes import RemoteEnvs, Rollout
from rollflow.stream.data.errors import RunError, WireError
from rollflow.stream.net.lookers import MOST_LOOKERS, look_at
from rollflow.stream.wire import Credit, Limits

SECRET = "correct horse battery staple"
ENVS = [partial(NumberedEnv, number) for number in range(4)]
OPTIONS: dict[str, Any] = {"module": NumberedModule(), "fragment_length": 8, "seed": 0}


@contextmanager
def rollout_over_hosts() -> Iterator[str]:
    """A rollout that has given a batch, and waits for hosts at an address."""
    remote = RemoteEnvs.listen("tcp://127.0.0.1:0", secret=SECRET)
    address = str(remote.addresses[0])
    with hosting(address, ENVS, lanes=2, secret=SECRET), Rollout(remote, **OPTIONS) as rollout:
        next(rollout.batches())
        yield address


@contextmanager
def stream_of_a_trainer() -> Iterator[str]:
    """A trainer that has got a batch."""
    stream = trainer(module=NumberedModule(), secret=SECRET)
    with fed(stream, Rollout(ENVS, lanes=2, num_fragments=4, **OPTIONS), secret=SECRET):
        batches = iter(stream)
        next(batches)
        yield str(stream.address)
        for _ in batches:
            pass


@pytest.fixture(params=[rollout_over_hosts, stream_of_a_trainer])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a process listens that has a run."""
    with request.param() as address:
        yield address


def test_its_runs_are_shown_to_who_knows_the_secret(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text(f"{SECRET}\n")
    assert main(["top", address, "--secret-file", str(key), "--json", "--once"]) == 0
    runs = json.loads(capsys.readouterr().out)
    kinds = {run["kind"] for run in runs}
    assert kinds & {"Rollout", "TrainerStream"}
    for run in runs:
        assert run["path"].startswith(f"{address}#")
        assert "error" not in run
        assert run["pid"] > 0


def test_they_are_looked_at_again_and_again_and_go_on(address: str) -> None:
    look = partial(look_at, address, secret=SECRET.encode(), tls=None, software="test")
    first, second = look(), look()
    assert [run["path"] for run in first] == [run["path"] for run in second]
    assert [run["began"] for run in first] == [run["began"] for run in second]
    assert all(before["time"] <= after["time"] for before, after in zip(first, second, strict=True))


@pytest.mark.parametrize("secret", ["another one", None])
def test_another_secret_is_refused_in_words(
    address: str, secret: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text(str(secret))
    arguments = [] if secret is None else ["--secret-file", str(key)]
    assert main(["top", address, "--json", "--once", *arguments]) == 1
    error = capsys.readouterr().err
    assert_one_line(error)
    text = "asks for a secret, and this looker has none" if secret is None else "the looker has another secret"
    assert text in error


def test_what_is_not_there_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["top", "tcp://127.0.0.1:9", "--json", "--once"]) == 1
    error = capsys.readouterr().err
    assert_one_line(error)
    assert "tcp://127.0.0.1:9: Connection refused" in error
    key = tmp_path / "key"
    key.write_text(SECRET)
    assert main(["top", "4711", "--secret-file", str(key), "--json", "--once"]) == 1
    assert "are for tcp://host:port" in capsys.readouterr().err


def test_who_sends_more_than_questions_is_refused(address: str) -> None:
    looker = RawLooker(address, secret=SECRET.encode())
    looker.welcome()
    looker.connection.tell(Credit(1))
    refused = looker.next_event()
    looker.close()
    assert "credit from a looker, expected inspect" in str(refused.error)


@contextmanager
def open_trainer() -> Iterator[str]:
    """A trainer that takes in whoever comes, with no rollout yet."""
    with trainer(join_timeout=0.0) as stream:
        with pytest.raises(RunError, match="0 of 1 rollouts came"):
            next(iter(stream))
        yield str(stream.address)


def _raise() -> Any:
    raise TypeError("it broke")


@pytest.mark.parametrize(
    ("snapshots", "limits", "told"),
    [
        (_raise, Limits(), "TypeError: it broke"),
        (lambda: [{"name": "x" * (1 << 21)}], Limits(), "expected 2097152 at most"),
        (lambda: [{"name": "x" * (1 << 17)}], Limits(max_frame=1 << 16), "frame"),
    ],
    ids=["it raises", "too much", "too large a frame"],
)
def test_what_can_not_be_shown_is_refused_in_words(
    snapshots: Any, limits: Limits, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_trainer() as address:
        with monkeypatch.context() as patched, closing(RawLooker(address, limits)) as looker:
            patched.setattr("rollflow.stream.net.lookers.snapshots_here", snapshots)
            with pytest.raises(WireError, match=told):
                looker.look()
        with closing(RawLooker(address)) as looker:  # and others are answered
            assert looker.look()


def test_only_so_many_look_at_once() -> None:
    with open_trainer() as address, ExitStack() as lookers:
        for _ in range(MOST_LOOKERS):
            lookers.enter_context(closing(RawLooker(address))).welcome()
        with closing(RawLooker(address)) as another, pytest.raises(WireError, match="16 others look at the runs"):
            another.welcome()
