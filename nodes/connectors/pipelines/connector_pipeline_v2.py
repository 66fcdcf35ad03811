"""Pipelines of connector pieces, which are pieces themselves."""

import abc
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, ClassVar

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, SharedData, Space
from rollflow.nodes.connectors.list_form import settle_observations
from rollflow.nodes.connectors.state_watch import checked_state
from rollflow.stream.data.errors import ConnectorError, StateError, page_on, shown, warn_caller
from rollflow.stream.fragments.fragment import FragmentEpisodes
from rollflow.stream.fragments.live_episode import LaneEpisodes

NameOrClass = str | type


def names_of(names: Sequence[str]) -> list[str]:
    """The names that pieces go by, in order, by what each is called: the second `Name` is `Name_2`."""
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}_{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


class NamedPieces(abc.ABC):
    """Base of pipelines: pieces that are called in order, with a name each."""

    name: Any  # of the pipeline
    _pieces: list[Any]

    @property
    def names(self) -> list[str]:
        """The pieces' names, in order: no two are the same."""
        return names_of([piece.name for piece in self._pieces])

    @abc.abstractmethod
    def _edit(self, pieces: list[Any]) -> None:
        """Have these pieces, in the place of those that are there. Raises ConnectorError if that can't be."""

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pieces)

    def __repr__(self) -> str:
        return f"<{self.name}: {' → '.join(self.names) or 'empty'}>"

    def insert_before(self, name_or_class: NameOrClass, connector: Any) -> Any:
        """Put a piece in front of another, which is returned. Raises ConnectorError when there is no such piece."""
        return self._insert(self._place(name_or_class), 0, connector)

    def insert_after(self, name_or_class: NameOrClass, connector: Any) -> Any:
        """Put a piece behind another, which is returned. Raises ConnectorError when there is no such piece."""
        return self._insert(self._place(name_or_class), 1, connector)

    def prepend(self, connector: Any) -> None:
        """Put a piece at the beginning."""
        self._edit([connector, *self._pieces])

    def append(self, connector: Any) -> None:
        """Put a piece at the end."""
        self._edit([*self._pieces, connector])

    def _without(self, name_or_class: NameOrClass) -> list[Any]:
        """The pieces but for one. Raises ConnectorError when there is no such piece."""
        place = self._place(name_or_class)
        return [*self._pieces[:place], *self._pieces[place + 1 :]]

    def _insert(self, place: int, offset: int, connector: Any) -> Any:
        found = self._pieces[place]
        self._edit([*self._pieces[: place + offset], connector, *self._pieces[place + offset :]])
        return found

    def _place(self, name_or_class: NameOrClass) -> int:
        """Place of the piece that has the name, or is of the class. Raises ConnectorError if there is none."""
        place = self._found(name_or_class)
        if place is None:
            raise ConnectorError(self._missing(name_or_class))
        return place

    def _found(self, name_or_class: NameOrClass) -> int | None:
        """Place of the piece that has the name, or is of the class, or else of a subclass; None if there is none.

        Raises ConnectorError for a class that several pieces are of.
        """
        names, pieces = self.names, self._pieces
        if isinstance(name_or_class, str):
            return names.index(name_or_class) if name_or_class in names else None
        places = [place for place, each in enumerate(pieces) if type(each) is name_or_class]
        places = places or [place for place, each in enumerate(pieces) if isinstance(each, name_or_class)]
        if len(places) > 1:
            raise ConnectorError(
                f"{self.name} has {len(places)} pieces of class '{name_or_class.__name__}', expected a name that says "
                f"which: {', '.join(names[place] for place in places)}"
            )
        return places[0] if places else None

    def _missing(self, name_or_class: NameOrClass) -> str:
        asked = name_or_class if isinstance(name_or_class, str) else name_or_class.__name__
        return f"{self.name} has no piece '{asked}'; pieces: {', '.join(self.names) or 'none'}"


