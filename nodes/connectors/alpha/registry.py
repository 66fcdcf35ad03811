"""Alpha connectors by stable names: what a saved pipeline is made from again."""

import importlib
from typing import Any

from rollflow.nodes.connectors.alpha.connector import Connector, ConnectorContext
from rollflow.stream.data.errors import ConnectorError, shown

_CONNECTORS: dict[str, type[Connector]] = {}
_BUILT_IN = "rollflow.nodes.connectors.alpha."
_HOMES = ("agent_connectors", "mean_std", "views", "action_connectors", "pipeline")  # files that register their own


def register_connector(name: str, cls: type[Connector]) -> None:
    """Give a connector class a stable name, by which `get_connector` makes one. A class of one's own may be replaced.

    Raises ConnectorError for anything but a connector class, and for the name of a connector of rollflow's.
    """
    if not isinstance(cls, type) or not issubclass(cls, Connector):
        raise ConnectorError(f"register_connector('{name}', …) got {cls!r}, expected a subclass of Connector")
    there = _CONNECTORS.get(name, cls)
    if there is not cls and there.__module__.startswith(_BUILT_IN) and name == there.__name__:
        raise ConnectorError(f"'{name}' is a connector of rollflow's, expected another name for {cls.__qualname__}")
    _CONNECTORS[name] = cls


def get_connector(name: str, ctx: ConnectorContext | None, params: Any = None) -> Any:
    """A connector of the class that is registered by a name, made by its `from_state(ctx, params)`.

    Raises ConnectorError for a name of no class, and where the class does not take the params.
    """
    for module in () if name in _CONNECTORS else _HOMES:
        importlib.import_module(f"{_BUILT_IN}{module}")
    if name not in _CONNECTORS:
        raise ConnectorError(
            f"no connector is registered by the name '{name}', expected register_connector('{name}', its class) "
            f"before; registered: {', '.join(sorted(_CONNECTORS))}"
        )
    made: Any
    try:
        made = _CONNECTORS[name].from_state(ctx, params)  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, ConnectorError):
            raise
        raise ConnectorError(f"connector '{name}' can't be made of params {shown(params)}: {error!r}") from error
    return made
