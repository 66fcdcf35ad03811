"""RunHandle: the asynchronous context manager that runs a graph."""

import warnings
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import anyio

from rollflow.stream.data.errors import GraphError
from rollflow.stream.graph.run import Run
from rollflow.stream.observe.trace import check_trace
from rollflow.stream.observe.watch import StallRules

if TYPE_CHECKING:
    from rollflow.stream.graph.graph import Graph


class RunHandle(AbstractAsyncContextManager[Run]):
    """Runs a graph until the block is left. A node's error is raised unchanged, with the node's name in a note.

    rules      of the stall doctor; None: it is off
    watches    whether the run has a stall doctor of its own, beside who may watch it otherwise
    trace      file for a trace; None: none

    Warns if it is never entered, since nothing would have run.
    """

    def __init__(
        self,
        graph: "Graph",
        seed: int | None = None,
        rules: StallRules | None = None,
        *,
        watches: bool = False,
        trace: str | PathLike[str] | None = None,
    ) -> None:
        self._name, self._is_entered = graph.name, True  # a trace that is refused is enough to be told
        check_trace(trace)
        self._is_entered = False
        self._block = _running(graph, seed, rules, watches=watches, trace=trace)

    async def __aenter__(self) -> Run:
        self._is_entered = True
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, traceback)

    def __enter__(self) -> NoReturn:
        """Raise GraphError: a graph runs in an event loop."""
        self._is_entered = True  # this error is enough
        raise GraphError(
            f"graph '{self._name}' was entered by 'with', but it runs in an event loop; expected 'async with "
            "graph.run() as run:' in an async function, run by anyio.run(function)"
        ).see("graph")

    def __exit__(self, *error: object) -> None:
        """Never called."""

    def __del__(self) -> None:
        if not self._is_entered:
            text = f"graph '{self._name}' was not run: expected `async with graph.run() as run:`"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


@asynccontextmanager
async def _running(
    graph: "Graph", seed: int | None, rules: StallRules | None, *, watches: bool, trace: str | PathLike[str] | None
) -> AsyncIterator[Run]:
    run = Run(graph, seed, rules, watches=watches)
    run.doctor.trace_to = trace
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
        context = failure.__context__  # `raise` would replace it by the group
        try:
            raise failure
        finally:
            failure.__context__ = context
            del failure, context  # whose tracebacks refer to this frame


def _close_after(run: Run, error: BaseException) -> None:
    """Close the nodes of a failed run; an error of that becomes a note on the first one."""
    try:
        run.close(error)
    except Exception as closing:
        error.add_note(f"and then, when the nodes were closed: {closing!r}")


def _distinct(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that has only one; else the group with each error once.

    A node's error is also raised in tasks that wait on the run, so the group may have it several times.
    """
    errors = list({_leaves(error): error for error in group.exceptions}.values())
    return errors[0] if len(errors) == 1 else group.derive(errors)


def _leaves(error: BaseException) -> tuple[int, ...]:
    """Identities of the errors in an error group: an event loop may copy a group, but not the errors in it."""
    if isinstance(error, BaseExceptionGroup):
        return tuple(leaf for each in error.exceptions for leaf in _leaves(each))
    return (id(error),)
