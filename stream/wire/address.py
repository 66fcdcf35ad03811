"""Where a gateway, a host or a trainer listens: `tcp://host:port`, `tcp://[::1]:port`, `unix:/path`, `shm:/path`."""

import ipaddress
import re
from dataclasses import dataclass

from rollflow.stream.errors import WireError

_TCP = re.compile(r"tcp://(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^\[\]:/?#@\s]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_TCP_FORMS = "'tcp://host:port', 'tcp://[ipv6]:port'"
_MOST_PATH = 103  # bytes: what the system with the least takes


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of a host; 0, to listen on, is any that is free."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
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
    """A socket in the file system."""

    path: str

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return True

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class SharedAddress(UnixAddress):
    """A socket in the file system, for whoever shares memory with the other end: a trainer and its sources."""

    def __str__(self) -> str:
        return f"shm:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(given: str | Address) -> Address:
    """The address that a text names, or that is one. Raises WireError for what is none."""
    return _parsed(_text_of(given), f"{_TCP_FORMS} or 'unix:/path'")


def parse_trainer_address(given: str | Address) -> Address:
    """The address of a trainer, which may share memory, likewise."""
    text = _text_of(given)
    if isinstance(text, str) and text.startswith("shm:"):
        return SharedAddress(_path_behind("shm:", text))
    return _parsed(text, f"{_TCP_FORMS}, 'unix:/path' or 'shm:/path'")


def _text_of(given: str | Address) -> str:
    return str(given) if isinstance(given, Address) else given


def _parsed(text: str, forms: str) -> Address:
    if not isinstance(text, str):
        raise _no_address(text, f"a string: {forms}")
    if text.startswith("unix:"):
        return UnixAddress(_path_behind("unix:", text))
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
    """Raise WireError where anybody on the network could come in without a secret, or where it is empty."""
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
