"""Rollouts that can't go on, since nobody takes what they have made."""

import threading

import pytest

from rollflow.stream.graph.background import Waiter


def stalling(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once a run waits though no environment is under way: it can't go on by itself."""
    can_not_go_on, wait = threading.Event(), Waiter.wait

    def waited(self: Waiter) -> None:
        if not any(node.in_flight for node, _ in self._nodes):
            can_not_go_on.set()
        wait(self)

    monkeypatch.setattr(Waiter, "wait", waited)
    return can_not_go_on
