"""What stands between a rollout's edge and its trainer, fed as fast as it takes with what has been made already."""

import secrets
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.envs import NoopEnv
from benchmarks.policies import Noop
from rollflow.nodes import Rollout
from rollflow.sinks.trainer.item_message import message_of_batch, message_of_fragment, nbytes_of
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.shared.lender import Lender
from rollflow.sinks.trainer.source_link import SourceLink
from rollflow.stream.space_codec import describe_space
from rollflow.stream.wire import (
    NONCE_BYTES,
    SESSION_BYTES,
    VERSION,
    Fragment,
    Hello,
    Limits,
    SharedAddress,
    SourceSession,
    parse_trainer_address,
)

_SPACE = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
_SLOTS, _ROWS, _FRAGMENTS = 64, 16, 8


def feed_batch(address: str, batch: dict[str, Any]) -> None:
    """Send a train batch again and again, as long as this process lives."""
    spaces = {"observation_space": describe_space(_SPACE), "action_space": describe_space(_SPACE)}
    told = spaces | {"sends": "batches", "spaces": [describe_space(_SPACE)]}
    _feed(address, told, lambda number: message_of_batch(number, batch))


def feed_fragments(address: str, size: int) -> None:
    """Send fragments of so many bytes again and again; for "shm:" they lie in memory that is shared."""
    rollout = rollout_of(size)
    environments = rollout.environments
    if isinstance(parse_trainer_address(address), SharedAddress):
        environments.share()
    with rollout:
        fragments = list(rollout.fragments())[1:]  # the first step of a lane is not in shared memory
        spaces: Sequence[Any] = [environments.observation_space, *rollout.env_to_module.observation_spaces]

        def message(number: int) -> Fragment:
            fragment = fragments[number % len(fragments)]
            fragment.sequence = number - 1
            return message_of_fragment(number, fragment, spaces)

        described = {
            "observation_space": describe_space(environments.observation_space),
            "action_space": describe_space(environments.action_space),
        }
        told = described | {"sends": "fragments", "spaces": [describe_space(space) for space in spaces]}
        _feed(address, told, message)


def rollout_of(size: int) -> Rollout:
    """A few fragments of about so many bytes."""
    width = max(1, (size // (_SLOTS * (_ROWS + 1)) - 26) // 4)  # 26 bytes of a step are no observation
    env = NoopEnv(_SLOTS, width)
    return Rollout(env, module=Noop(_SLOTS), fragment_length=_ROWS, num_fragments=_FRAGMENTS, seed=0)


def _feed(address: str, told: Mapping[str, Any], message: Callable[[int], Fragment]) -> None:
    """Send one message after the other, as they are made of their numbers."""
    target, limits, kept = parse_trainer_address(address), Limits(), Kept(1 << 30)
    session = SourceSession(secrets.token_bytes(SESSION_BYTES))
    lender = Lender(1 << 30) if isinstance(target, SharedAddress) else None

    def hello() -> Hello:
        metadata = {
            "has_fixed_lanes": True,
            "spaces": told["spaces"],
            "is_stateful": False,
            "module": "none",
            "weights": {},
            "version": 0,
            "sends": told["sends"],
            "compressions": [],
            "shares_memory": lender is not None,
        }
        return Hello(
            versions=(VERSION, VERSION),
            role="source",
            software="benchmark",
            name="feeder",
            nonce=secrets.token_bytes(NONCE_BYTES),
            session=session.token,
            max_frame=limits.max_frame,
            slots=(1,),
            observation_space=told["observation_space"],
            action_space=told["action_space"],
            autoreset="SAME_STEP",
            metadata=metadata,
        )

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
        made = message(session.given + 1)
        if lender is not None:
            lender.look_at(made)
        kept.add(made, nbytes_of(made), 1)
        session.given += 1
        link.wake()
    raise link.error
