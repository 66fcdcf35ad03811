"""Look at the runs of this user on this machine in a browser, until Ctrl-C.

The page is served on this machine alone, under an address that nobody can guess, and takes nothing from the internet.
"""

import argparse
import importlib
import secrets
import socket
from importlib import resources
from typing import Any

from rollflow.cli.top import SnapshotPoller, add_run, load_snapshots
from rollflow.stream.data.system import require_packages
from rollflow.stream.observe.graph_picture import graph_picture
from rollflow.stream.observe.run_socket import run_folder
from rollflow.stream.observe.snapshot import Snapshot, shown

_LOOK_S = 0.8  # between two looks, at least: several browsers share one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("--port", type=int, default=0, help="where it is served on 127.0.0.1 (a free one)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    require_packages("rollflow view", "view", "starlette", "uvicorn")
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


def _listening(port: int) -> socket.socket:
    expected = "expected a free port below 65536, or 0 for any"
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port is {port}, {expected}")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ValueError(f"--port {port}: {error}, {expected}") from error


def application(address: str | None, token: str) -> Any:
    """The application of starlette that serves the page, and the runs as they are now.

    address    of the run that is looked at; None: all
    token      first part of every path
    """
    starlette, routing, responses = (
        importlib.import_module(f"starlette.{name}") for name in ("applications", "routing", "responses")
    )
    files = resources.files("rollflow.cli") / "page"
    names = ("view.html", "uPlot.min.css", "view.css", "uPlot.iife.min.js", "view.js")
    frame, *styles_and_scripts = ((files / name).read_text() for name in names)
    styles, scripts = "\n".join(styles_and_scripts[:2]), "\n".join(styles_and_scripts[2:])
    poller = SnapshotPoller(address, _LOOK_S)

    def page(request: Any) -> Any:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; connect-src 'self'; img-src data:; script-src 'nonce-{nonce}'; "
            f"style-src 'nonce-{nonce}'; style-src-attr 'unsafe-inline'"
        )
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return responses.HTMLResponse(frame.format(nonce=nonce, css=styles, js=scripts), headers=headers)

    def runs(request: Any) -> Any:
        try:
            found = [page_of(run) for run in poller.next()]
        except ValueError:  # it has ended
            found = []
        answer = {"runs": found, "folder": str(run_folder())}
        return responses.JSONResponse(answer, headers={"Cache-Control": "no-store"})

    return starlette.Starlette(routes=[routing.Route(f"/{token}/", page), routing.Route(f"/{token}/runs", runs)])


def page_of(run: Snapshot) -> dict[str, Any]:
    """A snapshot with rates, what `shown` has of it, and the graph as SVG, `picture`, if there is one."""
    picture = {"picture": graph_picture(run, run["conclusion"])} if "tasks" in run else {}
    return {**run, **shown(run), **picture}
