"""Adapting a policy to other spaces: fields of one space made of the fields of another one, as a mapping says."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Space
from rollflow.nodes.connectors.env_to_module.observation_pieces import ObservationRewriter
from rollflow.nodes.connectors.list_form import check_is_space, map_column
from rollflow.nodes.connectors.module_to_env.action_pieces import TENSORS, ActionPiece, ListifyDataForVectorEnv
from rollflow.nodes.connectors.pipelines.connector_pipeline_v2 import ConnectorPipelineV2, pieces_of
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.space import ARRAYS, Leaf, Numerics, leaves_within, tree_of
from rollflow.stream.data.tree import Tree, library_of

Origin = float | str | list[Any] | tuple[str, float, float]
"""Where a field comes from: a number to fill it with, the path of a field, or [path, factor, offset]."""


@dataclass(frozen=True, slots=True)
class LeafRule:
    """How one leaf is made.

    target     the leaf
    sources    leaves whose D numbers are joined end to end
    index      i64[size], into the joined numbers; D: a 0, for constants; None: all of them, in order
    scale      (factor, offset), f64[2, size]; None: the numbers stay
    filled     bool[size], True for constants; None: there are none
    bounds     (low, high) that the numbers are brought into, f64[2, size]; None: into none
    """

    target: Leaf
    sources: tuple[Leaf, ...]
    index: NDArray[np.int64] | None
    scale: NDArray[np.float64] | None
    filled: NDArray[np.bool_] | None
    bounds: NDArray[np.float64] | None

    def made(self, items: Tree, lead: tuple[int, ...], numerics: Numerics) -> Any:
        """The leaf's array any[*lead, *shape] for items of the other space."""
        xp, wide, in_type = numerics
        parts = [xp.asarray(leaf.found(items)).reshape((*lead, leaf.size)) for leaf in self.sources]
        if self.filled is not None:
            parts.append(xp.zeros((*lead, 1)))
        rows = xp.concatenate(parts if len(parts) == 1 else list(map(wide, parts)), -1)
        if self.index is not None:
            rows = rows[..., xp.asarray(self.index)]
        if self.scale is not None:
            factor, offset = map(xp.asarray, self.scale)
            rows = wide(rows) * factor + offset
        if self.bounds is not None:
            low, high = map(xp.asarray, self.bounds)
            rows = xp.minimum(xp.maximum(wide(rows), low), high)
        return in_type(self.target.space, rows.reshape((*lead, *self.target.shape)))


class FieldMap:
    """Makes items of a space `target` of items of a space `source`.

        name      "observation" or "action", which paths begin with
        fields    path of a field of the target -> where it comes from; every leaf, or each number of it, has one
        clips     True: numbers are brought into the target's bounds

    `rules` has one for each leaf of the target. Floats are rounded if a field is of whole numbers. Raises
    ConnectorError with a line for each field that is missing or unknown, or whose shape differs.
    """

    def __init__(
        self, name: str, source: Space, target: Space, fields: Mapping[str, Origin], *, clips: bool = False
    ) -> None:
        self.target, self._clips = target, clips
        self._leaves = {leaf.path: leaf for leaf in leaves_within(source, name)}
        self._numbers = {path: (leaf, at) for leaf in self._leaves.values() for at, path in enumerate(leaf.numbers())}
        self._first = next(iter(self._leaves.values()))
        unused, problems = dict(fields), list[str]()
        self.rules = [self._rule(leaf, unused, problems) for leaf in leaves_within(target, name)]
        problems += [f"field {path} is not in {target}, expected its fields alone" for path in unused]
        if problems:
            used = {leaf.path for rule in self.rules for leaf in rule.sources}
            left = [leaf for leaf in self._leaves.values() if leaf.path not in used]
            problems += [f"nothing takes {leaf.path} in {leaf.space}" for leaf in left]
            raise ConnectorError("\n  ".join(dict.fromkeys(problems)))

    def __call__(self, items: Tree) -> Tree:
        """The items, a tree of arrays, or of tensors, any[..., *shape], of items with the same leading axes."""
        first = self._first.found(items)
        numerics = ARRAYS if library_of(first) is np else TENSORS
        array = numerics[0].asarray(first)
        lead = tuple(array.shape[: array.ndim - len(self._first.shape)])
        made = iter([rule.made(items, lead, numerics) for rule in self.rules])
        return tree_of(lambda _: next(made), self.target)

    def _rule(self, target: Leaf, unused: dict[str, Origin], problems: list[str]) -> LeafRule:
        """The rule for a leaf, whose fields leave `unused`."""
        bounds = target.bounds() if self._clips else None
        if target.path in unused:
            path, factor, offset = _parts(unused.pop(target.path))
            leaf = self._leaves.get(path or "")
            if leaf is not None and leaf.size == target.size:
                scale = None if (factor, offset) == (1.0, 0.0) else np.tile([[factor], [offset]], target.size)
                return LeafRule(target, (leaf,), None, scale, None, bounds)
            if leaf is not None or (path in self._numbers and target.size != 1):
                shape = [] if leaf is None else list(leaf.shape)
                problems.append(f"{path} has shape {shape}, expected {list(target.shape)} of {target.path}")
                path = None
            origins = [(path, factor, offset)] * target.size
        else:
            missing = [path for path in target.numbers() or [target.path] if path not in unused]
            if missing:
                named = target.path if len(missing) == target.size else ", ".join(missing)
                problems.append(f"field {named} has no origin, expected one for all of {target.path} in {target.space}")
            origins = [_parts(unused.pop(path, 0.0)) for path in target.numbers()]
        for path, _, _ in origins:
            if path is not None and path not in self._numbers:
                there = ", ".join({**self._leaves, **self._numbers})
                problems.append(f"{target.path} comes from {path}, which is not there; expected one of {there}")
        found = [None if path is None else self._numbers.get(path) for path, _, _ in origins]
        sources = tuple(dict.fromkeys(each[0] for each in found if each is not None))
        *begins, count = np.cumsum([0, *(leaf.size for leaf in sources)]).tolist()
        begin = dict(zip(sources, begins, strict=True))
        index = np.array([count if each is None else begin[each[0]] + each[1] for each in found], np.int64)
        scale, filled = np.array([origin[1:] for origin in origins], np.float64).reshape(-1, 2).T, index == count
        is_scaled, is_filled = bool((scale.T != (1.0, 0.0)).any()), bool(filled.any()) or not sources
        return LeafRule(target, sources, index, scale if is_scaled else None, filled if is_filled else None, bounds)


