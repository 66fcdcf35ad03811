"""A trainer in a process of its own, which may be killed at any moment and started again."""

import json
import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from feeding import FeedProcess, graph_of

from rollflow.sinks import TrainerStream
from rollflow.stream.wire import Limits

__all__ = ["FeedProcess", "TrainerChild", "forked", "records_of"]


def forked() -> ForkServerContext:
    """Processes that need not import anything again: there may be hundreds, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["anyio.from_thread", "rollflow.nodes.rollout", "rollflow.sinks"])  # the slow ones
    return context


class TrainerChild:
    """A trainer that writes down what it was handed over, together with its stream's state; goes on from there."""

    def __init__(
        self, address: str, folder: Path, *, ack: str, heartbeat_s: float = 5.0, grace_s: float = 60.0
    ) -> None:
        limits = Limits(heartbeat_s=heartbeat_s, grace_s=grace_s)
        self.process = forked().Process(target=_train, args=(address, str(folder), ack, limits))
        self.process.start()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()


class FeedChild:
    """A rollout that feeds a trainer, until it is killed."""

    def __init__(self, address: str, slots: list[int], **options: Any) -> None:
        self.process = forked().Process(target=_feed, args=(address, slots, options))
        self.process.start()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()


def records_of(folder: Path) -> list[tuple[int, int, int]]:
    """Lane, sequence and transitions of what a trainer was handed over, in this order."""
    path = folder / "checkpoint"
    return [tuple(record) for record in json.loads(path.read_text())["records"]] if path.exists() else []


def _train(address: str, folder: str, ack: Any, limits: Limits) -> None:
    path = Path(folder) / "checkpoint"
    stream = TrainerStream(address, yields="fragments", ack=ack, limits=limits)
    records: list[Any] = []
    if path.exists():
        checkpoint = json.loads(path.read_text())
        records = checkpoint["records"]
        stream.load_state_dict(checkpoint["stream"])
    with stream:
        for fragment in stream:
            records.append((fragment.lane, fragment.sequence, fragment.num_steps))
            written = path.with_suffix(".new")
            written.write_text(json.dumps({"stream": stream.state_dict(), "records": records}))
            os.replace(written, path)
            if ack == "manual":
                stream.ack()


def _feed(address: str, slots: list[int], options: dict[str, Any]) -> None:
    import anyio
    import torch

    torch.set_num_threads(1)

    async def main() -> None:
        graph, _, _ = graph_of(address, slots, **options)
        async with graph.run() as run:
            await run.wait()

    anyio.run(main)
