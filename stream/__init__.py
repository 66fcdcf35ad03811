"""The engine and the data: graphs and how they run, episodes, columns, fragments."""

from rollflow.stream.buffer import LookbackBuffer
from rollflow.stream.channel import Inlet, Outlet
from rollflow.stream.columns import Columns
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import (
    ColumnError,
    ConnectorError,
    EnvError,
    EpisodeError,
    EpisodeIndexError,
    GraphError,
    LagError,
    MetricsError,
    ModuleError,
    RollflowError,
    RunError,
    WireError,
)
from rollflow.stream.fragment import Fragment
from rollflow.stream.fragment_episodes import FragmentEpisodes
from rollflow.stream.gate import Gate
from rollflow.stream.graph import Graph
from rollflow.stream.inline_run import InlineRun
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.multi_agent_episode import MultiAgentEpisode
from rollflow.stream.one_hot import one_hot
from rollflow.stream.report import Report
from rollflow.stream.run import Run
from rollflow.stream.seeding import generator_for, seed_for

__all__ = [
    "AgentPart",
    "ColumnError",
    "Columns",
    "ConnectorError",
    "EnvError",
    "EpisodeError",
    "EpisodeIndexError",
    "Fragment",
    "FragmentEpisodes",
    "Gate",
    "Graph",
    "GraphError",
    "Inlet",
    "InlineRun",
    "LagError",
    "LaneEpisodes",
    "LookbackBuffer",
    "MetricsError",
    "ModuleError",
    "MultiAgentEpisode",
    "MultiAgentFragment",
    "Outlet",
    "Report",
    "RollflowError",
    "Run",
    "RunError",
    "SingleAgentEpisode",
    "WireError",
    "generator_for",
    "one_hot",
    "seed_for",
]
