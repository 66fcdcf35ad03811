"""Memory that is used again: never while anybody refers to it."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property_examples import examples

from rollflow.stream.data.blocks import BlockLayout, BlockPool, PrivateBlock, SharedBlock
from rollflow.stream.data.tree import leaves_of, map_tree

KINDS: list[Any] = [PrivateBlock, SharedBlock]
FDS = Path("/proc/self/fd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "derive",
    [
        lambda array: array[3:5],
        lambda array: array.reshape(4, 16).T,
        lambda array: array.view(np.float32)[::2],
        lambda array: memoryview(array),
        lambda array: {"deep": [array[1:].view()]},
        lambda array: BlockLayout({"x": (np.zeros(2, np.float32), 3)}).columns(array)["x"],
        lambda array: iter(array),
    ],
)
def test_whatever_is_derived_from_an_array_keeps_its_block(kind: Any, derive: Any) -> None:
    pool = BlockPool(64, kind)
    derived = derive(pool.take()[1])
    assert pool.take()[0] == 1
    del derived
    gc.collect()
    assert {pool.take()[0]} <= {0, 1}  # and what nobody has is free
    assert len(pool.blocks) == 2
    pool.close()


class Pool(RuleBasedStateMachine):
    """Arrays are taken, derived from and dropped at random: what somebody refers to stays as it was written."""

    @initialize(kind=st.sampled_from(KINDS))
    def make(self, kind: Any) -> None:
        self.pool: BlockPool[Any] = BlockPool(16, kind)
        self.held: list[tuple[int, int, Any]] = []  # (block, what was written, an array over all or a part)
        self.written = 0

    @rule()
    def take(self) -> None:
        index, array = self.pool.take()
        assert index not in {block for block, _, _ in self.held}
        self.written = self.written % 255 + 1
        array[:] = self.written
        self.held.append((index, self.written, array))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def derive(self, data: Any) -> None:
        # What hypothesis has drawn it keeps: the place, then, and not the array.
        block, written, array = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.held.append((block, written, array[: data.draw(st.integers(1, 4))]))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @invariant()
    def what_is_held_is_as_it_was_written(self) -> None:
        for _, written, array in self.held:
            assert (array == written).all()

    @invariant()
    def no_more_blocks_are_made_than_were_in_use_at_a_time(self) -> None:
        in_use = len({block for block, _, _ in self.held})
        self.most = max(getattr(self, "most", 0), in_use)
        assert len(self.pool.blocks) == self.most

    def teardown(self) -> None:
        self.held.clear()
        self.pool.close()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=30)

rows = st.dictionaries(
    st.text(min_size=1, max_size=3),
    st.tuples(
        st.recursive(
            st.builds(
                lambda dtype, shape: np.zeros(shape, dtype),
                st.sampled_from([np.uint8, np.bool_, np.int64, np.float32]),
                st.lists(st.integers(0, 3), max_size=2),
            ),
            lambda parts: st.one_of(
                st.dictionaries(st.sampled_from("abc"), parts, min_size=1, max_size=2),
                st.lists(parts, min_size=1, max_size=2).map(tuple),
            ),
            max_leaves=3,
        ),
        st.integers(0, 4),
    ),
    max_size=4,
)


@given(rows=rows)
def test_columns_of_a_block_lie_beside_each_other(rows: dict[str, Any]) -> None:
    layout = BlockLayout(rows)
    block = PrivateBlock(layout.size + 1).array()
    columns = layout.columns(block)
    leaves = [leaf for column in columns.values() for leaf in leaves_of(column.tree)]
    for number, leaf in enumerate(leaves):
        leaf[...] = number % 2 if leaf.dtype == np.bool_ else number
    for number, leaf in enumerate(leaves):
        assert (leaf == (number % 2 if leaf.dtype == np.bool_ else number)).all()
        assert leaf.size == 0 or (leaf.ctypes.data - block.ctypes.data) % 64 == 0
    for name, (row, count) in rows.items():
        shapes = map_tree(lambda leaf, count=count: (leaf.dtype, (count, *leaf.shape)), row)
        assert map_tree(lambda leaf: (leaf.dtype, leaf.shape), columns[name].tree) == shapes


def test_two_ends_of_a_shared_block_see_the_same() -> None:
    ours = SharedBlock(32)
    other = SharedBlock(32, os.dup(ours.fd))
    ours.write(b"rollflow", 8)
    assert other.array()[8:16].tobytes() == b"rollflow"
    other.array()[0] = 7
    assert ours.array()[0] == 7
    other.close()
    ours.close()


@pytest.mark.skipif(not FDS.exists(), reason="descriptors are counted by /proc")
def test_descriptors_are_given_back_and_the_memory_stays() -> None:
    gc.collect()  # what other tests have left
    before = len(os.listdir(FDS))
    pool = BlockPool(64, SharedBlock)
    taken = [pool.take()[1] for _ in range(3)]
    assert len(os.listdir(FDS)) > before
    pool.close()
    pool.close()
    taken[0][:] = 5
    whole = SharedBlock(8).taken()
    assert (taken[0] == 5).all()
    del taken, pool, whole
    gc.collect()
    assert len(os.listdir(FDS)) == before
