"""Filters that bring observations to mean 0 and deviation 1, with the statistics of `MeanStdFilter`."""

import threading
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.alpha.agent_connectors import OBSERVATIONS, columns_of
from rollflow.nodes.connectors.alpha.connector import AgentConnector, Connector, ConnectorContext
from rollflow.nodes.connectors.alpha.records import AgentConnectorDataType
from rollflow.nodes.connectors.alpha.registry import register_connector
from rollflow.nodes.connectors.env_to_module.mean_std_filter import MeanStdFilter
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError, shown
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode


class MeanStdObservationFilterAgentConnector(AgentConnector):
    """Filters observations, trees of arrays `any[...]`, to f32 ones of the same shapes; in evaluation it counts none.

    demean    True: subtract the mean
    destd     True: divide by the deviation
    clip      clip to -clip … clip; None: don't

    Numbers and states are those of `MeanStdFilter`: states of copies merge, and count each observation once. All
    numbers of an observation are filtered. Raises ConnectorError for observations of another shape than before.
    """

    def __init__(
        self,
        ctx: ConnectorContext | None = None,
        demean: bool = True,
        destd: bool = True,
        clip: float | None = 10.0,
    ) -> None:
        super().__init__(ctx)
        self.demean, self.destd, self.clip = demean, destd, clip
        self._filter: MeanStdFilter | None = None  # made for the first observation, or with a state
        self._shapes: Any = None  # of an observation, as plain data

    @property
    def filter(self) -> MeanStdFilter | None:
        """The piece that counts; None before the first observation."""
        return self._filter

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        for name in OBSERVATIONS:
            there = [data for data in (columns_of(self, each) for each in acd_list) if name in data]
            if there:
                filtered = self._filtered([data[name] for data in there])
                for data, observation in zip(there, filtered, strict=True):
                    data[name] = observation
        return acd_list

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        return self([ac_data])[0]

    def observation_space_after(self, observation_space: Space) -> Space:
        piece = MeanStdFilter(clip_by_value=self.clip)
        space = _space_of(_shapes_of_space(observation_space))
        made: Space = piece.recompute_output_observation_space(space, space)
        return made

    # Copies

    def apply_changes(self, other: Self, with_buffer: bool = False) -> None:
        """Count what another filter has counted, besides what this one has."""
        state = self.merge_states([other.learnt_state()])
        if state:
            self.take_learnt_state(state)

    def copy(self) -> Self:
        """A copy that counts as another filter."""
        return self.copied()

    def sync(self, other: Self) -> None:
        """Go on from another filter's statistics."""
        self.reset_state()
        state = other.learnt_state()
        if state:
            self.take_learnt_state(state)

    def reset_state(self) -> None:
        """Forget all statistics."""
        if self._filter is not None:
            self._filter.reset_state()

    # State

    def to_state(self) -> tuple[str, Any]:
        options = {"demean": self.demean, "destd": self.destd, "clip": self.clip}
        state = map_tree(_plain, self.learnt_state()) if self.learnt_state() else None
        return type(self).__name__, {**options, "state": state}

    @classmethod
    def from_state(cls, ctx: ConnectorContext, params: Any) -> Connector:
        options = dict(params or {})
        state = options.pop("state", None)
        made = cls(ctx, **options)
        if state is not None:
            made.take_learnt_state(state)
        return made

    def learnt_state(self) -> dict[str, Any]:
        state = {} if self._filter is None else self._filter.get_state()
        return {"shapes": self._shapes, "sources": state["sources"]} if state else {}

    def take_learnt_state(self, state: dict[str, Any]) -> None:
        if not {"shapes", "sources"} <= state.keys():
            raise ConnectorError(
                f"{type(self).__name__}: a state with {sorted(map(str, state))}, expected 'shapes' and 'sources'"
            )
        piece = self._made_for(state["shapes"])
        piece.set_state({"space": str(piece.input_observation_space), "sources": state["sources"]})

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The counts of this filter and of all others."""
        if not states:
            return self.learnt_state()
        piece = self._made_for(states[0]["shapes"])
        for state in states:
            self._made_for(state["shapes"])
        space = str(piece.input_observation_space)
        sources = [{"space": space, "sources": state["sources"]} for state in states]
        return {"shapes": self._shapes, "sources": piece.merge_states(sources)["sources"]}

    # Inside

    def _filtered(self, observations: list[Tree]) -> list[Tree]:
        piece = self._made_for(_shapes_of(observations[0]))
        piece.update_stats = self._is_training
        episodes = [SingleAgentEpisode(observations=[map_tree(np.asarray, each)]) for each in observations]
        piece(batch={}, episodes=episodes)
        return [episode.get_observations(-1) for episode in episodes]

    def _made_for(self, shapes: Any) -> MeanStdFilter:
        """The piece, for observations of these shapes. Raises ConnectorError where it is for others."""
        if self._filter is None:
            self._shapes = shapes
            self._filter = MeanStdFilter(
                _space_of(shapes), de_mean_to_zero=self.demean, de_std_to_one=self.destd, clip_by_value=self.clip
            )
        if shapes != self._shapes:
            raise ConnectorError(
                f"{type(self).__name__}: an observation of shapes {shapes}, expected {self._shapes}, as before"
            )
        return self._filter


class ConcurrentMeanStdObservationFilterAgentConnector(MeanStdObservationFilterAgentConnector):
    """`MeanStdObservationFilterAgentConnector` that several threads may call, synchronize and save at once."""

    def __init__(
        self,
        ctx: ConnectorContext | None = None,
        demean: bool = True,
        destd: bool = True,
        clip: float | None = 10.0,
    ) -> None:
        super().__init__(ctx, demean, destd, clip)
        self._lock = threading.RLock()

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        with self._lock:
            return super().__call__(acd_list)

    def learnt_state(self) -> dict[str, Any]:
        with self._lock:
            return super().learnt_state()

    def take_learnt_state(self, state: dict[str, Any]) -> None:
        with self._lock:
            super().take_learnt_state(state)

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        with self._lock:
            return super().merge_states(states)

    def reset_state(self) -> None:
        with self._lock:
            super().reset_state()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies, without the lock: a copy has its own."""
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


