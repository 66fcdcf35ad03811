"""Fragments as messages between processes, of this host or of others.

The columns of a message are those of the fragment, up to the row of the newest observations, and its rest is what
`described` says of it. Of several agents, columns and rest have a list `parts`. In the columns, each has its `columns`,
`clock` and `module_of`, as `AgentFragment` has them.

What comes from another process of this package has proved the secret, and is of the same version: its structure is
checked, that is dtypes and shapes, and whatever is raised when a fragment is made of it refuses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.stream import wire
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError, WireError, shown
from rollflow.stream.data.space import row_of
from rollflow.stream.data.tree import Tree, concatenate_trees, leaves_of, map_tree, stack_trees
from rollflow.stream.fragments.fragment import EpisodeIds, Final, Fragment, FragmentLayout, Loss
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment, MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire.codec import field

Plain = dict[str, Any]
_LAYOUT = field.entries(
    num_slots=field.whole(0, 1 << 20),
    num_rows=field.whole(0, 1 << 24),
    lookback=field.whole(0, 1 << 24),
    resets_next_step=field.flag,
    episodes=field.text(1 << 16),
)
_SEQUENCE = field.whole(0, 1 << 53)
_OF_SLOTS = {"acts": np.bool_, "waits": np.bool_, "received": np.float32, "serves": np.int16}
_KNOWN = {Columns.REWARDS: np.float32, Columns.TERMINATEDS: np.bool_, Columns.TRUNCATEDS: np.bool_}


@dataclass(frozen=True, slots=True)
class PartSpaces:
    """A part's agents and spaces, the same at both ends.

    seen    that its observations may be in: the environments' first, what its modules see last
    """

    part: AgentPart
    seen: Sequence[gym.Space[Any]]


def spaces_seen(parts: Sequence[AgentPart], pipelines: Sequence[EnvToModulePipeline]) -> list[PartSpaces]:
    """Spaces that observations of parts may be in, with the pipeline of each."""
    found = []
    for part, pipeline in zip(parts, pipelines, strict=True):
        before = pipeline.input_observation_space  # what joint pieces leave
        seen = [part.observation_space, *([] if before is None else [before]), *pipeline.observation_spaces]
        found.append(PartSpaces(part, seen))
    return found


# What is sent


def message_of_lane(lane: Lane | MultiAgentLane, number: int, fragment: Any, more: Mapping[str, Any]) -> wire.Fragment:
    """The message of a lane's fragment, of one agent or of several."""
    return message_of(number, fragment, _spaces_in(lane), more)


def _spaces_in(lane: Lane | MultiAgentLane) -> Sequence[Any]:
    """Spaces that observations of a lane may be in."""
    if isinstance(lane, MultiAgentLane):
        return [PartSpaces(each.part, each.observation_spaces) for each in lane.parts]
    return lane.observation_spaces


def message_of(number: int, fragment: AnyFragment, spaces: Sequence[Any], more: Mapping[str, Any]) -> wire.Fragment:
    """A fragment under a number, with `more` in its rest; the columns are referred to, not copied.

    spaces    that its observations may be in, the same at both ends; of several agents `PartSpaces`

    Raises ModuleError for the id of one of several modules that is no string.
    """
    if isinstance(fragment, Fragment):
        columns, rest = sent_columns(fragment), described(fragment, spaces)
    else:
        columns, rest = {"parts": list(map(_sent_part, fragment.parts))}, _described_agents(fragment, spaces)
    return wire.Fragment(fragment.lane, number, columns, rest | dict(more))


