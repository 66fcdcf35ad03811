"""Connector pieces in a row, which are a piece themselves."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from time import perf_counter_ns
from typing import Any

import gymnasium as gym

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.fused import Fused, fused_tail
from rollflow.nodes.connectors.given_pieces import check_piece
from rollflow.nodes.connectors.timer import Timer
from rollflow.stream.errors import ConnectorError
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.live_episode import LaneEpisodes

NameOrClass = str | type


class ConnectorPipelineV2(ConnectorV2):
    """Calls its pieces in order, each with what the one before returned.

        input_observation_space, input_action_space    of the first piece; each other one has those of the one before.
                                                       Where those are None, a piece keeps the ones it has
        connectors                                     the pieces, which may be pipelines

    Pieces go by their class's name; of several of one class the second is `Name_2`, and so on. After every edit all
    spaces are computed anew. A piece is given the columns that come with the episodes where it and all pieces after it
    can work with columns, else a plain list of episodes; both ways give the same batch.

    Raises ConnectorError, with the piece's name and place, when a piece returns anything but a dict; for an object that
    is put in twice, and for two pieces that would go by one name; and in every editing verb, for a class that several
    pieces are of: a name says which.
    """

    columnar = True
    fuses = True  # whether default pieces may be called as one: see `fused`

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        connectors: Sequence[ConnectorV2] | None = None,
        **kwargs: Any,
    ) -> None:
        self.connectors: list[ConnectorV2] = list(connectors or [])
        for piece in self.connectors:
            check_piece(piece)
        self._check_distinct(self.connectors)
        self._timers: list[Timer] = []
        self._fused_calls = self._fused_ns = 0  # since the pieces' timers were last brought up to date
        self._enclosing: list[ConnectorPipelineV2] = []
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self._arrange()

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        shared_data = {} if shared_data is None else shared_data
        return self.run(rl_module, batch, episodes, explore, shared_data, metrics, **kwargs)

    def run(
        self,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None,
        shared_data: dict[str, Any],
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        """What calling it does, for whoever does it at every vector step."""
        plain = episodes
        if self._first_columnar and isinstance(episodes, LaneEpisodes | FragmentEpisodes):
            plain = list(episodes)
        mark = perf_counter_ns()
        for place, (piece, timer) in enumerate(self._pieces):
            if place == self._fused_from and self.fuses and self._fused and isinstance(episodes, LaneEpisodes):
                fused = self._fused(self.connectors[place:], rl_module, batch, episodes, explore, shared_data)
                if fused is not None:
                    self._fused_calls += 1
                    self._fused_ns += perf_counter_ns() - mark
                    return fused
            try:
                batch = piece(
                    rl_module=rl_module,
                    batch=batch,
                    episodes=episodes if place >= self._first_columnar else plain,
                    explore=explore,
                    shared_data=shared_data,
                    metrics=metrics,
                    **kwargs,
                )
            except Exception as error:
                error.add_note(f"in connector piece {self._told(place)}")
                raise
            if not isinstance(batch, dict):
                raise self._no_batch(place, batch)
            now = perf_counter_ns()
            timer.calls += 1
            timer.total_ns += now - mark
            mark = now
        return batch

    # What it is made of

    def __len__(self) -> int:
        return len(self.connectors)

    def __iter__(self) -> Iterator[ConnectorV2]:
        return iter(self.connectors)

    def __getitem__(self, key: int | NameOrClass) -> Any:
        """A piece by place or name, or the list of all of a class."""
        if isinstance(key, int):
            return self.connectors[key]
        if isinstance(key, str):
            return self.connectors[self._place(key)]
        return [piece for piece in self.connectors if isinstance(piece, key)]

    @property
    def names(self) -> list[str]:
        """The pieces' names, in order: no two are the same."""
        return _names_of(self.connectors)

    @property
    def observation_spaces(self) -> list[gym.Space[Any]]:
        """What each piece leaves the observations in, in order; those of nested pipelines' pieces among them."""
        spaces: list[gym.Space[Any]] = []
        for piece in self.connectors:
            if isinstance(piece, ConnectorPipelineV2):
                spaces += piece.observation_spaces
            elif piece.observation_space is not None:
                spaces.append(piece.observation_space)
        return spaces

    def timers(self) -> dict[str, Timer]:
        """The pieces' names and timers; those that were called as one share their time."""
        self._share_fused_time()
        return dict(zip(self.names, self._timers, strict=True))

    # Editing

    def remove(self, name_or_class: NameOrClass) -> None:
        """Take a piece out. Warns, and does nothing, when it is not there."""
        place = self._find(name_or_class)
        if place is None:
            warnings.warn(f"nothing removed: {self._lacks(name_or_class)}", stacklevel=2)
        else:
            self._edit([*self.connectors[:place], *self.connectors[place + 1 :]])

    def insert_before(self, name_or_class: NameOrClass, connector: ConnectorV2) -> ConnectorV2:
        """Put a piece in front of another, which is returned. Raises ConnectorError when that is not there."""
        return self._insert(self._place(name_or_class), 0, connector)

    def insert_after(self, name_or_class: NameOrClass, connector: ConnectorV2) -> ConnectorV2:
        """Put a piece behind another, which is returned. Raises ConnectorError when that is not there."""
        return self._insert(self._place(name_or_class), 1, connector)

    def prepend(self, connector: ConnectorV2) -> None:
        """Put a piece at the beginning."""
        self._edit([connector, *self.connectors])

    def append(self, connector: ConnectorV2) -> None:
        """Put a piece at the end."""
        self._edit([*self.connectors, connector])

    # State

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Name -> state of every piece that has one, of those in `components` and not in `not_components`.

        "outer/inner" names a piece of a nested pipeline. Raises ConnectorError for a name that is not there.
        """
        wanted: dict[str, Any] = dict.fromkeys(self.names) if components is None else self._asked(components)
        unwanted = {} if not_components is None else self._asked(not_components)
        states: dict[str, Any] = {}
        for name, piece in self._named().items():
            if name not in wanted or unwanted.get(name, ()) is None:
                continue
            within = {"components": wanted[name]} if wanted[name] is not None else {}
            if name in unwanted:
                within["not_components"] = unwanted[name]
            states[name] = piece.get_state(**within)
        return {name: state for name, state in states.items() if state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the states of the pieces named; the others stay. Raises ConnectorError for a name that is not there."""
        pieces = self._named()
        self._check_names(state)
        for name, piece_state in state.items():
            try:
                pieces[name].set_state(piece_state)
            except Exception as error:
                error.add_note(f"in the state of connector piece '{name}' of {self.name}")
                raise

    def reset_state(self) -> None:
        """Reset every piece's state."""
        for piece in self.connectors:
            piece.reset_state()

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Name -> merged state, piece by piece; its own where none is given for a piece.

        Raises ConnectorError for a name that is not there.
        """
        for state in states:
            self._check_names(state)
        merged: dict[str, Any] = {}
        for name, piece in self._named().items():
            given = [state[name] for state in states if name in state]
            resulting = piece.merge_states(given) if given else piece.get_state()
            if resulting:
                merged[name] = resulting
        return merged

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """(name, piece) of all pieces."""
        return list(self._named().items())

    def __repr__(self) -> str:
        return f"<{self.name}: {' → '.join(self.names) or 'empty'}>"

    # Inside

    def _asked(self, components: str | Collection[str]) -> dict[str, list[str] | None]:
        """Name of a piece -> names inside it, None for all of it."""
        asked: dict[str, list[str] | None] = {}
        for component in {components} if isinstance(components, str) else components:
            name, _, inside = component.partition("/")
            if name not in self.names:
                raise ConnectorError(self._lacks(name))
            inner = asked.setdefault(name, [])
            if not inside:
                asked[name] = None
            elif inner is not None:
                inner.append(inside)
        return asked

    def _check_names(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        unknown = sorted(set(state) - set(self.names))
        if unknown:
            raise ConnectorError(
                f"{self.name}: a state for {unknown}, but the pieces are: {', '.join(self.names) or 'none'}"
            )

    def _named(self) -> dict[str, ConnectorV2]:
        return dict(zip(self.names, self.connectors, strict=True))

    def _insert(self, place: int, offset: int, connector: ConnectorV2) -> ConnectorV2:
        found = self.connectors[place]
        self._edit([*self.connectors[: place + offset], connector, *self.connectors[place + offset :]])
        return found

    def _edit(self, pieces: list[ConnectorV2]) -> None:
        for piece in pieces:
            check_piece(piece)
        self._check_distinct(pieces)
        before = list(self.connectors)
        self.connectors[:] = pieces
        try:
            self._arrange()
        except BaseException:
            self.connectors[:] = before
            self._arrange()
            raise

    def _check_distinct(self, pieces: list[ConnectorV2]) -> None:
        names = _names_of(pieces)
        for place, (piece, name) in enumerate(zip(pieces, names, strict=True)):
            if _holds(piece, self):
                raise ConnectorError(f"{self.name} was to be put into itself, expected another pipeline")
            if any(piece is other for other in pieces[:place]):
                raise ConnectorError(
                    f"{self.name}: the same {piece.name} object twice, expected two objects: each has its own state"
                )
            if name in names[:place]:
                raise ConnectorError(
                    f"{self.name}: two pieces called '{name}', expected different names; pieces: {', '.join(names)}"
                )

    def _place(self, name_or_class: NameOrClass) -> int:
        place = self._find(name_or_class)
        if place is None:
            raise ConnectorError(self._lacks(name_or_class))
        return place

    def _find(self, name_or_class: NameOrClass) -> int | None:
        """Where the piece is that has the name, or the one of the class, or else of a subclass; None if nowhere."""
        if isinstance(name_or_class, str):
            return self.names.index(name_or_class) if name_or_class in self.names else None
        places = [place for place, piece in enumerate(self.connectors) if type(piece) is name_or_class]
        places = places or [place for place, piece in enumerate(self.connectors) if isinstance(piece, name_or_class)]
        if len(places) > 1:
            raise ConnectorError(
                f"{self.name} has {len(places)} pieces of class '{name_or_class.__name__}', expected a name that says "
                f"which: {', '.join(self.names[place] for place in places)}"
            )
        return places[0] if places else None

    def _lacks(self, name_or_class: NameOrClass) -> str:
        asked = name_or_class if isinstance(name_or_class, str) else name_or_class.__name__
        return f"{self.name} has no piece '{asked}'; pieces: {', '.join(self.names) or 'none'}"

    def _share_fused_time(self) -> None:
        """Give the pieces that were called as one their calls, and their part of the time."""
        timers = self._timers[self._fused_from :] if self._fused_calls else []
        for timer in timers:
            timer.calls += self._fused_calls
            timer.total_ns += self._fused_ns // len(timers)
        self._fused_calls = self._fused_ns = 0

    def _arrange(self) -> None:
        """After an edit: spaces from piece to piece, and what depends on which pieces there are."""
        self._share_fused_time()
        timers = {id(piece): timer for piece, timer in getattr(self, "_pieces", [])}
        self._timers = [timers.get(id(piece), Timer()) for piece in self.connectors]
        self._pieces = list(zip(self.connectors, self._timers, strict=True))
        self._recompute_spaces()
        self._first_columnar = len(self.connectors)
        self.replaces_episodes = any(  # type: ignore[misc]  # as with the two below
            piece.replaces_episodes for piece in self.connectors
        )
        while (
            not self.replaces_episodes and self._first_columnar and self.connectors[self._first_columnar - 1].columnar
        ):
            self._first_columnar -= 1
        tail = fused_tail(self.connectors)
        self._fused_from: int = -1
        self._fused: Fused | None = None
        if tail is not None and tail[0] >= self._first_columnar:
            self._fused_from, self._fused = tail
        # An instance's word on what its class says for all: it depends on the pieces.
        self.columnar = self._first_columnar == 0  # type: ignore[misc]
        self.changes_episodes = any(piece.changes_episodes for piece in self.connectors)  # type: ignore[misc]
        self.lookback = max((piece.lookback for piece in self.connectors), default=0)
        for piece in self.connectors:
            if isinstance(piece, ConnectorPipelineV2) and self not in piece._enclosing:
                piece._enclosing.append(self)
        for pipeline in self._enclosing:
            pipeline._arrange()

    def _recompute_spaces(self) -> None:
        self._spaces_known = True
        observation_space, action_space = self._input_observation_space, self._input_action_space
        for place, piece in enumerate(self.connectors):
            try:
                piece.set_input_spaces(
                    piece.input_observation_space if observation_space is None else observation_space,
                    piece.input_action_space if action_space is None else action_space,
                )
            except Exception as error:
                error.add_note(f"in the spaces of connector piece {self._told(place)}")
                raise
            observation_space, action_space = piece.observation_space, piece.action_space
        self._observation_space, self._action_space = observation_space, action_space

    def _no_batch(self, place: int, given: Any) -> ConnectorError:
        return ConnectorError(
            f"connector piece {self._told(place)} returned {type(given).__name__}, expected the batch, a dict: "
            "does its __call__ end in 'return batch'?"
        )

    def _told(self, place: int) -> str:
        return f"'{self.names[place]}' ({place + 1} of {len(self)} in {self.name})"


def _names_of(pieces: list[ConnectorV2]) -> list[str]:
    names: list[str] = []
    for piece in pieces:
        count = sum(piece.name == other.name for other in pieces[: len(names)])
        names.append(piece.name if not count else f"{piece.name}_{count + 1}")
    return names


def _holds(piece: ConnectorV2, pipeline: ConnectorPipelineV2) -> bool:
    inside = piece.connectors if isinstance(piece, ConnectorPipelineV2) else []
    return piece is pipeline or any(_holds(each, pipeline) for each in inside)
