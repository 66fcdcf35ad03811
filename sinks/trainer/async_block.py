"""`async with` for what has a `with`."""

from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread


class AsyncBlock:
    """Entered as by `with`, and left so in another thread, since that may take a while; also where it is cancelled."""

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__, kind, error, traceback)