def described(fragment: Fragment, spaces: Sequence[gym.Space[Any]]) -> Plain:
    """Fields of a fragment beside its columns; those of which there is none are left out.

    spaces    that its observations may be in
    """
    fields = {
        "sequence": fragment.sequence,
        "num_rows": fragment.num_rows,
        "episode_start": fragment.episode_start,
        "episode_number": fragment.episode_number,
        "space": _index_of(fragment.observation_space, spaces),
    }
    if fragment.finals:
        fields["finals"] = _joined(fragment.finals)
    if fragment.starts:
        fields["starts"] = _starts_of(fragment)
    if fragment.losses:
        fields["losses"] = [[each.row, each.slots, each.cut, each.reason] for each in fragment.losses]
    if any(fragment.infos):
        fields["infos"] = fragment.infos
    if fragment.custom_data:
        fields["custom_data"] = [[*key, data] for key, data in fragment.custom_data.items()]
    if not fragment.is_even:
        fields["stops"] = fragment.stops
    return fields


def layout_entries(layout: FragmentLayout) -> Plain:
    """A layout as plain values, but for its action space."""
    assert isinstance(layout.episode_id, EpisodeIds)
    names = ("num_slots", "num_rows", "lookback", "resets_next_step")
    return {name: getattr(layout, name) for name in names} | {"episodes": layout.episode_id.prefix}


def sent_columns(fragment: Fragment, spare: int = 0) -> Plain:
    """The columns up to the last row, and so many rows behind it, if they are there."""
    last = fragment.last_row + spare
    return {
        name: column.rows(0, min(len(column), max(last, fragment.last_row + (name == Columns.OBS))))
        for name, column in fragment.columns.items()
    }


def _sent_part(part: AgentFragment) -> Plain:
    """The columns of a part; the row of the newest observations has the actions that wait for others."""
    stop = part.last_row + 1
    return {"columns": sent_columns(part, 1), "clock": part.clock[:stop], "module_of": part.module_of[:stop]}


def _described_agents(fragment: MultiAgentFragment, spaces: Sequence[PartSpaces]) -> Plain:
    clock, layout = fragment.clock, fragment.parts[0].layout
    layout = replace(layout, num_slots=fragment.num_envs, episode_id=fragment.episode_id)
    rest: Plain = {
        "sequence": fragment.sequence,
        "is_last": fragment.is_last,
        "num_rows": fragment.num_rows,
        "layout": layout_entries(layout),
        "first": clock.first,
        "started": clock.started,
        "numbers": clock.numbers,
        "ends": np.array(clock.ends, np.int64).reshape(-1, 4),
        "losses": [list(loss) for loss in clock.losses],
        "custom_data": [[*key, data] for key, data in fragment.custom_data.items()],
    }
    parts = zip(fragment.parts, spaces, strict=True)
    return rest | {"parts": [_described_part(part, each.seen) for part, each in parts]}


def _described_part(part: AgentFragment, seen: Sequence[gym.Space[Any]]) -> Plain:
    if wrong := [module_id for module_id in part.module_ids if not isinstance(module_id, str)]:
        raise ModuleError(f"module ids are {wrong}, expected strings where fragments go to another process or a file")
    ends = [[*key, vector_step] for key, vector_step in part.ends.items()]
    return described(part, seen) | {
        "module_ids": list(part.module_ids),
        "outputs": {module_id: list(names) for module_id, names in part.outputs.items()},
        "ends": np.array(ends, np.int64).reshape(-1, 3),
        "early": np.array(part.early, np.float64).reshape(-1, 3),
        **{name: getattr(part, name) for name in _OF_SLOTS},
    }


def _index_of(space: gym.Space[Any] | None, spaces: Sequence[gym.Space[Any]]) -> int:
    """The index of a space among others: of itself, else of an equal one, as after a way between processes."""
    for place, other in enumerate(spaces):
        if other is space:
            return place
    return list(spaces).index(space)  # type: ignore[arg-type]


def _joined(finals: list[Final]) -> Plain:
    """All last observations as one tree: there may be hundreds."""
    infos = [each.infos for each in finals]
    return {
        "rows": np.concatenate([np.broadcast_to(each.rows, each.slots.shape) for each in finals]),
        "counts": [len(each.slots) for each in finals],
        "slots": np.concatenate([each.slots for each in finals]),
        "observations": concatenate_trees([each.observations for each in finals]),
        "infos": infos if any(infos) else None,
    }


