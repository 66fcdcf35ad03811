"""Batches through Ray's object store: an actor puts them there, as many as are asked for ahead."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray


@contextmanager
def batches(source: Mapping[str, NDArray[np.float32]], depth: int) -> Iterator[Iterator[Any]]:
    """The same batch again and again, `depth` of them under way; they come as arrays in the store, not copied."""
    store = max(1 << 28, 2 * depth * sum(array.nbytes for array in source.values()))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=store,
    )
    try:
        producer = ray.remote(num_cpus=1)(_Producer).remote(dict(source))
        yield _taken(producer, depth)
    finally:
        ray.shutdown()


class _Producer:
    """In the other process."""

    def __init__(self, source: Mapping[str, NDArray[np.float32]]) -> None:
        self._source = {column: values.copy() for column, values in source.items()}  # out of the store

    def batch(self) -> Mapping[str, NDArray[np.float32]]:
        """It is copied into the store when it is returned."""
        return self._source


def _taken(producer: Any, depth: int) -> Iterator[Any]:
    asked = deque(producer.batch.remote() for _ in range(depth))
    while True:
        yield ray.get(asked.popleft())
        asked.append(producer.batch.remote())
