"""Sessions of gateways and hosts: the requests and answers that outlive a connection.

The requests of a lane are numbered 1, 2, … and one is under way at a time. After a lost connection the gateway sends
the request under way again, with the same number. A host that took it before sends the same answer, and does not take
it twice. So every request is taken once and its answer delivered once, however often connections break.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.frame import Buffer
from rollflow.stream.wire.codec.handshake import ROLLOUTS, WITH_AGENTS, Hello, LaneGrant, Welcome
from rollflow.stream.wire.codec.messages import (
    AgentRows,
    AgentSlots,
    Answer,
    Cut,
    Failed,
    Fragment,
    Request,
    Reset,
    Rows,
    Step,
    Turn,
)
from rollflow.stream.wire.codec.rows import AgentForm, RowForm

Mask = NDArray[np.bool_]


class AgentTurns:
    """State of all agent slots of a lane of N environments, part after part.

    An agent acts on its newest observation, until it is terminated or truncated. An episode goes on as long as one of
    its agents is left. In every step of an episode an agent must be able to act.
    """

    def __init__(self, hello: Hello, num_envs: int) -> None:
        assert hello.agents is not None
        by_part = [[hello.agents[number] for number in numbers] for numbers in hello.agents_by_part]
        self._by_part, self._num_envs = by_part, num_envs
        self._sizes = [num_envs * len(agents) for agents in by_part]
        self._envs = np.concatenate([np.repeat(np.arange(num_envs), len(agents)) for agents in by_part])
        nobody = np.zeros(len(self._envs), np.bool_)
        # Agents that had an observation in the episode, have ended, wait for an observation, and act next.
        self._has_come, self._has_ended, self._waits, self._acts = (nobody.copy() for _ in range(4))

    @property
    def acting(self) -> tuple[NDArray[np.int64], ...]:
        """The agent slots of every part that act next: i64[K] each, ascending."""
        return tuple(map(np.flatnonzero, np.split(self._acts, np.cumsum(self._sizes)[:-1])))

    def take(self, rows: AgentRows) -> None:
        """Take an answer whose form is right. Raises WireError, with the state unchanged, if it can't come next."""
        where = f"{'reset' if rows.rewards is None else 'step'} {rows.number} of lane {rows.lane}"
        seen = self._mask(rows.agent_slots)
        if rows.rewards is None:
            self._check_goes_on(seen, where)
            self._begin(np.ones_like(seen), seen)
            return
        assert rows.terminateds is not None
        assert rows.truncateds is not None
        rewarded = np.concatenate(rows.rewards) != 0
        terminated, truncated = np.concatenate(rows.terminateds), np.concatenate(rows.truncateds)
        self._refuse(seen & self._has_ended, where, "has an observation, but has ended before")
        self._refuse(rewarded & self._has_ended, where, "has a reward, but has ended before")
        come, waits = self._has_come | seen, (self._waits | self._acts) & ~seen
        self._refuse((terminated | truncated) & ~(come & ~self._has_ended), where, "ends, but is not there")
        self._refuse(truncated & waits, where, "is truncated after its action, but has no last observation")
        over = self._has_ended | terminated | truncated
        is_over = self._check_ended(rows, come & ~over, terminated, truncated, where)
        first = self._mask(rows.first_agent_slots or tuple(np.zeros(0, np.int64) for _ in self._sizes))
        self._refuse(first & ~is_over, where, "has a first observation, but no episode has begun")
        acts = (seen & ~over) | first
        self._check_goes_on(acts, where)
        self._has_come, self._has_ended, self._waits, self._acts = come, over, waits, acts
        self._begin(is_over, first)

    # Inside

    def _begin(self, anew: Mask, first: Mask) -> None:
        """Begin episodes: `anew` masks agents of reset environments, `first` those of them with an observation."""
        self._has_come[anew], self._has_ended[anew], self._waits[anew] = first[anew], False, False
        self._acts[anew] = first[anew]

    def _check_ended(
        self, rows: AgentRows, stays: Mask, terminated: Mask, truncated: Mask, where: str
    ) -> NDArray[np.bool_]:
        """Mask of agents whose episodes have ended. Raises WireError if the answer names other episodes."""
        assert rows.ended is not None
        assert rows.ended_truncated is not None
        expected = np.flatnonzero(self._counts(stays) == 0)
        if not np.array_equal(rows.ended, expected):
            raise WireError(
                f"{where}: ended is {rows.ended.tolist()}, expected {expected.tolist()}, in which no agent is left",
                "rows",
            )
        for name, by, those in (
            ("truncated", truncated, rows.ended[rows.ended_truncated]),
            ("terminated", terminated, rows.ended[~rows.ended_truncated]),
        ):
            without = those[self._counts(by)[those] == 0]
            if len(without):
                raise WireError(
                    f"{where}: the episode of slot {without[0]} is said to be {name}, but none of its agents is", "rows"
                )
        return np.isin(self._envs, expected)

    def _check_goes_on(self, acts: Mask, where: str) -> None:
        counts = self._counts(acts)
        if not counts.all():
            raise WireError(
                f"{where}: the episode of slot {np.argmin(counts)} goes on, but no agent has an observation to act on",
                "rows",
            )

    def _refuse(self, wrong: Mask, where: str, what: str) -> None:
        if wrong.any():
            number = int(np.argmax(wrong))
            part = int(np.searchsorted(np.cumsum(self._sizes), number, side="right"))
            agents = self._by_part[part]
            env, place = divmod(number - sum(self._sizes[:part]), len(agents))
            raise WireError(f"{where}: slot {env}, agent {agents[place]!r}: it {what}", "rows")

    def _counts(self, mask: Mask) -> NDArray[np.int64]:
        """i64[N]: number of each environment's agents in the mask."""
        return np.bincount(self._envs[mask], minlength=self._num_envs)

    def _mask(self, agent_slots: AgentSlots | Sequence[NDArray[np.int64]]) -> Mask:
        masks = []
        for slots, size in zip(agent_slots, self._sizes, strict=True):
            mask = np.full(size, slots is None)
            if slots is not None:
                mask[slots] = True
            masks.append(mask)
        return np.concatenate(masks)


