"""`rollflow view`: runs in a browser."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from command_errors import assert_one_line
from numbered_module import NumberedEnv, NumberedModule

from rollflow.cli import view
from rollflow.cli.main import main
from rollflow.nodes import Rollout
from rollflow.stream.pictures.runs_page import runs_html
from rollflow.stream.snapshots import run_folder
from rollflow.stream.snapshots.history import RunHistory
from rollflow.stream.snapshots.rates import with_rates


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(run_folder.FOLDER, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def running() -> Iterator[Rollout]:
    env = [partial(NumberedEnv, 0), partial(NumberedEnv, 1)]
    with Rollout(env, module=NumberedModule(), fragment_length=8, seed=0) as rollout:
        next(rollout.batches())
        yield rollout


class Client:
    """Asks an application for pages, without a socket."""

    def __init__(self, address: str | None = None) -> None:
        self._transport = httpx.ASGITransport(app=view.application(address, "token"))

    def get(self, path: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://127.0.0.1") as client:
                return await client.get(path)

        return anyio.run(ask)


def test_the_page_is_found_by_its_token_alone(running: Rollout) -> None:
    client = Client()
    for path in ("/", "/runs", "/other/", "/other/runs"):
        assert client.get(path).status_code == 404
    assert client.get("/token/").status_code == 200
    assert f"pid {os.getpid()}" in client.get("/token/").text
    assert "module_to_env" in client.get("/token/runs").text


def test_the_page_takes_nothing_from_elsewhere() -> None:
    client = Client()
    first, second = client.get("/token/"), client.get("/token/")
    policy = first.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'nonce-")
    [nonce] = set(re.findall(r'nonce="([^"]+)"', first.text))
    assert f"script-src 'nonce-{nonce}'" in policy
    assert nonce not in second.text
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg", "", first.text)


def test_without_a_run_it_says_where_it_looked(folder: Path) -> None:
    found = Client().get("/token/runs").text
    assert found == f"<p>no run of this user on this machine has a socket in {folder}</p>"


def test_a_run_that_was_asked_for_and_has_ended_leaves_an_empty_page(running: Rollout) -> None:
    client = Client(str(os.getpid()))
    assert "<section" in client.get("/token/").text
    running.close()
    assert "<section" not in Client(str(os.getpid())).get("/token/runs").text


def test_browsers_share_a_look_and_series_grow_by_looks(running: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [100.0]
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    looking = view.Looking(None)
    first = looking.html()
    next(running.batches())
    times.append(100.7)
    assert looking.html() is first
    times.append(100.9)
    assert looking.html() != first
    [history] = looking._histories.values()
    assert [len(history.figures[name]) for name in ("steps/s", "return", "version")] == [2, 2, 2]
    running.close()
    times.append(200.0)
    looking.html()
    assert looking._histories == {}


def test_series_are_of_the_last_hour_however_often_it_is_looked(
    running: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [100.0]
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    looking = view.Looking(None)
    for now in (100.0, 200.0, 3699.0, 3701.0):  # nobody looked for most of it
        times.append(now)
        html = looking.html()
    [history] = looking._histories.values()
    assert [when for when, _ in history.figures["steps/s"]] == [200.0, 3699.0, 3701.0]
    assert re.search(r'aria-label="steps/s" .* points="0\.0,[\d.]+ 239\.9,[\d.]+ 240\.0,', html)
    times.append(9000.0)
    looking.html()
    [history] = looking._histories.values()
    assert [when for when, _ in history.figures["steps/s"]] == [9000.0]


def test_names_are_no_markup_and_a_stall_stands_out() -> None:
    node: dict[str, Any] = {"items": 1, "busy_s": 1.0, "idle_s": 0.0, "blocked_s": 0.0}
    run = {
        "path": "/run/7-a.sock",
        "pid": 7,
        "command": "<b>train",
        "kind": "graph",
        "name": "<b>mine",
        "elapsed_s": 2.0,
        "conclusion": "held back by <b>a",
        "tasks": [["<b>a"]],
        "nodes": {"<b>a": node},
        "edges": [],
        "parties": [{"name": "<b>a", "kind": "call", "doing": "<b>is", "on": [], "age_s": 1.0}],
        "diagnosis": {"state": "stalled", "text": "<b>stands", "waited_s": 6.0},
        "parts": {"<b>r": {"name": "<b>lane", "figures": {"time/total_timesteps": 8, "time/time_elapsed": 2.0}}},
    }
    history = RunHistory()
    for now, past_s in ((0.0, 2.0), (2.0, 1.0)):
        history.add(with_rates({**run, "elapsed_s": past_s}, None), now)
    found = runs_html([with_rates(run, None)], {"/run/7-a.sock": history}, "/run")
    assert "<b>" not in found
    assert found.startswith('<section class="bad">')
    for text in (
        "&lt;b&gt;mine",
        "&lt;b&gt;stands",
        "steps/s 4",
        "&lt;b&gt;a</title>",
        "held back by",
        "&lt;b&gt;r: &lt;b&gt;lane",
    ):
        assert text in found
    error = {"path": "/run/8-a.sock", "pid": 8, "error": "no answer in 2 s"}
    assert "no answer in 2 s" in runs_html([with_rates(error, None)], {"/run/8-a.sock": RunHistory()}, "/run")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1"], r"process 1 has no run in .*, expected the process id of one"),
        (["--port", "70000"], "--port is 70000, expected a free port below 65536, or 0 for any"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", *arguments]) == 1
    error = capsys.readouterr().err
    assert_one_line(error)
    assert re.search(text, error), error


def test_a_port_that_is_taken_and_a_package_that_is_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["view", "--port", str(taken.getsockname()[1])]) == 1
    assert "expected a free port" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["view"]) == 1
    assert "takes the package starlette: pip install 'rollflow[view]'" in capsys.readouterr().err


@pytest.mark.slow
def test_it_serves_until_ctrl_c(running: Rollout) -> None:
    command = [sys.executable, "-m", "rollflow.cli.main", "view"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", url)
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert f"pid {os.getpid()}" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.rpartition("/")[0].rpartition("/")[0] + "/", timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