def _parts(origin: Origin) -> tuple[str | None, float, float]:
    """(path, factor, offset) of an origin; without a path the offset is the value."""
    if isinstance(origin, str):
        return origin, 1.0, 0.0
    if isinstance(origin, list | tuple):
        path, factor, offset = origin
        return str(path), float(factor), float(offset)
    return None, 1.0, float(origin)


@dataclass(kw_only=True, eq=False, repr=False)
class AdaptObservations(ObservationRewriter):
    """Rewrites every episode's last observation as one of another space, made of its fields.

        space     of the observations that it leaves
        fields    path of a field -> where it comes from: the path of a field of the observation, such as
                  `observation[2]` or `observation['speed']`; `[path, factor, offset]`; or a number to fill it with

    Raises ConnectorError for fields that are missing or unknown.
    """

    pipelines = ("env-to-module",)

    space: Space
    fields: Mapping[str, Origin]

    def __post_init__(self) -> None:
        self.fields = dict(self.fields)

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self.map = FieldMap("observation", input_observation_space, self.space, self.fields)
        return self.space

    def rewritten(self, observations: Tree, agent_id: Any = None) -> Tree:
        self._needed_space("observation")
        return self.map(observations)


@dataclass(kw_only=True, eq=False, repr=False)
class AdaptActions(ActionPiece):
    """Rewrites `actions_for_env` as actions of another space, made of their fields; `actions` stay as chosen.

        space     of the actions that the environments get
        fields    as for `AdaptObservations`, with paths such as `action[0]`

    It stands behind the piece that brings actions into the policy's bounds, and brings them into those of its space.
    Raises ConnectorError likewise.
    """

    on_device = False

    space: Space
    fields: Mapping[str, Origin]

    def __post_init__(self) -> None:
        self.fields = dict(self.fields)

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self.map = FieldMap("action", input_action_space, self.space, self.fields, clips=True)
        return self.space

    def __call__(self, *, batch: Batch, **kwargs: Any) -> Batch:
        self._know_spaces()
        self._needed_space("action")
        chosen = batch.get(Columns.ACTIONS_FOR_ENV, batch.get(Columns.ACTIONS))
        if chosen is not None:
            batch[Columns.ACTIONS_FOR_ENV] = map_column(chosen, self.map, self.map)
        return batch


