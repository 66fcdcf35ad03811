"""Fragments as messages between processes, of this host or of others.

The columns of a message are those of the fragment, up to the row of the newest observations, and its rest is what
`described` says of it. Of several agents, columns and rest have a list `parts`. In the columns, each has its `columns`,
`clock` and `module_of`, as `AgentFragment` has them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.nodes.offloaded.fragment_checks import (
    MOST,
    check_array,
    check_columns,
    check_ends,
    check_rest,
    check_whole,
    wrong,
)
from rollflow.stream import wire
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ModuleError, WireError, shown
from rollflow.stream.data.tree import Tree, concatenate_trees, map_tree, stack_trees
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
_OF_SLOTS = {"acts": np.bool_, "waits": np.bool_, "received": np.float32, "serves": np.int16}


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
    if isinstance(lane, MultiAgentLane):
        return message_of(
            number, fragment, [PartSpaces(each.part, each.observation_spaces) for each in lane.parts], more
        )
    return message_of(number, fragment, lane.observation_spaces, more)


def message_of(number: int, fragment: AnyFragment, spaces: Sequence[Any], more: Mapping[str, Any]) -> wire.Fragment:
    """A fragment under a number, with `more` in its rest; the columns are referred to, not copied.

    spaces    that its observations may be in, the same at both ends; of several agents `PartSpaces`

    Raises ModuleError for the id of one of several modules that is no string.
    """
    if isinstance(fragment, Fragment):
        columns, rest = _sent(fragment), described(fragment, spaces) | {"forms": _forms_of(fragment)}
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


def _sent(fragment: Fragment, spare: int = 0) -> Plain:
    """The columns up to the last row, and so many rows behind it, if they are there."""
    last = fragment.last_row + spare
    return {
        name: column.rows(0, min(len(column), max(last, fragment.last_row + (name == Columns.OBS))))
        for name, column in fragment.columns.items()
    }


def _sent_part(part: AgentFragment) -> Plain:
    """The columns of a part; the row of the newest observations has the actions that wait for others."""
    stop = part.last_row + 1
    return {"columns": _sent(part, 1), "clock": part.clock[:stop], "module_of": part.module_of[:stop]}


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
    if wrong := [module_id for module_id in part.module_ids if not isinstance(module_id, str | None)]:
        raise ModuleError(f"module ids are {wrong}, expected strings where fragments go to another process")
    ends = [[*key, vector_step] for key, vector_step in part.ends.items()]
    return described(part, seen) | {
        "forms": _forms_of(part),
        "module_ids": list(part.module_ids),
        "outputs": {module_id: dict(names) for module_id, names in part.outputs.items()},
        "ends": np.array(ends, np.int64).reshape(-1, 3),
        "early": np.array(part.early, np.float64).reshape(-1, 3),
        **{name: getattr(part, name) for name in _OF_SLOTS},
    }


def _forms_of(fragment: Fragment) -> dict[str, Tree]:
    """Trees of empty arrays for columns that are trees: the wire has lists in place of tuples."""
    return {
        name: map_tree(lambda leaf: leaf[0, :0], column.tree)
        for name, column in fragment.columns.items()
        if not isinstance(column.tree, np.ndarray)
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

    Raises WireError where it is none.
    """
    with _refusing("it is no fragment"):
        fragment: Fragment = _begun(message.lane, message.columns, message.rest, layout, spaces, is_checked=is_checked)
        _complete(fragment, message.rest)
        if "stops" in message.rest:
            fragment.seal_at(_checked_stops(fragment, message.rest))
        else:
            fragment.seal(message.rest["num_rows"])
        if lost is not None:
            fragment.begin_after_loss(lost)
        if is_checked:
            check_ends(fragment)
        return fragment


def agents_of_message(
    message: wire.Fragment, spaces: Sequence[PartSpaces], lost: str | None = None
) -> MultiAgentFragment:
    """The fragment in a message, its columns where they came; read-only. Raises WireError where it is none.

    lost    why the environments were lost before it; None: they were not
    """
    with _refusing("it is no fragment of agents"):
        rest = message.rest
        layout = layout_in(rest["layout"], spaces[0].part.recorded_space)
        check_whole("num_rows", rest["num_rows"], 0, layout.num_rows)
        check_whole("sequence", rest["sequence"], 0, MOST)
        clock = _clock_in(rest, layout)
        for name, parts in (("columns", message.columns["parts"]), ("rest", rest["parts"])):
            if not isinstance(parts, list | tuple) or len(parts) != len(spaces):
                raise wrong(f"{name}.parts is {shown(parts)}, expected a list of {len(spaces)} parts")
        custom_data = {(env, number): data for env, number, data in rest["custom_data"]}
        if not all(
            is_whole(env) and is_whole(at) and isinstance(data, dict) for (env, at), data in custom_data.items()
        ):
            raise wrong(f"custom_data is {shown(rest['custom_data'])}, expected maps by environment and episode")
        fragment = MultiAgentFragment(
            message.lane,
            rest["sequence"],
            [_part_in(message, index, each, layout, clock) for index, each in enumerate(spaces)],
            num_rows=rest["num_rows"],
            clock=clock,
            custom_data=custom_data,
        )
        fragment.is_last = rest["is_last"] is True
        if lost is not None:
            fragment.begin_after_loss(lost)
        return fragment


