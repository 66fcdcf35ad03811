"""Environments, module and connectors as one node that gives fragments, and as a plain loop over train batches."""

import copy
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import gymnasium as gym
import torch

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.connectors.learner_connector_pipeline import LearnerConnectorPipeline
from rollflow.nodes.connectors.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.environments import Environments, EnvSource
from rollflow.nodes.env_to_module import EnvToModule
from rollflow.nodes.episode_returns import EpisodeReturns
from rollflow.nodes.lag import LagBound, OnExcess
from rollflow.nodes.module_forward import GatheringForward, ModuleForward
from rollflow.nodes.module_to_env import ModuleToEnv
from rollflow.nodes.policy_weights import PolicyWeights, Weights
from rollflow.stream.errors import ModuleError, RollflowError, RunError
from rollflow.stream.fragment import Fragment, FragmentEpisodes
from rollflow.stream.graph import Graph
from rollflow.stream.report import Report
from rollflow.stream.seeding import fresh_seed, seed_for

Batch = dict[str, Any]
Pieces = ConnectorV2 | Sequence[ConnectorV2]


class Rollout:
    """Steps environments with a module and gives what they made, fragment by fragment.

        env, num_envs, lanes       what is stepped: see `Environments`
        module                     has `forward_exploration` and `forward_inference`; a copy of it acts, which learns
                                   of new weights by `publish` alone
        fragment_length            vector steps in a fragment (T)
        lookback                   steps that a chunk can look back into the one before (H)
        seed                       of environments and sampling; None: a fresh one, to be read from `seed`
        explore                    whether actions are sampled, by `forward_exploration`, or taken at their likeliest
        env_to_module_connector    `lambda env: piece or list of pieces`, put before the default ones
        module_to_env_connector    `lambda env: piece or list of pieces`, put among the default ones
        learner_connector          `lambda obs_space, act_space: piece or list of pieces`, before the default ones
        num_fragments              after so many fragments a lane stops; None: it never does
        prefetch                   batches that the rollout may run ahead of its reader; 0: it stands still while the
                                   reader works, so that every batch is exactly on-policy
        max_lag, on_excess         how many policy versions old a batch may be: see `LagBound`
        max_batch, max_wait        slots in one forward pass over several ready lanes, and seconds to wait for more;
                                   None: every lane has a pass of its own
        forward_in_thread          forward passes in a worker thread, while other lanes' environments step

    Either a plain loop, `with Rollout(...) as rollout: for batch in rollout.batches(): ...`, or the same with `async`,
    or a node of a `Graph`, with the port `fragments`. It runs once.

    Raises EnvError, ModuleError, ConnectorError or ValueError where an argument can't be worked with.
    """

    def __init__(
        self,
        env: EnvSource,
        *,
        module: Any,
        num_envs: int | None = None,
        lanes: int = 1,
        fragment_length: int = 128,
        lookback: int = 1,
        seed: int | None = None,
        explore: bool = True,
        env_to_module_connector: Callable[[Any], Pieces] | None = None,
        module_to_env_connector: Callable[[Any], Pieces] | None = None,
        learner_connector: Callable[[gym.Space[Any], gym.Space[Any]], Pieces] | None = None,
        num_fragments: int | None = None,
        prefetch: int = 0,
        max_lag: int | None = None,
        on_excess: OnExcess = "drop",
        max_batch: int | None = None,
        max_wait: float = 0.0,
        forward_in_thread: bool = False,
        metrics: Any = None,
    ) -> None:
        _check_numbers(
            fragment_length=(fragment_length, 1),
            lookback=(lookback, 0),
            seed=(seed, 0),
            num_fragments=(num_fragments, 1),
            prefetch=(prefetch, 0),
            max_lag=(max_lag, 0),
            max_batch=(max_batch, 1),
            max_wait=(max_wait, 0),
        )
        _check_module(module)
        self.seed = fresh_seed() if seed is None else seed
        self.module = module
        self.returns = EpisodeReturns()
        self.environments = Environments(
            env,
            num_envs=num_envs,
            lanes=lanes,
            fragment_length=fragment_length,
            lookback=lookback,
            seed=self.seed,
        )
        observation_space, action_space = self.environments.observation_space, self.environments.action_space
        acting = _acting_copy(module, observation_space, action_space)
        self._weights = PolicyWeights(acting)
        first_env = self.environments.envs[0]
        self.env_to_module = EnvToModulePipeline.default(
            observation_space, action_space, _pieces(env_to_module_connector, first_env)
        )
        self.module_to_env = ModuleToEnvPipeline.default(
            observation_space, action_space, _pieces(module_to_env_connector, first_env)
        )
        self._learner_connector = learner_connector
        self._learner_pipeline: LearnerConnectorPipeline | None = None
        self._metrics = metrics
        self._stages = {
            "env": self.environments,
            "env_to_module": EnvToModule(
                self.env_to_module, acting, explore=explore, num_fragments=num_fragments, metrics=metrics
            ),
            "module": self._forward_node(acting, explore, max_batch, max_wait, forward_in_thread),
            "module_to_env": ModuleToEnv(self.module_to_env, acting, explore=explore, metrics=metrics),
        }
        self.lag = LagBound(self._weights, max_lag, on_excess)
