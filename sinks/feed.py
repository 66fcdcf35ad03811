"""A rollout for a trainer in another process or on another host, run by a script of its own."""

import logging
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from rollflow.nodes.multi_agent.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.remote.remote_envs import Secret
from rollflow.sinks.learner_pipeline import MultiAgentLearnerPipeline
from rollflow.sinks.trainer.any_rollout import AnyRollout, check_rollout
from rollflow.sinks.trainer_sink import TrainerSink
from rollflow.stream.graph import Graph
from rollflow.stream.report import Report
from rollflow.stream.run import Run
from rollflow.stream.wire import Address, Limits

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_INTERRUPTED = (
    "interrupted: the trainer gets what is under way, and is waited for%s where it is not there; a second time ends it "
    "at once"
)


def feed(
    rollout: AnyRollout,
    address: str | Address,
    *,
    secret: Secret = None,
    tls: ssl.SSLContext | None = None,
    name: str | None = None,
    linger: float | None = 60.0,
    max_bytes: int = 1 << 30,
    spill: str | Path | None = None,
    limits: Limits | None = None,
    watch: Callable[[], Awaitable[object]] | None = None,
    on_end: Callable[[Report], object] | None = None,
) -> str | None:
    """Run a rollout whose fragments go to the trainer at `address`, until it ends or the trainer says goodbye.

    Of a `MultiAgentRollout` its train batches go there, each of as many fragments as there are lanes at the beginning.

        on_end     called with the run's report when it has ended, unless it raised something

    What else there is to say is said to a `TrainerSink`, with these parameters. Returns the trainer's reason to leave,
    None where it has not left. Raises ValueError for a `Rollout` with learner_connector or max_lag, which are said to
    the `TrainerStream`, and what the rollout, its environments or the connection raised.

    In a program's main thread Ctrl-C, or SIGTERM, has the environments stop, and waits until the trainer has what was
    under way, or has not been there for `linger` seconds; a second one does not wait. Then the signal has its usual
    effect: KeyboardInterrupt, as a rule.
    """
    check_rollout(rollout)
    _check_is_said_to_trainer(rollout)
    sink = TrainerSink(
        address,
        sends="batches" if isinstance(rollout, MultiAgentRollout) else "fragments",
        secret=secret,
        tls=tls,
        name=name,
        linger=linger,
        max_bytes=max_bytes,
        spill=spill,
        limits=limits,
        watch=watch,
    )
    graph = Graph("feed")
    graph.add(rollout=rollout, trainer=sink)
    if isinstance(rollout, MultiAgentRollout):
        lanes = rollout.environments.num_lanes
        graph.add(learner=MultiAgentLearnerPipeline(rollout.learner, fragments_per_batch=lanes, lag=rollout.lag))
        graph.connect("rollout.fragments", "learner")
        graph.connect("learner", "trainer")
    else:
        graph.connect("rollout.fragments", "trainer")
    _run(graph, sink, on_end)
    return sink.goodbye


def _check_is_said_to_trainer(rollout: AnyRollout) -> None:
    """Raise ValueError where a rollout was told how batches are to be made that the trainer makes."""
    if isinstance(rollout, MultiAgentRollout):
        return
    said = {"learner_connector": rollout.has_learner_pieces, "max_lag": rollout.lag.max_lag is not None}
    for name, is_said in said.items():
        if is_said:
            raise ValueError(
                f"the rollout has {name}=, and its batches are made at the trainer: expected "
                f"TrainerStream({name}=…) there, or a graph with a LearnerPipeline and TrainerSink(sends='batches')"
            )


def _run(graph: Graph, sink: TrainerSink, on_end: Callable[[Report], object] | None) -> None:
    """Run it; a signal that has ended it takes effect then."""
    handlers = _signal_handlers()
    try:
        report, signalled = anyio.run(_fed, graph, sink, list(handlers))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # an event loop would leave others
    if report is not None and on_end is not None:
        on_end(report)
    if signalled is not None:
        signal.raise_signal(signalled)


def _signal_handlers() -> dict[signal.Signals, Any]:
    """Those of the signals that are waited for meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}


async def _fed(
    graph: Graph, sink: TrainerSink, numbers: Sequence[signal.Signals]
) -> tuple[Report | None, signal.Signals | None]:
    """The report, None where it has not begun, and the signal that has ended it."""
    run: Run | None = None
    came: list[signal.Signals] = []
    raised: Exception | None = None
    with anyio.open_signal_receiver(*numbers) if numbers else nullcontext() as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_leave_with_trainer, sink, tasks.cancel_scope)
            try:
                async with graph.run() as run:
                    if signals is not None:
                        tasks.start_soon(_leave_when_signalled, signals, run, sink, tasks, came)
                    await run.wait()
            except Exception as error:
                raised = error  # as it is, not in a group
            tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised
    return None if run is None else run.report(), came[-1] if came else None


async def _leave_with_trainer(sink: TrainerSink, scope: CancelScope) -> None:
    if await sink.wait_goodbye() is not None:
        scope.cancel()


async def _leave_when_signalled(
    signals: AsyncIterator[signal.Signals], run: Run, sink: TrainerSink, tasks: TaskGroup, came: list[signal.Signals]
) -> None:
    async for number in signals:
        if came:
            tasks.cancel_scope.cancel()
        else:
            logger.warning(_INTERRUPTED, "" if sink.linger is None else f" for {sink.linger:g} s (linger)")
            run.stop()
            if sink.linger is not None:
                tasks.start_soon(_leave_without_trainer, sink, sink.linger, tasks.cancel_scope)
        came.append(number)


async def _leave_without_trainer(sink: TrainerSink, seconds: float, scope: CancelScope) -> None:
    """Once there has been no trainer for so long."""
    since = anyio.current_time()
    while sink.has_trainer or anyio.current_time() - since < seconds:
        await anyio.sleep(_LOOK_S)
        if sink.has_trainer:
            since = anyio.current_time()
    logger.warning("interrupted, and there has been no trainer for %g s: it is waited for no more", seconds)
    scope.cancel()
