"""What stands between a rollout's edge and its trainer, fed as fast as it takes with what has been made already."""

import secrets
import select
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.envs import NoopEnv
from benchmarks.policies import Noop
from rollflow import Rollout
from rollflow.sinks.trainer.lending import FragmentLender
from rollflow.sinks.trainer.messages import message_of_batch, message_of_fragment, nbytes_of
from rollflow.sinks.trainer.pace_gate import ResendBuffer
from rollflow.sinks.trainer.uplink import TrainerUplink
from rollflow.stream.data.space import describe_space
from rollflow.stream.net.endpoint import endpoint_at
from rollflow.stream.wire import Fragment, Hello, Limits
from rollflow.stream.wire.codec.handshake import NONCE_BYTES, VERSION
from rollflow.stream.wire.software import software

_SPACE = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
_SLOTS, _ROWS, _FRAGMENTS = 64, 16, 8


def feed_batch(address: str, batch: dict[str, Any]) -> None:
    """Send a train batch again and again, as long as this process lives."""
    _feed(address, _described(_SPACE, _SPACE, [_SPACE]), "batches", lambda number: message_of_batch(number, batch))


def feed_fragments(address: str, size: int) -> None:
    """Send fragments of so many bytes again and again; for "shm:" they lie in memory that is shared."""
    rollout = rollout_of(size)
    environments = rollout.environments
    if address.startswith("shm:"):
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


def fragments_of(size: int) -> tuple[Fragment, dict[str, Any]]:
    """A message with a fragment of so many bytes, and fields of the hello of a rollout that sends such."""
    rollout = rollout_of(size)
    with rollout:
        fragment = list(rollout.fragments())[1]
    spaces: Sequence[Any] = [rollout.environments.observation_space, *rollout.env_to_module.observation_spaces]
    described = _described(rollout.environments.observation_space, rollout.environments.action_space, spaces)
    return message_of_fragment(1, fragment, spaces), described


def description_of(
    token: bytes,
    described: dict[str, Any],
    *,
    role: str = "source",
    name: str = "feeder",
    slots: tuple[int, ...] = (1,),
) -> Hello:
    """The hello of a rollout or, in another role, of a host, with a session of this token.

    slots    of each lane
    """
    return Hello(
        versions=(VERSION, VERSION),
        role=role,
        software=software(),
        name=name,
        nonce=secrets.token_bytes(NONCE_BYTES),
        session=token,
        max_frame=Limits().max_frame,
        slots=slots,
        **{"autoreset": "SAME_STEP", **described},
    )


def rollout_of(size: int) -> Rollout:
    """A few fragments of about so many bytes."""
    width = max(1, (size // (_SLOTS * (_ROWS + 1)) - 26) // 4)  # 26 bytes of a step are no observation
    env = NoopEnv(_SLOTS, width)
    return Rollout(env, module=Noop(_SLOTS), fragment_length=_ROWS, num_fragments=_FRAGMENTS, seed=0)


def _described(observation_space: Any, action_space: Any, spaces: Sequence[Any]) -> dict[str, Any]:
    """Fields of a hello: one lane, whose module has no weights; `spaces` are those that observations may come in."""
    metadata = {
        "has_fixed_lanes": True,
        "parts": [
            {
                "agents": ["agent"],
                "spaces": [describe_space(space) for space in spaces],
                "action_space": describe_space(action_space),
            }
        ],
        "is_stateful": False,
        "module": "none",
        "weights": {},
        "version": 0,
    }
    spaces_of_envs = {"observation_space": observation_space, "action_space": action_space}
    described = {name: describe_space(space) for name, space in spaces_of_envs.items()}
    return described | {"metadata": metadata}


def _feed(address: str, told: dict[str, Any], sends: str, message: Callable[[int], Fragment]) -> None:
    """Send one message after the other, as they are made of their numbers."""
    endpoint, kept = endpoint_at(address, None, None, None, may_share=True), ResendBuffer(1 << 30)
    lender = FragmentLender(1 << 30) if endpoint.shares else None

    told["metadata"] |= {"sends": sends, "shares_memory": lender is not None}

    link = TrainerUplink(
        endpoint,
        "feeder",
        lambda: told | {"slots": (1,)},
        kept,
        lambda version, weights: False,
        lender,
    )
    session = kept
    link.start()
    poll = select.poll()
    poll.register(link.bell.fileno(), select.POLLIN)
    while link.error is None:
        if session.given - session.done >= session.window:
            poll.poll()
            link.bell.silence()
            continue
        made = message(session.given + 1)
        if lender is not None:
            lender.look_at(made)
        kept.add(made, nbytes_of(made), 1)
        link.wake()
    raise link.error
