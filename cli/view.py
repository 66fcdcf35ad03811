"""`rollflow view`: the runs of this user on this machine, in a browser."""

import argparse
import importlib
import importlib.util
import secrets
import socket
import threading
import time
from typing import Any

from rollflow.cli.top import SnapshotPoller, add_run, load_snapshots
from rollflow.stream.pictures.runs_page import PAGE, runs_html
from rollflow.stream.snapshots.history import RunHistory
from rollflow.stream.snapshots.run_folder import run_folder

_LOOK_S = 0.8  # between two looks, at least: several browsers share one


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "view",
        help="look at the runs of this user on this machine in a browser",
        description="Look at the runs of this user on this machine in a browser, until Ctrl-C. The page is served on "
        "this machine alone, under an address that nobody can guess, and takes nothing from the internet.",
    )
    add_run(parser)
    parser.add_argument("--port", type=int, default=0, help="where it is served on 127.0.0.1 (a free one)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ValueError(f"rollflow view takes the package {missing[0]}: pip install 'rollflow[view]'")
    load_snapshots(args.address)  # so that a mistake is said at once
    uvicorn = importlib.import_module("uvicorn")
    with _listening(args.port) as listening:
        token = secrets.token_urlsafe(16)
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/", flush=True)
        config = uvicorn.Config(application(args.address, token), log_level="warning", timeout_graceful_shutdown=1)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
    return 0


def _listening(port: int) -> socket.socket:
    expected = "expected a free port below 65536, or 0 for any"
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is {port}, {expected}")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ValueError(f"--port {port}: {error}, {expected}") from error


def application(address: str | None, token: str) -> Any:
    """The application of starlette that serves the page.

    address    of the run that is looked at; None: all
    token      first part of every path
    """
    applications, routing = (importlib.import_module(f"starlette.{name}") for name in ("applications", "routing"))
    html = importlib.import_module("starlette.responses").HTMLResponse
    looking = Looking(address)

    def page(request: Any) -> Any:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "style-src-attr 'unsafe-inline'"
        )
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return html(PAGE.format(nonce=nonce, runs=looking.html()), headers=headers)

    def runs(request: Any) -> Any:
        return html(looking.html(), headers={"Cache-Control": "no-store"})

    routes = [routing.Route(f"/{token}/", page), routing.Route(f"/{token}/runs", runs)]
    return applications.Starlette(routes=routes)


class Looking:
    """Looks at runs for browsers, and keeps what it saw in the last hour. From any thread.

    address    of the run that is looked at; None: all
    """

    def __init__(self, address: str | None) -> None:
        self._looks = SnapshotPoller(address)
        self._lock = threading.Lock()
        self._html, self._looked = "", 0.0
        self._histories: dict[str, RunHistory] = {}

    def html(self) -> str:
        """HTML of the runs as they are now, or were a moment ago."""
        with self._lock:
            if not self._looked or time.monotonic() - self._looked >= _LOOK_S:
                self._html, self._looked = self._look(), time.monotonic()
            return self._html

    def _look(self) -> str:
        try:
            runs = self._looks.next()
        except ValueError:  # it has ended
            runs = []
        self._histories = {run["path"]: self._histories.get(run["path"]) or RunHistory() for run in runs}
        for run in runs:
            self._histories[run["path"]].add(run, time.monotonic())
        return runs_html(runs, self._histories, str(run_folder()))
