"""Fragments of several agents as messages of the wire.

The columns of a message are `parts`, a list with the columns of each part, and lists of their `clock` and `module_of`,
all as `AgentFragment` has them, up to the row of the newest observations. The rest is what `described` says of a
fragment: of the lane, and in `parts` of each part.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import is_whole
from rollflow.nodes.connectors.pipelines.default_pipelines import EnvToModulePipeline
from rollflow.nodes.offloaded.fragment_checks import (
    MOST,
    check_array,
    check_ends,
    check_whole,
    wrong,
)
from rollflow.nodes.offloaded.fragment_message import (
    Plain,
    checked,
    complete,
    described,
    forms_of,
    index_of,
    message_of,
)
from rollflow.stream import wire
from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import ModuleError, WireError, shown
from rollflow.stream.fragments.fragment import EpisodeIds, FragmentLayout
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, AgentInfos
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import EnvClock, MultiAgentFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane
from rollflow.stream.wire.codec import field
from rollflow.stream.wire.codec.handshake import MOST_AGENTS

PARTS, CLOCK, MODULE_OF = "parts", "clock", "module_of"
_PREFIX = field.text(1 << 16)
_LAYOUT = field.entries(
    num_envs=field.whole(1, 1 << 20),
    num_rows=field.whole(0, 1 << 24),
    lookback=field.whole(0, 1 << 24),
    episodes=_PREFIX,
    agents=field.list_of(_PREFIX, MOST_AGENTS),
)


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


def message_of_lane(lane: Lane | MultiAgentLane, number: int, fragment: Any, more: Mapping[str, Any]) -> wire.Fragment:
    """The message of a lane's fragment, of one agent or of several."""
    if isinstance(lane, MultiAgentLane):
        spaces = [PartSpaces(part.part, part.observation_spaces) for part in lane.parts]
        return message_of_agents(number, fragment, spaces, more)
    return message_of(number, fragment, lane.observation_spaces, more)


def message_of_agents(
    number: int, fragment: MultiAgentFragment, spaces: Sequence[PartSpaces], more: Mapping[str, Any]
) -> wire.Fragment:
    """The message of a fragment, with `more` in its rest; the columns are referred to, not copied.

    Raises ModuleError for a module's id that is no string.
    """
    parts, clock = fragment.parts, fragment.clock
    columns: Plain = {
        PARTS: [{name: _sent(part, column) for name, column in part.columns.items()} for part in parts],
        CLOCK: [part.clock[: part.last_row + 1] for part in parts],
        MODULE_OF: [part.module_of[: part.last_row + 1] for part in parts],
    }
    of_env = _numbers_of(fragment)
    rest: Plain = {
        "agents": True,
        "sequence": fragment.sequence,
        "is_last": fragment.is_last,
        "num_rows": fragment.num_rows,
        "layout": _layout_of(fragment),
        "first": clock.first,
        "started": clock.started,
        "numbers": clock.numbers,
        "ends": _ends_of(clock),
        PARTS: [_described_part(part, each.seen, of_env) for part, each in zip(parts, spaces, strict=True)],
    }
    if clock.losses:
        rest["losses"] = [list(loss) for loss in clock.losses]
    if fragment.custom_data:
        rest["custom_data"] = [[*key, data] for key, data in fragment.custom_data.items()]
    return wire.Fragment(fragment.lane, number, columns, rest | dict(more))


def agents_of_message(message: wire.Fragment, spaces: Sequence[PartSpaces]) -> MultiAgentFragment:
    """The fragment in a message, its columns where they came; read-only. Raises WireError where it is none."""
    try:
        rest = message.rest
        layout = _layout_in(rest["layout"], len(spaces))
        num_envs, num_rows = layout["num_envs"], rest["num_rows"]
        check_whole("num_rows", num_rows, 0, layout["num_rows"])
        check_whole("sequence", rest["sequence"], 0, MOST)
        clock = _clock_in(rest, num_envs, num_rows)
        for name in (PARTS, CLOCK, MODULE_OF):
            _check_list(name, message.columns[name], len(spaces))
        _check_list("rest.parts", rest[PARTS], len(spaces))
        ids = EpisodeIds(layout["episodes"])
        parts = [_part_in(message, index, each, layout, clock, ids) for index, each in enumerate(spaces)]
        custom_data = {(env, number): data for env, number, data in rest.get("custom_data", ())}
        if not all(
            is_whole(env) and is_whole(at) and isinstance(data, dict) for (env, at), data in custom_data.items()
        ):
            raise wrong(f"custom_data is {shown(rest['custom_data'])}, expected maps by environment and episode")
        fragment = MultiAgentFragment(
            message.lane,
            rest["sequence"],
            parts,
            num_envs=num_envs,
            num_rows=num_rows,
            clock=clock,
            episode_id=ids,
            custom_data=custom_data,
        )
        fragment.is_last = rest["is_last"] is True
        return fragment
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"it is no fragment of agents: {type(error).__name__}: {error}", "fragment") from error


