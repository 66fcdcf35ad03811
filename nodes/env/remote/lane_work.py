"""Work of a host's lanes: each answers what it is asked for, in a thread of its own."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rollflow.nodes.env.remote.host_lane import ServedLane, end_lanes
from rollflow.nodes.env.workers.lane_threads import LaneThreads
from rollflow.stream.data.errors import ColumnError, WireError
from rollflow.stream.wire import SESSION_BYTES, Answer, HostConnection, HostSession, Request

logger = logging.getLogger(__name__)


class LaneWork:
    """Lanes, their threads, and the session with the rollout that they work for.

    lanes       in the order of the host's Hello, where each has its place
    lock        of connections and the session
    failed      gives the answer to a request whose work has raised; None: it has none
    answered    called with the lock, in a lane's thread, where an answer may be there to be sent

    session     with the rollout, or offered to the next
    """

    def __init__(
        self,
        lanes: Sequence[ServedLane],
        lock: AbstractContextManager[Any],
        failed: Callable[[Any, Exception], Answer | None],
        answered: Callable[[], None],
    ) -> None:
        self.lanes = lanes
        self._lock, self._failed, self._answered = lock, failed, answered
        self._threads = LaneThreads(len(lanes))
        self._begun, self._done = [0] * len(lanes), [0] * len(lanes)  # requests of each lane
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have another session: there is no rollout."""
        self.session = HostSession(secrets.token_bytes(SESSION_BYTES))
        self._place_of: dict[int, int] = {}  # of a lane, by what the gateway calls it

    def grant(self, lanes: Iterable[int]) -> None:
        """Note what the gateway calls the lanes."""
        self._place_of = {lane: place for place, lane in enumerate(lanes)}

    def begin(
        self, connection: HostConnection, request: Request, work_on: Callable[[Any, Any], Callable[[], Answer | None]]
    ) -> None:
        """Have a lane's thread do a request. From the thread that has the sockets.

        work_on    gives the work, by the lane and the request; where the work gives None, nobody wants it any more
        """
        place = self._place_of[request.lane]
        self._begun[place] += 1
        work = work_on(self.lanes[place], request)
        self._threads.put(place, partial(self._do, place, connection, request, work))

    def describe(self) -> dict[str, Any]:
        """Fields of a Hello about the lanes."""
        return self.lanes[0].describe()

    @property
    def busy(self) -> list[int]:
        """Places of the lanes that are at something."""
        return [place for place, begun in enumerate(self._begun) if begun != self._done[place]]

    def has_more(self, *, is_served: bool) -> bool:
        """True if something that lanes have made, or are making, has not been sent to the rollout.

        is_served    whether the rollout has a connection; without one it is not known what has reached it
        """
        return bool(self._place_of) and bool(not is_served or self.busy or self.session.owed)

    def close(self, patience_s: float, left_s: float) -> None:
        """End the threads and close the environments: see `end_lanes`.

        left_s    seconds for a lane that is at something, where they are fewer
        """
        busy = self.busy
        patience = [min(patience_s, left_s) if place in busy else patience_s for place in range(len(self.lanes))]
        end_lanes(self._threads, self.lanes, patience)

    def _do(self, place: int, connection: HostConnection, request: Request, work: Callable[[], Answer | None]) -> None:
        answer: Answer | None
        try:
            answer = work()
        except BaseException as error:
            logger.warning("lane %d: %r", request.lane, error, exc_info=error)
            answer = self._failed(request, error)  # type: ignore[arg-type]
        with self._lock:
            if answer is not None:
                self._give(connection, request, answer)
            self._done[place] += 1
            self._answered()

    def _give(self, connection: HostConnection, request: Request, answer: Answer) -> None:
        try:
            connection.answer(request, answer)
        except (WireError, ColumnError) as error:
            if getattr(error, "code", "") != "undelivered":
                failed = self._failed(request, error)
                with contextlib.suppress(WireError):  # the connection is broken: the answer waits for the next
                    if failed is not None:
                        connection.answer(request, failed)
