"""One lane of a host whose environments are stepped, in a thread, as requests come."""

from typing import Any, Generic, TypeVar

from rollflow.nodes.stepping import close_failed
from rollflow.stream.wire import Reset, Step

A = TypeVar("A")


class ServedEnvironments(Generic[A]):
    """Environments of one lane; of what kind is said by the classes made of this.

    can_be_remade    whether they can be made again: they are, when they are reset after they have raised
    env              as they are now

    Raises EnvError where they can't be made.
    """

    env: Any

    def __init__(self, *, can_be_remade: bool) -> None:
        self._can_be_remade, self._has_failed = can_be_remade, False
        self._make()

    def answer(self, request: Reset | Step) -> A:
        """Do what is asked for. Raises what the environments raise."""
        try:
            if isinstance(request, Step):
                return self._step(request)
            if self._has_failed and self._can_be_remade:
                close_failed(self.env)
                self._make()
            answer = self._reset(request)
            self._has_failed = False
            return answer
        except BaseException:
            self._has_failed = True
            raise

    # What those do otherwise who are made of this

    def _make(self) -> None:
        """Make the environments."""
        raise NotImplementedError

    def _reset(self, request: Reset) -> A:
        raise NotImplementedError

    def _step(self, request: Step) -> A:
        raise NotImplementedError