def layout_in(entries: Any, action_space: gym.Space[Any]) -> FragmentLayout:
    """The layout of `layout_entries`. Raises WireError where it is none."""
    told = _LAYOUT(entries, "layout")
    ids = EpisodeIds(told.pop("episodes"))
    return FragmentLayout(**told, action_space=action_space, episode_id=ids)


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """Raise WireError for whatever a message raises that makes no sense."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{text}: {type(error).__name__}: {error}", "fragment") from error


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

    is_checked    whether to raise WireError where columns or rest make no sense
    spare         rows that are behind the others in all columns but the observations
    kind, more    class of the fragment, and further arguments of it
    """
    if is_checked:
        check_whole("num_rows", rest["num_rows"], 0, layout.num_rows)
        check_whole("space", rest["space"], 0, len(spaces) - 1)
    forms, space = field.mapping(rest["forms"], "forms"), spaces[rest["space"]]
    made = {name: Column(name, _formed(tree, forms.get(name), name)) for name, tree in columns.items()}
    starts = rest["episode_start"], rest["episode_number"]
    fragment = kind(layout, lane, rest["sequence"], made, *starts, **more)
    fragment.observation_space = space
    if is_checked:
        check_columns(fragment.columns, layout, rest["num_rows"], space, spare)
        check_rest(rest, layout, rest["num_rows"], space)
    return fragment


def _formed(tree: Tree, form: Tree, where: str) -> Tree:
    """A tree with tuples where a form has them. Raises WireError where it differs from that otherwise.

    form    None: it is an array
    """
    if isinstance(tree, np.ndarray) and (form is None or isinstance(form, np.ndarray)):
        return tree
    if isinstance(form, dict) and isinstance(tree, dict) and tree.keys() == form.keys():
        return {key: _formed(tree[key], part, f"{where}[{key!r}]") for key, part in form.items()}
    if isinstance(form, tuple | list) and isinstance(tree, list | tuple) and len(tree) == len(form):
        parts = [_formed(part, like, f"{where}[{i}]") for i, (part, like) in enumerate(zip(tree, form, strict=True))]
        return type(form)(parts)
    raise WireError(f"{where} differs from its form", "fragment")


def _complete(fragment: Fragment, fields: Mapping[str, Any]) -> None:
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
    first, started, numbers, ends = rest["first"], rest["started"], rest["numbers"], rest["ends"]
    num_envs, losses = layout.num_slots, [(step, reason) for step, reason in rest["losses"]]
    check_whole("first", first, 0, MOST)
    last = first + rest["num_rows"]
    check_array("started", started, np.int64, (num_envs,), 0, first)
    was_lost_before = bool(losses) and losses[0][0] == first  # then the episodes lost have the number before the first
    check_array("numbers", numbers, np.int64, (num_envs,), -1 if was_lost_before else 0, MOST)
    check_array("ends", ends, np.int64, (len(ends), 4), 0, MOST)
    steps = ends[:, 0]
    if (steps[1:] < steps[:-1]).any() or (len(ends) and (steps[0] < first or steps[-1] > last)):
        raise wrong(f"ends are {shown(ends)}, expected vector steps from {first} to {last} in their order")
    if (ends[:, 1] >= num_envs).any() or (ends[:, 2:] > 1).any():
        raise wrong(f"ends are {shown(ends)}, expected environments below {num_envs}, and flags")
    lost = [[step, env, 1, 1] for step, _ in losses for env in range(num_envs)]
    if ends[ends[:, 3] == 1].tolist() != lost or not all(isinstance(reason, str) for _, reason in losses):
        raise wrong(f"losses are {shown(losses)}, expected only those that ended episodes, with their reasons")
    told = [(step, env, bool(is_truncated), bool(is_lost)) for step, env, is_truncated, is_lost in ends.tolist()]
    return EnvClock(first, started, numbers, layout.episode_id, told, losses)


