"""Pipelines of Alpha connectors, which are connectors themselves and can be edited."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from rollflow.nodes.connectors.alpha.connector import (
    ActionConnector,
    ActionConnectorDataType,
    AgentConnector,
    AgentConnectorDataType,
    Connector,
    ConnectorContext,
    get_connector,
)
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError, RollflowError, shown


class ConnectorPipeline(Connector):
    """Connectors that are called in order.

    ctx           for connectors that have none of their own
    connectors    the connectors, which may be pipelines

    Connectors go by their class's name, the second of a class by `Name_2`. Raises ConnectorError for a connector of the
    other kind, and for an object that is in the pipeline already.
    """

    kind: ClassVar[type[Connector]] = Connector

    def __init__(self, ctx: ConnectorContext | None, connectors: Sequence[Any] = ()) -> None:
        super().__init__(ctx)
        self.connectors: list[Any] = []
        for connector in connectors:
            self.append(connector)

    def in_training(self) -> None:
        super().in_training()
        for connector in self.connectors:
            connector.in_training()

    def in_eval(self) -> None:
        super().in_eval()
        for connector in self.connectors:
            connector.in_eval()

    def bind(self, ctx: ConnectorContext | None) -> None:
        super().bind(ctx)
        for connector in self.connectors:
            connector.bind(ctx)

    # Editing

    @property
    def names(self) -> list[str]:
        """The names that the connectors go by, in order."""
        names: list[str] = []
        for connector in self.connectors:
            name = type(connector).__name__
            count = sum(type(other).__name__ == name for other in self.connectors[: len(names)])
            names.append(f"{name}_{count + 1}" if count else name)
        return names

    def remove(self, name: str) -> None:
        """Take a connector out. Raises ConnectorError where there is none of the name."""
        del self.connectors[self._place(name)]

    def insert_before(self, name: str, connector: Any) -> None:
        """Put a connector in front of another. Raises ConnectorError where there is none of the name."""
        self._insert(self._place(name), connector)

    def insert_after(self, name: str, connector: Any) -> None:
        """Put a connector behind another. Raises ConnectorError where there is none of the name."""
        self._insert(self._place(name) + 1, connector)

    def prepend(self, connector: Any) -> None:
        """Put a connector at the beginning."""
        self._insert(0, connector)

    def append(self, connector: Any) -> None:
        """Put a connector at the end."""
        self._insert(len(self.connectors), connector)

    def __getitem__(self, key: int | slice | str | type) -> list[Any]:
        """The list of connectors at a place, of a class's name, or of a class; empty where there is none.

        Raises IndexError for a place that there is not, and TypeError for any other key.
        """
        if isinstance(key, slice):
            return self.connectors[key]
        if isinstance(key, int):
            return [self.connectors[key]]
        if isinstance(key, str):
            named = zip(self.names, self.connectors, strict=True)
            return [each for name, each in named if key in (name, type(each).__name__)]
        if isinstance(key, type):
            return [each for each in self.connectors if isinstance(each, key)]
        raise TypeError(f"{type(self).__name__}[{key!r}]: expected a place, a name or a class")

    def __len__(self) -> int:
        return len(self.connectors)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.connectors)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' → '.join(self.names) or 'empty'}>"

    def _place(self, name: str) -> int:
        names = self.names
        if name not in names:
            raise ConnectorError(
                f"{type(self).__name__} has no connector '{name}'; connectors: {', '.join(names) or 'none'}"
            )
        return names.index(name)

    def _insert(self, place: int, connector: Any) -> None:
        kind = self.kind
        if not isinstance(connector, kind):
            is_class = isinstance(connector, type)
            text = f"the class {connector.__name__}" if is_class else type(connector).__name__
            remedy = f"{connector.__name__}(ctx)" if is_class else f"one that is an {kind.__name__}"
            raise ConnectorError(
                f"{type(self).__name__} was to have {text}, expected {remedy}; an AgentConnector goes into an "
                "AgentConnectorPipeline, and an ActionConnector into an ActionConnectorPipeline"
            )
        if connector is self or any(connector is each for each in self.connectors):
            raise ConnectorError(
                f"{type(self).__name__}: the same {type(connector).__name__} object twice, expected another object"
            )
        self.connectors.insert(place, connector)
        connector.bind(self.ctx)
        if self._is_training:
            connector.in_training()
        else:
            connector.in_eval()

    # State

    def to_state(self) -> tuple[str, Any]:
        """The class's name, and the list of the connectors' names and params."""
        return type(self).__name__, [list(each.to_state()) for each in self.connectors]

    @classmethod
    def from_state(cls, ctx: ConnectorContext, params: Any) -> Self:
        """A pipeline of params that `to_state` gave. Raises ConnectorError for names that are not registered."""
        if not isinstance(params, list | tuple) or not all(_is_pair(each) for each in params):
            raise ConnectorError(f"{cls.__name__}: params are {shown(params)}, expected a list of [name, params]")
        return cls(ctx, [get_connector(name, ctx, each) for name, each in params])

    def learnt_state(self) -> dict[str, Any]:
        states = {name: each.learnt_state() for name, each in self._named()}
        return {name: state for name, state in states.items() if state}

    def take_learnt_state(self, state: dict[str, Any]) -> None:
        self._check_names(state)
        for name, each in self._named():
            if name in state:
                each.take_learnt_state(state[name])

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        for state in states:
            self._check_names(state)
        merged: dict[str, Any] = {}
        for name, each in self._named():
            theirs = [state[name] for state in states if name in state]
            merged[name] = each.merge_states(theirs) if theirs else each.learnt_state()
        return {name: state for name, state in merged.items() if state}

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self.names, self.connectors, strict=True))

    def _check_names(self, state: Any) -> None:
        unknown = sorted(set(state) - set(self.names))
        if unknown:
            raise ConnectorError(
                f"{type(self).__name__}: a state for {unknown}, but the connectors are: "
                f"{', '.join(self.names) or 'none'}"
            )

    def _in_turn(self, item: Any, is_sound: Callable[[Any], bool], expected: str) -> Any:
        """Call the connectors one after the other, with a note of the place on errors.

        is_sound, expected    of what a connector returns: a test, and its text
        """
        for place, connector in enumerate(self.connectors):
            where = f"'{self.names[place]}' ({place + 1} of {len(self)} in {type(self).__name__})"
            try:
                item = connector(item)
            except Exception as error:
                error.add_note(f"in connector {where}")
                raise
            if not is_sound(item):
                raise ConnectorError(
                    f"connector {where} returned {shown(item)}, expected {expected}: does it return it?"
                )
        return item


class AgentConnectorPipeline(ConnectorPipeline, AgentConnector):
    """Agent connectors, called in order, each with the list that the one before returned."""

    kind = AgentConnector

    def __call__(self, acd_list: list[AgentConnectorDataType]) -> list[AgentConnectorDataType]:
        made: list[AgentConnectorDataType] = self._in_turn(acd_list, _is_agent_list, "a list of AgentConnectorDataType")
        return made

    def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
        """Transform the data of a single agent."""
        (made,) = self([ac_data])
        return made

    def reset(self, env_id: str) -> None:
        for connector in self.connectors:
            connector.reset(env_id)

    def on_policy_output(self, output: ActionConnectorDataType) -> None:
        for connector in self.connectors:
            connector.on_policy_output(output)

    def observation_space_after(self, observation_space: Space) -> Space:
        return _space_through(self, "observation_space_after", observation_space)


class ActionConnectorPipeline(ConnectorPipeline, ActionConnector):
    """Action connectors, called in order, each with the output that the one before returned."""

    kind = ActionConnector

    def __call__(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        made: ActionConnectorDataType = self._in_turn(
            ac_data,
            _is_action_data,
            "ActionConnectorDataType with an output of three parts, (actions, states, fetches)",
        )
        return made

    def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
        return self(ac_data)

    def action_space_after(self, action_space: Space) -> Space:
        return _space_through(self, "action_space_after", action_space)


def _space_through(pipeline: ConnectorPipeline, method: str, space: Space) -> Space:
    for place, connector in enumerate(pipeline.connectors):
        try:
            space = getattr(connector, method)(space)
        except Exception as error:
            error.add_note(f"in the space of connector '{pipeline.names[place]}', which gets items of {space}")
            if isinstance(error, RollflowError):
                raise
            raise ConnectorError(f"{pipeline.names[place]} can't take an item of {space}: {error!r}") from error
    return space


def _is_agent_list(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(each, AgentConnectorDataType) for each in item)


def _is_action_data(item: Any) -> bool:
    return isinstance(item, ActionConnectorDataType) and isinstance(item.output, tuple) and len(item.output) == 3


def _is_pair(item: Any) -> bool:
    return isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)
