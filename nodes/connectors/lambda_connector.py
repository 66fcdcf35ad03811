"""A function as a connector piece."""

import inspect
from collections.abc import Callable
from typing import Any

from rollflow.nodes.argument_checks import checked_count
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Space
from rollflow.stream.data.errors import ConnectorError

_OFFERED = ("rl_module", "batch", "episodes", "explore", "shared_data", "metrics")


class LambdaConnector(ConnectorV2):
    """A piece that calls a function.

        function             takes any of `rl_module`, `batch`, `episodes`, `explore`, `shared_data` and `metrics`, by
                             name; returns the batch, or None when it has changed that in place
        name                 name in a pipeline; None: the function's name
        columnar             True if the function takes columns with the episodes, as the class attribute
        changes_episodes     True if the function may write to the episodes, likewise
        lookback             steps that the function looks back in an episode
        observation_space    (observation space, action space) -> the space it leaves observations in; None: the same

    Raises ConnectorError for a function with any other argument.
    """

    is_of_user = True  # as its function is

    def __init__(
        self,
        function: Callable[..., Batch | None],
        *,
        name: str | None = None,
        columnar: bool = False,
        changes_episodes: bool = True,
        lookback: int = 0,
        observation_space: Callable[[Space, Space], Space] | None = None,
    ) -> None:
        super().__init__()
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__) if name is None else name
        self.lookback = checked_count("lookback", lookback, 0)
        self.columnar = columnar  # type: ignore[misc]  # of this function
        self.changes_episodes = changes_episodes  # type: ignore[misc]
        self._recompute = observation_space
        self._wanted = _wanted(function, self.name)

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        if self._recompute is None:
            return input_observation_space
        return self._recompute(input_observation_space, input_action_space)

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        arguments = {"batch": batch, **kwargs}
        returned = self.function(**{name: arguments.get(name) for name in self._wanted})
        return batch if returned is None else returned


def _wanted(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConnectorError(f"{function!r} is no function with arguments of its own, expected such a one") from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return _OFFERED
    wanted = tuple(parameter.name for parameter in parameters)
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    unknown = [each for each in required if each not in _OFFERED]
    if unknown or any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise ConnectorError(
            f"function '{name}' takes ({', '.join(wanted)}), expected only, by name: {', '.join(_OFFERED)}"
        )
    return tuple(each for each in wanted if each in _OFFERED)
