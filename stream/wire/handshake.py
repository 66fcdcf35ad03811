"""The messages that a host and a gateway begin with: Hello, Challenge, Proof, Welcome."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from rollflow.stream.wire.field import (
    agent_id,
    flag,
    list_of,
    mapping,
    nullable,
    one_of,
    raw,
    record,
    seconds,
    span,
    text,
    whole,
)

VERSION = 1  # of the protocol, the only one that is spoken here
NONCE_BYTES = 32
SESSION_BYTES = 16
MOST_LANES = 4096
MOST_SLOTS = 1 << 20
MOST_AGENTS = 4096
MOST_NUMBER = (1 << 53) - 1  # the largest whole number that every language has

LaneId = Annotated[int, whole(0, MOST_NUMBER)]
Number = Annotated[int, whole(1, MOST_NUMBER)]
Role = Annotated[Literal["env", "agents", "rollout", "source"], one_of("env", "agents", "rollout", "source")]
Autoreset = Annotated[Literal["NEXT_STEP", "SAME_STEP", "DISABLED"], one_of("NEXT_STEP", "SAME_STEP", "DISABLED")]
Version = Annotated[int, whole(1, 0xFFFF)]
Name = Annotated[str, text(256)]
Nonce = Annotated[bytes, raw(NONCE_BYTES)]
Proved = Annotated[bytes, raw(0, 32)]
FrameSize = Annotated[int, whole(1 << 16, 0xFFFFFFFC)]
Slots = Annotated[int, whole(1, MOST_SLOTS)]


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    """A host introduces itself.

    versions             the lowest and the highest protocol version that it speaks
    role                 "env": it steps environments; "agents": such with several agents each; "rollout": it runs
                         whole rollouts; "source": it runs one of its own, and sends its fragments to a trainer
    software, name       of what runs there, and of the host, for people
    nonce                32 random bytes, new for every connection
    session              16 random bytes that it has chosen: the same for as long as it remembers its lanes
    max_frame            bytes of a frame that it takes, behind the length itself
    slots                environments of each of its lanes
    observation_space,   of one environment, as `describe_space` describes it; of role "agents": a Tuple of those of the
    action_space         parts, a part being all agents with the same two spaces
    autoreset            what its environments do at an episode's end: see the protocol's documentation
    metadata             what else there is to know, such as the environment's id
    busy                 whether a gateway is being served already: another one is not to welcome this host
    agents               of role "agents": the ids of all agents that there can be in an environment, strings or whole
                         numbers
    parts                of role "agents": each agent's part, the parts numbered as their first agents come
    """

    kind: ClassVar[str] = "hello"
    versions: Annotated[tuple[int, ...], span(1, 0xFFFF)]
    role: Role
    software: Name
    name: Name
    nonce: Nonce
    session: Annotated[bytes, raw(SESSION_BYTES)]
    max_frame: FrameSize
    slots: Annotated[tuple[int, ...], list_of(whole(1, MOST_SLOTS), MOST_LANES)]
    observation_space: Annotated[Mapping[str, Any], mapping]
    action_space: Annotated[Mapping[str, Any], mapping]
    autoreset: Autoreset
    metadata: Annotated[Mapping[str, Any], mapping]
    busy: Annotated[bool, flag] = False
    agents: Annotated[tuple[str | int, ...] | None, nullable(list_of(agent_id, MOST_AGENTS))] = None
    parts: Annotated[tuple[int, ...] | None, nullable(list_of(whole(0, MOST_AGENTS - 1), MOST_AGENTS))] = None

    @property
    def num_envs(self) -> int:
        """Environments in all."""
        return sum(self.slots)

    @property
    def agents_by_part(self) -> list[list[int]]:
        """Of role "agents", once its form has been checked: the numbers of each part's agents, in order."""
        assert self.parts is not None
        numbers: list[list[int]] = [[] for _ in range(max(self.parts) + 1)]
        for number, part in enumerate(self.parts):
            numbers[part].append(number)
        return numbers

    def first_slots(self, first: int) -> list[int]:
        """The number of every lane's first slot, where that of the first lane's is `first`."""
        return list(accumulate(self.slots[:-1], initial=first))


@dataclass(frozen=True, slots=True, eq=False)
class Challenge:
    """A gateway answers a Hello.

    version        the protocol version that is spoken from here on
    software       of what runs there, for people
    nonce          32 random bytes, new for every connection
    secret         whether the gateway has a secret, which the host is to prove that it knows
    max_frame      bytes of a frame that it takes, behind the length itself
    heartbeat_s    seconds of silence after which either side asks whether the other is there
    grace_s        seconds that it waits for a lost host to come back
    """

    kind: ClassVar[str] = "challenge"
    version: Version
    software: Name
    nonce: Nonce
    secret: Annotated[bool, flag]
    max_frame: FrameSize
    heartbeat_s: Annotated[float, seconds]
    grace_s: Annotated[float, seconds]


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """A host proves that it knows the secret.

    mac    32 bytes, `proof.prove`; none where there is no secret
    """

    kind: ClassVar[str] = "proof"
    mac: Proved


@dataclass(frozen=True, slots=True, eq=False)
class LaneGrant:
    """What a gateway calls one of a host's lanes, and where it stands.

    lane          its id, in every message about it
    slots         environments in it
    first_slot    number of its first slot among all of the rollout's
    number        of the last request that the gateway has the answer to; 0: there is none
    """

    lane: LaneId
    slots: Slots
    first_slot: Annotated[int, whole(0, MOST_NUMBER)]
    number: Annotated[int, whole(0, MOST_NUMBER)]


@dataclass(frozen=True, slots=True, eq=False)
class Welcome:
    """A gateway proves that it knows the secret as well, and takes the host in.

    mac        32 bytes, `proof.prove`; none where there is no secret
    session    the host's own, to come back with after the connection was lost
    resumed    whether the gateway knows it from an earlier Welcome, which may not have arrived
    credits    messages that nobody asked for which the host may send
    lanes      the host's lanes, in the order of the Hello's `slots`
    """

    kind: ClassVar[str] = "welcome"
    mac: Proved
    session: Annotated[bytes, raw(SESSION_BYTES)]
    resumed: Annotated[bool, flag]
    credits: Annotated[int, whole(0, MOST_NUMBER)]
    lanes: Annotated[tuple[LaneGrant, ...], list_of(record(LaneGrant), MOST_LANES)]