def check_kind(pieces: Sequence[ConnectorV2], kind: str) -> None:
    """Raise ConnectorError for a piece that belongs in pipelines of another kind, also within inner pipelines.

    kind    of the pipeline; empty: it takes any piece
    """
    for piece in pieces:
        if kind and piece.pipelines and kind not in piece.pipelines:
            raise ConnectorError(
                f"{piece.name} is put into the {kind} pipeline, expected in the {' or '.join(piece.pipelines)} pipeline"
            )
        check_kind(getattr(piece, "connectors", ()), kind)


def pieces_of(made: Any, what: str) -> list[ConnectorV2]:
    """The pieces that a connector builder function returned. Raises ConnectorError for anything else."""
    pieces = list(made) if isinstance(made, list | tuple) else [made]
    for piece in pieces:
        if not isinstance(piece, ConnectorV2):
            raise ConnectorError(
                f"{what} returned {_class_of(piece)}, expected a ConnectorV2 piece or a list of pieces"
            )
    return pieces


def note_of_piece(error: Exception) -> None:
    """Add to an error that a piece raised what is the likely mistake, if its kind says so."""
    if isinstance(error, TypeError):
        error.add_note(
            f"a piece is called with rl_module, batch, episodes, explore, shared_data, metrics; {page_on('piece')}"
        )
    elif isinstance(error, AttributeError) and isinstance(error.obj, list):
        error.add_note(
            "a piece that reads columns sets columnar = True in its own class, since a class that overrides __call__ "
            f"does not inherit it; this one is given a plain list of episodes; {page_on('piece')}"
        )
    elif isinstance(error, ValueError) and "read-only" in str(error):
        error.add_note(
            "observations of a batch, and columns of episodes, are the very rows that are recorded; expected a new "
            f"array: batch['obs'] = batch['obs'] * 2 rather than batch['obs'] *= 2; {page_on('piece')}"
        )


def _class_of(piece: Any) -> str:
    return f"the class {piece.__name__}, not {piece.__name__}()" if isinstance(piece, type) else type(piece).__name__


@dataclass(slots=True)
class Timer:
    """Calls of a piece, or of several pieces as one, and the time that they took.

    calls       in all
    total_ns    nanoseconds
    """

    calls: int = 0
    total_ns: int = 0

    @property
    def mean_us(self) -> float:
        """Microseconds a call."""
        return self.total_ns / self.calls / 1e3 if self.calls else 0.0


