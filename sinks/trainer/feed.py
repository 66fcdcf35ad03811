"""Feed: runs a rollout for a trainer in another process or on another host, in a script of its own."""

import logging
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any, Literal

import anyio

from rollflow.nodes.argument_checks import checking_keywords, places_in
from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout
from rollflow.nodes.rollout.options import Watch
from rollflow.sinks.learner.learner_pipeline import LearnerPipeline, MultiAgentLearnerPipeline
from rollflow.sinks.trainer.sink import AnyRollout, TrainerSink, check_rollout
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.node import ending_quietly, out_of_group
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.run import Run
from rollflow.stream.net.endpoint import Secret
from rollflow.stream.observe.watch import StallRules
from rollflow.stream.wire import Address, Limits

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_INTERRUPTED = (
    "interrupted: the trainer gets what is under way, and is waited for%s where it is not there; a second time ends it "
    "at once"
)


_PLACES = {name: f"{place} of the rollout" for name, place in places_in(watch=Watch).items()}
_PLACES["max_lag"] = "TrainerStream(max_lag=…), or max_lag=… of a rollout that sends batches"


@checking_keywords("feed", _PLACES)
def feed(
    rollout: AnyRollout,
    address: str | Address,
    *,
    secret: Secret = None,
    tls: ssl.SSLContext | None = None,
    name: str | None = None,
    linger: float | None = 60.0,
    retry_s: float | None = None,
    max_bytes: int = 1 << 30,
    limits: Limits | None = None,
    watch: Callable[[], Awaitable[object]] | None = None,
    sends: Literal["fragments", "batches"] | None = None,
    on_end: Callable[[Report], object] | None = None,
) -> str | None:
    """Run a rollout whose fragments go to the trainer at `address`, until it ends or the trainer says goodbye.

        sends      "fragments", or "batches": train batches, each of as many fragments as there are lanes at the
                   beginning, are made here. None: "batches" of a `MultiAgentRollout`, "fragments" of a `Rollout`
        on_end     called with the run's report when it has ended, unless it raised an error

    All other parameters are those of `TrainerSink`; the log, the stall doctor and a trace, of the stages here, are as
    the rollout's `log` and `watch` say. Returns the trainer's reason to leave, None if it has not left. Raises
    ValueError if fragments are sent of a rollout with learner_connector or max_lag, which the `TrainerStream` takes
    instead, and errors of the rollout, its environments or the connection.

    In a program's main thread, Ctrl-C or SIGTERM stops the environments. Then the trainer is waited for until it has
    what was under way, or has not been there for `linger` seconds; a second signal ends that. After that the signal has
    its usual effect: KeyboardInterrupt, as a rule.
    """
    check_rollout(rollout)
    sends = sends or ("batches" if isinstance(rollout, MultiAgentRollout) else "fragments")
    if sends == "fragments":
        _check_leaves_batches(rollout)
    sink = TrainerSink(
        address,
        sends=sends,
        secret=secret,
        tls=tls,
        name=name,
        linger=linger,
        retry_s=retry_s,
        max_bytes=max_bytes,
        limits=limits,
        watch=watch,
    )
    graph, trace = Graph("feed"), rollout.log.hand_over_trace()
    graph.add(rollout=rollout, trainer=sink)
    if sends == "batches":
        graph.add(learner=_learner_of(rollout))
        graph.connect("rollout.fragments", "learner")
        graph.connect("learner", "trainer")
    else:
        graph.connect("rollout.fragments", "trainer")
    handlers = _signal_handlers()
    try:
        report, signalled = anyio.run(_run_graph, graph, sink, list(handlers), rollout.stall, trace)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # an event loop would leave others
    if report is not None and on_end is not None:
        on_end(report)
    if signalled is not None:
        signal.raise_signal(signalled)  # takes effect afterwards
    return sink.goodbye


def _learner_of(rollout: AnyRollout) -> LearnerPipeline | MultiAgentLearnerPipeline:
    """Learner pipeline that makes a train batch of as many fragments as there are lanes now."""
    options: Any = {"fragments_per_batch": rollout.environments.num_lanes, "lag": rollout.lag}
    if isinstance(rollout, MultiAgentRollout):
        return MultiAgentLearnerPipeline(rollout.learner, **options)
    return LearnerPipeline(rollout.learner_pipeline, rollout.module, **options)


def _check_leaves_batches(rollout: AnyRollout) -> None:
    """Raise ValueError for a rollout with options of batches, which the trainer makes here."""
    has_pieces = rollout.learner.has_pieces if isinstance(rollout, MultiAgentRollout) else rollout.has_learner_pieces
    learner = "learner_connector", has_pieces, "yields=Batches(learner_connector=…)"
    for name, is_set, instead in (learner, ("max_lag", rollout.lag.max_lag is not None, "max_lag=…")):
        if is_set:
            raise ValueError(
                f"the rollout has {name}=, and its batches are made at the trainer: expected "
                f"TrainerStream({instead}) there, or a graph with a LearnerPipeline and TrainerSink(sends='batches')"
            )


def _signal_handlers() -> dict[signal.Signals, Any]:
    """Handlers of the signals that stop a feed, to be restored; {} outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}


async def _run_graph(
    graph: Graph,
    sink: TrainerSink,
    numbers: Sequence[signal.Signals],
    rules: StallRules,
    trace: str | PathLike[str] | None,
) -> tuple[Report | None, signal.Signals | None]:
    """Run the graph until it ends, a signal or the trainer ends it; its report, and the last signal."""
    run: Run | None = None
    received: list[signal.Signals] = []
    linger = sink.linger

    async def leave_with_trainer() -> None:
        if await sink.wait_goodbye() is not None:
            tasks.cancel_scope.cancel()

    async def leave_when_signalled(signals: AsyncIterator[signal.Signals], run: Run) -> None:
        async for number in signals:
            if received:
                tasks.cancel_scope.cancel()
            else:
                logger.warning(_INTERRUPTED, "" if linger is None else f" for {linger:g} s (linger)")
                run.stop()
                if linger is not None:
                    tasks.start_soon(ending_quietly, partial(leave_without_trainer, linger))
            received.append(number)

    async def leave_without_trainer(seconds: float) -> None:
        """Leave once there has been no trainer for so many seconds."""
        since = anyio.current_time()
        while sink.has_trainer or anyio.current_time() - since < seconds:
            await anyio.sleep(_LOOK_S)
            if sink.has_trainer:
                since = anyio.current_time()
        logger.warning("interrupted, and there has been no trainer for %g s: it is waited for no more", seconds)
        tasks.cancel_scope.cancel()

    with anyio.open_signal_receiver(*numbers) if numbers else nullcontext() as signals, out_of_group():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ending_quietly, leave_with_trainer)
            async with graph.run(stall_after=rules.after, on_stall=rules.on_stall, trace=trace) as run:
                if signals is not None:
                    tasks.start_soon(ending_quietly, partial(leave_when_signalled, signals, run))
                await run.wait()
            tasks.cancel_scope.cancel()
    return None if run is None else run.report(), received[-1] if received else None
