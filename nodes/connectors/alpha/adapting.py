"""Checks that a policy with further connectors fits another environment, end to end."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rollflow.nodes.connectors.alpha.connector import ConnectorContext
from rollflow.nodes.connectors.alpha.pipeline import ActionConnectorPipeline, AgentConnectorPipeline
from rollflow.nodes.connectors.alpha.signatures import compare_spaces
from rollflow.nodes.connectors.spaces import Space
from rollflow.stream.data.errors import ConnectorError


def check_adapted(
    policy: Any, environment: Any, agent_connectors: Sequence[Any], action_connectors: Sequence[Any]
) -> None:
    """Raise ConnectorError where connectors do not make a policy fit an environment, with the fields that differ.

    policy               has the `observation_space` and the `action_space` that it was trained for
    environment          has those that it is to act in
    agent_connectors     from the environment to the policy
    action_connectors    from the policy to the environment
    """
    ctx = ConnectorContext(observation_space=policy.observation_space, action_space=policy.action_space)
    before = AgentConnectorPipeline(ctx, agent_connectors)
    after = ActionConnectorPipeline(ctx, action_connectors)
    check_fits(
        before.observation_space_after(environment.observation_space),
        policy.observation_space,
        f"observations in {environment.observation_space} come out of {before!r}",
        "the policy takes",
        compare_spaces(policy.observation_space, environment.observation_space, "observation"),
    )
    check_fits(
        after.action_space_after(policy.action_space),
        environment.action_space,
        f"the policy's actions in {policy.action_space} come out of {after!r}",
        "the environment takes",
        compare_spaces(policy.action_space, environment.action_space, "action"),
    )


def check_fits(left: Space, expected: Space, where: str, who: str, changes: Sequence[Any]) -> None:
    """Raise ConnectorError, with the field, where items of a space `left` are none of the space `expected`.

    where, who    begin the text, and name who expects
    changes       lines behind it, on what differs
    """
    wrong = list(_misfits(left, expected, ""))
    if wrong:
        path, got, wanted = wrong[0]
        field = f"field {path}" if path else "item"
        differences = "".join(f"\n  {change}" for change in changes)
        raise ConnectorError(
            f"{where} in {left}: {field} is {got}, but {who} {wanted}, in {expected}; expected connectors that make it"
            f"{differences}"
        )


def _misfits(left: Space, expected: Space, path: str) -> Iterator[tuple[str, str, str]]:
    """(field, what it is, what it should be) of all fields that do not fit."""
    for kind in (spaces.Dict, spaces.Tuple):
        if isinstance(left, kind) or isinstance(expected, kind):
            if not (isinstance(left, kind) and isinstance(expected, kind)):
                yield path, str(left), str(expected)
                return
            yield from _misfits_of_parts(_parts(left), _parts(expected), path)
            return
    if left.shape != expected.shape:
        yield path, f"of shape {list(left.shape or ())}", f"shape {list(expected.shape or ())}"
    elif not _is_castable(left, expected):
        yield path, f"of dtype {left.dtype}", f"dtype {expected.dtype}"
    elif isinstance(left, spaces.Discrete) and isinstance(expected, spaces.Discrete):
        if left.start < expected.start or left.start + left.n > expected.start + expected.n:
            yield path, str(left), str(expected)
    elif isinstance(left, spaces.MultiDiscrete) and isinstance(expected, spaces.MultiDiscrete):
        last, most = left.start + left.nvec, expected.start + expected.nvec
        if (left.start < expected.start).any() or (last > most).any():
            yield path, str(left), str(expected)


def _misfits_of_parts(left: dict[Any, Space], expected: dict[Any, Space], path: str) -> Iterator[tuple[str, str, str]]:
    for key in [*expected, *(key for key in left if key not in expected)]:
        place = f"{path}[{key!r}]"
        if key not in left:
            yield place, "missing", str(expected[key])
        elif key not in expected:
            yield place, str(left[key]), "no such field"
        else:
            yield from _misfits(left[key], expected[key], place)


def _parts(space: Any) -> dict[Any, Space]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))


def _is_castable(left: Space, expected: Space) -> bool:
    one, other = np.dtype(left.dtype), np.dtype(expected.dtype)
    return np.can_cast(one, other, "same_kind") or (one.kind in "biu" and other.kind in "biu")
