"""The state of a lane that stands at the gate before the forward pass, for another lane to go on from."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollflow.nodes.connectors.common.batches import CHOSEN_BY, DEVICE
from rollflow.nodes.connectors.module_to_env.action_pieces import RACES
from rollflow.nodes.device.fragment import DeviceFragment
from rollflow.nodes.device.lane import DeviceLane
from rollflow.nodes.offloaded.fragment_message import (
    completed,
    described,
    fragment_of_lane,
    layout_entries,
    message_of_lane,
    sent_columns,
    spaces_seen,
)
from rollflow.stream import wire
from rollflow.stream.data.errors import CheckpointError
from rollflow.stream.data.infos import SlotInfos, copied
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.ready_lane import ReadyLane, SlotAnswers
from rollflow.stream.multi_agent.multi_agent_fragment import AnyFragment
from rollflow.stream.multi_agent.multi_agent_lane import MultiAgentLane

State = dict[str, Any]
_OF_LANE = "num_steps", "vector_steps", "policy_version"
_NOT_PLAIN = "generator", RACES, CHOSEN_BY, DEVICE


def check_lanes(lanes: Sequence[Any]) -> None:
    """Raise CheckpointError for a lane whose state can't be saved."""
    if wrong := next((type(lane).__name__ for lane in lanes if type(lane) not in KINDS), None):
        raise CheckpointError(
            f"a run with a {wrong} can't be saved: expected environments that step here, or "
            "in threads or worker processes; state_dict() has what every run has counted"
        )


def state_of_lane(lane: Any) -> State | None:
    """The state of a lane: its open fragment with the lookback, its counts, and what it samples with. All copies.

    None: it was set aside.
    """
    if lane.is_set_aside:
        return None
    state_of, _ = KINDS[type(lane)]
    return state_of(lane)


def go_on(lane: Any, state: Mapping[str, Any], acting: Any) -> None:
    """Have a new lane go on from the state of another, as `state_of_lane` gave it.

    acting    what acts in its environments
    """
    _, go_on_from = KINDS[type(lane)]
    go_on_from(lane, state, acting)


def plain_fragment(fragment: AnyFragment, lane: Any) -> State:
    """A lane's fragment as plain values and arrays. All copies."""
    if isinstance(fragment, DeviceFragment):
        return {"lane": fragment.lane, "tensors": copied(fragment.get_state(lane.observation_spaces))}
    episodes = {"episodes": layout_entries(fragment.layout)["episodes"]} if isinstance(fragment, Fragment) else {}
    message = message_of_lane(lane, 0, fragment, episodes)
    rest = _plain_rest(fragment, message.rest)
    return {"lane": fragment.lane, "columns": copied(message.columns), "rest": copied(rest)}


def fragment_in(plain: Mapping[str, Any], lane: Any) -> Any:
    """The fragment that `plain_fragment` was given."""
    if "tensors" in plain:
        return lane.fragment_in(plain["tensors"])
    return fragment_of_lane(lane, wire.Fragment(plain["lane"], 0, plain["columns"], _rest_of(plain["rest"])))


# Lanes of one agent


def _state_of_lane(lane: Lane, spare: int = 0) -> State:
    part = copy.copy(lane.fragment)
    part.num_rows = lane.num_rows
    part.observation_space = lane.observation_space
    part.infos = part.infos[: part.last_row + 1]
    return {
        "columns": copied(sent_columns(part, spare)),
        "rest": _plain_rest(part, described(part, lane.observation_spaces)),
        "starts": lane.episode_start.copy(),
        "numbers": lane.episode_number.copy(),
        "ended": np.flatnonzero(lane.dead),
        "data": [[*key, data] for key, data in copy.deepcopy(lane.custom_data).items()],
        "batch": copied(lane.batch),
        **_counts_and_sampling(lane),
    }


def _go_on_lane(lane: Lane, state: Mapping[str, Any], acting: Any) -> None:
    lane.observation_spaces = (lane.observation_space, *acting.env_to_module.observation_spaces)
    rest = _rest_of(state["rest"])
    completed(lane.fragment, rest)
    lane.fragment.custom_data = {}
    lane.fragment.sequence = rest["sequence"]
    lane.fragment.episode_start[:], lane.fragment.episode_number[:] = rest["episode_start"], rest["episode_number"]
    lane.episode_start[:], lane.episode_number[:] = state["starts"], state["numbers"]
    lane.custom_data = {(slot, number): data for slot, number, data in state["data"]}
    lane.go_on(state["columns"], rest["space"], rest["num_rows"], state["ended"])
    lane.batch = state["batch"]
    _set_counts_and_sampling(lane, state)


def _state_of_ready(lane: ReadyLane) -> State:
    held = [copied(_answers_in(each, _plain_infos)) for each in lane.held]
    # Behind the newest observations are actions that are under way.
    return _state_of_lane(lane, 1) | {"ended": np.empty(0, np.int64), "slots": lane.get_state(), "held": held}