_ANSWERS: dict[str, type[Rows | AgentRows | Fragment]] = {
    "env": Rows,
    "agents": AgentRows,
    **dict.fromkeys(ROLLOUTS, Fragment),
}


class AnswerSchema(Protocol):
    """Checks requests and answers against the spaces of a Hello, for one agent or several."""

    def check_request(self, request: Reset | Step, slots: int) -> Reset | Step:
        """The request for a lane of `slots` environments, in the form of the spaces. Raises WireError."""
        ...

    def check_rows(self, rows: Any, request: Reset | Step, slots: int) -> Any:
        """The answer to the request, in the form of the spaces. Raises WireError."""
        ...


def form_of(hello: Hello) -> AnswerSchema:
    """The schema of a Hello. Raises WireError for invalid spaces."""
    return AgentForm.of(hello) if hello.role in WITH_AGENTS else RowForm.of(hello)


class TakenRequest(Enum):
    """Reaction of a host to a request."""

    NEW = auto()  # do it
    AGAIN = auto()  # send its answer again
    KNOWN = auto()  # do nothing: it is being done, or was answered before the last one


@dataclass(slots=True)
class _Lane:
    slots: int
    number: int = 0  # number of the last request
    request: Request | None = None  # the last request; a gateway has it while it is under way
    needs_reset: bool = True  # a host's
    answer: Answer | None = None  # a host's, to that request; None: it is being done
    first_slot: int = 0  # a gateway's number of it
    turns: AgentTurns | None = None  # a gateway's; None: environments have one agent each


