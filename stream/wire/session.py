"""What outlives a connection: which requests were made, and which were answered.

The requests of a lane are numbered 1, 2, … and there is one under way at a time. A gateway that has lost a connection
asks what was under way again, under the same number; a host that took it before answers as before, and does not take it
twice. So every request is taken once and its answer handed over once, however often connections break.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rollflow.stream.errors import WireError
from rollflow.stream.wire.agent_rows import AgentRows
from rollflow.stream.wire.agent_turns import AgentTurns
from rollflow.stream.wire.frame import Buffer
from rollflow.stream.wire.handshake import Hello, LaneGrant, Welcome
from rollflow.stream.wire.running import Answer, Cut, Failed, Fragment, Request, Reset, Rows, Turn

_ANSWERS: dict[str, type[Rows | AgentRows | Fragment]] = {"env": Rows, "agents": AgentRows, "rollout": Fragment}


class Taken(Enum):
    """What a host is to do with a request."""

    NEW = auto()  # do it
    AGAIN = auto()  # send the answer that there is again
    KNOWN = auto()  # nothing: it is being done, or was answered long ago


@dataclass(slots=True)
class _HostLane:
    slots: int
    number: int = 0  # of the last request taken
    request: Request | None = None  # that one
    answer: Answer | None = None  # to it; None: it is being done
    needs_reset: bool = True


class HostSession:
    """A host's memory of its lanes, from the first Welcome on.

    token        16 random bytes to come back with
    max_frame    bytes of a frame that the gateway takes
    send         sends a lane's frame through the connection that was welcomed last; None before the first
    """

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.max_frame = 0xFFFFFFFF
        self.send: Callable[[Sequence[Buffer], int], None] | None = None
        self._lanes: dict[int, _HostLane] = {}

    def begin(self, welcome: Welcome, hello: Hello) -> None:
        """Take a Welcome: go on where this was, or start anew. Raises WireError where it does not fit."""
        slots = tuple(grant.slots for grant in welcome.lanes)
        ids = [grant.lane for grant in welcome.lanes]
        if slots != hello.slots or len(set(ids)) < len(ids):
            raise WireError(
                f"welcome.lanes: lanes {ids} of {list(slots)} slots, expected different ids, and {list(hello.slots)} "
                "slots as in the hello",
                "session",
            )
        if welcome.session != self.token:
            raise WireError("welcome.session is not the one in the hello", "session")
        if welcome.resumed and self._lanes:
            self._check_resumed(welcome)
            return
        for grant in welcome.lanes:
            if grant.number:
                raise WireError(
                    f"welcome.lanes: lane {grant.lane} at number {grant.number}, expected 0 in a new session", "session"
                )
        steps = hello.role != "rollout"
        self._lanes = {grant.lane: _HostLane(grant.slots, needs_reset=steps) for grant in welcome.lanes}

    def slots_of(self, lane: int) -> int:
        """Environments in a lane. Raises WireError for a lane that there is not."""
        return self._lane(lane).slots

    def take(self, request: Request) -> Taken:
        """What to do with a request. Raises WireError for one that can't be made."""
        lane, where = self._lane(request.lane), f"{request.kind} {request.number} of lane {request.lane}"
        if request.number < lane.number:
            return Taken.KNOWN
        if request.number == lane.number:
            if type(request) is not type(lane.request):
                raise WireError(f"{where}: number {lane.number} was another kind of request", "number")
            return Taken.KNOWN if lane.answer is None else Taken.AGAIN
        if request.number > lane.number + 1:
            raise WireError(f"{where}: expected number {lane.number + 1} or less", "number")
        if lane.number and lane.answer is None:
            raise WireError(f"{where}: number {lane.number} has not been answered yet", "number")
        if lane.needs_reset and not isinstance(request, Reset):
            raise WireError(f"{where}: expected a reset first", "order")
        lane.number, lane.request, lane.answer = request.number, request, None
        return Taken.NEW

    def cuts(self, cut: Cut) -> bool:
        """Whether the turn that is to end now is being done. Raises WireError for one that there never was."""
        lane = self._lane(cut.lane)
        _check_cut(cut, lane.number)
        return cut.number == lane.number and lane.answer is None

    def waits_for(self, request: Request) -> bool:
        """Whether a request that was taken is still to be answered: not where another session has begun since."""
        lane = self._lanes.get(request.lane)
        return lane is not None and lane.request is request and lane.answer is None

    def keep(self, answer: Answer) -> None:
        """Keep the answer to the request of its lane that waits for it, until the lane's next one is taken."""
        lane = self._lane(answer.lane)
        assert lane.answer is None
        lane.answer = answer
        if not isinstance(lane.request, Turn):
            lane.needs_reset = isinstance(answer, Failed)

    def answer_to(self, request: Request) -> Answer:
        """The answer that was kept to a request of this number."""
        answer = self._lane(request.lane).answer
        assert answer is not None
        return answer

    def _lane(self, lane: int) -> _HostLane:
        try:
            return self._lanes[lane]
        except KeyError:
            raise _no_lane(lane, list(self._lanes)) from None

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


@dataclass(slots=True)
class _GatewayLane:
    slots: int
    first_slot: int
    number: int = 0  # of the last request
    request: Request | None = None  # that one, while it is under way
    needs_reset: bool = True
    turns: AgentTurns | None = None  # of several agents: who acts next


