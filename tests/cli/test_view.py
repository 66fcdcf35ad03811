"""`rollflow view`: runs in a browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from command_errors import Says
from serving_process import Program

from rollflow import Rollout
from rollflow.cli import top, view
from rollflow.stream.observe.snapshot import with_rates

pytestmark = pytest.mark.usefixtures("folder")


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
    [run] = client.get("/token/runs").json()["runs"]
    assert (run["pid"], run["title"]) == (os.getpid(), "Rollout 1 lane × 2 slots")
    assert run["sentence"] == run["conclusion"]


def test_the_page_takes_nothing_from_elsewhere() -> None:
    client = Client()
    first, second = client.get("/token/"), client.get("/token/")
    policy = first.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; img-src data:; script-src 'nonce-")
    [nonce] = set(re.findall(r'nonce="([^"]+)"', first.text))
    assert f"script-src 'nonce-{nonce}'" in policy
    assert nonce not in second.text
    assert set(re.findall(r"https?://[\w./]+", first.text)) == {"https://github.com/leeoniya/uPlot"}  # its notice
    assert "Leon Sorokin" in (resources.files("rollflow.cli") / "page" / "uPlot.LICENSE").read_text()


def test_a_run_that_has_ended_leaves_a_page_that_says_where_it_looked(running: Rollout, folder: Path) -> None:
    address = str(os.getpid())
    assert len(Client(address).get("/token/runs").json()["runs"]) == 1
    running.close()
    for each in (address, None):
        assert Client(each).get("/token/runs").json() == {"runs": [], "folder": str(folder)}


def test_browsers_share_a_look(running: Rollout) -> None:
    times = [100.0]
    polled = top.SnapshotPoller(None, 0.8, lambda: times[-1])
    first = polled.next()
    next(running.batches())
    times.append(100.7)
    assert polled.next() is first
    times.append(100.9)
    assert polled.next() != first


def test_a_run_has_the_caller_and_the_learner_pipeline_behind_its_ring(running: Rollout) -> None:
    [run] = map(view.page_of, top.SnapshotPoller(None).next())
    assert {name for task in run["tasks"] for name in task} == run["nodes"].keys()
    ways = {edge["source"]: edge["target"] for edge in run["edges"] if not edge["feedback"]}
    assert ways["learner_pipeline"] == "caller"
    for name in run["nodes"]:
        assert f">{name}  " in run["picture"]
    assert {name for name, _ in run["tiles"]} >= {"steps/s", "steps", "return", "version"}


NAME = "<b>a"
RUN: dict[str, Any] = {
    **{name: NAME for name in ("command", "kind", "name", "bottleneck", "conclusion")},
    "elapsed_s": 2.0,
    "tasks": [[NAME]],
    "nodes": {NAME: {"items": 1, "busy_s": 1.0, "idle_s": 0.0, "blocked_s": 0.0}},
    "edges": [],
    "diagnosis": {"state": "stalled", "text": "<b>stands", "waited_s": 6.0},
    "parts": {"<b>r": {"name": "<b>lane", "figures": {"time/total_timesteps": 8, "time/time_elapsed": 2.0}}},
}


def test_names_are_no_markup_and_a_stall_stands_out_unless_a_reader_waits_for_a_slow_fragment() -> None:
    found = view.page_of(with_rates(RUN, None))
    assert "<b>" not in found["picture"]
    assert found["is_bad"]
    assert found["texts"] == ["<b>stands", "<b>r: <b>lane"]  # which the page shows as text
    assert found["tiles"] == [("steps/s", 4.0), ("steps", 8)]
    error = view.page_of(with_rates({"path": "/run/8-a.sock", "pid": 8, "error": "no answer in 2 s"}, None))
    assert (error["is_bad"], error["sentence"]) == (True, "no answer in 2 s")
    waits = {"state": "waits", "text": "no fragment for 4.0 s: env is in step()", "waited_s": 4.0}
    found = view.page_of(with_rates({**RUN, "diagnosis": waits}, None))
    assert not found["is_bad"]
    assert found["texts"] == ["<b>r: <b>lane"]


def test_a_taken_port_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch, refused: Says) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "expected a free port" in refused("view", "--port", taken.getsockname()[1])
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert "takes the package starlette: pip install 'rollflow[view]'" in refused("view")


@pytest.mark.slow
def test_it_serves_until_ctrl_c(running: Rollout) -> None:
    command = [sys.executable, "-m", "rollflow.cli.main", "view"]
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", url)
        with urllib.request.urlopen(f"{url}runs", timeout=60) as answer:
            assert f'"pid":{os.getpid()}' in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url.rpartition("/")[0].rpartition("/")[0] + "/", timeout=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