class Session:
    """Memory of the lanes that two ends have in common.

    token    16 random bytes of the host that identify the session
    send     sends a lane's frame through the connection that was welcomed last; None before the first
    """

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.send: Callable[[Sequence[Buffer], int], None] | None = None
        self._lanes: dict[int, _Lane] = {}

    def slots_of(self, lane: int) -> int:
        """Number of environments in a lane. Raises WireError for an unknown lane."""
        return self._lane(lane).slots

    def cuts(self, cut: Cut) -> bool:
        """True if the turn that is to end now is being done. Raises WireError for a turn that was never requested."""
        lane = self._lane(cut.lane)
        if cut.number > lane.number:
            raise WireError(f"cut {cut.number} of lane {cut.lane}: expected number {lane.number} or less", "number")
        return cut.number == lane.number and lane.request is not None and lane.answer is None

    def _lane(self, lane: int) -> _Lane:
        try:
            return self._lanes[lane]
        except KeyError:
            raise WireError(f"lane {lane}, expected one of {list(self._lanes)}", "number") from None


class HostSession(Session):
    """A host's memory of its lanes, from the first Welcome on.

    max_frame    largest frame that the gateway takes, in bytes
    owed         lanes whose last answer is kept, until the gateway, which has not got it, asks for it again
    """

    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self.max_frame = 0xFFFFFFFF
        self.owed: set[int] = set()

    def begin(self, welcome: Welcome, hello: Hello) -> None:
        """Take a Welcome: resume the session, or start anew. Raises WireError if it does not fit."""
        slots = tuple(grant.slots for grant in welcome.lanes)
        ids = [grant.lane for grant in welcome.lanes]
        if slots != hello.slots or len(set(ids)) < len(ids):
            raise WireError(
                f"welcome.lanes: lanes {ids} of {list(slots)} slots, expected different ids, and {list(hello.slots)} "
                "slots as in the hello",
                "session",
            )
        if welcome.resumed and self._lanes:
            self._check_resumed(welcome)
            return
        for grant in welcome.lanes:
            if grant.number:
                raise WireError(
                    f"welcome.lanes: lane {grant.lane} at number {grant.number}, expected 0 in a new session", "session"
                )
        steps = hello.role not in ROLLOUTS
        self._lanes = {grant.lane: _Lane(grant.slots, needs_reset=steps) for grant in welcome.lanes}

    def take(self, request: Request) -> TakenRequest:
        """Take a request; return the reaction to it. Raises WireError for a request that can't be made now."""
        lane, where = self._lane(request.lane), f"{request.kind} {request.number} of lane {request.lane}"
        if request.number < lane.number:
            return TakenRequest.KNOWN
        if request.number == lane.number:
            if type(request) is not type(lane.request):
                raise WireError(f"{where}: number {lane.number} was another kind of request", "number")
            return TakenRequest.KNOWN if lane.answer is None else TakenRequest.AGAIN
        if request.number > lane.number + 1:
            raise WireError(f"{where}: expected number {lane.number + 1} or less", "number")
        if lane.number and lane.answer is None:
            raise WireError(f"{where}: number {lane.number} has not been answered yet", "number")
        if lane.needs_reset and not isinstance(request, Reset):
            raise WireError(f"{where}: expected a reset first", "order")
        lane.number, lane.request, lane.answer = request.number, request, None
        self.owed.discard(request.lane)
        return TakenRequest.NEW

    def waits_for(self, request: Request) -> bool:
        """True if a taken request is still to be answered, and no other session has begun since."""
        lane = self._lanes.get(request.lane)
        return lane is not None and lane.request is request and lane.answer is None

    def keep(self, answer: Answer) -> None:
        """Keep an answer until the lane's next request is taken."""
        lane = self._lane(answer.lane)
        assert lane.answer is None
        lane.answer = answer
        if not isinstance(lane.request, Turn):
            lane.needs_reset = isinstance(answer, Failed)

    def answer_to(self, request: Request) -> Answer:
        """The kept answer to a request, to be sent again."""
        self.owed.discard(request.lane)
        answer = self._lane(request.lane).answer
        assert answer is not None
        return answer

    def _check_resumed(self, welcome: Welcome) -> None:
        if {grant.lane for grant in welcome.lanes} != self._lanes.keys():
            raise WireError("welcome.lanes: resumes other lanes than this host's", "session")
        for grant in welcome.lanes:
            number = self._lanes[grant.lane].number
            if grant.number not in (number, number - 1):
                raise WireError(
                    f"welcome.lanes: lane {grant.lane} at number {grant.number}, expected {number} or {number - 1}",
                    "session",
                )
        self.owed = {
            grant.lane
            for grant in welcome.lanes
            if grant.number < self._lanes[grant.lane].number and self._lanes[grant.lane].answer is not None
        }


