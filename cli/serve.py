"""Have saved policies act for a PolicyClient, and for others by POST /v1/policies/NAME/act, with JSON or msgpack.

A policy that is saved anew under its path takes over, and so do the weights of a trainer that is followed, without a
dropped request.
"""

import argparse
import logging
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollflow.cli import arguments
from rollflow.sinks import WeightsFollower
from rollflow.stream.data.errors import RollflowError
from rollflow.stream.data.system import require_packages

if TYPE_CHECKING:
    from rollflow.policy.serving import Shelf

logger = logging.getLogger(__name__)
PREFIX = "follow-"
_LOOKS_UNTIL_AGAIN = 10  # after an error, such as another secret


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
    add(
        "--follow",
        action="append",
        default=[],
        metavar="[NAME=]ADDRESS",
        help="a trainer, a TrainerStream at tcp://host:port, unix:/path or shm:/path, whose newest weights act; where "
        "it trains several modules, in the policies of their names",
    )
    arguments.add_protection(parser, PREFIX)
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
    looks: list[Callable[[], object]] = []
    with ExitStack() as stack:
        stack.callback(shelf.close)
        for text in args.policies:
            name, path = _named(text)
            looks.append(WatchedPolicy(shelf, name, path, allow=args.allow, device=args.device).look)
        for each in _following(shelf, args):
            stack.callback(each.close)
            looks.append(each.look)
        options: dict[str, Any] = {"certificate": args.tls_cert, "key": args.tls_key}
        server = stack.enter_context(HttpServer(shelf, args.http, secret=arguments.secret_of(args), **options))
        stack.callback(Watcher(looks).close)
        print(f"serving {', '.join(shelf.names)} at {server.url}", file=sys.stderr, flush=True)
        threading.Event().wait()  # until a signal


def _named(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).name.removesuffix(".zip"), text
    if not name or not path:
        raise ValueError(f"policy {text!r}, expected PATH or NAME=PATH")
    return name, path


def _following(shelf: "Shelf", args: argparse.Namespace) -> Iterator["Following"]:
    """One `Following` for each `--follow`. Raises ValueError and RollflowError if one is invalid."""
    secret, tls = arguments.secret_of(args, PREFIX), arguments.tls_of(args, PREFIX, listens=False)
    if not args.follow and (secret is not None or tls is not None):
        raise ValueError("--follow-secret-… and --follow-tls are for --follow ADDRESS, expected it as well")
    for text in args.follow:
        name, equals, address = text.rpartition("=")
        if equals:
            shelf.versions(name)
        yield Following(shelf, name or None, address, secret, tls)


class Following:
    """Policies of a shelf that follow a trainer; what becomes of it is logged.

    name    of the policy; None: the only one, or those that are named as the trainer's modules
    """

    def __init__(
        self, shelf: "Shelf", name: str | None, address: str, secret: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._shelf, self._name, self._address = shelf, name, address
        self._dial = partial(WeightsFollower, address, self._take, secret=secret, tls=tls)
        self._version, self._is_away, self._looks = 0, False, 0
        self._follower = self._dial()

    def look(self) -> None:
        """Say whether the trainer is away or back; after an error dial it again some time later."""
        follower = self._follower
        if (is_away := bool(problem := follower.problem)) != self._is_away:
            self._is_away = is_away
            if is_away:
                weights = f"weights {self._version} of it" if self._version else "the weights that were saved"
                logger.warning("trainer %s is away, %s act on: %s", self._address, weights, problem)
            else:
                logger.warning("trainer %s is there, and is followed", self._address)
        self._looks = 0 if follower.error is None else self._looks + 1
        if self._looks >= _LOOKS_UNTIL_AGAIN:
            follower.close()
            self._follower, self._looks = self._dial(), 0

    def close(self) -> None:
        """Leave the trainer."""
        self._follower.close()

    def _take(self, version: int, weights: Mapping[str, Any]) -> None:
        try:
            names = self._shelf.publish(weights, version, self._name)
        except RollflowError as error:
            logger.warning("weights %d of trainer %s do not act: %s", version, self._address, error)
            return
        self._version = version
        logger.info("weights %d of trainer %s act in %s", version, self._address, ", ".join(names))
