"""The pipelines that a policy has unless it is given others, by the options of its context."""

from rollflow.nodes.connectors.alpha.action_connectors import (
    ClipActionsConnector,
    ConvertToNumpyConnector,
    ImmutableActionsConnector,
    NormalizeActionsConnector,
)
from rollflow.nodes.connectors.alpha.agent_connectors import (
    ClipRewardAgentConnector,
    ObsPreprocessorConnector,
    StateBufferConnector,
)
from rollflow.nodes.connectors.alpha.connector import ActionConnector, AgentConnector, ConnectorContext
from rollflow.nodes.connectors.alpha.mean_std import (
    ConcurrentMeanStdObservationFilterAgentConnector,
    MeanStdObservationFilterAgentConnector,
)
from rollflow.nodes.connectors.alpha.pipeline import ActionConnectorPipeline, AgentConnectorPipeline
from rollflow.nodes.connectors.alpha.views import ViewRequirementAgentConnector
from rollflow.stream.data.errors import ConnectorError

_FILTERS = {
    "MeanStdFilter": MeanStdObservationFilterAgentConnector,
    "ConcurrentMeanStdFilter": ConcurrentMeanStdObservationFilterAgentConnector,
}


def default_agent_connectors(ctx: ConnectorContext) -> AgentConnectorPipeline:
    """Rewards clipped, observations preprocessed and filtered, states buffered, and the policy's input made.

    `ctx.config` says which:

        clip_rewards          True: by their sign; a number: to -number … number; False or absent: not
        observation_filter    "MeanStdFilter" or "ConcurrentMeanStdFilter"; "NoFilter" or absent: none

    Raises ConnectorError for another filter.
    """
    connectors: list[AgentConnector] = []
    clip = ctx.config.get("clip_rewards")
    if clip:
        connectors.append(ClipRewardAgentConnector(ctx, sign=clip is True, limit=None if clip is True else abs(clip)))
    connectors.append(ObsPreprocessorConnector(ctx))
    name = ctx.config.get("observation_filter") or "NoFilter"
    if name != "NoFilter":
        if name not in _FILTERS:
            raise ConnectorError(f"observation_filter is {name!r}, expected NoFilter or one of {', '.join(_FILTERS)}")
        connectors.append(_FILTERS[name](ctx))
    return AgentConnectorPipeline(ctx, [*connectors, StateBufferConnector(ctx), ViewRequirementAgentConnector(ctx)])


def default_action_connectors(ctx: ConnectorContext) -> ActionConnectorPipeline:
    """Actions as arrays, brought into their bounds, and read-only.

    `ctx.config` says how: `normalize_actions` scales from -1 … 1, `clip_actions` clips; both are absent for neither.
    """
    bounded: list[ActionConnector] = []
    if ctx.config.get("normalize_actions"):
        bounded.append(NormalizeActionsConnector(ctx))
    if ctx.config.get("clip_actions"):
        bounded.append(ClipActionsConnector(ctx))
    return ActionConnectorPipeline(ctx, [ConvertToNumpyConnector(ctx), *bounded, ImmutableActionsConnector(ctx)])
