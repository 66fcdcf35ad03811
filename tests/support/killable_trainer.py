"""A trainer in a process of its own, which may be killed at any moment and started again."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from feeding_rollouts import graph_of, trainer, weights, weights_of_agents
from remote_hosts import forked
from remote_rollouts import await_that
from serial_module import at_of

from rollflow import Columns, Fragment, TrainerStream
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


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


def record_of(fragment: Fragment | MultiAgentFragment) -> Record:
    """Return a fragment's record; of several agents a slot is an environment, with all their rewards."""
    if isinstance(fragment, MultiAgentFragment):
        slots = [part.gather("obs") for part in fragment.parts]
        rewards = [part.gather("rewards").astype(np.int64) for part in fragment.parts]
        by_slot = _by_slot([at_of(each)[:, 0] for each in slots], rewards)
        return _record(fragment.lane, fragment.sequence, fragment.num_steps, by_slot)
    rewards = np.asarray(fragment.column("rewards"), np.int64)
    return _record(fragment.lane, fragment.sequence, fragment.num_steps, dict(enumerate(rewards.T)))


def record_of_batch(batch: dict[str, Any], number: int) -> Record:
    """Return a train batch's record, or that of several modules' ones; it counts as a fragment of one lane."""
    parts = list(batch.values()) if is_by_module(batch) else [batch]
    slots = [at_of(part["obs"])[:, 0].numpy() for part in parts]
    rewards = [part["rewards"].numpy().astype(np.int64) for part in parts]
    return _record(0, number, sum(map(len, rewards)), _by_slot(slots, rewards))


def is_by_module(batch: dict[str, Any]) -> bool:
    """True for a batch of several modules: the observations of one may be a tree as well."""
    return "rewards" not in batch


def _by_slot(slots: Sequence[Any], rewards: Sequence[Any]) -> dict[int, Any]:
    """Slot -> its rewards as they come; of several agents, which have their numbers in turn, by these."""
    of_all, numbers = np.concatenate(slots), np.concatenate(rewards)
    by_slot = {int(slot): numbers[of_all == slot] for slot in np.unique(of_all)}
    return {slot: np.sort(each) for slot, each in by_slot.items()} if len(slots) > 1 else by_slot


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


class TrainerChild:
    """A trainer that writes down what it was handed over, together with its stream's state; goes on from there.

    options    of `_train`
    """

    def __init__(self, address: str, folder: Path, **options: Any) -> None:
        self.process = forked().Process(target=_train, args=(address, folder / "checkpoint"), kwargs=options)
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
    """Return the records of the items that a trainer was handed over, in this order."""
    path = folder / "checkpoint"
    return [Record(*record) for record in json.loads(path.read_text())["records"]] if path.exists() else []


def lost_by(folder: Path) -> tuple[dict[str, int], int]:
    """Return the losses of a trainer when it saved last: transitions by cause, and items that those before it had."""
    saved = json.loads((folder / "checkpoint").read_text())
    return saved["lost"], saved["missed"]


def _train(
    address: str,
    path: Path,
    *,
    ack: Any,
    max_lag: int | None = None,
    dies_at: float | None = None,
    agents: int = 0,
    **options: Any,
) -> None:
    """Take items, write down what they are, and go on from there.

    max_lag    it publishes new weights behind each batch, and rollouts are held back to this; None: it publishes none
    dies_at    it publishes before it saves, and is killed between the two with its batch of this number, when the
               weights are out; None: it saves first
    agents     in each environment; 0: one, with one module
    options    of the stream, which gives fragments unless they say otherwise
    """
    bound: dict[str, Any] = {} if max_lag is None else {"max_lag": max_lag, "on_excess": "pace"}
    stream = TrainerStream(address, ack=ack, **{"yields": "fragments", **bound, **options})
    records: list[Any] = []
    if path.exists():
        checkpoint = json.loads(path.read_text())
        records = checkpoint["records"]
        stream.load_state_dict(checkpoint["stream"])
    with stream:
        publish = partial(_publish, stream, records, max_lag, weights_of_agents if agents else weights)
        publish()
        for number, item in enumerate(stream):
            if max_lag is not None:
                check_young(stream, item, max_lag, is_numbered=dies_at is None)
            is_batch = isinstance(item, dict)
            records.append(record_of_batch(item, len(records)) if is_batch else record_of(item))
            if dies_at is not None:
                publish()
                if number == dies_at:
                    await_that(lambda: has_told(stream))
                    os.kill(os.getpid(), signal.SIGKILL)
            written = path.with_suffix(".new")
            told = {"records": records, "lost": stream.lost, "missed": stream.missed}
            written.write_text(json.dumps({"stream": stream.state_dict(), **told}))
            os.replace(written, path)
            if dies_at is None:
                publish()
            if ack == "manual":
                stream.ack()
        assert dies_at is not None or not stream.lost


def _publish(
    stream: TrainerStream, records: Sequence[Any], max_lag: int | None, weights: Callable[[float], Any]
) -> None:
    """The weights that training has come to: what was saved says which they are."""
    if max_lag is not None:
        stream.publish(weights(float(len(records))))


def has_told(stream: TrainerStream) -> bool:
    """Return True once all rollouts have been sent the newest weights."""
    peers = [peer for peer in stream._listener._loop.peers if peer.source is not None]
    return all(peer.version == stream.version and not peer.connection.undelivered for peer in peers)


def check_young(stream: TrainerStream, batch: dict[str, Any], max_lag: int, *, is_numbered: bool) -> None:
    """No action of a train batch is older than it may be, and each was computed with its version's weights.

    is_numbered    whether these say which version it is
    """
    for part in batch.values() if is_by_module(batch) else [batch]:
        versions = part[Columns.POLICY_VERSION]
        assert int(versions.min()) >= stream.version - max_lag
        if is_numbered:
            assert (part["weight"] == versions - 1).all()  # the first version has weights of 0


def _feed(address: str, slots: list[int], options: dict[str, Any]) -> None:
    import anyio

    torch.set_num_threads(1)

    async def main() -> None:
        graph, _, _ = graph_of(address, slots, **options)
        async with graph.run() as run:
            await run.wait()

    anyio.run(main)


def take(address: str, halt_at: int | None, told: Any) -> None:
    """Tell what a trainer takes, which stands still at fragments of a number."""
    torch.set_num_threads(1)
    with trainer(address, yields="fragments") as stream:
        for fragment in stream:
            rewards = sum(float(part.gather("rewards").sum()) for part in getattr(fragment, "parts", [fragment]))
            told.send((fragment.lane, fragment.sequence, rewards))
            if fragment.sequence == halt_at:
                signal.pause()


@contextmanager
def trainer_process(address: str, halt_at: int | None = None) -> Iterator[tuple[Any, Any]]:
    """A trainer in a process, and the end of a pipe by which it tells what it takes."""
    mine, theirs = forked().Pipe(duplex=False)
    process = forked().Process(target=take, args=(address, halt_at, theirs))
    process.start()
    theirs.close()
    yield process, mine
    process.join()


def received(told: Any) -> Any:
    """The next thing that comes by a pipe; None: its other end is closed."""
    try:
        return told.recv()
    except EOFError:
        return None
