"""The pipelines of a policy with further pieces in them, which fit it into another environment."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from rollflow.nodes.connectors.adapting.matching import Choices, Matching, Question, UnsettledFields, Used
from rollflow.nodes.connectors.adapting.pieces import AdaptActions, AdaptObservations
from rollflow.nodes.connectors.alpha.adapting import check_fits
from rollflow.nodes.connectors.alpha.signatures import compare_signatures, compare_spaces
from rollflow.nodes.connectors.connector_v2 import ConnectorV2
from rollflow.nodes.connectors.module_to_env.individual_items import ListifyDataForVectorEnv
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2
from rollflow.nodes.connectors.pipelines.pieces import pieces_of
from rollflow.nodes.connectors.spaces import check_is_space
from rollflow.stream.data.errors import ConnectorError


def adapted_pipelines(
    policy: Any,
    environment: Any,
    agent_connectors: Sequence[Any],
    action_connectors: Sequence[Any],
    choices: Choices | None,
) -> tuple[ConnectorPipelineV2, ConnectorPipelineV2]:
    """Copies of a policy's pipelines, from the environment's observations to its actions.

        policy               has `env_to_module` and `module_to_env`, and the spaces that these are for
        environment          has the `observation_space` and the `action_space` that it is to act in
        agent_connectors     pieces or Alpha connectors before the policy's own; without any, the fields are matched
        action_connectors    likewise behind them
        choices              what the two spaces do not settle; None: nothing is chosen

    Raises ConnectorError, with the field, where observations or actions do not fit.
    """
    for name in ("observation_space", "action_space"):
        check_is_space(getattr(environment, name, None), f"{name} of the environment is")
    before = pieces_of(list(agent_connectors), "agent_connectors")
    after = pieces_of(list(action_connectors), "action_connectors")
    matched = _matched(policy, environment, choices or Choices(), (not before, not after))
    before, after = copy.deepcopy(before or matched[0]), copy.deepcopy(after or matched[1])
    observed, acted = (ConnectorPipelineV2(connectors=pieces) for pieces in (before, after))
    observed.set_input_spaces(environment.observation_space, policy.action_space)
    acted.set_input_spaces(policy.observation_space, policy.action_space)
    for kind, pipeline, expected, who in (
        ("observation", observed, policy.observation_space, "the policy takes"),
        ("action", acted, environment.action_space, "the environment takes"),
    ):
        given, left = getattr(pipeline, f"input_{kind}_space"), getattr(pipeline, f"{kind}_space")
        changes = compare_spaces(getattr(policy, f"{kind}_space"), getattr(environment, f"{kind}_space"), kind)
        check_fits(left, expected, f"{kind}s in {given} come out of {pipeline.names or 'no connector'}", who, changes)
    return (
        _with_pieces(policy.env_to_module, environment.observation_space, policy.action_space, before, []),
        _with_pieces(policy.module_to_env, policy.observation_space, policy.action_space, [], after),
    )


def _with_pieces(
    pipeline: ConnectorPipelineV2,
    observation_space: Any,
    action_space: Any,
    before: Sequence[Any],
    after: Sequence[Any],
) -> ConnectorPipelineV2:
    """A copy of a pipeline for other spaces, with further pieces at its ends; items are listed behind all of them."""
    own = list(copy.deepcopy(pipeline))
    end = len(own) - (bool(own) and type(own[-1]) is ListifyDataForVectorEnv)
    pieces = [*before, *own[:end], *after, *own[end:]]
    return type(pipeline)(observation_space, action_space, connectors=pieces)


def _matched(
    policy: Any, environment: Any, choices: Choices, sides: tuple[bool, bool]
) -> tuple[list[ConnectorV2], list[ConnectorV2]]:
    """Pieces made of the fields that match, for observations and for actions, each where its side is asked for."""
    used: Used = {}
    pieces: list[list[ConnectorV2]] = [[], []]
    questions: list[Question] = []
    for place, (kind, source, target, make) in enumerate(
        (
            ("observation", environment.observation_space, policy.observation_space, AdaptObservations),
            ("action", policy.action_space, environment.action_space, AdaptActions),
        )
    ):
        if sides[place] and source != target:
            matching = Matching(kind, source, target, choices, used)
            questions += matching.questions
            pieces[place] = [] if questions else [make(space=target, fields=matching.fields)]
    unused = [f"{option} of {name!r}" for option, name in _named(choices) if (option, name) not in used]
    if unused and not questions:
        raise ConnectorError(f"{', '.join(unused)}: nothing is to be settled there, expected it to be left out")
    if questions:
        raise UnsettledFields(compare_signatures(policy, environment).changes, questions)
    return pieces[0], pieces[1]


def _named(choices: Choices) -> Iterator[tuple[str, str]]:
    for option in ("take", "fill", "keep", "scale"):
        yield from ((option, name) for name in getattr(choices, option))
