"""A trainer in a process of its own, which may be killed at any moment and started again."""

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from feeding import FeedProcess, graph_of
from remote_rollouts import await_that

from rollflow.sinks import TrainerStream
from rollflow.stream import Columns, Fragment
from rollflow.stream.wire import Limits

__all__ = ["FeedProcess", "Record", "TrainerChild", "check_whole", "forked", "lost_by", "record_of", "records_of"]


class Record(NamedTuple):
    """A fragment that was handed over, of environments whose rewards are the numbers of their steps.

    numbers          slot -> numbers of its first and last step; the last batch may have none of some slots
    is_consecutive   whether none is missing between them
    """

    lane: int
    sequence: int
    steps: int
    numbers: dict[str, list[int]]
    is_consecutive: bool


def record_of(fragment: Fragment) -> Record:
    """What there is to write down of a fragment."""
    rewards = np.asarray(fragment.column("rewards"), np.int64)
    return _record(fragment.lane, fragment.sequence, fragment.num_steps, dict(enumerate(rewards.T)))


def record_of_batch(batch: dict[str, Any], number: int) -> Record:
    """The same of a train batch, which counts as a fragment of one lane."""
    slots, rewards = batch["obs"][:, 0].numpy(), batch["rewards"].numpy().astype(np.int64)
    return _record(0, number, len(rewards), {int(slot): rewards[slots == slot] for slot in np.unique(slots)})


def _record(lane: int, sequence: int, steps: int, by_slot: Mapping[int, Any]) -> Record:
    numbers = {str(slot): [int(of_slot[0]), int(of_slot[-1])] for slot, of_slot in by_slot.items()}
    is_consecutive = all(bool((np.diff(of_slot) == 1).all()) for of_slot in by_slot.values())
    return Record(lane, sequence, steps, numbers, is_consecutive)


def check_whole(records: Sequence[Record]) -> None:
    """Every lane's fragments are there from the first on, each once and in its order, and so are all slots' steps."""
    by_lane: dict[int, list[Record]] = {}
    for record in records:
        by_lane.setdefault(record.lane, []).append(record)
    for lane in by_lane.values():
        assert [record.sequence for record in lane] == list(range(len(lane)))
        last: dict[str, int] = {}
        for record in lane:
            assert record.is_consecutive, record
            for slot, (first, newest) in record.numbers.items():
                assert first == last.get(slot, 0) + 1, record
                last[slot] = newest


def forked() -> ForkServerContext:
    """Processes that need not import anything again: there may be hundreds, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["anyio.from_thread", "rollflow.nodes.rollout", "rollflow.sinks"])  # the slow ones
    return context


class TrainerChild:
    """A trainer that writes down what it was handed over, together with its stream's state; goes on from there.

    max_lag    it publishes new weights behind each batch, and rollouts are held back to this; None: it publishes none
    sources    rollouts that it waits for
    dies_at    it publishes before it saves, and is killed between the two with its batch of this number, when the
               weights are out; None: it saves first
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        *,
        ack: str,
        yields: str = "fragments",
        limits: Limits | None = None,
        max_lag: int | None = None,
        sources: int = 1,
        dies_at: float | None = None,
    ) -> None:
        arguments = address, str(folder), ack, yields, limits or Limits(), max_lag, sources, dies_at
        self.process = forked().Process(target=_train, args=arguments)
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


def records_of(folder: Path) -> list[Record]:
    """What a trainer was handed over, in this order."""
    path = folder / "checkpoint"
    return [Record(*record) for record in json.loads(path.read_text())["records"]] if path.exists() else []


def lost_by(folder: Path) -> tuple[dict[str, int], int]:
    """What a trainer had left out when it saved last: transitions, by cause, and items that those before it had."""
    saved = json.loads((folder / "checkpoint").read_text())
    return saved["lost"], saved["missed"]


def _train(
    address: str,
    folder: str,
    ack: Any,
    yields: Any,
    limits: Limits,
    max_lag: int | None,
    sources: int,
    dies_at: float | None,
) -> None:
    path = Path(folder) / "checkpoint"
    bound: dict[str, Any] = {} if max_lag is None else {"max_lag": max_lag, "on_excess": "pace"}
    stream = TrainerStream(address, yields=yields, ack=ack, limits=limits, sources=sources, **bound)
    records: list[Any] = []
    if path.exists():
        checkpoint = json.loads(path.read_text())
        records = checkpoint["records"]
        stream.load_state_dict(checkpoint["stream"])
    with stream:
        _publish(stream, records, max_lag)
        for number, item in enumerate(stream):
            if max_lag is not None:
                check_young(stream, item, max_lag, is_numbered=dies_at is None)
            records.append(record_of(item) if isinstance(item, Fragment) else record_of_batch(item, len(records)))
            if dies_at is not None:
                _publish(stream, records, max_lag)
                if number == dies_at:
                    await_that(lambda: has_told(stream))
                    os.kill(os.getpid(), signal.SIGKILL)
            written = path.with_suffix(".new")
            told = {"records": records, "lost": stream.lost, "missed": stream.missed}
            written.write_text(json.dumps({"stream": stream.state_dict(), **told}))
            os.replace(written, path)
            if dies_at is None:
                _publish(stream, records, max_lag)
            if ack == "manual":
                stream.ack()
        assert dies_at is not None or not stream.lost


def _publish(stream: TrainerStream, records: Sequence[Any], max_lag: int | None) -> None:
    """The weights that training has come to: what was saved says which they are."""
    if max_lag is not None:
        stream.publish({"weight": torch.tensor(float(len(records)))})


def has_told(stream: TrainerStream) -> bool:
    """Whether all rollouts have been sent the newest weights."""
    sources = stream._door.connected
    is_sent = [source.connection is not None and not source.connection.undelivered for source in sources]
    return all(is_sent) and all(source.told.version == stream.version for source in sources)


def check_young(stream: TrainerStream, batch: dict[str, Any], max_lag: int, *, is_numbered: bool) -> None:
    """No action of a train batch is older than it may be, and each was computed with its version's weights.

    is_numbered    whether these say which version it is
    """
    versions = batch[Columns.POLICY_VERSION]
    assert int(versions.min()) >= stream.version - max_lag
    if is_numbered:
        assert (batch["weight"] == versions - 1).all()  # the first version has weights of 0


def _feed(address: str, slots: list[int], options: dict[str, Any]) -> None:
    import anyio

    torch.set_num_threads(1)

    async def main() -> None:
        graph, _, _ = graph_of(address, slots, **options)
        async with graph.run() as run:
            await run.wait()

    anyio.run(main)
