"""What a rollout says first through each connection to its trainer."""

import secrets
from collections.abc import Mapping

from rollflow.nodes.remote.software import software
from rollflow.sinks.trainer.any_rollout import Described
from rollflow.sinks.trainer.compression import available
from rollflow.stream.wire import NONCE_BYTES, VERSION, Hello


def introduction(
    told: Described,
    session: bytes,
    *,
    name: str,
    sends: str,
    max_frame: int,
    digests: Mapping[int, bytes],
    shares_memory: bool,
) -> Hello:
    """A hello of a rollout as it is now.

    session          the token of its session
    name             that it goes by at the trainer
    sends            "fragments" or "batches"
    max_frame        bytes of a frame that it takes
    digests          policy version -> digest, of weights that came from this trainer
    shares_memory    whether it lends what it sends
    """
    return Hello(
        versions=(VERSION, VERSION),
        role="source",
        software=software(),
        name=name,
        nonce=secrets.token_bytes(NONCE_BYTES),
        session=session,
        max_frame=max_frame,
        slots=told.slots,
        observation_space=told.spaces[0],
        action_space=told.spaces[1],
        autoreset="SAME_STEP",
        metadata={
            "sends": sends,
            "compressions": available(),
            "shares_memory": shares_memory,
            "digest": digests.get(told.metadata["version"]),
            **told.metadata,
        },
    )
