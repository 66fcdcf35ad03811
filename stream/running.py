"""A graph that runs for as long as a block goes on."""

import warnings
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

import anyio

from rollflow.stream.graph import Graph
from rollflow.stream.run import Run


class Running(AbstractAsyncContextManager[Run]):
    """Runs a graph until the block is left. A node's error is raised as it is, with the node's name noted on it.

    Warns where there never is a block: nothing would run, and nobody would say so.
    """

    def __init__(self, graph: Graph, seed: int | None = None) -> None:
        self._name, self._is_entered = graph.name, False
        self._block = _running(graph, seed)

    async def __aenter__(self) -> Run:
        self._is_entered = True
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, traceback)

    def __del__(self) -> None:
        if not self._is_entered:
            told = f"graph '{self._name}' was not run: expected `async with graph.run() as run:`"
            warnings.warn(told, RuntimeWarning, stacklevel=2)


@asynccontextmanager
async def _running(graph: Graph, seed: int | None) -> AsyncIterator[Run]:
    run = Run(graph, seed)
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            run.start(tasks)
            yield run
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failure = _distinct(group)
        _close_after(run, failure)
    except BaseException as error:
        _close_after(run, error)
        raise
    else:
        run.close()
    if failure is not None:
        context = failure.__context__  # what it came from, rather than what is handled here
        try:
            raise failure
        finally:
            failure.__context__ = context


def _close_after(run: Run, error: BaseException) -> None:
    """Close the nodes of a run that has failed: should that fail too, the first error has more to say."""
    try:
        run.close()
    except Exception as closing:
        error.add_note(f"and then, when the nodes were closed: {closing!r}")


def _distinct(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group, as it is; where there are several, the group with each of them once.

    What a node raises is raised to those who wait on the run, too.
    """
    errors = list({_leaves(error): error for error in group.exceptions}.values())
    return errors[0] if len(errors) == 1 else group.derive(errors)


def _leaves(error: BaseException) -> tuple[int, ...]:
    """What tells errors apart: an event loop may hand on a copy of a group, but not of what is in it."""
    if isinstance(error, BaseExceptionGroup):
        return tuple(leaf for each in error.exceptions for leaf in _leaves(each))
    return (id(error),)
