"""What stands between a rollout's edge and its trainer, fed as fast as it takes with what has been made already."""

import secrets
import select
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.envs import NoopEnv
from benchmarks.policies import Noop
from rollflow.nodes import Rollout
from rollflow.sinks.trainer.any_rollout import Described
from rollflow.sinks.trainer.introduction import introduction
from rollflow.sinks.trainer.item_message import message_of_batch, message_of_fragment, nbytes_of
from rollflow.sinks.trainer.kept import Kept
from rollflow.sinks.trainer.shared.lender import Lender
from rollflow.sinks.trainer.source_link import SourceLink
from rollflow.stream.space_codec import describe_space
from rollflow.stream.wire import (
    SESSION_BYTES,
    Fragment,
    Limits,
    SharedAddress,
    SourceSession,
    parse_trainer_address,
)

_SPACE = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
_SLOTS, _ROWS, _FRAGMENTS = 64, 16, 8


def feed_batch(address: str, batch: dict[str, Any]) -> None:
    """Send a train batch again and again, as long as this process lives."""
    _feed(address, _described(_SPACE, _SPACE, [_SPACE]), "batches", lambda number: message_of_batch(number, batch))


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

        told = _described(environments.observation_space, environments.action_space, spaces)
        _feed(address, told, "fragments", message)


def rollout_of(size: int) -> Rollout:
    """A few fragments of about so many bytes."""
    width = max(1, (size // (_SLOTS * (_ROWS + 1)) - 26) // 4)  # 26 bytes of a step are no observation
    env = NoopEnv(_SLOTS, width)
    return Rollout(env, module=Noop(_SLOTS), fragment_length=_ROWS, num_fragments=_FRAGMENTS, seed=0)


def _described(observation_space: Any, action_space: Any, spaces: Sequence[Any]) -> Described:
    """A rollout of one lane, whose module has no weights; `spaces` are those that observations may come in."""
    metadata = {
        "has_fixed_lanes": True,
        "spaces": [describe_space(space) for space in spaces],
        "is_stateful": False,
        "module": "none",
        "weights": {},
        "version": 0,
    }
    return Described((1,), (describe_space(observation_space), describe_space(action_space)), metadata)


def _feed(address: str, told: Described, sends: str, message: Callable[[int], Fragment]) -> None:
    """Send one message after the other, as they are made of their numbers."""
    target, limits, kept = parse_trainer_address(address), Limits(), Kept(1 << 30)
    session = SourceSession(secrets.token_bytes(SESSION_BYTES))
    lender = Lender(1 << 30) if isinstance(target, SharedAddress) else None

    hello = partial(
        introduction,
        told,
        session.token,
        name="feeder",
        sends=sends,
        max_frame=limits.max_frame,
        digests={},
        shares_memory=lender is not None,
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
