"""Questions to the other end of a connection: each asker gets the answer to its own, as text that is safe in a log."""

import threading
from concurrent.futures import Future

import pytest

from rollflow.stream.net import inspections
from rollflow.stream.net.inspections import Inspections, heard
from rollflow.stream.wire import StackCall, Standing


def test_one_whose_patience_is_over_does_not_take_the_question_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, joined, gives_up = Inspections(), threading.Event(), threading.Event()

    class Answer(Future[Standing]):
        def result(self, timeout: float | None = None) -> Standing:
            if threading.current_thread() is joiner:
                joined.set()
                assert gives_up.wait(60)
            return super().result(timeout)

    def join() -> None:
        with pytest.raises(TimeoutError):
            asked.ask(3, lambda: False)  # it is under way, and not sent again

    def send_first() -> bool:
        joiner.start()
        return joined.wait(60)

    def send_second() -> bool:
        gives_up.set()
        joiner.join()
        asked.take(Standing(3, "is in step()", 1.0, ()))
        return True

    joiner = threading.Thread(target=join)
    monkeypatch.setattr(inspections, "Future", Answer)
    monkeypatch.setattr(inspections, "_PATIENCE_S", 0.0)
    with pytest.raises(TimeoutError):
        asked.ask(3, send_first)
    answer = asked.ask(3, send_second)
    assert answer is not None
    assert answer.doing == "is in step()"


def test_what_a_stranger_says_is_quoted() -> None:
    call = StackCall("a\n.py", 1, "step\x1b[31m", "\x07", True)
    doing, stack = heard(Standing(0, "is\x1b]0;x\x07\n", 1.0, (call,)))
    assert doing == r"is\x1b]0;x\x07\n"
    assert [(frame.file, frame.name, frame.text) for frame in stack] == [(r"a\n.py", r"step\x1b[31m", r"\x07")]
