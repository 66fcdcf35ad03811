"""Name and version of this software, for people at the other end of a wire, and the hello that has it."""

import secrets
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rollflow.stream.wire.codec.handshake import NONCE_BYTES, VERSION, Hello, Role
from rollflow.stream.wire.codec.limits import Limits


@cache
def software() -> str:
    """This package and its version."""
    try:
        return f"rollflow {version('rollflow')}"
    except PackageNotFoundError:
        return "rollflow"


def hello_of(role: Role, name: str, session: bytes, limits: Limits, **more: Any) -> Hello:
    """The first message of a connection that is made now, with `more` fields; an end without spaces gives none."""
    return Hello(
        versions=(VERSION, VERSION),
        role=role,
        software=software(),
        name=name,
        nonce=secrets.token_bytes(NONCE_BYTES),
        session=session,
        max_frame=limits.max_frame,
        **dict[str, Any](observation_space={}, action_space={}, autoreset="SAME_STEP", metadata={}) | more,
    )
