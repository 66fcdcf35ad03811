"""A source without a rollout: what stands between a rollout's edge and its trainer, fed as fast as it takes."""

import secrets
import select
from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.sinks.trainer.item_message import message_of_batch, nbytes_of
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.shared.lender import Lender
from rollflow.sinks.trainer.source_link import SourceLink
from rollflow.stream.space_codec import describe_space
from rollflow.stream.wire import (
    NONCE_BYTES,
    SESSION_BYTES,
    VERSION,
    Hello,
    Limits,
    SharedAddress,
    SourceSession,
    parse_trainer_address,
)

_SPACE = describe_space(gym.spaces.Box(-1.0, 1.0, (3,), np.float32))


def feed(address: str, batch: dict[str, Any]) -> None:
    """Send a train batch again and again, as long as this process lives."""
    target, limits, kept = parse_trainer_address(address), Limits(), Kept(1 << 30)
    session = SourceSession(secrets.token_bytes(SESSION_BYTES))
    lender = Lender(1 << 30) if isinstance(target, SharedAddress) else None

    def hello() -> Hello:
        metadata = {
            "has_fixed_lanes": True,
            "spaces": [_SPACE],
            "is_stateful": False,
            "module": "none",
            "weights": {},
            "version": 0,
            "sends": "batches",
            "compressions": [],
            "shares_memory": lender is not None,
        }
        told: Any = {"software": "benchmark", "name": "feeder", "autoreset": "SAME_STEP", "slots": (1,)}
        told |= {"observation_space": _SPACE, "action_space": _SPACE, "metadata": metadata}
        told |= {"nonce": secrets.token_bytes(NONCE_BYTES), "session": session.token, "max_frame": limits.max_frame}
        return Hello(versions=(VERSION, VERSION), role="source", **told)

    link = SourceLink(
        target,
        hello,
        session,
        kept,
        lambda version, weights: False,
        secret=None,
        tls=None,
        limits=limits,
        lender=lender,
    )
    link.start()
    poll = select.poll()
    poll.register(link.bell.fileno(), select.POLLIN)
    while link.error is None:
        window = 0 if link.wanted is None else link.wanted.window
        if session.given - session.done >= window:
            poll.poll()
            link.bell.silence()
            continue
        message = message_of_batch(session.given + 1, batch)
        kept.add(message, nbytes_of(message), 1)
        session.given += 1
        link.wake()
    raise link.error
