"""Exercise a host of environments, of one agent each or of several, and print what it does wrong."""

import argparse
import socket

from rollflow.cli import arguments
from rollflow.nodes.env.remote.host_checks import check_host
from rollflow.stream.net.endpoint import endpoint_at
from rollflow.stream.wire import UnixAddress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("address", help="where the host listens: tcp://host:port or unix:/path")
    arguments.add_secret(parser, "the secret that both sides must know")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for a step or a reset (10)")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status, 0 if nothing is wrong."""
    address, _, secret, _ = endpoint_at(args.address, arguments.secret_of(args), None, None)

    def opened() -> socket.socket:
        if isinstance(address, UnixAddress):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address.path)
            return sock
        return socket.create_connection((address.host, address.port), timeout=10.0)

    checks = check_host(opened, secret=secret, patience_s=args.timeout)
    return arguments.print_checks((name, fault and f"it {fault}") for name, fault in checks)
