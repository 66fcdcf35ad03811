"""What a client knows of served policies, and what it makes of a server's answers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from rollflow.policy.serving.request import (
    ClosedError,
    OverloadedError,
    PartlyActedError,
    RequestError,
    ServingError,
    SessionLostError,
    UnknownPolicyError,
)
from rollflow.stream.data.errors import WireError
from rollflow.stream.data.tree import Tree, tree_at
from rollflow.stream.wire import Acted
from rollflow.stream.wire.codec.spaces import placed, read_space

_ERRORS = {
    kind.status: kind for kind in (RequestError, UnknownPolicyError, SessionLostError, OverloadedError, ClosedError)
}


class ServedPolicy(NamedTuple):
    """What a client knows of a policy that is served.

    version       that takes what begins
    has_memory    whether an action may depend on what came before in its session
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    version: str
    has_memory: bool


def policy_of(name: str, plain: Any) -> ServedPolicy:
    """A policy as a server describes it. Raises WireError for what is no description."""
    where = f"settings.policies[{name!r}]"
    if (
        not isinstance(plain, dict)
        or not {"observation_space", "action_space", "version", "has_memory"} <= plain.keys()
    ):
        raise WireError(f"{where} is no description of a policy, expected its spaces, version and has_memory")
    observed, chosen = (read_space(plain[each], f"{where}.{each}") for each in ("observation_space", "action_space"))
    return ServedPolicy(observed, chosen, str(plain["version"]), bool(plain["has_memory"]))


def count_of(observations: Any) -> int:
    """Length of the leading axis of observations any[N, ...]; 0 where there is none."""
    while isinstance(observations, Mapping | tuple):
        observations = next(iter(observations.values() if isinstance(observations, Mapping) else observations), None)
    return len(observations) if isinstance(observations, np.ndarray | list) and np.ndim(observations[:1]) else 0


def actions_of(acted: Acted, space: gym.Space[Any], count: int) -> Tree:
    """The actions, any[N, ...], of an answer to N observations. Raises ServingError where some have none."""
    errors: dict[int, ServingError] = {}
    for place, status, text in acted.refused:
        error = _ERRORS.get(status, ServingError)(text)
        errors |= {each: error for each in (range(count) if place is None else [place])}
    if len(errors) == count and len({(type(error), str(error)) for error in errors.values()}) == 1:
        raise errors[0]
    actions = None
    if acted.places:
        actions = placed(acted.actions, space, len(acted.places), "acted.actions")
    if errors:
        made = {place: tree_at(actions, row) for row, place in enumerate(acted.places)}
        raise PartlyActedError(made, errors)
    return actions