def _starts_of(fragment: Fragment) -> list[list[Any]]:
    """Places and states of a fragment's starts, those of one kind together: there may be hundreds."""
    groups: dict[str, dict[tuple[int, int], Tree]] = {}
    for key, state in fragment.starts.items():
        groups.setdefault(str(map_tree(lambda leaf: (leaf.dtype, leaf.shape), state)), {})[key] = state
    return [[*np.array(list(group), np.int64).T.copy(), stack_trees(list(group.values()))] for group in groups.values()]


# What has come


def fragment_of(
    message: wire.Fragment,
    layout: FragmentLayout,
    spaces: Sequence[gym.Space[Any]],
    lost: str | None = None,
    *,
    is_checked: bool = True,
) -> Fragment:
    """The fragment in a message, its columns where they came; read-only.

    spaces        that its observations may be in, the same at both ends
    lost          why the environments were lost before it; None: they were not
    is_checked    whether the sender may be anybody

    Raises WireError if it is none.
    """
    with refusing("it is no fragment"):
        fragment: Fragment = _begun(message.lane, message.columns, message.rest, layout, spaces, is_checked=is_checked)
        completed(fragment, message.rest)
        if "stops" in message.rest:
            fragment.seal_at(_stops_in(fragment, message.rest))
        else:
            fragment.seal(message.rest["num_rows"])
        if lost is not None:
            fragment.begin_after_loss(lost)
        return fragment


def fragment_of_lane(lane: Any, message: wire.Fragment) -> AnyFragment:
    """The fragment of a lane in a message that `message_of_lane` gave."""
    spaces = _spaces_in(lane)
    fragment: AnyFragment
    if "parts" in message.rest:
        fragment = agents_of_message(message, spaces)
    else:
        layout = replace(lane.layout, episode_id=EpisodeIds(message.rest["episodes"]))
        fragment = fragment_of(message, layout, spaces)
    share_layouts(fragment, lane.layouts)
    return fragment


def share_layouts(fragment: AnyFragment, layouts: list[FragmentLayout]) -> None:
    """Have a lane's fragments share their layouts, by which a replay joins their episodes.

    layouts    of the lane's fragment before, part by part; those of this one at the end
    """
    parts = fragment.parts if isinstance(fragment, MultiAgentFragment) else [fragment]
    own = [part.layout for part in parts]
    if own == layouts:
        for part, layout in zip(parts, layouts, strict=True):
            part.layout = layout
    else:
        layouts[:] = own


def agents_of_message(
    message: wire.Fragment, spaces: Sequence[PartSpaces], lost: str | None = None
) -> MultiAgentFragment:
    """The fragment in a message, its columns where they came; read-only. Raises WireError if it is none.

    lost    why the environments were lost before it; None: they were not
    """
    with refusing("it is no fragment of agents"):
        rest = message.rest
        layout = layout_in(rest["layout"], spaces[0].part.recorded_space)
        clock = _clock_in(rest, layout)
        fragment = MultiAgentFragment(
            message.lane,
            _SEQUENCE(rest["sequence"], "sequence"),
            [_part_in(message, index, each, layout, clock) for index, each in enumerate(spaces)],
            num_rows=rest["num_rows"],
            clock=clock,
            custom_data={(env, number): data for env, number, data in rest["custom_data"]},
        )
        fragment.is_last = rest["is_last"] is True
        if lost is not None:
            fragment.begin_after_loss(lost)
        return fragment


def layout_in(entries: Any, action_space: gym.Space[Any]) -> FragmentLayout:
    """The layout of `layout_entries`. Raises WireError if it is none."""
    told = _LAYOUT(entries, "layout")
    ids = EpisodeIds(told.pop("episodes"))
    return FragmentLayout(**told, action_space=action_space, episode_id=ids)


