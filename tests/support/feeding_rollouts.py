"""Rollouts that feed a trainer, in threads and in processes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from held_envs import await_that
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule

from rollflow import Fragment, Graph, MultiAgentRollout, Rollout, TrainerStream, feed
from rollflow.sinks import LearnerPipeline, MultiAgentLearnerPipeline, Sources, TrainerSink
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.run import Run
from rollflow.stream.wire import Limits

AnyRollout = Rollout | MultiAgentRollout
HASTY = Limits(heartbeat_s=0.3, grace_s=0.5, handshake_s=2.0)
SHORT = Limits(heartbeat_s=5.0, grace_s=30.0)


def weights(value: float) -> dict[str, torch.Tensor]:
    """Return weights of a `NumberedModule`."""
    return {"weight": torch.tensor(value)}


def trainer(
    address: str = "tcp://127.0.0.1:0", *, sources: int = 1, join_timeout: float | None = 60.0, **options: Any
) -> TrainerStream:
    """A stream at an address; without one on a port of this machine's."""
    return TrainerStream(address, sources=Sources(sources, join_timeout), **{"limits": SHORT, **options})


@contextmanager
def failing(address: str, **options: Any) -> Iterator[TrainerStream]:
    """A trainer that fails at the end of the block."""
    with suppress(ZeroDivisionError), trainer(address, **options) as stream:
        yield stream
        raise ZeroDivisionError("no steps")


def await_come(stream: TrainerStream) -> None:
    """Let rollouts connect before they are asked for anything, and wait until one has come or was turned away."""
    stream._listener.open()
    await_that(lambda: stream._listener.come or stream._listener.refusals)


def weights_of_agents(value: float) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights of the modules of several agents."""
    return {each: weights(value) for each in ("nested", "plain")}


def modules_of_agents() -> dict[str, NumberedModule]:
    """Return the modules of several agents."""
    return {"nested": NumberedModule(), "plain": NumberedModule()}


def module_of(agent: str, episode: Any) -> str:
    """The module of an agent of `NumberedAgents`, of which the first has nested observations."""
    return "nested" if agent == "agent 0" else "plain"


def rollout_of(
    slots: Sequence[int], *, agents: int = 0, env: type[NumberedEnv] = NumberedEnv, **options: Any
) -> AnyRollout:
    """A rollout over environments that number their steps.

    agents    that act in each step; 0: each has one, which is not told by its name
    """
    settings: dict[str, Any] = {"fragment_length": 8, "seed": 0, **options}
    if not agents:
        return Rollout([partial(env, slot) for slot in slots], **{"module": NumberedModule(), **settings})
    envs = [partial(NumberedAgents, slot, agents=agents, nested=1, at_once=True) for slot in slots]
    return agents_rollout_over(envs, **settings)


def agents_rollout_over(envs: Any, **options: Any) -> MultiAgentRollout:
    """A rollout over environments of `NumberedAgents`, of which the first agent has nested observations."""
    acting = {"module": modules_of_agents(), "agent_to_module_mapping_fn": module_of}
    return MultiAgentRollout(envs, **{"fragment_length": 8, "seed": 0, **acting, **options})


def graph_of(
    address: Any, slots: Sequence[int], *, sink: dict[str, Any] | None = None, **options: Any
) -> tuple[Graph, AnyRollout, TrainerSink]:
    """A rollout over environments that number their steps, and a sink, in a graph."""
    return graph_over(rollout_of(slots, **options), address, **(sink or {}))


def learner_of(rollout: AnyRollout, **options: Any) -> LearnerPipeline | MultiAgentLearnerPipeline:
    """What makes batches of a rollout's fragments."""
    if isinstance(rollout, MultiAgentRollout):
        return MultiAgentLearnerPipeline(rollout.learner, **options)
    return LearnerPipeline(rollout.learner_pipeline, rollout.module, **options)


def graph_over(
    rollout: AnyRollout, address: Any, *, fragments_per_batch: int = 1, **sink: Any
) -> tuple[Graph, AnyRollout, TrainerSink]:
    """A rollout and a sink in a graph, and between them what makes batches of so many fragments, if it sends these."""
    sends = TrainerSink(str(address), **{"limits": SHORT, "name": "feed", **sink})
    graph = Graph("feed")
    graph.add(rollout=rollout, trainer=sends)
    if sink.get("sends") == "batches":
        graph.add(learner=learner_of(rollout, fragments_per_batch=fragments_per_batch))
        graph.connect("rollout.fragments", "learner")
        graph.connect("learner", "trainer")
    else:
        graph.connect("rollout.fragments", "trainer")
    return graph, rollout, sends


def graph_for_two(rollout: AnyRollout, folder: Path) -> tuple[Graph, AnyRollout, list[TrainerSink]]:
    """A rollout for the trainers "one" and "other" in a folder."""
    graph, sinks = Graph("two"), [TrainerSink(f"unix:{folder}/{name}", limits=SHORT) for name in ("one", "other")]
    for sink in sinks:
        graph.connect(rollout.fragments, sink, capacity=1)
    return graph, rollout, sinks


class Feed:
    """A rollout that runs in another thread.

    ended         is done when it has ended, with what was raised
    is_drained    whether it is to end by itself, once the trainer has all
    """

    def __init__(self, portal: BlockingPortal, graph: Graph, rollout: AnyRollout, sink: TrainerSink) -> None:
        self.rollout: Any = rollout
        self.sink = sink
        self._portal, self._graph = portal, graph
        self._run: Run | None = None
        self.is_drained = False
        self.ended: Future[None] = portal.start_task_soon(self._main)

    def drain(self) -> None:
        """Have it stop making steps, and end once the trainer has all of them."""
        assert self._run is not None
        self.is_drained = True
        self._portal.call(self._run.stop)

    def report(self) -> Report | None:
        """Return the counts so far, or None before it has begun."""
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
def running(graph: Graph, rollout: AnyRollout, sink: TrainerSink) -> Iterator[Feed]:
    """A graph in another thread, until it ends; one whose rollout never does is cut off."""
    with start_blocking_portal() as portal:
        feed = Feed(portal, graph, rollout, sink)
        try:
            yield feed
        except BaseException:
            feed.ended.cancel()
            raise
        if _ends(rollout) or feed.is_drained:
            feed.ended.result()
        else:
            feed.ended.cancel()


def _ends(rollout: AnyRollout) -> bool:
    """True for one that makes so many fragments."""
    return rollout._counting._num_fragments is not None


@contextmanager
def fed(stream: TrainerStream, rollout: Any, **options: Any) -> Iterator["tuple[TrainerStream, Future[Any]]"]:
    """The stream within its block, and what comes of `feed`, by which a rollout feeds it from another thread."""
    failed: BaseException | None = None
    with ThreadPoolExecutor() as threads:
        with stream:
            feeding = threads.submit(feed, rollout, str(stream.address), **{"limits": SHORT, **options})
            try:
                yield stream, feeding
            except BaseException as error:  # the stream says goodbye all the same, or the rollout would wait for it
                failed = error
        feeding.result()
    if failed is not None:
        raise failed


def sequences_of(fragments: Sequence[Fragment]) -> dict[int, list[int]]:
    """The numbers of the fragments of each lane, in the order in which they came."""
    by_lane: dict[int, list[int]] = {}
    for fragment in fragments:
        by_lane.setdefault(fragment.lane, []).append(fragment.sequence)
    return by_lane
