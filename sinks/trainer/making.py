"""Makes train batches, fragments or episodes in a process that has asked for what they are made of."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rollflow.nodes.metrics_logger import MetricsLogger
from rollflow.nodes.weights_codec import from_arrays
from rollflow.sinks.trainer.age import AgeBound
from rollflow.sinks.trainer.by_module import parted_weights
from rollflow.sinks.trainer.dataset_server import Given, Setup
from rollflow.sinks.trainer.handing_over import HandingOver
from rollflow.sinks.trainer.item_message import tensors_of
from rollflow.sinks.trainer.source import Arrived, Source
from rollflow.stream.fragment import Fragment
from rollflow.stream.wire import TrainerSession


class Tagged(NamedTuple):
    """An item for a loop.

    item       a train batch, a fragment or an episode
    share      number of what it was made of
    is_last    whether there is nothing more of that
    """

    item: Any
    share: int
    is_last: bool


class Making:
    """Makes items of what a stream's dataset gives."""

    def __init__(self, told: Setup) -> None:
        self._handing_over = HandingOver(told.yields, told.learner_connector, told.module, MetricsLogger())
        self._module = told.module
        self._yields, self._age = told.yields, AgeBound(told.max_lag, told.on_excess)
        self._sources: dict[bytes, Source] = {}

    def made_of(self, given: Given) -> Iterator[Tagged]:
        """The items, one by one."""
        if given.weights is not None:
            weights = from_arrays(given.weights)
            by_module = isinstance(self._module, Mapping)
            self._module.load_state_dict(parted_weights(weights, self._module) if by_module else weights)
        for token, introduction in given.introductions.items():
            source = self._sources[token] = Source(TrainerSession(token))
            source.name, source.spaces, source.action_space, source.is_stateful, source.is_by_module = introduction
        taken = []
        for token, number, columns, version in given.items:
            item = columns if isinstance(columns, Fragment) else tensors_of(columns)
            taken.append(Arrived(self._sources[token], number, item, version))
        for made in self._handing_over.made_of(taken):
            if self._yields == "batches":
                self._age.mask(made.item, made.of, given.version)
            yield Tagged(made.item, given.share, made.is_last)

    def count_masked(self) -> int:
        """Steps that were masked since this was asked last."""
        return self._age.lost.pop("masked", 0)
