"""Sessions of gateways and hosts: the requests and answers that outlive a connection.

The requests of a lane are numbered 1, 2, … and one is under way at a time. After a lost connection the gateway sends
the request under way again, with the same number. A host that took it before sends the same answer, and does not take
it twice. So every request is taken once and its answer delivered once, however often connections break.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import EnvError, WireError
from rollflow.stream.multi_agent.agent_states import AgentNumbers, AgentStates, Ends
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
    Turn,
)
from rollflow.stream.wire.codec.rows import AgentForm, RowForm


class AgentTurns:
    """Agents of a lane of N environments that a host steps: who is to act, and whether an answer can come next.

    first_slot    the number of the lane's first environment, in errors
    """

    def __init__(self, hello: Hello, num_envs: int, first_slot: int = 0) -> None:
        assert hello.agents is not None
        by_part = [[hello.agents[number] for number in numbers] for numbers in hello.agents_by_part]
        self._slots = AgentNumbers(by_part, num_envs, first_slot)
        self._states = AgentStates(self._slots)

    @property
    def acting(self) -> tuple[NDArray[np.int64], ...]:
        """The agent slots of every part that act next: i64[K] each, ascending."""
        acting, bounds = self._states.acting, self._slots.bounds
        return tuple(acting[share] - first for share, first in zip(self._slots.split(acting), bounds, strict=False))

    def take(self, rows: AgentRows) -> None:
        """Take an answer whose form is right. Raises WireError if it can't come next."""
        try:
            self._take(rows)
        except EnvError as error:
            kind = "reset" if rows.rewards is None else "step"
            raise WireError(f"{kind} {rows.number} of lane {rows.lane}: {error}", "rows") from None

    def _take(self, rows: AgentRows) -> None:
        slots, states, seen = self._slots, self._states, self._numbers(rows.agent_slots)
        if rows.rewards is None:
            slots.steps[:] = -1
            states.begin(np.arange(slots.num_envs), seen)
            slots.steps[:] = 0
            return
        assert rows.terminateds is not None
        assert rows.truncateds is not None
        said = np.concatenate(rows.terminateds), np.concatenate(rows.truncateds)
        ends, envs = states.step(seen, np.flatnonzero(np.concatenate(rows.rewards)), said)
        self._refuse((said[0] ^ ends[0]) | (said[1] ^ ends[1]), "it ends, but is not there")
        self._check_ended(rows, envs, ends)
        slots.steps += 1
        if len(envs):
            assert rows.first_agent_slots is not None
            slots.steps[envs] = -1
            first = self._numbers(rows.first_agent_slots)
            others = np.zeros(slots.count, np.bool_)
            others[first] = ~np.isin(slots.envs[first], envs)
            self._refuse(others, "it has a first observation, but no episode has begun")
            states.begin(envs, first)
            slots.steps[envs] = 0

    def _check_ended(self, rows: AgentRows, envs: NDArray[np.int64], ends: Ends) -> None:
        """Raise EnvError if the answer names other episodes that have ended, or says that they did otherwise."""
        assert rows.ended is not None
        assert rows.ended_truncated is not None
        if not np.array_equal(rows.ended, envs):
            raise EnvError(f"ended is {rows.ended.tolist()}, expected {envs.tolist()}, in which no agent is left")
        for name, by, those in (
            ("truncated", ends[1], envs[rows.ended_truncated]),
            ("terminated", ends[0], envs[~rows.ended_truncated]),
        ):
            without = those[~by[self._slots.of_env[those]].any(axis=1)]
            if len(without):
                where = self._slots.env_named(int(without[0]))
                raise EnvError(f"{where}: its episode is said to be {name}, but none of its agents is")

    def _refuse(self, wrong: NDArray[np.bool_], what: str) -> None:
        if wrong.any():
            raise EnvError(f"{self._slots.named(int(np.argmax(wrong)))}: {what}")

    def _numbers(self, agent_slots: AgentSlots) -> NDArray[np.int64]:
        """Numbers of agents, by their slots in each part."""
        each = zip(agent_slots, pairwise(self._slots.bounds), strict=True)
        return np.concatenate([np.arange(*bounds) if slots is None else slots + bounds[0] for slots, bounds in each])


_ANSWERS: dict[str, type[Rows | AgentRows | Fragment]] = {
    "env": Rows,
    "agents": AgentRows,
    **dict.fromkeys(ROLLOUTS, Fragment),
}


def form_of(hello: Hello) -> Any:
    """The `AgentForm` or `RowForm` of a Hello. Raises WireError for invalid spaces."""
    return AgentForm.of(hello) if hello.role in WITH_AGENTS else RowForm.of(hello)


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

    def take(self, request: Request) -> bool:
        """Take a request; True if it is new, and to be done. Raises WireError for a request that can't be made now."""
        lane, where = self._lane(request.lane), f"{request.kind} {request.number} of lane {request.lane}"
        if request.number < lane.number:
            return False
        if request.number == lane.number:
            if type(request) is not type(lane.request):
                raise WireError(f"{where}: number {lane.number} was another kind of request", "number")
            return False
        if request.number > lane.number + 1:
            raise WireError(f"{where}: expected number {lane.number + 1} or less", "number")
        if lane.number and lane.answer is None:
            raise WireError(f"{where}: number {lane.number} has not been answered yet", "number")
        if lane.needs_reset and not isinstance(request, Reset):
            raise WireError(f"{where}: expected a reset first", "order")
        lane.number, lane.request, lane.answer = request.number, request, None
        self.owed.discard(request.lane)
        return True

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

    def answer_to(self, request: Request) -> Answer | None:
        """The kept answer to a request, to be sent again; None: it is being done, or was answered before the last."""
        lane = self._lane(request.lane)
        if lane.number != request.number:
            return None
        self.owed.discard(request.lane)
        return lane.answer

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
            lane: _Lane(slots, first_slot=first, turns=AgentTurns(hello, slots, first) if has_several else None)
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