# What is sent


def _sent(part: AgentFragment, column: Column) -> Any:
    """Its rows up to that of the newest observations, in which actions stand that wait for another."""
    return column.rows(0, min(len(column), part.last_row + 1))


def _layout_of(fragment: MultiAgentFragment) -> Plain:
    layouts = [part.layout for part in fragment.parts]
    return {
        "num_envs": fragment.num_envs,
        "num_rows": layouts[0].num_rows,
        "lookback": layouts[0].lookback,
        "episodes": _prefix_of(fragment.episode_id),
        "agents": [_prefix_of(layout.episode_id) for layout in layouts],
    }


def _prefix_of(ids: Any) -> str:
    assert isinstance(ids, EpisodeIds)
    return ids.prefix


def _ends_of(clock: EnvClock) -> NDArray[np.int64]:
    """i64[E, 4]: vector step, environment, whether it was truncated, whether it was lost, of every end in order."""
    nth, ends = Counter[int](), []
    for vector_step, env, is_truncated in clock.ends:
        ends.append((vector_step, env, is_truncated, clock.was_lost(env, nth[env])))
        nth[env] += 1
    return np.array(ends, np.int64).reshape(-1, 4)


def _numbers_of(fragment: MultiAgentFragment) -> dict[str, int]:
    """The number of each episode in a fragment among those of its environment, by the episode's id."""
    clock = fragment.clock
    return {
        fragment.episode_id(env, number): number
        for env, first in enumerate(clock.numbers.tolist())
        for number in range(first, first + clock.count(env))
    }


def _described_part(part: AgentFragment, seen: Sequence[gym.Space[Any]], of_env: Mapping[str, int]) -> Plain:
    """The map of a part, with all but its columns."""
    if wrong := [module_id for module_id in part.module_ids if not isinstance(module_id, str | None)]:
        raise ModuleError(f"module ids are {wrong}, expected strings where fragments go to another process")
    entries = described(part)
    if "infos" in entries:
        entries["infos"] = [_plain_infos(each) for each in entries["infos"]]
    if "finals" in entries and entries["finals"]["infos"] is not None:
        entries["finals"]["infos"] = [_plain_infos(each) for each in entries["finals"]["infos"]]
    parents = [[*key, of_env[parent]] for key, parent in part.parents.items() if parent in of_env]
    ends = [[*key, vector_step] for key, vector_step in part.ends.items()]
    if part.early:
        entries["early"] = np.array(part.early, np.float64)
    return entries | {
        "forms": forms_of(part.columns),
        "space": index_of(part.observation_space, seen),
        "stops": part.stops,
        "acts": part.acts,
        "waits": part.waits,
        "received": part.received,
        "serves": part.serves,
        "module_ids": list(part.module_ids),
        "outputs": {module_id: dict(names) for module_id, names in part.outputs.items()},
        "ends": np.array(ends, np.int64).reshape(-1, 3),
        "parents": np.array(parents, np.int64).reshape(-1, 3),
    }


def _plain_infos(infos: Any) -> list[Any]:
    """Infos of a row as pairs of an agent slot and its info."""
    return [[slot, info] for slot, info in infos.of_slots.items()] if isinstance(infos, AgentInfos) else []


# What has come


def _layout_in(entries: Any, parts: int) -> Plain:
    layout: Plain = _LAYOUT(entries, "layout")
    _check_list("layout.agents", layout["agents"], parts)
    return layout


