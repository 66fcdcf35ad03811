"""The acting copy of a module, the connector pipelines around it, its passes, and the generators it samples with."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch

from rollflow.nodes.connectors.learner.advantages import device_of
from rollflow.nodes.connectors.module_to_env.get_actions import RACES
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.modules.distribution import Races
from rollflow.nodes.stages.connector_builders import acting_copy, module_for, pieces_given
from rollflow.nodes.stages.module_spaces import are_alike
from rollflow.stream.data.space import is_columnar
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.graph.seeding import generator_for, seed_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Acting:
    """A module as it acts in environments of one agent.

    module                          as it was given, or made: it is not changed by acting
    copy                            that acts, and that published weights alone change
    spaces                          of what the module sees, and of what it chooses
    env_to_module, module_to_env    default pipelines with the pieces given
    """

    module: Any
    copy: Any
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    env_to_module: EnvToModulePipeline
    module_to_env: ModuleToEnvPipeline

    @property
    def is_stateful(self) -> bool:
        """True if the module has a state from one step to the next."""
        return is_stateful(self.copy)


def acting_for(
    env: Any,
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    *,
    module: Any,
    model_config: Any,
    env_to_module_connector: Any,
    module_to_env_connector: Any,
    device: Any,
    seed: int,
) -> Acting:
    """Module and pipelines that act in environments of these spaces, as `Rollout` takes them.

    env     a lane's vector environment, or a description of it, for functions that make connector pieces
    seed    of a module that is made here

    Raises ModuleError, ConnectorError or ValueError for a module, a config or a connector that can't be used.
    """
    before = pieces_given(env_to_module_connector, "env_to_module_connector", env, spaces=spaces)
    after = pieces_given(module_to_env_connector, "module_to_env_connector", env, spaces=spaces)
    left = EnvToModulePipeline(*spaces, connectors=before)  # the pieces, and what they leave for the module
    inner = left.observation_space, left.action_space
    seen = tuple(space if one is None else one for one, space in zip(inner, spaces, strict=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "weights"))
        made = module_for(module, model_config, *seen)
    copy = acting_copy(made, device)
    stateful, on, chosen = is_stateful(copy), device_of(copy), chosen_space(copy, spaces[1])
    on_device = None if on.type == "cpu" else on
    right = ModuleToEnvPipeline.default(*spaces, after, stateful=stateful)
    _warn_of_declared_space(right.action_space, chosen, spaces[1])
    return Acting(
        made,
        copy,
        (seen[0], chosen),
        EnvToModulePipeline.default(*spaces, before, stateful=stateful, device=on_device),
        right,
    )


def _warn_of_declared_space(declared: Any, chosen: gym.Space[Any], action_space: gym.Space[Any]) -> None:
    """Log that the space that module-to-env pieces declare has no effect: nobody chooses in it, or takes it."""
    if declared is not None and not any(are_alike(declared, space) for space in (chosen, action_space)):
        logger.warning(
            "module_to_env_connector: a piece's recompute_output_action_space gives %s, which has no effect: the "
            "module chooses in %s, and the environments take %s; expected recompute_output_action_space of an "
            "env_to_module_connector piece, or the module's action_space, which say what the module chooses in",
            declared,
            chosen,
            action_space,
        )


def chosen_space(module: Any, action_space: gym.Space[Any]) -> gym.Space[Any]:
    """The space of what a module chooses: its own `action_space`, or that of the environments where both are alike.

    action_space    of the environments
    """
    own = getattr(module, "action_space", None)
    if not isinstance(own, gym.Space) or not is_columnar(own) or are_alike(own, action_space):
        return action_space
    return own


def compile_options(compile_forward: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Options of `torch.compile`; None where passes are not compiled."""
    return None if compile_forward is False else {} if compile_forward is True else dict(compile_forward)


def seed_lane(lane: Lane, seed: int) -> None:
    """Give a lane the generators that its actions are sampled with."""
    lane.shared_data |= sampling_data(lane.index, seed, "module")


def sampling_data(lane: int, seed: int, name: str) -> dict[str, Any]:
    """Entries of a lane's `shared_data` that a module of this name samples its actions with."""
    return {
        "lane": lane,
        "generator": torch.Generator().manual_seed(seed_for(seed, name, lane)),
        RACES: Races(generator_for(seed, name, lane)),
    }
