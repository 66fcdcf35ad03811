"""The engine and the data: graphs and how they run, episodes, columns, fragments.

Names are imported when they are first asked for: a program that only acts needs no engine.
"""

from typing import TYPE_CHECKING

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.stream.data.errors import (
        ColumnError as ColumnError,
        ConnectorError as ConnectorError,
        DatasetError as DatasetError,
        EnvError as EnvError,
        EpisodeError as EpisodeError,
        EpisodeIndexError as EpisodeIndexError,
        GraphError as GraphError,
        LagError as LagError,
        MetricsError as MetricsError,
        ModuleError as ModuleError,
        PolicyError as PolicyError,
        ReplayError as ReplayError,
        RunError as RunError,
        StallError as StallError,
        StateError as StateError,
        WireError as WireError,
    )
    from rollflow.stream.fragments.live_episode import LaneEpisodes as LaneEpisodes
    from rollflow.stream.graph.channel import Inlet as Inlet, Outlet as Outlet
    from rollflow.stream.graph.node import Gate as Gate
    from rollflow.stream.graph.report import Report as Report
    from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment as MultiAgentFragment
    from rollflow.stream.observe.waits import Diagnosis as Diagnosis

__all__, __getattr__, __dir__ = lazy_names(__name__)
