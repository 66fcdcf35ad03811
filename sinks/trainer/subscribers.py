"""The trainers of one rollout: what one of them means for the others."""

import weakref
from collections.abc import Callable
from typing import Any

_of: weakref.WeakKeyDictionary[Any, weakref.WeakSet["Subscriber"]] = weakref.WeakKeyDictionary()  # by rollout


class Subscriber:
    """A trainer that is to get what a rollout makes.

    rollout    that it is one of several for, maybe
    changed    called when another one of its trainers has left, or has come back

    has_left    whether it has said goodbye; it may come back
    """

    def __init__(self, rollout: Any, changed: Callable[[], None]) -> None:
        self.has_left = False
        self._changed = changed
        self._all = _of.setdefault(rollout, weakref.WeakSet())
        self._all.add(self)

    @property
    def is_alone(self) -> bool:
        """Whether the rollout has no other trainers."""
        return len(self._all) == 1

    @property
    def is_passed_over(self) -> bool:
        """Whether it has left, and others are still there that are not to wait for it."""
        return self.has_left and not all(each.has_left for each in self._all)

    def look_again(self, *, has_left: bool) -> None:
        """Take down whether it has left, and tell the others where that is news."""
        if has_left != self.has_left:
            self.has_left = has_left
            for each in self._all:
                each._changed()