def _part_in(
    message: wire.Fragment, index: int, spaces: PartSpaces, layout: FragmentLayout, clock: EnvClock
) -> AgentFragment:
    """One part's fragment. Raises WireError where it makes no sense."""
    told, entries, part = message.columns["parts"][index], message.rest["parts"][index], spaces.part
    slots, rows = layout.num_slots * len(part.agents), entries["num_rows"]
    assert isinstance(layout.episode_id, EpisodeIds)
    ids = layout.episode_id.of_agents(index)
    own = replace(layout, num_slots=slots, action_space=part.recorded_space, episode_id=ids)
    check_whole("parts: num_rows", rows, 0, message.rest["num_rows"])
    spare = min(1, own.num_rows - rows)  # a row of actions that wait for an observation
    agents: Plain = {"part": part, "env_clock": clock, "clock": told["clock"], "module_of": told["module_of"]}
    fragment: AgentFragment = _begun(
        message.lane, told["columns"], entries, own, spaces.seen, spare=spare, kind=AgentFragment, **agents
    )
    stop, step, modules = fragment.first_row + rows, clock.first + message.rest["num_rows"], len(entries["module_ids"])
    check_array("clock", fragment.clock, np.int64, (stop + 1, slots), 0, step)
    check_array("module_of", fragment.module_of, np.int16, (stop + spare, slots), 0, max(0, modules - 1))
    _complete(fragment, entries)
    _restore_slots(fragment, entries, step)
    _restore_modules(fragment, entries)
    check_ends(fragment)
    return fragment


def _checked_stops(fragment: Fragment, entries: Mapping[str, Any]) -> NDArray[np.int64]:
    """The row after each slot's last step. Raises WireError where they are not those of the fragment's rows."""
    stops: NDArray[np.int64] = entries["stops"]
    first, stop = fragment.first_row, fragment.first_row + entries["num_rows"]
    check_array("stops", stops, np.int64, (fragment.layout.num_slots,), first, stop)
    if int(stops.max()) != stop:
        raise wrong(f"stops are {shown(stops)}, expected the last at {stop}")
    return stops


def _restore_slots(fragment: AgentFragment, entries: Mapping[str, Any], last: int) -> None:
    """Take over where the agent slots stand. Raises WireError where they can't stand there.

    last    last vector step of the fragment
    """
    slots, first, stop = fragment.layout.num_slots, fragment.first_row, fragment.first_row + entries["num_rows"]
    ends, early = entries["ends"], entries["early"]
    stops = _checked_stops(fragment, entries)
    for name, dtype in _OF_SLOTS.items():
        check_array(name, entries[name], dtype, (slots,))
        setattr(fragment, name, entries[name])
    check_array("serves", fragment.serves, np.int16, (slots,), 0, max(0, len(entries["module_ids"]) - 1))
    if (fragment.waits & (stops >= first + fragment.layout.num_rows)).any():
        raise wrong("an agent that has made all steps waits for an observation, expected none")
    fragment.seal_at(stops)
    is_there = np.arange(first + 1, stop + 1)[:, None] < stops + (fragment.acts | fragment.waits)
    if (is_there & (np.diff(fragment.clock[first:], axis=0) < 0)).any():
        raise wrong("clock goes back, expected vector steps in their order")
    check_array("ends", ends, np.int64, (len(ends), 3), 0, MOST)
    fragment.ends = {(row, slot): step for row, slot, step in ends.tolist()}
    check_array("early", early, np.float64, (len(early), 3))
    if not np.isfinite(early).all() or ((early[:, :2] < [1, 0]) | (early[:, :2] > [last, slots - 1])).any():
        raise wrong(f"early is {shown(early)}, expected vector steps up to {last}, agent slots, and rewards")
    fragment.early = [(int(vector_step), int(slot), reward) for vector_step, slot, reward in early.tolist()]


def _restore_modules(fragment: AgentFragment, entries: Mapping[str, Any]) -> None:
    """Take over who served the agents. Raises WireError where that is not known of a chunk, or not when it ended."""
    module_ids, outputs = entries["module_ids"], entries["outputs"]
    if not isinstance(module_ids, list) or not all(isinstance(each, str | None) for each in module_ids):
        raise wrong(f"module_ids is {shown(module_ids)}, expected a list of strings")
    for module_id, names in outputs.items():
        if not isinstance(module_id, str) or not set(names.values()) <= fragment.columns.keys():
            raise wrong(f"outputs of module {shown(module_id)} are {shown(names)}, expected names of columns")
    fragment.module_ids, fragment.outputs = tuple(module_ids), outputs
    chunks = fragment.chunks
    acted = {module_ids[place] for place in np.unique(fragment.chunk_modules).tolist()}
    waiting = {module_ids[place] for place in np.unique(fragment.serves[fragment.waits]).tolist()}
    if not (acted | waiting) <= outputs.keys():
        raise wrong(f"modules {sorted(map(str, acted | waiting))} acted, expected some of {sorted(outputs)}")
    done = np.flatnonzero(chunks.terminated | chunks.truncated)
    last_rows = zip((chunks.stop[done] - 1).tolist(), chunks.slot[done].tolist(), strict=True)
    if not set(last_rows) <= fragment.ends.keys():
        raise wrong("ends of some chunks are missing, expected those of all")
