"""Rollouts that feed a trainer, in threads and in processes."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numbered import NumberedEnv, NumberedModule

from rollflow.nodes import Rollout
from rollflow.sinks import LearnerPipeline, TrainerSink, TrainerStream, feed
from rollflow.stream import Fragment, Graph
from rollflow.stream.report import Report
from rollflow.stream.run import Run
from rollflow.stream.wire import Limits

HASTY = Limits(heartbeat_s=0.3, grace_s=0.5, handshake_s=2.0)
SHORT = Limits(heartbeat_s=5.0, grace_s=30.0)
_PROGRAM = """
import sys; sys.path[:] = {path!r}
from functools import partial
import anyio, torch
from feeding import graph_of
from numbered import NumberedEnv, NumberedModule
torch.set_num_threads(1)
async def main():
    graph, rollout, sink = graph_of({address!r}, {slots!r}, sink={sink!r}, **{options!r})
    async with graph.run() as run:
        await run.wait()
    print(rollout.num_steps, flush=True)
anyio.run(main)
"""


def weights(value: float) -> dict[str, torch.Tensor]:
    """Those of a `NumberedModule`."""
    return {"weight": torch.tensor(value)}


def trainer(**options: Any) -> TrainerStream:
    """A stream on a port of this machine's."""
    return TrainerStream("tcp://127.0.0.1:0", **{"limits": SHORT, "join_timeout": 60.0, **options})


def graph_of(
    address: Any,
    slots: Sequence[int],
    *,
    env: type[NumberedEnv] = NumberedEnv,
    sink: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Graph, Rollout, TrainerSink]:
    """A rollout over environments that number their steps, and a sink, in a graph."""
    envs = [partial(env, slot) for slot in slots]
    settings: dict[str, Any] = {"module": NumberedModule(), "fragment_length": 8, "seed": 0, **options}
    return graph_over(Rollout(envs, **settings), address, **(sink or {}))


def graph_over(
    rollout: Rollout, address: Any, *, fragments_per_batch: int = 1, **sink: Any
) -> tuple[Graph, Rollout, TrainerSink]:
    """A rollout and a sink in a graph, and between them what makes batches of so many fragments, if it sends these."""
    sends = TrainerSink(str(address), **{"limits": SHORT, "name": "feed", **sink})
    graph = Graph("feed")
    graph.add(rollout=rollout, trainer=sends)
    if sink.get("sends") == "batches":
        pipeline, module = rollout.learner_pipeline, rollout.module
        graph.add(learner=LearnerPipeline(pipeline, module, fragments_per_batch=fragments_per_batch))
        graph.connect("rollout.fragments", "learner")
        graph.connect("learner", "trainer")
    else:
        graph.connect("rollout.fragments", "trainer")
    return graph, rollout, sends


class Feed:
    """A rollout that runs in another thread.

    ended    is done when it has ended, with what was raised
    """

    def __init__(self, portal: BlockingPortal, graph: Graph, rollout: Rollout, sink: TrainerSink) -> None:
        self.rollout, self.sink = rollout, sink
        self._portal, self._graph = portal, graph
        self._run: Run | None = None
        self.ended: Future[None] = portal.start_task_soon(self._main)

    def drain(self) -> None:
        """Have it stop making steps, and end once the trainer has all of them."""
        assert self._run is not None
        self._portal.call(self._run.stop)

    def report(self) -> Report | None:
        """What has been counted so far; None: it has not begun."""
        return None if self._run is None else self._run.report()

    def held_back_by(self) -> str | None:
        """The name of the stage that holds the others back."""
        report = self.report()
        return None if report is None else report.bottleneck

    async def _main(self) -> None:
        async with self._graph.run() as self._run:
            await self._run.wait()


@contextmanager
def feeding(address: Any, slots: Sequence[int] = (0, 1, 2, 3), **options: Any) -> Iterator[Feed]:
    """A rollout in another thread; what it raised is raised when this is left."""
    with running(*graph_of(address, slots, **options)) as feed:
        yield feed


@contextmanager
def running(graph: Graph, rollout: Rollout, sink: TrainerSink) -> Iterator[Feed]:
    """A graph in another thread, until it ends; one whose rollout never does is cut off."""
    with start_blocking_portal() as portal:
        feed = Feed(portal, graph, rollout, sink)
        try:
            yield feed
        except BaseException:
            feed.ended.cancel()
            raise
        if rollout._num_fragments is None:
            feed.ended.cancel()
        else:
            feed.ended.result()


@contextmanager
def fed(stream: TrainerStream, rollout: Any) -> Iterator["Future[Any]"]:
    """Within the stream, which a rollout feeds by `feed` from another thread; what that comes to."""
    failed: BaseException | None = None
    with ThreadPoolExecutor() as threads:
        with stream:
            feeding = threads.submit(feed, rollout, str(stream.address), limits=SHORT)
            try:
                yield feeding
            except BaseException as error:  # the stream says goodbye all the same, or the rollout would wait for it
                failed = error
        feeding.result()
    if failed is not None:
        raise failed


class FeedProcess:
    """A rollout in a process of its own."""

    def __init__(
        self, address: Any, slots: Sequence[int], *, sink: dict[str, Any] | None = None, **options: Any
    ) -> None:
        program = _PROGRAM.format(path=sys.path, address=str(address), slots=list(slots), sink=sink, options=options)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self) -> tuple[str, str]:
        """Wait until it has ended; what it printed, and what it had to say."""
        return self.process.communicate(timeout=60)

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.communicate()


def in_lanes_order(fragments: Sequence[Fragment]) -> list[Fragment]:
    return sorted(fragments, key=lambda fragment: (fragment.lane, fragment.sequence))


def sequences_of(fragments: Sequence[Fragment]) -> dict[int, list[int]]:
    """The numbers of the fragments of each lane, in the order in which they came."""
    by_lane: dict[int, list[int]] = {}
    for fragment in fragments:
        by_lane.setdefault(fragment.lane, []).append(fragment.sequence)
    return by_lane
