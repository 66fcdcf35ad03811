"""`rollflow check-host`: a check that a host of environments keeps to the protocol."""

import argparse
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rollflow.cli import arguments
from rollflow.nodes.env.remote.host_checks import check_host, encrypted
from rollflow.nodes.env.remote.remote_envs import address_of, close_sockets, listen_on, secret_bytes
from rollflow.stream.wire import UnixAddress, check_secret, parse_address


def add_to(commands: Any) -> None:
    """Add the command to those of `rollflow`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check-host",
        help="check whether a host of environments keeps to the protocol",
        description="Exercise a host of environments, of one agent each or of several, and print what it does wrong.",
    )
    parser.add_argument("address", nargs="?", help="where the host listens: tcp://host:port or unix:/path")
    parser.add_argument("--listen", metavar="ADDRESS", help="wait here for a host that dials, again after each check")
    arguments.add_protection(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for a step or a reset (10)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status, 0 where nothing is wrong."""
    if (args.address is None) == (args.listen is None):
        raise ValueError("expected either an address or --listen")
    secret, tls = secret_bytes(arguments.secret_of(args)), arguments.tls_of(args)
    wrong = 0
    with ExitStack() as stack:
        if args.listen is None:
            opened = _dialled(args.address, secret, tls)
        else:
            opened = _listened(args.listen, secret, tls, stack)
        for name, fault in check_host(opened, secret=secret, patience_s=args.timeout):
            print(f"{'ok   ' if fault is None else 'WRONG'}  {name}", flush=True)
            if fault is not None:
                wrong += 1
                print(f"       it {fault}", flush=True)
    print("all is well" if not wrong else f"{wrong} wrong")
    return min(wrong, 1)


def _dialled(text: str, secret: bytes | None, tls: ssl.SSLContext | None) -> Callable[[], socket.socket]:
    address = parse_address(text)
    check_secret(address, secret)

    def opened() -> socket.socket:
        if isinstance(address, UnixAddress):
            sock, name = socket.socket(socket.AF_UNIX), None
            sock.connect(address.path)
        else:
            sock, name = socket.create_connection((address.host, address.port), timeout=10.0), address.host
        return sock if tls is None else encrypted(sock, tls, is_server=False, name=name)

    return opened


def _listened(
    text: str, secret: bytes | None, tls: ssl.SSLContext | None, stack: ExitStack
) -> Callable[[], socket.socket]:
    address = parse_address(text)
    check_secret(address, secret)
    listeners = listen_on(address)
    stack.callback(close_sockets, listeners)
    print(f"waiting for a host on {address_of(listeners[0])}", file=sys.stderr, flush=True)
    listeners[0].setblocking(True)

    def opened() -> socket.socket:
        sock, _ = listeners[0].accept()
        return sock if tls is None else encrypted(sock, tls, is_server=True)

    return opened