@contextmanager
def refusing(text: str, code: str = "fragment") -> Iterator[None]:
    """Raise WireError, with this code, for whatever a message of another process raises that makes no sense."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{text}: {type(error).__name__}: {error}", code) from error


def _begun(
    lane: int,
    columns: Mapping[str, Tree],
    rest: Mapping[str, Any],
    layout: FragmentLayout,
    spaces: Sequence[gym.Space[Any]],
    *,
    is_checked: bool = True,
    spare: int = 0,
    kind: type[Fragment] = Fragment,
    **more: Any,
) -> Any:
    """A fragment of which nothing is known but its columns, and how its episodes began.

    is_checked    whether to raise WireError if columns or rest make no sense
    spare         rows that are behind the others in all columns but the observations
    kind, more    class of the fragment, and further arguments of it
    """
    made = {name: Column(name, tree) for name, tree in columns.items()}
    starts = rest["episode_start"], rest["episode_number"]
    fragment = kind(layout, lane, _SEQUENCE(rest["sequence"], "sequence"), made, *starts, **more)
    fragment.observation_space = space = spaces[rest["space"]]
    if is_checked:
        _check_columns(fragment.columns, layout, rest["num_rows"], space, spare)
        for name in ("episode_start", "episode_number"):
            _check_array(name, rest[name], np.int64, (layout.num_slots,))
    return fragment


def _check_columns(
    columns: Mapping[str, Column], layout: FragmentLayout, rows: int, space: gym.Space[Any], spare: int
) -> None:
    """Raise WireError if columns are not those of so many rows, and so many more, with observations in a space."""
    slots, most = layout.num_slots, layout.lookback + rows
    for name, column in columns.items():
        expected = most + (1 if name == Columns.OBS else spare)
        for leaf in leaves_of(column.tree):
            if leaf.shape[:2] != (expected, slots):
                raise _wrong(f"{name} is {_shown(leaf)}, expected [{expected}, {slots}, …]")
    for name, dtype in _KNOWN.items():
        _check_rows(name, columns[name].tree, dtype)
    for name, of in ((Columns.OBS, space), (Columns.ACTIONS, layout.action_space)):
        tree = columns[name].tree
        if isinstance(tree, np.ndarray) and of.shape is not None and of.dtype is not None:  # no row is made for it
            _check_rows(name, tree, of.dtype, of.shape)
        else:
            map_tree(
                lambda leaf, row, name=name: _check_rows(name, leaf, row.dtype, row.shape[1:]), tree, row_of(of, 1)
            )


def _check_rows(name: str, leaf: Any, dtype: Any, shape: tuple[int, ...] = ()) -> None:
    if not isinstance(leaf, np.ndarray) or leaf.dtype != dtype or leaf.shape[2:] != shape:
        found, slots = (_shown(leaf), leaf.shape[1:2]) if isinstance(leaf, np.ndarray) else (shown(leaf), ())
        raise _wrong(f"{name} is {found}, expected rows of {np.dtype(dtype)}{[*slots, *shape]}")


def _check_array(name: str, value: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """Raise WireError for what is no such array."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        raise _wrong(f"{name} is {shown(value)}, expected {np.dtype(dtype)}{list(shape)}")


def form_of(columns: Mapping[str, Column]) -> dict[str, Tree]:
    """Dtypes and shapes of columns' rows, leaf by leaf as text: the same in every fragment of a rollout."""
    return {
        name: map_tree(lambda leaf: f"{_named(leaf.dtype)}{list(leaf.shape[2:])}", column.tree)
        for name, column in columns.items()
    }


def check_form(form: Mapping[str, Tree], known: Mapping[str, Tree]) -> None:
    """Raise WireError if columns are others, or of another form, than in the fragments before."""
    if form.keys() != known.keys():
        raise _wrong(f"columns are {sorted(form)}, expected {sorted(known)}, as in others")
    for name, each in form.items():
        if each != known[name]:
            raise _wrong(f"a row of {name} is {shown(each)} in each slot, expected {shown(known[name])}, as in others")


