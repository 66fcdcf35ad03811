"""A DataLoader over a trainer's stream that knows what its loop was given."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset, default_convert

from rollflow.sinks.trainer.making import Tagged

_NOT_TO_BE_SAID = {
    "batch_size": "each item is a whole batch, of as many fragments as `TrainerStream` has fragments_per_batch",
    "prefetch_factor": "it is what `TrainerStream.dataset` has",
}


class _Source(Protocol):
    """A dataset whose workers can say which item is made of what."""

    def __iter__(self) -> Iterator[Any]: ...

    def tagged(self) -> Iterator[Tagged]:
        """The items of a worker."""
        ...


class TrainerLoader(DataLoader[Any]):
    """Made by `TrainerDataset.loader`.

    source        of the items
    prefetch      items that each worker makes ahead
    following     gives the items to the loop, and says so to the stream
    collate_fn    called with each item; None: `default_convert`
    options       of the `DataLoader`
    """

    def __init__(
        self,
        source: _Source,
        prefetch: int,
        following: Callable[[Iterator[Tagged]], Iterator[Any]],
        *,
        num_workers: int,
        collate_fn: Callable[[Any], Any] | None,
        **options: Any,
    ) -> None:
        for name, told in _NOT_TO_BE_SAID.items():
            if options.pop(name, None) is not None:
                raise TypeError(f"{name} is given to the loader, expected none: {told}")
        self._following = following
        dataset: Any = _Tagged(source) if num_workers else source
        convert: Any = _OfItem(collate_fn or default_convert) if num_workers else collate_fn
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            collate_fn=convert,
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is a class of its own
        items: Iterator[Any] = super().__iter__()
        return self._following(items) if self.num_workers else items


class _Tagged(IterableDataset[Tagged]):
    """What workers iterate."""

    def __init__(self, source: _Source) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Tagged]:
        return self._source.tagged()


class _OfItem:
    """Does something with the item alone; it goes to workers that are spawned."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, tagged: Tagged) -> Tagged:
        return tagged._replace(item=self._convert(tagged.item))
