"""Rollouts that act as a saved policy does."""

from collections.abc import Callable, Iterable
from typing import Any

from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline, ModuleToEnvPipeline
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.nodes.policies.evaluation import check_spaces
from rollflow.nodes.policies.policy import VECTOR_STEPS, Policy
from rollflow.nodes.rollout.rollout import Rollout


def rollout_of(policy: Policy, env: Any, **options: Any) -> Rollout:
    """A rollout with a policy's module and pieces, which are shared with it: what they have learnt stays as it is.

    env, options    as for `Rollout`

    Raises PolicyError for environments with other spaces than those that the policy was made for.
    """
    stateful = is_stateful(policy.module)
    rollout = Rollout(
        env,
        module=policy.module,
        env_to_module_connector=_own_pieces(
            policy, policy.env_to_module, EnvToModulePipeline.default(stateful=stateful)
        ),
        module_to_env_connector=_own_pieces(
            policy, policy.module_to_env, ModuleToEnvPipeline.default(stateful=stateful)
        ),
        explore=policy.explore,
        **options,
    )
    rollout.environments.begin_at(policy.trained_on.get(VECTOR_STEPS, 0))  # schedules go on
    # The default pieces, too, are the policy's: they may have other arguments, or another order.
    for ours, theirs in ((rollout.env_to_module, policy.env_to_module), (rollout.module_to_env, policy.module_to_env)):
        for name in ours.names:
            ours.remove(name)
        for piece in theirs:
            ours.append(piece)
    return rollout


def _own_pieces(
    policy: Policy, pieces: Iterable[ConnectorV2], usual: Iterable[ConnectorV2]
) -> Callable[[Any], list[ConnectorV2]]:
    """A function that gives a policy's pieces beside the usual ones, for environments with its spaces."""
    classes = {type(piece) for piece in usual}

    def made(env: Any) -> list[ConnectorV2]:
        check_spaces(policy, env.single_observation_space, env.single_action_space, "the environments")
        return [piece for piece in pieces if type(piece) not in classes]

    return made
