"""The lanes of a host, and a thread for each of them."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

from gymnasium.vector import VectorEnv

from rollflow.nodes.closing import close_all, closing_on_error
from rollflow.nodes.stepping import autoreset_mode, close_failed
from rollflow.stream.errors import EnvError
from rollflow.stream.space_codec import describe_space, space_of
from rollflow.stream.wire import Answer, HostConnection, Request

logger = logging.getLogger(__name__)

_QUIET_S = 0.5  # how long a lane is waited for without a word
_WORDS = {
    "observation_space": "observation space",
    "action_space": "action space",
    "autoreset": "autoreset mode",
    "agents": "list of agents",
    "parts": "list of the agents' parts",
}


class ServedLane(Protocol):
    """A lane of a host: environments, and whatever is done with them."""

    @property
    def env(self) -> Any:
        """`num_envs` environments, which are to be closed."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a Hello says of them: fields by their names."""
        ...


L = TypeVar("L", bound=ServedLane)


def all_made(lanes: Iterable[L]) -> list[L]:
    """The lanes of a host, each made when asked for; where one can't be made, those before it are closed."""
    made: list[L] = []
    with closing_on_error(lambda: close_all(("a lane", lane.env.close) for lane in made)):
        for lane in lanes:
            made.append(lane)  # noqa: PERF402  # so that those that are made are known
    return made


class Job(NamedTuple):
    """What a lane is to do: `work` gives the answer, or None where nobody wants it any more."""

    connection: HostConnection
    request: Request
    work: Callable[[], Answer | None]


class LaneThreads:
    """Threads that do what the lanes are asked for.

    lanes       what they work with
    answered    called with every answer, by the lane's thread
    failed      gives the answer where the work has raised, or None
    """

    def __init__(
        self,
        lanes: Sequence[ServedLane],
        answered: Callable[[Job, Answer], None],
        failed: Callable[[Request, Exception], Answer | None],
    ) -> None:
        self._lanes = lanes
        self._answered, self._failed = answered, failed
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in lanes]
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"rollflow lane {place}", daemon=True)
            for place, jobs in enumerate(self._jobs)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, place: int, job: Job) -> None:
        """Have a lane do something, once it has done what it was asked for before."""
        self._jobs[place].put(job)

    def close(self, patience_s: float) -> None:
        """End the threads once they have done what they are at, and close the lanes; who takes longer is left."""
        for jobs in self._jobs:
            jobs.put(None)
        for place, (thread, lane) in enumerate(zip(self._threads, self._lanes, strict=True)):
            thread.join(_QUIET_S)
            if thread.is_alive():
                logger.warning("lane %d is still at something: it is waited for, %g s at most", place, patience_s)
                thread.join(patience_s)
            if not thread.is_alive():
                close_failed(lane.env)

    def _work(self, jobs: "SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            answer: Answer | None
            try:
                answer = job.work()
            except BaseException as error:
                logger.warning("lane %d: %r", job.request.lane, error, exc_info=error)
                answer = self._failed(job.request, error)  # type: ignore[arg-type]
            if answer is not None:
                self._answered(job, answer)


def check_alike(lanes: Sequence[ServedLane]) -> None:
    """Raise EnvError where lanes differ in what one description is for."""
    first = lanes[0].describe()
    for place, lane in enumerate(lanes):
        for name, mine in lane.describe().items():
            if mine != first[name]:
                told, other = (space_of(each) if name.endswith("space") else each for each in (mine, first[name]))
                raise EnvError(f"lane {place}: its {_WORDS[name]} is {told}, expected that of lane 0, {other}")


def described(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """What a Hello says of a vector environment."""
    return {
        "observation_space": describe_space(env.single_observation_space),
        "action_space": describe_space(env.single_action_space),
        "autoreset": autoreset_mode(env).name,
    }