@lru_cache(64)
def _named(dtype: np.dtype[Any]) -> str:
    return str(dtype)  # takes numpy 4 µs


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _wrong(text: str) -> WireError:
    """The error of a fragment that makes no sense."""
    return WireError(text, "fragment")


def completed(fragment: Fragment, fields: Mapping[str, Any]) -> None:
    """Give a fragment what `described` said of its ends, losses, infos and custom data."""
    if fields.get("finals") is not None:
        fragment.finals = _finals_of(fields["finals"])
    for start in fields.get("starts", ()):
        fragment.record_starts(*start)
    fragment.losses = [Loss(*loss) for loss in fields.get("losses", ())]
    if fields.get("infos") is not None:
        fragment.infos[: len(fields["infos"])] = fields["infos"]
    fragment.custom_data = {(slot, number): data for slot, number, data in fields.get("custom_data", ())}


def _finals_of(fields: Plain) -> list[Final]:
    infos, counts, begin, finals = fields["infos"], fields["counts"], 0, []
    for count, each in [(len(fields["slots"]), {})] if infos is None else zip(counts, infos, strict=True):
        part = slice(begin, begin + count)
        observations = map_tree(lambda leaf, part=part: leaf[part], fields["observations"])
        finals.append(Final(fields["rows"][part], fields["slots"][part], observations, each))
        begin = part.stop
    return finals


def _clock_in(rest: Mapping[str, Any], layout: FragmentLayout) -> EnvClock:
    for name in ("started", "numbers"):
        _check_array(name, rest[name], np.int64, (layout.num_slots,))
    ends = [(step, env, bool(is_cut), bool(is_lost)) for step, env, is_cut, is_lost in rest["ends"].tolist()]
    losses = [(step, reason) for step, reason in rest["losses"]]
    return EnvClock(rest["first"], rest["started"], rest["numbers"], layout.episode_id, ends, losses)


def _part_in(
    message: wire.Fragment, index: int, spaces: PartSpaces, layout: FragmentLayout, clock: EnvClock
) -> AgentFragment:
    """One part's fragment. Raises WireError if it makes no sense."""
    told, entries, part = message.columns["parts"][index], message.rest["parts"][index], spaces.part
    slots, rows = layout.num_slots * len(part.agents), entries["num_rows"]
    assert isinstance(layout.episode_id, EpisodeIds)
    ids = layout.episode_id.of_agents(index)
    own = replace(layout, num_slots=slots, action_space=part.recorded_space, episode_id=ids)
    spare = min(1, own.num_rows - rows)  # a row of actions that wait for an observation
    agents: Plain = {"part": part, "env_clock": clock, "clock": told["clock"], "module_of": told["module_of"]}
    fragment: AgentFragment = _begun(
        message.lane, told["columns"], entries, own, spaces.seen, spare=spare, kind=AgentFragment, **agents
    )
    stop = fragment.first_row + rows
    _check_array("clock", fragment.clock, np.int64, (stop + 1, slots))
    _check_array("module_of", fragment.module_of, np.int16, (stop + spare, slots))
    completed(fragment, entries)
    for name, dtype in _OF_SLOTS.items():
        _check_array(name, entries[name], dtype, (slots,))
        setattr(fragment, name, entries[name])
    fragment.seal_at(_stops_in(fragment, entries))
    fragment.ends = {(row, slot): step for row, slot, step in entries["ends"].tolist()}
    fragment.early = [(int(step), int(slot), reward) for step, slot, reward in entries["early"].tolist()]
    fragment.module_ids, fragment.outputs = tuple(entries["module_ids"]), entries["outputs"]
    return fragment


def _stops_in(fragment: Fragment, entries: Mapping[str, Any]) -> NDArray[np.int64]:
    """The row after each slot's last step."""
    stops: NDArray[np.int64] = entries["stops"]
    _check_array("stops", stops, np.int64, (fragment.layout.num_slots,))
    return stops
