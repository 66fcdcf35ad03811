"""What acts: a copy of the module, and the connector pipelines around it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch

from rollflow.nodes.connectors.env_to_module.env_to_module_pipeline import EnvToModulePipeline
from rollflow.nodes.connectors.learner.values import device_of
from rollflow.nodes.connectors.module_to_env.module_to_env_pipeline import ModuleToEnvPipeline
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.given import acting_copy, module_for, pieces_given
from rollflow.stream.seeding import seed_for


@dataclass(frozen=True, slots=True)
class Acting:
    """What acts.

    module                          as it was given, or made: it is not changed by acting
    copy                            that acts, and that published weights alone change
    spaces                          of what the module sees, and of its actions
    env_to_module, module_to_env    default pipelines with the pieces given
    """

    module: Any
    copy: Any
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    env_to_module: EnvToModulePipeline
    module_to_env: ModuleToEnvPipeline

    @property
    def is_stateful(self) -> bool:
        """Whether the module has a state from one step to the next."""
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
    """What acts in environments of these spaces, as a `Rollout` is given it.

    env     a lane's vector environment, or what is known of it, for functions that make connector pieces
    seed    of a module that is made here

    Raises ModuleError, ConnectorError or ValueError where what is given can't be worked with.
    """
    before = pieces_given(env_to_module_connector, "env_to_module_connector", env, spaces=spaces)
    after = pieces_given(module_to_env_connector, "module_to_env_connector", env, spaces=spaces)
    seen_space = EnvToModulePipeline(*spaces, connectors=before).observation_space
    seen = spaces if seen_space is None else (seen_space, spaces[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "weights"))
        made = module_for(module, model_config, *seen)
    copy = acting_copy(made, device)
    stateful, on = is_stateful(copy), device_of(copy)
    on_device = None if on.type == "cpu" else on
    return Acting(
        made,
        copy,
        seen,
        EnvToModulePipeline.default(*spaces, before, stateful=stateful, device=on_device),
        ModuleToEnvPipeline.default(*spaces, after, stateful=stateful),
    )


def compile_options(compile_forward: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Options of `torch.compile`; None where passes are not compiled."""
    return None if compile_forward is False else {} if compile_forward is True else dict(compile_forward)