def _shapes_of(observation: Tree) -> Any:
    """The shapes of an observation's arrays, as plain data that JSON can carry."""
    return _shapes(observation, dict, tuple, np.shape)


def _shapes_of_space(space: Space) -> Any:
    return _shapes(space, spaces.Dict, spaces.Tuple, lambda part: part.shape)


def _shapes(item: Any, mapping: type, several: type, shape: Callable[[Any], Any]) -> Any:
    if isinstance(item, mapping):
        parts = item.items()  # type: ignore[attr-defined]
        return {"dict": {key: _shapes(part, mapping, several, shape) for key, part in parts}}
    if isinstance(item, several):
        return {"tuple": [_shapes(part, mapping, several, shape) for part in item]}  # type: ignore[attr-defined]
    return list(shape(item))


def _space_of(shapes: Any) -> Space:
    """The space of observations of these shapes, without bounds. Raises ConnectorError for anything else."""
    if isinstance(shapes, dict) and shapes.keys() == {"dict"}:
        return spaces.Dict({key: _space_of(part) for key, part in shapes["dict"].items()})
    if isinstance(shapes, dict) and shapes.keys() == {"tuple"}:
        return spaces.Tuple([_space_of(part) for part in shapes["tuple"]])
    if not isinstance(shapes, list | tuple):
        raise ConnectorError(f"shapes of an observation are {shown(shapes)}, expected lists of numbers")
    return spaces.Box(-np.inf, np.inf, tuple(shapes), np.float32)


def _plain(leaf: Any) -> Any:
    return leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf


register_connector("MeanStdObservationFilterAgentConnector", MeanStdObservationFilterAgentConnector)
register_connector("ConcurrentMeanStdObservationFilterAgentConnector", ConcurrentMeanStdObservationFilterAgentConnector)
