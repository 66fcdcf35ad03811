"""Handshake: the messages Hello, Challenge, Proof and Welcome, and the proofs in them.

Both sides prove that they know the secret without sending it. The proofs cover the exact bytes of the Hello and the
Challenge: versions, spaces, and random bytes of both sides. They also cover which side proves, so that a proof can't be
sent back.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform, get_args

from rollflow.stream.wire.codec import field

VERSION = 1  # the only version of the protocol that is supported
NONCE_BYTES = 32
SESSION_BYTES = 16
MOST_LANES = 4096
MOST_SLOTS = 1 << 20
MOST_AGENTS = 4096
MOST_NUMBER = (1 << 53) - 1  # the largest integer that a double, and so every language, has exactly

LaneId = Annotated[int, field.whole(0, MOST_NUMBER)]
Number = Annotated[int, field.whole(1, MOST_NUMBER)]
_Role = Literal["env", "agents", "rollout", "agent_rollout", "source", "sampler"]
Role = Annotated[_Role, field.one_of(*get_args(_Role))]
ROLLOUTS = ("rollout", "agent_rollout")  # roles of hosts that run whole rollouts
WITH_AGENTS = ("agents", "agent_rollout")  # roles of hosts whose environments have several agents each
NO_HOSTS = ("source", "sampler")  # roles of ends that are no hosts, and have no spaces
Autoreset = Annotated[Literal["NEXT_STEP", "SAME_STEP", "DISABLED"], field.one_of("NEXT_STEP", "SAME_STEP", "DISABLED")]
Version = Annotated[int, field.whole(1, 0xFFFF)]
Name = Annotated[str, field.text(256)]
Nonce = Annotated[bytes, field.raw(NONCE_BYTES)]
Proved = Annotated[bytes, field.raw(0, 32)]
FrameSize = Annotated[int, field.whole(1 << 16, 0xFFFFFFFC)]
Slots = Annotated[int, field.whole(1, MOST_SLOTS)]

HOST = b"rollflow host"
GATEWAY = b"rollflow gateway"


def transcript_of(hello: bytes, challenge: bytes) -> bytes:
    """SHA-256 over the frames of a Hello and a Challenge, with their lengths."""
    return hashlib.sha256(hello + challenge).digest()


def prove(secret: bytes | None, who: bytes, transcript: bytes) -> bytes:
    """HMAC-SHA256 with the secret over `who` (HOST or GATEWAY) and the transcript; empty without a secret."""
    return b"" if secret is None else hmac.digest(secret, who + transcript, "sha256")


def is_proof(proof: bytes, secret: bytes | None, who: bytes, transcript: bytes) -> bool:
    """True if `proof` is the result of `prove`, compared in constant time."""
    return hmac.compare_digest(proof, prove(secret, who, transcript))


@dataclass_transform(eq_default=False, frozen_default=True)
class WireMessage:
    """A message: a frozen dataclass, which is equal to itself alone.

    Its `kind` on the wire is the name of its class in snake case, unless it says another.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls):
            cls.kind = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        dataclass(frozen=True, eq=False)(cls)


