"""`rollflow serve`: saved policies act for clients over HTTP and WebSocket."""

import argparse
import importlib.util
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollflow.cli import arguments, follow


def add_to(commands: Any) -> None:
    """Add `serve` to the commands of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="have saved policies act for clients, over HTTP and WebSocket",
        description="Have saved policies act for a PolicyClient, and for others by POST /v1/policies/NAME/act, with "
        "JSON or msgpack. A policy that is saved anew under its path takes over, and so do the weights of a trainer "
        "that is followed, without a dropped request.",
    )
    parser.add_argument(
        "policies",
        nargs="+",
        metavar="[NAME=]PATH",
        help="a saved policy; its name is that of the path if none is there",
    )
    parser.add_argument(
        "--http", default="127.0.0.1:8080", metavar="HOST:PORT", help="where to listen (127.0.0.1:8080)"
    )
    arguments.add_secret(parser, "the secret that clients show; asked for off loopback")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="this server's certificate: listen with TLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, where it is in a file of its own")
    parser.add_argument(
        "--canary",
        action="append",
        default=[],
        metavar="NAME=PATH:SHARE",
        help="another version of a policy, for a share of what begins, such as 0.1",
    )
    follow.add_options(parser)
    parser.add_argument("--openpi", metavar="NAME", help="the policy that speaks openpi's WebSocket protocol at /")
    arguments.add_allow(parser)
    parser.add_argument("--device", help="of the forward passes, such as cuda")
    parser.add_argument("--max-batch", type=int, default=64, help="requests in one forward pass, at most (64)")
    parser.add_argument(
        "--max-wait", type=float, default=0.0, metavar="MS", help="how long the first waits for others (0)"
    )
    parser.add_argument("--max-waiting", type=int, default=1024, help="requests that may wait; more get 429 (1024)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    needed = "starlette", "uvicorn", "websockets", "prometheus_client"
    if missing := [name for name in needed if not importlib.util.find_spec(name)]:
        raise ValueError(f"serving takes the package {missing[0]}: pip install rollflow[serve]")
    from rollflow.policy.serving import BatchOptions, HttpServer, Shelf, WatchedPolicy, Watcher

    shelf = Shelf(BatchOptions(args.max_batch, args.max_wait / 1000, args.max_waiting))
    watched = []
    for text in args.policies:
        name, path = _named(text)
        watched.append(WatchedPolicy(shelf, name, path, allow=args.allow, device=args.device))
    for text in args.canary:
        name, path, share = _canary(text)
        watched.append(WatchedPolicy(shelf, name, path, share=share, allow=args.allow, device=args.device))
    if args.openpi is not None:
        shelf.versions(args.openpi)
    followed = follow.following(shelf, args)
    with ExitStack() as stack:
        stack.callback(shelf.close)
        options: dict[str, Any] = {"certificate": args.tls_cert, "key": args.tls_key, "openpi_for": args.openpi}
        server = stack.enter_context(HttpServer(shelf, args.http, secret=arguments.secret_of(args), **options))
        for each in followed:
            each.begin()
            stack.callback(each.close)
        stack.callback(Watcher([*watched, *followed]).close)
        print(f"serving {', '.join(shelf.names)} at {server.url}", file=sys.stderr, flush=True)
        threading.Event().wait()  # until a signal
    return 0


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).name.removesuffix(".zip"), text
    if not name or not path:
        raise ValueError(f"policy {text!r}, expected PATH or NAME=PATH")
    return name, path


def _canary(text: str) -> tuple[str, str, float]:
    named, _, share = text.rpartition(":")
    try:
        return *_named(named), float(share)
    except ValueError:
        raise ValueError(f"--canary {text!r}, expected NAME=PATH:SHARE, such as pole=new-policy:0.1") from None
