"""The engine and the data: graphs and how they run, episodes, columns, fragments."""

from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import (
    ColumnError,
    ConnectorError,
    DatasetError,
    EnvError,
    EpisodeError,
    EpisodeIndexError,
    GraphError,
    LagError,
    MetricsError,
    ModuleError,
    PolicyError,
    ReplayError,
    RollflowError,
    RunError,
    StallError,
    StateError,
    WireError,
)
from rollflow.stream.data.space import one_hot
from rollflow.stream.doctor.diagnosis import Diagnosis
from rollflow.stream.episodes.buffer import LookbackBuffer
from rollflow.stream.episodes.multi_agent import MultiAgentEpisode
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.episode_collector import WholeEpisodes
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.fragments.fragment_episodes import FragmentEpisodes
from rollflow.stream.fragments.live_episode import LaneEpisodes
from rollflow.stream.graph.channel import Inlet, Outlet
from rollflow.stream.graph.gate import Gate
from rollflow.stream.graph.graph import Graph
from rollflow.stream.graph.inline_run import InlineRun
from rollflow.stream.graph.report import Report
from rollflow.stream.graph.run import Run
from rollflow.stream.graph.seeding import generator_for, seed_for
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

__all__ = [
    "AgentPart",
    "ColumnError",
    "Columns",
    "ConnectorError",
    "DatasetError",
    "Diagnosis",
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
    "PolicyError",
    "ReplayError",
    "Report",
    "RollflowError",
    "Run",
    "RunError",
    "SingleAgentEpisode",
    "StallError",
    "StateError",
    "WholeEpisodes",
    "WireError",
    "generator_for",
    "one_hot",
    "seed_for",
]