class GatewaySession:
    """A gateway's memory of one host, from its first Welcome on.

    token           16 random bytes of the host's, which it comes back with
    hello           the host's first
    lanes           id of each of its lanes, in the order of the Hello's `slots`
    first_slots     number of the first slot of each
    send            sends a lane's frame through the connection that was welcomed last; None before the first
    is_welcomed     whether there was such a connection
    """

    def __init__(self, token: bytes, hello: Hello, lanes: Sequence[int], first_slots: Sequence[int]) -> None:
        self.token = token
        self.hello = hello
        self.send: Callable[[Sequence[Buffer], int], None] | None = None
        self.is_welcomed = False
        steps, has_several = hello.role != "rollout", hello.role == "agents"
        self._lanes = {
            lane: _GatewayLane(slots, first, needs_reset=steps, turns=AgentTurns(hello, slots) if has_several else None)
            for lane, slots, first in zip(lanes, hello.slots, first_slots, strict=True)
        }

    def check_same(self, hello: Hello) -> None:
        """Raise WireError where a host that wants to go on is not what it was."""
        for name in ("role", "slots", "observation_space", "action_space", "autoreset", "agents", "parts"):
            if getattr(hello, name) != getattr(self.hello, name):
                raise WireError(f"hello.{name} is not what it was when the session began, expected the same", "session")

    @property
    def lanes(self) -> list[int]:
        """Their ids."""
        return list(self._lanes)

    @property
    def under_way(self) -> list[Request]:
        """The requests that have no answer yet."""
        return [lane.request for lane in self._lanes.values() if lane.request is not None]

    def grants(self) -> tuple[LaneGrant, ...]:
        """The lanes as a Welcome has them."""
        return tuple(
            LaneGrant(lane, each.slots, each.first_slot, each.number - (each.request is not None))
            for lane, each in self._lanes.items()
        )

    def slots_of(self, lane: int) -> int:
        """Environments in a lane. Raises WireError for a lane that there is not."""
        return self._lane(lane).slots

    def next_number(self, lane: int) -> int:
        """The number of a lane's next request. Raises WireError for a lane that there is not."""
        return self._lane(lane).number + 1

    def turns_of(self, lane: int) -> AgentTurns | None:
        """Whose turn it is in a lane of environments with several agents; None: they have one agent each."""
        return self._lane(lane).turns

    def ask(self, request: Request) -> None:
        """Take down that a request is under way. Raises WireError for one that can't be made now."""
        lane, where = self._lane(request.lane), f"{request.kind} {request.number} of lane {request.lane}"
        if lane.request is not None:
            raise WireError(f"{where}: number {lane.number} has not been answered yet", "number")
        if request.number != lane.number + 1:
            raise WireError(f"{where}: expected number {lane.number + 1}", "number")
        if isinstance(request, Turn) != (self.hello.role == "rollout"):
            raise WireError(f"{where}: not for a host of role {self.hello.role}", "role")
        if lane.needs_reset and not isinstance(request, Reset):
            raise WireError(f"{where}: expected a reset first", "order")
        lane.number, lane.request = request.number, request

    def cuts(self, cut: Cut) -> bool:
        """Whether the turn that is to end now is under way. Raises WireError for one that was not asked for."""
        lane = self._lane(cut.lane)
        _check_cut(cut, lane.number)
        return cut.number == lane.number and lane.request is not None

    def asked(self, answer: Answer) -> Request | None:
        """The request that an answer is to; None: its answer has come before. Raises WireError where there is none."""
        lane, where = self._lane(answer.lane), f"{answer.kind} {answer.number} of lane {answer.lane}"
        if answer.number > lane.number:
            raise WireError(f"{where}: nothing above number {lane.number} was asked for", "number")
        if answer.number < lane.number or lane.request is None:
            return None
        check_answer(lane.request, answer, self.hello.role)
        return lane.request

    def take(self, answer: Answer) -> None:
        """Take down that the request under way has this answer. Raises WireError where it can't be what comes next."""
        lane = self._lane(answer.lane)
        if lane.turns is not None and isinstance(answer, AgentRows):
            lane.turns.take(answer)
        if not isinstance(lane.request, Turn):
            lane.needs_reset = isinstance(answer, Failed)
        lane.request = None

    def _lane(self, lane: int) -> _GatewayLane:
        try:
            return self._lanes[lane]
        except KeyError:
            raise _no_lane(lane, list(self._lanes)) from None


def check_answer(request: Request, answer: Answer, role: str) -> None:
    """Raise WireError where a message of this kind and number is no answer of a host of this role to a request."""
    expected = _ANSWERS[role]
    if not isinstance(answer, expected | Failed) or (answer.lane, answer.number) != (request.lane, request.number):
        raise WireError(
            f"{answer.kind} {answer.number} of lane {answer.lane}, expected {expected.kind} or failed {request.number} "
            f"of lane {request.lane}, the answer to {request.kind}",
            "number",
        )


def _check_cut(cut: Cut, last: int) -> None:
    if cut.number > last:
        raise WireError(f"cut {cut.number} of lane {cut.lane}: expected number {last} or less", "number")


def _no_lane(lane: int, lanes: list[int]) -> WireError:
    return WireError(f"lane {lane}, expected one of {lanes}", "number")