class Hello(WireMessage):
    """Introduction of a host.

    versions             lowest and highest protocol version that it supports
    role                 "env": it steps environments; "agents": environments with several agents each; "rollout":
                         it runs whole rollouts; "agent_rollout": those of environments with several agents;
                         "source": it runs one of its own, and sends fragments to a trainer; "sampler": it wants
                         steps from a replay host
    software, name       names of its software and of the host, for people
    nonce                32 random bytes, new for every connection
    session              16 random bytes of its choice: the same as long as it remembers its lanes
    max_frame            largest frame that it takes, in bytes, without the length field
    slots                number of environments in each of its lanes
    observation_space,   space of one environment, as `describe_space` describes it; with several agents: a Tuple of the
    action_space         spaces of the parts, a part being all agents with the same two spaces
    autoreset            reset mode of its environments at an episode's end: see the protocol's documentation
    metadata             other information, such as the environment's id
    busy                 whether it serves a gateway already: another one is not to welcome this host
    agents               with several agents: the ids of all possible agents of an environment, strings or integers
    parts                with several agents: each one's part; parts are numbered in the order of their first agents
    """

    versions: Annotated[tuple[int, ...], field.span(1, 0xFFFF)]
    role: Role
    software: Name
    name: Name
    nonce: Nonce
    session: Annotated[bytes, field.raw(SESSION_BYTES)]
    max_frame: FrameSize
    slots: Annotated[tuple[int, ...], field.list_of(field.whole(1, MOST_SLOTS), MOST_LANES)]
    observation_space: Annotated[Mapping[str, Any], field.mapping]
    action_space: Annotated[Mapping[str, Any], field.mapping]
    autoreset: Autoreset
    metadata: Annotated[Mapping[str, Any], field.mapping]
    busy: Annotated[bool, field.flag] = False
    agents: Annotated[tuple[str | int, ...] | None, field.nullable(field.list_of(field.agent_id, MOST_AGENTS))] = None
    parts: Annotated[
        tuple[int, ...] | None, field.nullable(field.list_of(field.whole(0, MOST_AGENTS - 1), MOST_AGENTS))
    ] = None

    @property
    def num_envs(self) -> int:
        """Number of environments in all lanes."""
        return sum(self.slots)

    @property
    def agents_by_part(self) -> list[list[int]]:
        """The numbers of each part's agents, in order; only for a checked Hello with agents."""
        assert self.parts is not None
        numbers: list[list[int]] = [[] for _ in range(max(self.parts) + 1)]
        for number, part in enumerate(self.parts):
            numbers[part].append(number)
        return numbers

    def first_slots(self, first: int) -> list[int]:
        """The number of every lane's first slot, from `first` on."""
        return list(accumulate(self.slots[:-1], initial=first))


class Challenge(WireMessage):
    """Gateway's answer to a Hello.

    version        protocol version from here on
    software       name of its software, for people
    nonce          32 random bytes, new for every connection
    secret         whether the gateway has a secret, which the host must prove to know
    max_frame      largest frame that it takes, in bytes, without the length field
    heartbeat_s    seconds of silence after which either side sends a ping
    grace_s        seconds that it waits for a lost host to come back
    """

    version: Version
    software: Name
    nonce: Nonce
    secret: Annotated[bool, field.flag]
    max_frame: FrameSize
    heartbeat_s: Annotated[float, field.seconds]
    grace_s: Annotated[float, field.seconds]


class Proof(WireMessage):
    """Host's proof that it knows the secret.

    mac    32 bytes, the result of `prove`; empty without a secret
    """

    mac: Proved


@dataclass(frozen=True, slots=True, eq=False)
class LaneGrant:
    """A gateway's id and state of one of a host's lanes.

    lane          id of the lane in all messages
    slots         number of environments in it
    first_slot    number of its first slot in the rollout
    number        number of the last answered request; 0: there is none
    """

    lane: LaneId
    slots: Slots
    first_slot: Annotated[int, field.whole(0, MOST_NUMBER)]
    number: Annotated[int, field.whole(0, MOST_NUMBER)]


class Welcome(WireMessage):
    """Gateway's proof that it knows the secret as well, and its acceptance of the host.

    mac        32 bytes, the result of `prove`; empty without a secret
    session    the Hello's session, with which the host comes back after a lost connection
    resumed    whether the gateway knows the session from an earlier Welcome, which may not have arrived
    credits    number of unrequested messages that the host may send
    lanes      the host's lanes, in the order of the Hello's `slots`
    """

    mac: Proved
    session: Annotated[bytes, field.raw(SESSION_BYTES)]
    resumed: Annotated[bool, field.flag]
    credits: Annotated[int, field.whole(0, MOST_NUMBER)]
    lanes: Annotated[tuple[LaneGrant, ...], field.list_of(field.record(LaneGrant), MOST_LANES)]
