"""Minibatches of train batches: flat ones, nested ones, sequences of stateful modules."""

from typing import Any

import numpy as np
import pytest
import torch

from rollflow import minibatches
from rollflow.stream import ColumnError
from rollflow.stream.data.tree import leaves_of, map_tree


def numbered(*shape: int) -> torch.Tensor:
    """Items that all have the number of their row, 0 … B - 1."""
    rows = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return rows.expand(shape).clone()


FLAT = {"obs": numbered(10, 3), "rewards": numbered(10)}
NESTED = {
    "obs": {"image": numbered(10, 2, 2), "parts": (numbered(10), numbered(10, 1))},
    "actions": {"move": numbered(10), "turn": numbered(10, 2)},
    "infos": list(range(10)),
}
SEQUENCES = {
    "obs": numbered(10, 4, 3),
    "state_in": {"h": numbered(10, 8), "c": numbered(10, 8)},
    "next_state_in": {"h": numbered(10, 8), "c": numbered(10, 8)},
    "seq_lens": numbered(10),
    "loss_mask": numbered(10, 4),
}
ARRAYS = map_tree(lambda leaf: leaf.numpy(), FLAT)
BATCHES: list[Any] = [FLAT, NESTED, SEQUENCES, ARRAYS]


def rows_of(part: dict[str, Any]) -> list[int]:
    """The rows that a part has, by every leaf of every column."""
    found = [
        np.asarray(leaf).reshape(len(leaf), -1)
        for column in part.values()
        for leaf in ([column] if isinstance(column, list) else leaves_of(column))
    ]
    assert all((each == found[0][:, :1]).all() for each in found)
    return [int(row) for row in found[0][:, 0]]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 10), (4, [4, 4, 2]), (5, [5, 5]), (10, [10]), (99, [10])])
def test_each_row_comes_once_with_all_its_columns(batch: Any, size: int, sizes: list[int]) -> None:
    parts = list(minibatches(batch, size))
    assert [list(part) for part in parts] == [list(batch)] * len(sizes)
    assert [len(rows_of(part)) for part in parts] == sizes
    assert sorted(row for part in parts for row in rows_of(part)) == list(range(10))


def test_the_order_is_the_generators() -> None:
    def order(**options: Any) -> list[int]:
        return [row for part in minibatches(SEQUENCES, 3, **options) for row in rows_of(part)]

    first, again, other = (order(generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert order(shuffle=False) == list(range(10))
    torch.manual_seed(5)
    expected = torch.randperm(10).tolist()
    torch.manual_seed(5)
    assert order() == expected


def test_the_order_of_the_rows_takes_nothing_from_the_generator_without_shuffling() -> None:
    before = torch.get_rng_state()
    list(minibatches(FLAT, 3, shuffle=False))
    list(minibatches(FLAT, 3, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_smaller_last_part_may_be_left_out() -> None:
    assert [len(part["obs"]) for part in minibatches(FLAT, 4, drop_last=True)] == [4, 4]
    assert [len(part["obs"]) for part in minibatches(FLAT, 5, drop_last=True)] == [5, 5]
    assert list(minibatches(FLAT, 11, drop_last=True)) == []


@pytest.mark.parametrize(
    ("batch", "size", "error", "text"),
    [
        (FLAT, 0, ValueError, "size is 0, expected"),
        ({"rewards": numbered(3)}, 1, ColumnError, r"the batch has columns \['rewards'\], expected 'obs' among them$"),
        ({"one": FLAT, "two": FLAT}, 1, ColumnError, "a batch for each module: call minibatches for each"),
        ({**FLAT, "odd": numbered(4)}, 1, ColumnError, "column 'odd' has 4 rows, expected 10, as 'obs' has"),
    ],
)
def test_mistakes_are_named_at_once(batch: Any, size: int, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        minibatches(batch, size)