class Runners(weakref.WeakSet[Any]):
    """Rollouts and others that run a pipeline while their `is_running` is True; a copy has none."""

    @property
    def are_running(self) -> bool:
        """True while one of them runs."""
        return any(runner.is_running for runner in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Runners, ()


class ConnectorPipelineV2(NamedPieces, ConnectorV2):
    """Calls its pieces in order, each with the batch that the one before returned.

        input_observation_space,    of the first piece; each other one has the output spaces of the one before. If
        input_action_space          these are None, a piece keeps the ones it has
        connectors                  the pieces, which may be pipelines

    Pieces go by their class's name; of several of one class the second is `Name_2`, and so on. Every edit recomputes
    all spaces. If a piece and all pieces after it can use columns, it gets those that come with the episodes. Else
    it gets a plain list of episodes; both ways give the same batch.

    Raises ConnectorError, with the piece's name and place, if a piece returns anything but a dict. Edits raise it
    for an object that is there already, two pieces of one name, and a class that several pieces are of. They raise it
    while a rollout runs the pipeline, too.
    """

    kind: ClassVar[str] = ""  # of the pipelines that `ConnectorV2.pipelines` names; empty: takes any piece
    columnar = True
    fuses = True  # whether the last pieces may be called as one, where their classes are in `fused_forms`
    fused_forms: ClassVar[Mapping[tuple[type, ...], Callable[[Sequence[Any]], Any]]] = {}

    def __init__(
        self,
        input_observation_space: Space | None = None,
        input_action_space: Space | None = None,
        *,
        connectors: Sequence[ConnectorV2] | None = None,
        **kwargs: Any,
    ) -> None:
        self._pieces: list[ConnectorV2] = list(connectors or [])
        self._check(self._pieces)
        self._timers: list[tuple[ConnectorV2, Timer]] = []  # of the pieces, in order
        self._fused_timer = Timer()  # of the last pieces, where they are called as one
        self._fused_pieces: list[ConnectorV2] = []
        self._uncalled: list[ConnectorV2] = []  # pieces that no call has reached since they were put in
        self._enclosing: list[ConnectorPipelineV2] = []
        self._runners, self._state_owners = Runners(), Runners()
        super().__init__(input_observation_space, input_action_space, **kwargs)
        self._arrange()

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: SharedData = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        shared_data = {} if shared_data is None else shared_data
        return self.run(rl_module, batch, episodes, explore, shared_data, metrics, kwargs)

    def run(
        self,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None,
        shared_data: dict[str, Any],
        metrics: Any = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Batch:
        """Call the pieces: `__call__` with positional arguments, for callers at every vector step.

        more    keywords that the pieces are given as well
        """
        if self._uncalled:
            with self._watching_first_call():
                return self.run(rl_module, batch, episodes, explore, shared_data, metrics, more)
        first, fused = 0, self._fused
        if fused is not None and self.fuses and isinstance(episodes, LaneEpisodes):
            first = self._fused_from
            if first:
                given = {"rl_module": rl_module, "explore": explore, "shared_data": shared_data, "metrics": metrics}
                batch = self._called(range(first), batch, episodes, {**given, **more})
            mark = perf_counter_ns()
            try:
                made: Batch | None = fused.make(rl_module, batch, episodes, explore, shared_data)
            except Exception as error:
                self._note_piece(error, first, batch)
                raise
            if made is not None:
                timer = self._fused_timer
                timer.calls += 1
                timer.total_ns += perf_counter_ns() - mark
                return made
        given = {"rl_module": rl_module, "explore": explore, "shared_data": shared_data, "metrics": metrics}
        return self._called(range(first, len(self._pieces)), batch, episodes, {**given, **more})

    def _fused_alone(self, method: str, calls: int, *given: Any) -> Batch | None:
        """What a method of the pieces as one makes, for so many calls; None if it can't, or there are other pieces."""
        if self._fused_from != 0 or not self.fuses:
            return None
        mark = perf_counter_ns()
        made: Batch | None = getattr(self._fused, method)(*given)
        if made is not None:
            self._fused_timer.calls += calls
            self._fused_timer.total_ns += perf_counter_ns() - mark
        return made

    def _called(self, places: range, batch: Batch, episodes: Episodes, given: dict[str, Any]) -> Batch:
        """The batch that the pieces at some places make of it, each called with what is given as well."""
        is_columnar = isinstance(episodes, LaneEpisodes | FragmentEpisodes)
        plain = list(episodes) if self._first_columnar and is_columnar else episodes
        mark = perf_counter_ns()
        for place in places:
            piece, timer = self._timers[place]
            try:
                batch = piece(batch=batch, episodes=episodes if place >= self._first_columnar else plain, **given)
                if piece.changes_episodes:
                    settle_observations(episodes, piece.observation_space)
            except Exception as error:
                self._note_piece(error, place, batch)
                note_of_piece(error)
                raise
            if not isinstance(batch, dict):
                raise ConnectorError(
                    f"connector piece {self._described(place)} returned {type(batch).__name__}, expected the batch, a "
                    "dict: does its __call__ end in 'return batch'?"
                )
            now = perf_counter_ns()
            timer.calls += 1
            timer.total_ns += now - mark
            mark = now
        return batch

    # What it is made of

    def __getitem__(self, key: int | NameOrClass) -> Any:
        """Return a piece by place or name, or the list of all of a class."""
        if isinstance(key, int):
            return self._pieces[key]
        if isinstance(key, str):
            return self._pieces[self._place(key)]
        return [piece for piece in self._pieces if isinstance(piece, key)]

    @property
    def connectors(self) -> tuple[ConnectorV2, ...]:
        """The pieces, in order: edits go through `append`, `prepend`, `insert_before`, `insert_after` and `remove`."""
        return tuple(self._pieces)

    @property
    def observation_spaces(self) -> list[Space]:
        """The spaces that the pieces leave observations in, in order, with those of nested pipelines' pieces."""
        spaces: list[Space] = []
        for piece in self._pieces:
            if isinstance(piece, ConnectorPipelineV2):
                spaces += piece.observation_spaces
            elif piece.observation_space is not None:
                spaces.append(piece.observation_space)
        return spaces

    def timers(self) -> dict[str, Timer]:
        """Name -> timer of every piece by itself; if the last ones are called as one, "first … last" -> theirs."""
        timers = {name: replace(timer) for name, (_, timer) in zip(self.names, self._timers, strict=True)}
        if self._fused_timer.calls:
            timers[f"{self.names[self._fused_from]} … {self.names[-1]}"] = replace(self._fused_timer)
        return timers

    # Editing

    def refuse_edits_while_run_by(self, runner: Any, *, has_states: bool = False) -> None:
        """Refuse edits, which would come too late, while a runner runs, and `set_state` if it has states elsewhere."""
        self._runners.add(runner)
        if has_states:
            self._state_owners.add(runner)

    def remove(self, name_or_class: NameOrClass) -> None:
        """Take a piece out. Warns, and does nothing, when there is no such piece."""
        if self._found(name_or_class) is None:
            warn_caller(f"nothing removed: {self._missing(name_or_class)}")
        else:
            self._edit(self._without(name_or_class))

    # State

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Name -> state of every piece that has one, of those in `components` and not in `not_components`.

        "outer/inner" names a piece of a nested pipeline. Raises ConnectorError for a name of no piece.
        """
        wanted: dict[str, Any] = dict.fromkeys(self.names) if components is None else self._parts_asked_for(components)
        unwanted = {} if not_components is None else self._parts_asked_for(not_components)
        states: dict[str, Any] = {}
        for name, piece in self._named().items():
            if name not in wanted or unwanted.get(name, ()) is None:
                continue
            within = {"components": wanted[name]} if wanted[name] is not None else {}
            if name in unwanted:
                within["not_components"] = unwanted[name]
            states[name] = checked_state(piece.name, "get_state", piece.get_state(**within))
            if states[name] and type(piece).set_state is ConnectorV2.set_state:
                raise StateError(
                    f"{piece.name} has a state but no set_state of its own, so the state could not be taken over "
                    "again; expected a set_state(state) beside its get_state"
                ).see("state")
        return {name: state for name, state in states.items() if state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the states of the pieces named; the others stay. Raises ConnectorError for a name that is not there.

        Raises StateError while a rollout runs whose workers or hosts have the states.
        """
        self._check_owns_states("set_state")
        self.take_over_state(state)

    def take_over_state(self, state: dict[str, Any]) -> None:
        """Do what `set_state` does, for the rollout that has merged the states of its workers or hosts."""
        pieces = self._named()
        self._check_names(state)
        for name, piece_state in state.items():
            try:
                getattr(pieces[name], "take_over_state", pieces[name].set_state)(piece_state)
            except Exception as error:
                error.add_note(f"in the state of connector piece '{name}' of {self.name}")
                raise

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Name -> merged state, piece by piece; a piece's own if `states` have none of it.

        Raises ConnectorError for a name of no piece.
        """
        for state in states:
            self._check_names(state)
        merged: dict[str, Any] = {}
        for name, piece in self._named().items():
            of_piece = [state[name] for state in states if name in state]
            method, result = (
                ("merge_states", piece.merge_states(of_piece)) if of_piece else ("get_state", piece.get_state())
            )
            if checked_state(name, method, result):
                merged[name] = result
        return merged

    def reset_state(self) -> None:
        """Reset every piece's state. Raises StateError as `set_state` does."""
        self._check_owns_states("reset_state")
        for piece in self._pieces:
            piece.reset_state()

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """(name, piece) of all pieces."""
        return list(self._named().items())

    # Inside

    def _named(self) -> dict[str, Any]:
        return dict(zip(self.names, self._pieces, strict=True))

    def _check_names(self, state: Any) -> None:
        """Raise ConnectorError for a state that is none, or has a name of no piece."""
        if not isinstance(state, Mapping):
            raise ConnectorError(f"{self.name}: the state is {shown(state)}, expected a dict, as get_state gives it")
        unknown = sorted(set(state) - set(self.names))
        if unknown:
            raise ConnectorError(
                f"{self.name}: a state for {unknown}, expected {{name of a piece: its state}}, as get_state gives it; "
                f"pieces: {', '.join(self.names) or 'none'}"
            )

    def _edit(self, pieces: list[ConnectorV2]) -> None:
        if self._is_used("_runners"):
            raise ConnectorError(
                f"{self.name} is edited while it is in use by a rollout that runs, and what has come by would have "
                "missed it; expected the edit before the run, or pieces by a connector argument of the rollout"
            ).see("edit")
        self._check(pieces)
        before, self._pieces[:] = list(self._pieces), pieces
        try:
            self._arrange()
        except BaseException:
            self._pieces[:] = before
            self._arrange()
            raise

    def _is_used(self, by: str) -> bool:
        """True while one of the runners in an attribute runs, of this pipeline or of one that encloses it."""
        around = (each for each in self._enclosing if any(piece is self for piece in each._pieces))
        return bool(getattr(self, by).are_running) or any(pipeline._is_used(by) for pipeline in around)

    def _check_owns_states(self, method: str) -> None:
        if self._is_used("_state_owners"):
            raise StateError(
                f"{self.name} is given a state, but the workers or hosts of a rollout that runs have states of their "
                f"own, which would overwrite it; expected {method} before the run"
            )

    @contextmanager
    def _watching_first_call(self) -> Iterator[None]:
        """Watch pieces that declare no state, from the first call since they were put in."""
        watched, self._uncalled = [piece for piece in self._uncalled if piece.begin_state_watch()], []
        try:
            yield
        finally:
            for piece in watched:
                piece.note_first_call()

    def _check(self, pieces: list[ConnectorV2]) -> None:
        for piece in pieces:
            if not isinstance(piece, ConnectorV2):
                raise ConnectorError(f"{piece!r} is {_class_of(piece)}, expected a ConnectorV2 piece")
            if _holds(piece, self):
                raise ConnectorError(f"{self.name} was to be put into itself, expected another pipeline")
        names = names_of([piece.name for piece in pieces])
        for place, (piece, name) in enumerate(zip(pieces, names, strict=True)):
            if any(piece is other for other in pieces[:place]):
                raise ConnectorError(
                    f"{self.name}: the same {piece.name} object twice, expected two objects: each has its own state"
                )
            if name in names[:place]:
                raise ConnectorError(
                    f"{self.name}: two pieces called '{name}', expected different names; pieces: {', '.join(names)}"
                )
        check_kind(pieces, self.kind)

    def _parts_asked_for(self, components: str | Collection[str]) -> dict[str, list[str] | None]:
        """Name of a piece -> names inside it, by "outer/inner"; None for all of it."""
        asked: dict[str, list[str] | None] = {}
        for component in {components} if isinstance(components, str) else components:
            name, _, inside = component.partition("/")
            self._place(name)
            inner = asked.setdefault(name, [])
            if not inside:
                asked[name] = None
            elif inner is not None:
                inner.append(inside)
        return asked

    def _arrange(self) -> None:
        """Recompute spaces, and all that depends on which pieces there are; called after every edit."""
        self._uncalled = list(self._pieces)
        self._recompute_spaces()
        self._first_columnar = len(self._pieces)
        replaces = self.replaces_episodes = any(piece.replaces_episodes for piece in self._pieces)
        while not replaces and self._first_columnar and self._pieces[self._first_columnar - 1].columnar:
            self._first_columnar -= 1
        fused_before = self._fused_pieces
        self._fused_from, self._fused = self._fused_tail()
        self._fused_pieces = self._pieces[self._fused_from :] if self._fused else []
        timers = {id(piece): timer for piece, timer in self._timers}
        self._timers = [(piece, timers.get(id(piece), Timer())) for piece in self._pieces]
        if list(map(id, self._fused_pieces)) != list(map(id, fused_before)):
            self._fused_timer = Timer()
        self.columnar = self._first_columnar == 0
        self.changes_episodes = any(piece.changes_episodes for piece in self._pieces)
        self.lookback = max((piece.lookback for piece in self._pieces), default=0)
        for piece in self._pieces:
            if isinstance(piece, ConnectorPipelineV2) and self not in piece._enclosing:
                piece._enclosing.append(self)
        for pipeline in self._enclosing:
            pipeline._arrange()

    def _fused_tail(self) -> tuple[int, Any]:
        """Place of the first of the last pieces that can be called as one, and these as one; (-1, None): none can."""
        for classes, fused in self.fused_forms.items():
            place = len(self._pieces) - len(classes)
            if place >= self._first_columnar and tuple(map(type, self._pieces[place:])) == classes:
                return place, fused(self._pieces[place:])
        return -1, None

    def _recompute_spaces(self) -> None:
        self._spaces_known = True
        observation_space, action_space = self._input_observation_space, self._input_action_space
        for place, piece in enumerate(self._pieces):
            try:
                piece.set_input_spaces(
                    piece.input_observation_space if observation_space is None else observation_space,
                    piece.input_action_space if action_space is None else action_space,
                )
            except Exception as error:
                error.add_note(f"in the spaces of connector piece {self._described(place)}")
                raise
            observation_space, action_space = piece.observation_space, piece.action_space
        self._observation_space, self._action_space = observation_space, action_space

    def _note_piece(self, error: Exception, place: int, batch: Batch) -> None:
        """Say which piece raised an error, and whose work it was given."""
        if not self._pieces[place].is_of_user:
            note_own_pieces(error, self._pieces[:place])
            if isinstance(error, KeyError):
                error.add_note(f"its batch has {', '.join(map(repr, batch)) or 'no column'}")
        error.add_note(f"in connector piece {self._described(place)}")

    def _described(self, place: int) -> str:
        return f"'{self.names[place]}' ({place + 1} of {len(self)} in {self.name})"


def pieces_within(*pipelines: Iterable[ConnectorV2]) -> Iterator[ConnectorV2]:
    """Every piece of pipelines, or of sequences of pieces, those of nested pipelines included."""
    for piece in (piece for pipeline in pipelines for piece in pipeline):
        if isinstance(piece, ConnectorPipelineV2):
            yield from pieces_within(piece)
        else:
            yield piece


def note_own_pieces(error: Exception, *pipelines: Iterable[ConnectorV2]) -> None:
    """Add to an error the names of the user's pieces in pipelines before it, unless a piece is named already."""
    names = [piece.name for piece in pieces_within(*pipelines) if piece.is_of_user]
    told = str(error), *getattr(error, "__notes__", ())
    if names and not any("connector piece '" in text or text.startswith("behind the connector") for text in told):
        error.add_note(f"behind the connector piece{'s' if len(names) > 1 else ''} {', '.join(names)}")


def _holds(piece: ConnectorV2, pipeline: ConnectorPipelineV2) -> bool:
    inside = piece._pieces if isinstance(piece, ConnectorPipelineV2) else []
    return piece is pipeline or any(_holds(each, pipeline) for each in inside)


def slowest_piece(pipelines: Iterable[ConnectorPipelineV2]) -> str:
    """Name of the piece that took most of the time of some pipelines, or of pieces called as one; "": none."""
    times: Counter[str] = Counter()
    for pipeline in pipelines:
        times.update({name: timer.total_ns for name, timer in pipeline.timers().items()})
    [(name, total_ns)] = times.most_common(1) or [("", 0)]
    return name if total_ns else ""