class GatewaySession(Session):
    """A gateway's memory of one host, from its first Welcome on.

    hello           the host's first Hello
    lanes           ids of the host's lanes, in the order of the Hello's `slots`
    first_slots     number of the first slot of each lane
    is_welcomed     whether a connection was welcomed
    """

    def __init__(self, token: bytes, hello: Hello, lanes: Sequence[int], first_slots: Sequence[int]) -> None:
        super().__init__(token)
        self.hello = hello
        self.is_welcomed = False
        has_several = hello.role == "agents"
        self._lanes = {
            lane: _Lane(slots, first_slot=first, turns=AgentTurns(hello, slots) if has_several else None)
            for lane, slots, first in zip(lanes, hello.slots, first_slots, strict=True)
        }

    def check_same(self, hello: Hello) -> None:
        """Raise WireError if the Hello of a returning host differs from its first one."""
        for name in ("role", "slots", "observation_space", "action_space", "autoreset", "agents", "parts"):
            if getattr(hello, name) != getattr(self.hello, name):
                raise WireError(f"hello.{name} is not what it was when the session began, expected the same", "session")

    @property
    def lanes(self) -> list[int]:
        """The ids of the lanes."""
        return list(self._lanes)

    @property
    def under_way(self) -> list[Request]:
        """The requests without an answer."""
        return [lane.request for lane in self._lanes.values() if lane.request is not None]

    def grants(self) -> tuple[LaneGrant, ...]:
        """The lanes in the form of a Welcome."""
        return tuple(
            LaneGrant(lane, each.slots, each.first_slot, each.number - (each.request is not None))
            for lane, each in self._lanes.items()
        )

    def next_number(self, lane: int) -> int:
        """The number of a lane's next request. Raises WireError for an unknown lane."""
        return self._lane(lane).number + 1

    def turns_of(self, lane: int) -> AgentTurns | None:
        """The agents that act next in a lane; None: its environments have one agent each."""
        return self._lane(lane).turns

    def ask(self, request: Request) -> None:
        """Record that a request is under way: the next one of a lane that has none."""
        lane = self._lane(request.lane)
        assert lane.request is None
        assert request.number == lane.number + 1
        assert isinstance(request, Turn) == (self.hello.role in ROLLOUTS)
        lane.number, lane.request = request.number, request

    def asked(self, answer: Answer) -> Request | None:
        """The request that an answer is for; None: it was answered before. Raises WireError if there is no request."""
        lane, where = self._lane(answer.lane), f"{answer.kind} {answer.number} of lane {answer.lane}"
        if answer.number > lane.number:
            raise WireError(f"{where}: nothing above number {lane.number} was asked for", "number")
        if answer.number < lane.number or lane.request is None:
            return None
        check_answer(lane.request, answer, self.hello.role)
        return lane.request

    def take(self, answer: Answer) -> None:
        """Record the answer to the request under way. Raises WireError if this answer can't come next."""
        lane = self._lane(answer.lane)
        if lane.turns is not None and isinstance(answer, AgentRows):
            lane.turns.take(answer)
        lane.request = None


def check_answer(request: Request, answer: Answer, role: str) -> None:
    """Raise WireError if an answer has the wrong kind, lane or number for a request to a host of this role."""
    expected = _ANSWERS[role]
    if not isinstance(answer, expected | Failed) or (answer.lane, answer.number) != (request.lane, request.number):
        raise WireError(
            f"{answer.kind} {answer.number} of lane {answer.lane}, expected {expected.kind} or failed {request.number} "
            f"of lane {request.lane}, the answer to {request.kind}",
            "number",
        )
