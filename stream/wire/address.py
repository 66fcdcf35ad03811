"""Addresses of gateways, hosts and trainers: `tcp://host:port`, `tcp://[::1]:port`, `unix:/path`, `shm:/path`."""

import ipaddress
import re
from dataclasses import dataclass
from typing import ClassVar

from rollflow.stream.data.errors import WireError

_TCP = re.compile(r"tcp://(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^\[\]:/?#@\s]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_TCP_FORMS = "'tcp://host:port', 'tcp://[ipv6]:port'"
_MOST_PATH = 103  # bytes: the lowest limit among supported systems


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of a host; to listen on port 0 means any free port."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the address."""
        if self.host.lower() == "localhost":
            return True
        try:
            number = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return (getattr(number, "ipv4_mapped", None) or number).is_loopback

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the file system; with "shm:" its two ends, a trainer and a source, share memory."""

    path: str
    scheme: str = "unix:"
    is_local: ClassVar[bool] = True  # only this machine can reach it

    def __str__(self) -> str:
        return f"{self.scheme}{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(address: str | Address, *, may_share: bool = False) -> Address:
    """Parse the address of a gateway, a host or a trainer. Raises WireError for a text that is no address.

    may_share    whether it may be `shm:/path`, as a trainer's may
    """
    schemes = ("unix:", "shm:") if may_share else ("unix:",)
    forms = f"{_TCP_FORMS}, 'unix:/path' or 'shm:/path'" if may_share else f"{_TCP_FORMS} or 'unix:/path'"
    text = str(address) if isinstance(address, Address) else address
    if not isinstance(text, str):
        raise _no_address(text, f"a string: {forms}")
    for scheme in schemes:
        if text.startswith(scheme):
            return UnixAddress(_path_behind(scheme, text), scheme)
    match = _TCP.fullmatch(text)
    if match is None:
        has_no_port = _TCP.fullmatch(f"{text}:0") is not None
        raise _no_address(text, f"a port behind it: {forms}" if has_no_port else forms)
    port = int(match["port"])
    if port > 0xFFFF:
        raise _no_address(text, "a port from 0 to 65535")
    if match["six"] is not None:
        try:
            ipaddress.IPv6Address(match["six"])
        except ValueError:
            raise _no_address(text, "an IPv6 address in brackets") from None
    return TcpAddress(match["six"] or match["name"], port)


def check_secret(address: Address, secret: bytes | None) -> None:
    """Raise WireError for a network address without a secret, and for an empty secret."""
    if secret is None and not address.is_local:
        raise WireError(
            f"address {str(address)!r} without a secret, expected one, or a loopback address or Unix socket", "secret"
        )
    if secret is not None and not secret:
        raise WireError(f"address {str(address)!r}: the secret is empty, expected at least one byte", "secret")


def _path_behind(scheme: str, text: str) -> str:
    path = text.removeprefix(scheme)
    if not path.startswith("/") or "\0" in path or len(path.encode(errors="surrogateescape")) > _MOST_PATH:
        raise _no_address(text, f"an absolute path of at most {_MOST_PATH} bytes behind '{scheme}'")
    return path


def _no_address(text: str, expected: str) -> WireError:
    return WireError(f"address {text!r}, expected {expected}", "address")
