"""Have saved policies act for a PolicyClient, and for others by POST /v1/policies/NAME/act, with JSON or msgpack.

A policy that is saved anew under its path takes over, without a dropped request.
"""

import argparse
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollflow.cli import arguments
from rollflow.stream.data.system import require_packages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "policies",
        nargs="+",
        metavar="[NAME=]PATH",
        help="a saved policy; its name is that of the path if none is there",
    )
    add("--http", default="127.0.0.1:8080", metavar="HOST:PORT", help="where to listen (127.0.0.1:8080)")
    arguments.add_secret(parser, "the secret that clients show; asked for off loopback")
    add("--tls-cert", type=Path, metavar="FILE", help="this server's certificate: listen with TLS")
    add("--tls-key", type=Path, metavar="FILE", help="its key, where it is in a file of its own")
    arguments.add_allow(parser)
    add("--device", help="of the forward passes, such as cuda")
    add("--max-batch", type=int, default=64, help="requests in one forward pass, at most (64)")
    add("--max-wait", type=float, default=0.0, metavar="MS", help="how long the first waits for others (0)")
    add("--max-waiting", type=int, default=1024, help="requests that may wait; more get 429 (1024)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    require_packages("serving", "serve", "starlette", "uvicorn", "websockets", "prometheus_client")
    from rollflow.policy.serving import BatchOptions, HttpServer, Shelf, WatchedPolicy, Watcher

    shelf = Shelf(BatchOptions(args.max_batch, args.max_wait / 1000, args.max_waiting))
    with ExitStack() as stack:
        stack.callback(shelf.close)
        watched = [WatchedPolicy(shelf, *_named(text), allow=args.allow, device=args.device) for text in args.policies]
        options: dict[str, Any] = {"certificate": args.tls_cert, "key": args.tls_key}
        server = stack.enter_context(HttpServer(shelf, args.http, secret=arguments.secret_of(args), **options))
        stack.callback(Watcher([each.look for each in watched]).close)
        print(f"serving {', '.join(shelf.names)} at {server.url}", file=sys.stderr, flush=True)
        threading.Event().wait()  # until a signal


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).name, text
    if not name or not path:
        raise ValueError(f"policy {text!r}, expected PATH or NAME=PATH")
    return name, path
