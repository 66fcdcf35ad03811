"""What the commands that talk over a wire have in common: addresses, a secret, certificates."""

import argparse
import ssl
from pathlib import Path


def add_to(parser: argparse.ArgumentParser, *, connect: str, listen: str) -> None:
    """Add the arguments that say whom to talk to, and how; the help for both directions differs."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--connect", metavar="ADDRESS", help=f"{connect}: tcp://host:port or unix:/path")
    where.add_argument("--listen", metavar="ADDRESS", help=f"{listen}: tcp://host:port or unix:/path")
    add_protection_to(parser)


def add_protection_to(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `secret_of` and `tls_of` read."""
    parser.add_argument("--secret-file", type=Path, metavar="FILE", help="the secret that both sides must know")
    parser.add_argument("--tls", action="store_true", help="encrypt; the other side's certificate is checked")
    parser.add_argument("--tls-ca", metavar="FILE", help="whose certificates are good; without it, the system's")
    parser.add_argument("--tls-cert", metavar="FILE", help="this side's certificate, and maybe its key")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, where it is in a file of its own")


def secret_of(told: argparse.Namespace) -> str | None:
    """The secret in the file. Raises ValueError where it can't be read, or is empty."""
    if told.secret_file is None:
        return None
    try:
        secret: str = told.secret_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--secret-file {told.secret_file}: {why}, expected a file of text") from error
    if not secret:
        raise ValueError(f"--secret-file {told.secret_file} is empty, expected a secret")
    return secret


def tls_of(told: argparse.Namespace) -> ssl.SSLContext | None:
    """The context that the arguments ask for; None: no TLS. Raises ValueError and OSError where they make none."""
    if not told.tls:
        given = [name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(told, name) is not None]
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} without --tls, expected both")
        return None
    listens = told.listen is not None
    if listens and told.tls_cert is None:
        raise ValueError("--tls with --listen, expected --tls-cert as well")
    for name in (told.tls_ca, told.tls_cert, told.tls_key):
        if name is not None and not Path(name).is_file():
            raise ValueError(f"there is no file {name}, expected a certificate or its key")
    context = ssl.create_default_context(
        ssl.Purpose.CLIENT_AUTH if listens else ssl.Purpose.SERVER_AUTH, cafile=told.tls_ca
    )
    if listens and told.tls_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    if told.tls_cert is not None:
        context.load_cert_chain(told.tls_cert, told.tls_key)
    return context
