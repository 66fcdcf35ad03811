"""Inspections: the other end of a connection is asked what it is at, for the stall doctor of this process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rollflow.stream.doctor.stacks import Frame
from rollflow.stream.net.sockets import quoted
from rollflow.stream.wire.codec.standing import MOST_CALLS, MOST_NAME, MOST_PATH, StackCall, Standing

_PATIENCE_S = 1.0


class Inspections:
    """Questions that are under way, by lane. From any thread."""

    def __init__(self) -> None:
        self._asked: dict[int, Future[Standing]] = {}
        self._lock = threading.Lock()

    def ask(self, lane: int, send: Callable[[], bool]) -> Standing | None:
        """Have a question sent, unless one is under way, and wait for its answer; None: it can't be sent.

        Raises TimeoutError where none comes within a second.
        """
        with self._lock:
            answer = self._asked.get(lane)
            is_first = answer is None
            if answer is None:
                answer = self._asked[lane] = Future()
        try:
            return answer.result(_PATIENCE_S) if not is_first or send() else None
        finally:
            with self._lock:
                if self._asked.get(lane) is answer:  # else it is somebody's who has asked anew
                    del self._asked[lane]

    def take(self, standing: Standing) -> None:
        """Take an answer; one that comes too late is dropped."""
        with self._lock:
            answer = self._asked.pop(standing.lane, None)
        if answer is not None:
            answer.set_result(standing)


def standing_of(lane: int, doing: str, elapsed_s: float, stack: Sequence[Frame]) -> Standing:
    """The answer about a lane: what it is at, for how many seconds, and the stack of its thread, innermost call first.

    Long texts are cut, and calls beyond the innermost 64 left out.
    """
    calls = [
        StackCall(
            _plain(frame.file[-MOST_PATH:]),
            frame.line,
            _plain(frame.name[:MOST_NAME]),
            _plain(frame.text[:MOST_NAME]),
            frame.is_own,
        )
        for frame in stack[:MOST_CALLS]
    ]
    return Standing(lane, doing[:MOST_NAME], max(0.0, elapsed_s), tuple(calls))


def heard(standing: Standing) -> tuple[str, tuple[Frame, ...]]:
    """What the other end is at, and its stack; as texts for a log, in which nothing of a stranger's is special."""
    return quoted(standing.doing), tuple(
        Frame(quoted(call.file), call.line, quoted(call.name), quoted(call.source), call.is_own)
        for call in standing.calls
    )


def _plain(text: str) -> str:
    """The text, with characters replaced that UTF-8 can't encode."""
    return text.encode(errors="replace").decode()
