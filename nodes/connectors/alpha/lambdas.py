"""Functions as Alpha connectors."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollflow.nodes.connectors.alpha.connector import ActionConnector, AgentConnector, Connector, ConnectorContext
from rollflow.nodes.connectors.alpha.records import (
    ActionConnectorDataType,
    AgentConnectorDataType,
    AgentConnectorsOutput,
    PolicyOutputType,
)
from rollflow.nodes.connectors.alpha.registry import register_connector
from rollflow.stream.data.errors import ConnectorError, shown


class AgentData(dict[str, Any]):
    """Columns of one agent, as a function gets them: a dict that is its own `data`, with the ids beside it."""

    def __init__(self, columns: Mapping[str, Any], env_id: str, agent_id: str) -> None:
        super().__init__(columns)
        self.env_id, self.agent_id = env_id, agent_id

    @property
    def data(self) -> "AgentData":
        """The columns, for functions that take an `AgentConnectorDataType`."""
        return self


def register_lambda_agent_connector(name: str, fn: Callable[[Any], Any]) -> type[AgentConnector]:
    """Make an agent connector class of a function, and register it.

    fn    takes the data of one agent and returns it; `d["new_obs"]` and `d.data["new_obs"]` both read a column

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it where the
    function returns anything else.
    """
    _check_arguments(name, fn, 1, "(data)")

    class LambdaAgentConnector(AgentConnector):
        def transform(self, ac_data: AgentConnectorDataType) -> AgentConnectorDataType:
            env_id, agent_id, data = ac_data.env_id, ac_data.agent_id, ac_data.data
            if isinstance(data, AgentConnectorsOutput):
                raise ConnectorError(
                    f"{name} stands behind a connector that makes the policy's input, expected it before that: {name} "
                    "changes columns, which are then in 'raw_dict' and 'sample_batch'"
                )
            returned = fn(AgentData(data, env_id, agent_id))
            if isinstance(returned, AgentConnectorDataType):
                return returned
            if not isinstance(returned, Mapping):
                raise ConnectorError(
                    f"the function of {name} returned {type(returned).__name__}, expected the data: does it return it?"
                )
            return AgentConnectorDataType(env_id, agent_id, dict(returned))

        def to_state(self) -> tuple[str, Any]:
            return name, None

        @classmethod
        def from_state(cls, ctx: ConnectorContext, params: Any) -> AgentConnector:
            return cls(ctx)

    return _registered(name, fn, LambdaAgentConnector)


def register_lambda_action_connector(name: str, fn: Callable[[Any, Any, Any], PolicyOutputType]) -> type[Any]:
    """Make an action connector class of a function, and register it.

    fn    takes actions, states and fetches, and returns the three

    Raises ConnectorError for a function that takes another number of arguments. The connector raises it where the
    function does not return a tuple of three.
    """
    _check_arguments(name, fn, 3, "(actions, states, fetches)")

    class LambdaActionConnector(ActionConnector):
        def transform(self, ac_data: ActionConnectorDataType) -> ActionConnectorDataType:
            returned: Any = fn(*ac_data.output)
            if not isinstance(returned, tuple) or len(returned) != 3:
                raise ConnectorError(
                    f"the function of {name} returned {type(returned).__name__}, expected a tuple of three: (actions, "
                    "states, fetches); a lambda needs parentheses around them"
                )
            return ActionConnectorDataType(ac_data.env_id, ac_data.agent_id, ac_data.input_dict, returned)

        def to_state(self) -> tuple[str, Any]:
            return name, None

        @classmethod
        def from_state(cls, ctx: ConnectorContext, params: Any) -> ActionConnector:
            return cls(ctx)

    return _registered(name, fn, LambdaActionConnector)


def _registered(name: str, fn: Callable[..., Any], made: type[Any]) -> type[Any]:
    # With the function's module and the registered name, a class that is kept under that name there can be pickled.
    made.__name__ = made.__qualname__ = name
    made.__module__ = getattr(fn, "__module__", None) or made.__module__
    made.__doc__ = getattr(fn, "__doc__", None)
    register_connector(name, made)
    return made


def _check_arguments(name: str, fn: Any, count: int, expected: str) -> None:
    kind = Connector.__name__
    if not callable(fn):
        raise ConnectorError(
            f"{name} is to be a {kind} of {type(fn).__name__} {shown(fn)}, expected a function {expected}"
        )
    try:
        signature = inspect.signature(fn)
        signature.bind(*range(count))
    except TypeError:
        raise ConnectorError(f"the function of {name} takes {signature}, expected {expected}") from None
    except ValueError:  # it has no signature
        return
