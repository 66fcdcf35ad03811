"""The engine and the data: graphs and how they run, episodes, columns, fragments.

Names are imported when they are first asked for: a program that only acts needs no engine.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
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
    from rollflow.stream.fragments.fragment import Fragment, FragmentEpisodes
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

_HOMES = {
    "AgentPart": "multi_agent.agent_part",
    "ColumnError": "data.errors",
    "Columns": "data.columns",
    "ConnectorError": "data.errors",
    "DatasetError": "data.errors",
    "Diagnosis": "doctor.diagnosis",
    "EnvError": "data.errors",
    "EpisodeError": "data.errors",
    "EpisodeIndexError": "data.errors",
    "Fragment": "fragments.fragment",
    "FragmentEpisodes": "fragments.fragment_episodes",
    "Gate": "graph.gate",
    "Graph": "graph.graph",
    "GraphError": "data.errors",
    "Inlet": "graph.channel",
    "InlineRun": "graph.inline_run",
    "LagError": "data.errors",
    "LaneEpisodes": "fragments.live_episode",
    "LookbackBuffer": "episodes.buffer",
    "MetricsError": "data.errors",
    "ModuleError": "data.errors",
    "MultiAgentEpisode": "episodes.multi_agent",
    "MultiAgentFragment": "multi_agent.multi_agent_fragment",
    "Outlet": "graph.channel",
    "PolicyError": "data.errors",
    "ReplayError": "data.errors",
    "Report": "graph.report",
    "RollflowError": "data.errors",
    "Run": "graph.run",
    "RunError": "data.errors",
    "SingleAgentEpisode": "episodes.single_agent",
    "StallError": "data.errors",
    "StateError": "data.errors",
    "WholeEpisodes": "fragments.episode_collector",
    "WireError": "data.errors",
    "generator_for": "graph.seeding",
    "one_hot": "data.space",
    "seed_for": "graph.seeding",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
