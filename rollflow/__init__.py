"""rollflow: an async streaming dataflow engine for reinforcement-learning rollouts.

These are the names that programs use. `rollflow.nodes`, `rollflow.stream`, `rollflow.sinks` and `rollflow.policy` have
more, for those who extend them. Names are imported when they are first asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if (_checkout := Path(__file__).parent.parent / "pyproject.toml").exists():
    __path__.append(str(_checkout.parent))  # imported from a checkout, whose packages stand beside this folder

from rollflow.stream.data.lazy_names import lazy_names

if TYPE_CHECKING:
    from rollflow.nodes.connectors.common.episode_columns import FrameStacking as FrameStacking
    from rollflow.nodes.connectors.connector_v2 import ConnectorV2 as ConnectorV2
    from rollflow.nodes.connectors.env_to_module.observation_pieces import MeanStdFilter as MeanStdFilter
    from rollflow.nodes.connectors.learner.train_columns import (
        GeneralAdvantageEstimation as GeneralAdvantageEstimation,
        VTrace as VTrace,
        minibatches as minibatches,
    )
    from rollflow.nodes.connectors.module_to_env.action_pieces import EpsilonGreedy as EpsilonGreedy
    from rollflow.nodes.device.jax_envs import JaxEnvs as JaxEnvs
    from rollflow.nodes.device.torch_envs import TorchEnvs as TorchEnvs
    from rollflow.nodes.env.remote.env_host import EnvHost as EnvHost
    from rollflow.nodes.env.remote.remote_envs import RemoteEnvs as RemoteEnvs, RemoteRollouts as RemoteRollouts
    from rollflow.nodes.modules.default_module import DefaultModelConfig as DefaultModelConfig
    from rollflow.nodes.modules.rl_module import RLModule as RLModule
    from rollflow.nodes.offloaded.rollout_host import RolloutHost as RolloutHost
    from rollflow.nodes.policies.policy import Policy as Policy
    from rollflow.nodes.rollout.multi_agent_rollout import MultiAgentRollout as MultiAgentRollout
    from rollflow.nodes.rollout.options import (
        Checkpoints as Checkpoints,
        Forward as Forward,
        Timeouts as Timeouts,
        Watch as Watch,
    )
    from rollflow.nodes.rollout.rollout import Rollout as Rollout
    from rollflow.policy.client import PolicyClient as PolicyClient
    from rollflow.sinks.datasets.dataset_sink import DatasetSink as DatasetSink
    from rollflow.sinks.datasets.dataset_source import DatasetSource as DatasetSource
    from rollflow.sinks.replay.replay import Replay as Replay
    from rollflow.sinks.trainer.feed import feed as feed
    from rollflow.sinks.trainer.stream import TrainerStream as TrainerStream
    from rollflow.stream.data.columns import Columns as Columns
    from rollflow.stream.data.errors import RollflowError as RollflowError
    from rollflow.stream.episodes.multi_agent import MultiAgentEpisode as MultiAgentEpisode
    from rollflow.stream.episodes.single_agent import SingleAgentEpisode as SingleAgentEpisode
    from rollflow.stream.fragments.fragment import Fragment as Fragment
    from rollflow.stream.graph.graph import Graph as Graph

__version__ = "0.1.0"
__all__, __getattr__, __dir__ = lazy_names(__name__)