def _go_on_ready(lane: ReadyLane, state: Mapping[str, Any], acting: Any) -> None:
    _go_on_lane(lane, state, acting)
    lane.set_state(
        state["slots"], [SlotAnswers(**_answers_in(SlotAnswers(**each), _infos_of)) for each in state["held"]]
    )


def _answers_in(answers: SlotAnswers, form: Callable[[Any], Any]) -> State:
    """The fields of answers, with infos in another form."""
    final = None if answers.final is None else (answers.final[0], form(answers.final[1]))
    return answers._replace(infos=form(answers.infos), final=final)._asdict()


# Lanes on a device


def _state_of_tensors(lane: DeviceLane) -> State:
    return {**copied(lane.get_state()), **_counts_and_sampling(lane)}


def _go_on_tensors(lane: DeviceLane, state: Mapping[str, Any], acting: Any) -> None:
    lane.observation_spaces = (lane.observation_space, *acting.env_to_module.observation_spaces)
    lane.set_state(state)
    _set_counts_and_sampling(lane, state)


# Lanes of several agents


def _state_of_agents(lane: MultiAgentLane) -> State:
    own = lane.get_state()
    return {
        **own,
        "fragment": plain_fragment(lane.so_far(), lane),
        "batches": [copied(turn.batch) for turn in lane.turns],
        "sampling": [_state_of_sampling(lane.shared_data_of(place)) for place in own["sampled"]],
    }


def _go_on_agents(lane: MultiAgentLane, state: Mapping[str, Any], acting: Any) -> None:
    spaces = spaces_seen([part.part for part in lane.parts], acting.env_to_module)
    for part, each in zip(lane.parts, spaces, strict=True):
        part.observation_spaces = each.seen
    modules = [acting.acting[module_id] for module_id in state["modules"]]
    lane.go_on(fragment_in(state["fragment"], lane), modules, state)
    for place, each in zip(state["sampled"], state["sampling"], strict=True):
        _set_sampling(lane.shared_data_of(place), each)
    for part in lane.parts:
        lane.turns += part.shown_again(lane.shared_data_of)
    for turn, batch in zip(lane.turns, state["batches"], strict=True):
        turn.batch = batch


# Parts of a state


def _plain_rest(fragment: AnyFragment, rest: Mapping[str, Any]) -> State:
    """The rest of a fragment's message, with its infos and those of ended episodes in plain form."""
    if isinstance(fragment, Fragment):
        return _with_infos({**rest, "infos": fragment.infos}, _plain_infos)
    return {**rest, "parts": list(map(_plain_rest, fragment.parts, rest["parts"]))}


def _rest_of(plain: Mapping[str, Any]) -> State:
    """What `_plain_rest` was given, with the infos in it."""
    if "parts" in plain:
        return {**plain, "parts": list(map(_rest_of, plain["parts"]))}
    return _with_infos(plain, _infos_of)


def _with_infos(rest: Mapping[str, Any], form: Callable[[Any], Any]) -> State:
    """The same with all infos in another form."""
    changed = {**rest, "infos": list(map(form, rest["infos"]))}
    if (finals := rest.get("finals")) is not None and finals["infos"]:
        changed["finals"] = {**finals, "infos": list(map(form, finals["infos"]))}
    return changed


def _plain_infos(infos: Mapping[str, Any]) -> Any:
    """Infos in plain form: of slots a list of pairs and their number, else as they are."""
    return [*map(list, infos.of_slots.items()), infos.count] if isinstance(infos, SlotInfos) else infos


def _infos_of(plain: Any) -> Any:
    """The infos of `_plain_infos`."""
    if not isinstance(plain, list):
        return plain
    *pairs, count = plain
    infos = SlotInfos(count=count)
    infos.of_slots.update(map(tuple, pairs))
    return infos


def _counts_and_sampling(lane: Any) -> State:
    return {"sampling": _state_of_sampling(lane.shared_data), **{name: getattr(lane, name) for name in _OF_LANE}}


def _set_counts_and_sampling(lane: Any, state: Mapping[str, Any]) -> None:
    _set_sampling(lane.shared_data, state["sampling"])
    for name in _OF_LANE:
        setattr(lane, name, state[name])


def _state_of_sampling(shared: Mapping[str, Any]) -> State:
    plain = {name: copied(value) for name, value in shared.items() if name not in _NOT_PLAIN}
    return {"generator": shared["generator"].get_state(), RACES: shared[RACES].get_state(), "plain": plain}


def _set_sampling(shared: State, state: Mapping[str, Any]) -> None:
    shared |= state["plain"]
    for name in ("generator", RACES):
        shared[name].set_state(state[name])


# Class of a lane -> what gives its state, and what has a new one go on from that. A subclass is another kind.
KINDS: dict[type, tuple[Callable[[Any], State], Callable[[Any, Mapping[str, Any], Any], None]]] = {
    Lane: (_state_of_lane, _go_on_lane),
    ReadyLane: (_state_of_ready, _go_on_ready),
    DeviceLane: (_state_of_tensors, _go_on_tensors),
    MultiAgentLane: (_state_of_agents, _go_on_agents),
}
