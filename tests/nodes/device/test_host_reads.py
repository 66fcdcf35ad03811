"""The counter of host reads counts each kind of read, and nothing else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.host_reads import counting_reads

ONE, ROW, MASK = torch.tensor(2.0), torch.arange(4.0), torch.tensor([True, False, True, False])
READS: dict[str, Callable[[], Any]] = {
    "cpu": ROW.cpu,
    "numpy": ROW.numpy,
    "asarray": lambda: np.asarray(ROW),
    "tolist": ROW.tolist,
    "item": ONE.item,
    "bool": lambda: bool(ONE),
    "int": lambda: int(ONE),
    "float": lambda: float(ONE),
    "range": lambda: range(ONE.long()),
    "in": lambda: 3.0 in ROW,
    "to another device": lambda: ROW.to("meta"),
    "to the host": lambda: ROW.to("cpu"),
    "nonzero": ROW.nonzero,
    "where": lambda: torch.where(MASK),
    "masked_select": lambda: ROW.masked_select(MASK),
    "unique": lambda: torch.unique(ROW),
    "equal": lambda: torch.equal(ROW, ROW),
    "index by a mask": lambda: ROW[MASK],
    "write by a mask": lambda: ROW.clone().__setitem__(MASK, torch.zeros(2)),
    "index by an array": lambda: ROW[np.array([0, 1])],
    "index by a list": lambda: ROW[[0, 1]],
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "repeat_interleave": lambda: ROW.repeat_interleave(torch.tensor(2)),
}
QUIET: dict[str, Callable[[], Any]] = {
    "scalar": lambda: ROW + torch.tensor(1.0),
    "sum": lambda: (ROW * 2).sum(),
    "row": lambda: ROW[1:3] + ROW[0],
    "index by a tensor": lambda: ROW[MASK.long()],
    "where of three": lambda: torch.where(MASK, ROW, 0.0),
    "masked_fill": lambda: ROW.masked_fill(MASK, 0.0),
    "same device": lambda: ROW.to(ROW.device),
    "dtype": lambda: ROW.to(torch.float64),
    "split": lambda: ROW.split([1, 3]),
    "copy": lambda: torch.empty(4).copy_(ROW),
    "sample": lambda: torch.distributions.Normal(ROW, ONE, validate_args=False).sample(),
    "any": MASK.any,
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_counted_once(name: str) -> None:
    with counting_reads() as reads:
        READS[name]()
    assert len(reads) == 1
    READS[name]()
    assert len(reads) == 1  # the counting has ended


@pytest.mark.parametrize("name", QUIET)
def test_what_stays_on_the_device_is_not_counted(name: str) -> None:
    with counting_reads() as reads:
        QUIET[name]()
    assert reads == []
