"""Columns of fragments that worker processes lend: each has its own values, in the dtype that a piece gave it."""

import os
import selectors
import socket
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollflow import ConnectorV2, Rollout
from rollflow.nodes.env.workers.frames import FrameKind, receive_frame
from rollflow.nodes.offloaded.lent_fragments import FragmentReader, FragmentWriter
from rollflow.nodes.offloaded.rollout_processes import RolloutLink
from rollflow.stream.data.blocks import SharedBlock
from rollflow.stream.data.packing import pack, unpack

FRAGMENTS = 8  # the last of which lie in blocks that have been written to before
MAKES: dict[str, Any] = {
    "strings": lambda count: np.array([f"s{count:03d}"]),
    "strings that widen late": lambda count: np.array(["s" * max(4, count - 20)]),
    "bytes": lambda count: np.array([f"s{count:03d}".encode()]),
    "long doubles": lambda count: np.array([count], np.longdouble) / 3,
    "big-endian": lambda count: np.array([count], ">f4"),
    "times": lambda count: np.array([count], "datetime64[s]"),
}
Copies = list[dict[str, np.ndarray]]


class Marks(ConnectorV2):
    """Gives each vector step columns, which say the number of the step."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names, self.count = names, 0

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.count += 1
        return batch | {name: MAKES[name](self.count) for name in self.names}


def rollout_of_marks(*names: str, **options: Any) -> Rollout:
    options |= {"fragment_length": 4, "num_fragments": FRAGMENTS, "seed": 0}
    return Rollout("CartPole-v1", lanes=1, module_to_env_connector=lambda env: Marks(names), **options)


def copies_of(fragments: Iterator[Any]) -> Copies:
    return [{name: fragment.columns[name].tree.copy() for name in MAKES} for fragment in fragments]


def check_same(there: Copies, here: Copies) -> None:
    assert len(there) == len(here) == FRAGMENTS
    for name in here[0]:
        assert [each[name].dtype for each in there] == [each[name].dtype for each in here], name
        assert [each[name].tolist() for each in there] == [each[name].tolist() for each in here], name


@pytest.mark.parametrize("name", MAKES)
def test_a_column_of_any_dtype_is_read_as_it_was_written(name: str) -> None:
    here, there = [], []
    rollout = rollout_of_marks(name)
    rollout.environments.share()
    with rollout:
        reader = FragmentReader(0, hands_on=False)
        for fragment in rollout.fragments():
            if not there:
                writer = FragmentWriter(rollout.environments.lanes[0])
            mapped = len(writer.blocks)
            fields = unpack(pack(writer.write(fragment)))
            for index, block in enumerate(writer.blocks[mapped:], mapped):
                reader.map(index, SharedBlock(block.size, os.dup(block.fd)))
            message = reader.read(fields)
            there.append({name: message.columns[name].copy()})
            here.append({name: fragment.columns[name].tree[: fragment.last_row].copy()})
            del fragment, message
            while reader.freed:
                writer.free(reader.freed.popleft())
    check_same(there, here)
    assert len(writer.blocks) < FRAGMENTS


@pytest.mark.slow
def test_columns_of_all_dtypes_are_those_of_their_fragment_in_worker_processes() -> None:
    with rollout_of_marks(*MAKES) as inline, rollout_of_marks(*MAKES, where="rollouts", workers=1) as rollouts:
        check_same(copies_of(rollouts.fragments()), copies_of(inline.fragments()))


def test_freed_blocks_are_told_of_some_in_each_turn_so_that_a_worker_at_another_lane_has_room_for_them() -> None:
    link = RolloutLink(0, None, SimpleNamespace(states=None, lacking=lambda _: ()))
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector() as selector:
        link.connect(ours, selector, print)
        link._fragments = FragmentReader(0, hands_on=False)
        link._fragments.freed.extend(range(100))
        for _ in range(2):
            link.step()
        told = [receive_frame(theirs).kind for _ in range(102)]
    assert [index for index, kind in enumerate(told) if kind is FrameKind.TURN] == [64, 101]
