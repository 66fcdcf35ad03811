"""What a chain in an event loop waits on when it can't go on."""

from collections.abc import Sequence

import anyio
import anyio.abc

from rollflow.stream.background import Background


class Wake:
    """What a chain waits on when it can't go on: something to be called whenever that may have changed."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self._is_set = False

    def set(self) -> None:
        """Let the chain go on, now or when it next waits."""
        self._is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until `set` has been called since the last wait."""
        if not self._is_set:
            self._event = anyio.Event()
            await self._event.wait()
            self._event = None
        self._is_set = False


class Watch:
    """Wakes a chain when one of its background nodes has something to say."""

    def __init__(self, nodes: Sequence[Background], wake: Wake, tasks: anyio.abc.TaskGroup | None) -> None:
        assert tasks is not None
        self._wake = wake
        self._scopes: list[anyio.CancelScope] = []
        self._begins: list[Wake] = []
        for node in nodes:
            if node.fileno() >= 0:
                self._scopes.append(anyio.CancelScope())
                self._begins.append(Wake())
                tasks.start_soon(self._watch, node, self._scopes[-1], self._begins[-1])

    def begin(self) -> None:
        """Watch all nodes until each has told of something once."""
        for begin in self._begins:
            begin.set()

    def end(self) -> None:
        """Watch no more."""
        for scope in self._scopes:
            scope.cancel()

    async def _watch(self, node: Background, scope: anyio.CancelScope, begin: Wake) -> None:
        with scope:
            while True:
                await begin.wait()
                with anyio.move_on_after(node.patience):
                    await anyio.wait_readable(node.fileno())
                self._wake.set()