def adapted_pipelines(
    policy: Any,
    environment: Any,
    agent_connectors: Sequence[Any],
    action_connectors: Sequence[Any],
    fields: Mapping[str, Origin],
) -> tuple[ConnectorPipelineV2, ConnectorPipelineV2]:
    """Copies of a policy's pipelines, from the environment's observations to its actions: see `Policy.adapted`.

    Raises ConnectorError with all that does not match.
    """
    for name in ("observation_space", "action_space"):
        check_is_space(getattr(environment, name, None), f"{name} of the environment is")
    observations = "observation", environment.observation_space, policy.observation_space
    actions = "action", policy.action_space, environment.action_space
    before = copy.deepcopy(pieces_of(list(agent_connectors), "agent_connectors"))
    after = copy.deepcopy(pieces_of(list(action_connectors), "action_connectors"))
    unused, problems = dict(fields), list[str]()
    before = before or _piece_of(AdaptObservations, *observations, unused, problems)
    after = after or _piece_of(AdaptActions, *actions, unused, problems)
    problems += [f"field {path} is not there, or made by a connector" for path in unused]
    if problems:
        text = "the policy does not fit the environment; expected fields={field: where it comes from} for these:"
        raise ConnectorError("\n  ".join([text, *problems]))
    observed, acted = (ConnectorPipelineV2(connectors=pieces) for pieces in (before, after))
    observed.set_input_spaces(environment.observation_space, policy.action_space)
    acted.set_input_spaces(policy.observation_space, policy.action_space)
    check_fits(observed.observation_space, policy.observation_space, "observation", observed.names)
    check_fits(acted.action_space, environment.action_space, "action", acted.names)
    return (
        _with_pieces(policy.env_to_module, environment.observation_space, policy.action_space, before, []),
        _with_pieces(policy.module_to_env, policy.observation_space, policy.action_space, [], after),
    )


def check_fits(left: Any, expected: Any, name: str, connectors: object) -> None:
    """Raise ConnectorError, with a line for each field, if items of a space `left` are none of the space `expected`.

    name          "observation", which a policy takes, or "action", which an environment takes
    connectors    that leave the items
    """
    if problems := list(_misfits(left, expected, name)):
        taker = "policy" if name == "observation" else "environment"
        text = f"{name}s in {left} come out of {connectors}, but the {taker} takes {expected}; expected connectors for"
        raise ConnectorError("\n  ".join([f"{text} these:", *problems]))


def _misfits(left: Space, expected: Space, name: str) -> Iterator[str]:
    given, wanted = ({leaf.path: leaf for leaf in leaves_within(each, name)} for each in (left, expected))
    yield from (f"{path} in {leaf.space} is missing" for path, leaf in wanted.items() if path not in given)
    for path, leaf in given.items():
        own = wanted.get(path)
        if own is None:
            yield f"{path} in {leaf.space} is not taken"
        elif leaf.shape != own.shape:
            yield f"{path} has shape {list(leaf.shape)}, expected shape {list(own.shape)}"
        elif not (np.can_cast(leaf.dtype, own.dtype, "same_kind") or (leaf.is_whole and own.is_whole)):
            yield f"{path} has dtype {leaf.dtype}, expected dtype {own.dtype}"
        elif not any(isinstance(each.space, spaces.Box) for each in (leaf, own)):
            (low, high), (least, most) = leaf.bounds(), own.bounds()
            if (low < least).any() or (high > most).any():
                yield f"{path} is in {leaf.space}, expected {own.space}"


def _piece_of(
    kind: type[AdaptObservations | AdaptActions],
    name: str,
    source: Space,
    target: Space,
    unused: dict[str, Origin],
    problems: list[str],
) -> list[ConnectorV2]:
    """A piece that makes one space of the other one, unless they are the same; its fields leave `unused`.

    Leaves with the same path and the same space need no origin.
    """
    there = {leaf.path: leaf for leaf in leaves_within(source, name)}
    own = {path: unused.pop(path) for path in list(unused) if path.startswith(name)}
    if source == target and not own:
        return []
    for leaf in leaves_within(target, name):
        if leaf.path in there and there[leaf.path].space == leaf.space and own.keys().isdisjoint(leaf.numbers()):
            own.setdefault(leaf.path, leaf.path)
    try:
        problems += _misfits_of_values(FieldMap(name, source, target, own).rules)
    except ConnectorError as error:
        problems.append(str(error))
    return [kind(space=target, fields=own)]


def _misfits_of_values(rules: Iterable[LeafRule]) -> Iterator[str]:
    """A line for each leaf that gets numbers its space does not hold: constants, whole numbers, or floats."""
    for rule in rules:
        low, high = rule.target.bounds()
        own, is_filled = f"{rule.target.path} in {rule.target.space}", rule.filled
        is_filled = np.zeros(rule.target.size, np.bool_) if is_filled is None else is_filled
        ends = np.concatenate([*(leaf.bounds() for leaf in rule.sources), np.zeros((2, 1))], axis=-1)
        ends = ends[:, :-1] if rule.index is None else ends[:, rule.index]
        ends = ends if rule.scale is None else np.sort(ends * rule.scale[0] + rule.scale[1], axis=0)
        is_inside = (low <= ends[0]) & (ends[1] <= high)
        yield from (f"{own} can't hold {value:g}" for value in ends[0][is_filled & ~is_inside])
        if rule.target.is_whole and rule.sources:
            is_inside |= is_filled
            floats = [leaf for leaf in rule.sources if not leaf.is_whole] if rule.scale is None else []
            if floats or not is_inside.all():
                comes = ", ".join(f"{leaf.path} in {leaf.space}" for leaf in floats or rule.sources)
                yield f"{own} can't hold what comes from {comes}"


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