def _clock_in(rest: Mapping[str, Any], num_envs: int, num_rows: int) -> EnvClock:
    first, started, numbers = rest["first"], rest["started"], rest["numbers"]
    check_whole("first", first, 0, MOST)
    last = first + num_rows
    check_array("started", started, np.int64, (num_envs,), 0, first)
    ends, losses = rest["ends"], [(step, reason) for step, reason in rest.get("losses", ())]
    was_lost_before = bool(losses) and losses[0][0] == first  # then the episodes lost have the number before the first
    check_array("numbers", numbers, np.int64, (num_envs,), -1 if was_lost_before else 0, MOST)
    clock = EnvClock(first, started, numbers)
    check_array("ends", ends, np.int64, (len(ends), 4), 0, MOST)
    steps, envs = ends[:, 0], ends[:, 1]
    if (steps[1:] < steps[:-1]).any() or (len(ends) and (steps[0] < first or steps[-1] > last)):
        raise wrong(f"ends are {shown(ends)}, expected vector steps from {first} to {last} in their order")
    if (envs >= num_envs).any() or (ends[:, 2:] > 1).any():
        raise wrong(f"ends are {shown(ends)}, expected environments below {num_envs}, and flags")
    begin = 0
    while begin < len(ends):
        alike = (ends[begin:, [0, 3]] == ends[begin, [0, 3]]).all(axis=1)
        count = len(alike) if alike.all() else int(np.argmin(alike))
        if ends[begin, 3]:
            count = num_envs
            if not losses or losses[0][0] != ends[begin, 0] or not isinstance(losses[0][1], str):
                raise wrong(f"losses are {shown(rest.get('losses'))}, expected a vector step and a reason for each")
            if not np.array_equal(envs[begin : begin + count], np.arange(count)):
                raise wrong(f"ends are {shown(ends)}, expected all environments where they were lost")
            clock.lose(*losses.pop(0))
        else:
            chosen = slice(begin, begin + count)
            clock.end(envs[chosen], int(steps[begin]), ends[chosen, 2].astype(np.bool_))
        begin += count
    if losses:
        raise wrong(f"losses are {shown(rest['losses'])}, expected only those that ended episodes")
    return clock


def _part_in(
    message: wire.Fragment, index: int, spaces: PartSpaces, layout: Plain, clock: EnvClock, ids: EpisodeIds
) -> AgentFragment:
    """One part's fragment. Raises WireError where it makes no sense."""
    entries, part = message.rest[PARTS][index], spaces.part
    own = FragmentLayout(
        num_slots=layout["num_envs"] * len(part.agents),
        num_rows=layout["num_rows"],
        lookback=layout["lookback"],
        action_space=part.recorded_space,
        resets_next_step=False,
        episode_id=EpisodeIds(layout["agents"][index]),
    )
    trees, finals = message.columns[PARTS][index], entries.get("finals")
    is_said = {"infos": None, "finals": finals and {**finals, "infos": None}}
    spare = min(1, own.num_rows - entries["num_rows"])  # a row of actions that wait for an observation
    times, modules = message.columns[CLOCK][index], message.columns[MODULE_OF][index]
    fragment: AgentFragment = checked(
        wire.Fragment(message.lane, message.number, trees, {**entries, **is_said}),
        own,
        spaces.seen,
        spare,
        kind=AgentFragment,
        part=part,
        clock=times,
        module_of=modules,
    )
    check_whole("parts: num_rows", entries["num_rows"], 0, message.rest["num_rows"])
    entries = _with_agent_infos(entries, own)
    end, step, slots = fragment.first_row + entries["num_rows"], clock.first + message.rest["num_rows"], own.num_slots
    check_array(CLOCK, times, np.int64, (end + 1, slots), 0, step)
    check_array(MODULE_OF, modules, np.int16, (end + spare, slots), 0, max(0, len(entries["module_ids"]) - 1))
    complete(fragment, entries)
    _restore_slots(fragment, entries, step)
    _restore_modules(fragment, entries, ids)
    check_ends(fragment)
    return fragment


def _with_agent_infos(entries: Plain, layout: FragmentLayout) -> Plain:
    """The map of a part with infos as `AgentInfos`. Raises WireError where there are too many, or too few."""
    entries, finals = dict(entries), entries.get("finals")
    if entries.get("infos") is not None:
        entries["infos"] = [_agent_infos(each, layout) for each in entries["infos"]]
        if len(entries["infos"]) > layout.lookback + entries["num_rows"] + 1:
            raise wrong(f"infos of {len(entries['infos'])} rows, expected at most one more than there are")
    if finals is not None and finals["infos"] is not None:
        _check_list("finals: infos", finals["infos"], len(finals["rows"]))
        entries["finals"] = {**finals, "infos": [_agent_infos(each, layout) for each in finals["infos"]]}
    return entries


def _agent_infos(pairs: Any, layout: FragmentLayout) -> AgentInfos:
    infos = AgentInfos()
    for slot, info in pairs:
        check_whole("infos: slot", slot, 0, layout.num_slots - 1)
        if not isinstance(info, dict):
            raise wrong(f"infos: {shown(info)}, expected a map")
        infos.of_slots[slot] = info
    return infos


def _restore_slots(fragment: AgentFragment, entries: Mapping[str, Any], last: int) -> None:
    """Take over where the agent slots stand. Raises WireError where they can't stand there.

    last    last vector step of the fragment
    """
    slots, first, rows = fragment.layout.num_slots, fragment.first_row, entries["num_rows"]
    stops, ends = entries["stops"], entries["ends"]
    check_array("stops", stops, np.int64, (slots,), first, first + rows)
    if int(stops.max()) != first + rows:
        raise wrong(f"stops are {shown(stops)}, expected the last at {first + rows}")
    for name in ("acts", "waits"):
        check_array(name, entries[name], np.bool_, (slots,), 0, 1)
        setattr(fragment, name, entries[name])
    check_array("received", entries["received"], np.float32, (slots,))
    check_array("serves", entries["serves"], np.int16, (slots,), 0, max(0, len(entries["module_ids"]) - 1))
    if (entries["waits"] & (stops >= fragment.layout.lookback + fragment.layout.num_rows)).any():
        raise wrong("an agent that has made all steps waits for an observation, expected none")
    fragment.received, fragment.serves = entries["received"], entries["serves"]
    fragment.restore_stops(stops)
    is_there = np.arange(first + 1, first + rows + 1)[:, None] < stops + (entries["acts"] | entries["waits"])
    if (is_there & (np.diff(fragment.clock[first:], axis=0) < 0)).any():
        raise wrong("clock goes back, expected vector steps in their order")
    check_array("ends", ends, np.int64, (len(ends), 3), 0, MOST)
    fragment.ends = {(row, slot): step for row, slot, step in ends.tolist()}
    if (early := entries.get("early")) is not None:
        check_array("early", early, np.float64, (len(early), 3))
        if not np.isfinite(early).all() or ((early[:, :2] < [1, 0]) | (early[:, :2] > [last, slots - 1])).any():
            raise wrong(f"early is {shown(early)}, expected vector steps up to {last}, agent slots, and rewards")
        fragment.early = [(int(vector_step), int(slot), reward) for vector_step, slot, reward in early.tolist()]


def _restore_modules(fragment: AgentFragment, entries: Mapping[str, Any], ids: EpisodeIds) -> None:
    """Take over who served the agents, and in which episodes. Raises WireError where that is not known of a chunk."""
    module_ids, outputs, parents = entries["module_ids"], entries["outputs"], entries["parents"]
    if not isinstance(module_ids, list) or not all(isinstance(each, str | None) for each in module_ids):
        raise wrong(f"module_ids is {shown(module_ids)}, expected a list of strings")
    for module_id, names in outputs.items():
        if not isinstance(module_id, str) or not set(names.values()) <= fragment.columns.keys():
            raise wrong(f"outputs of module {shown(module_id)} are {shown(names)}, expected names of columns")
    fragment.module_ids, fragment.outputs = tuple(module_ids), outputs
    check_array("parents", parents, np.int64, (len(parents), 3), 0, MOST)
    agents = len(fragment.part.agents)
    fragment.parents = {(slot, number): ids(slot // agents, of_env) for slot, number, of_env in parents.tolist()}
    chunks = fragment.chunks
    acted = {module_ids[place] for place in np.unique(fragment.chunk_modules).tolist()}
    waiting = {module_ids[place] for place in np.unique(fragment.serves[fragment.waits]).tolist()}
    if not (acted | waiting) <= outputs.keys():
        raise wrong(f"modules {sorted(map(str, acted | waiting))} acted, expected some of {sorted(outputs)}")
    keys = list(zip(chunks.slot.tolist(), chunks.number.tolist(), strict=True))
    done = np.flatnonzero(chunks.terminated | chunks.truncated)
    last_rows = zip((chunks.stop[done] - 1).tolist(), chunks.slot[done].tolist(), strict=True)
    if not set(keys) <= fragment.parents.keys() or not set(last_rows) <= fragment.ends.keys():
        raise wrong("parents or ends of some chunks are missing, expected those of all")


def _check_list(name: str, value: Any, count: int) -> None:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise wrong(f"{name} is {shown(value)}, expected a list of {count} parts")
