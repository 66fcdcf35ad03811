"""The state of a lane that stands at the gate before the forward pass, for another lane to go on from."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollflow.nodes.connectors.module_to_env.action_pieces import RACES
from rollflow.nodes.device.lane import DeviceLane
from rollflow.nodes.offloaded.fragment_message import completed, described, fragment_of, message_of_lane, sent_columns
from rollflow.stream import wire
from rollflow.stream.data.errors import CheckpointError
from rollflow.stream.data.infos import SlotInfos, copied
from rollflow.stream.fragments.lane import Lane
from rollflow.stream.fragments.ready_lane import ReadyLane, SlotAnswers

State = dict[str, Any]
_OF_LANE = "num_steps", "vector_steps", "policy_version"


def check_lanes(lanes: Sequence[Any]) -> None:
    """Raise CheckpointError for a lane whose state can't be saved."""
    if wrong := next((type(lane).__name__ for lane in lanes if type(lane) not in KINDS), None):
        raise CheckpointError(
            f"a run with a {wrong} can't be saved: expected environments of one agent that step in lock step, here or "
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


def plain_fragment(fragment: Any, lane: Any) -> State:
    """A lane's fragment as plain values and arrays. All copies."""
    if fragment.device is not None:
        return {"lane": fragment.lane, "tensors": copied(fragment.get_state(lane.observation_spaces))}
    message = message_of_lane(lane, 0, fragment, {})
    return {
        "lane": fragment.lane,
        "columns": copied(message.columns),
        "rest": copied(plain_rest(message.rest, fragment.infos)),
    }


def fragment_in(plain: Mapping[str, Any], lane: Any) -> Any:
    """The fragment that `plain_fragment` was given."""
    if "tensors" in plain:
        return lane.fragment_in(plain["tensors"])
    message = wire.Fragment(plain["lane"], 0, plain["columns"], rest_of(plain["rest"]))
    return fragment_of(message, lane.layout, lane.observation_spaces)


# Lanes of one agent


def _state_of_lane(lane: Lane, spare: int = 0) -> State:
    part = copy.copy(lane.fragment)
    part.num_rows = lane.num_rows
    part.observation_space = lane.observation_space
    rest = described(part, lane.observation_spaces)
    return {
        "columns": copied(sent_columns(part, spare)),
        "rest": plain_rest(rest, part.infos[: part.last_row + 1]),
        "starts": lane.episode_start.copy(),
        "numbers": lane.episode_number.copy(),
        "ended": np.flatnonzero(lane.dead),
        "data": [[*key, data] for key, data in copy.deepcopy(lane.custom_data).items()],
        "batch": copied(lane.batch),
        **_counts_and_sampling(lane),
    }


def _go_on_lane(lane: Lane, state: Mapping[str, Any], acting: Any) -> None:
    lane.observation_spaces = (lane.observation_space, *acting.env_to_module.observation_spaces)
    rest = rest_of(state["rest"])
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


# Parts of a state


def plain_rest(rest: Mapping[str, Any], infos: Sequence[Mapping[str, Any]]) -> State:
    """What is `described` of a fragment, with its infos and those of ended episodes in plain form."""
    return _with_infos({**rest, "infos": infos}, _plain_infos)


def rest_of(plain: Mapping[str, Any]) -> State:
    """What `plain_rest` was given, with the infos in it."""
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
    shared = lane.shared_data
    plain = {name: value for name, value in shared.items() if isinstance(value, bool | int | float | str)}
    sampling = {"generator": shared["generator"].get_state(), RACES: shared[RACES].get_state(), "plain": plain}
    return {"sampling": sampling, **{name: getattr(lane, name) for name in _OF_LANE}}


def _set_counts_and_sampling(lane: Any, state: Mapping[str, Any]) -> None:
    shared, sampling = lane.shared_data, state["sampling"]
    shared |= sampling["plain"]
    for name in ("generator", RACES):
        shared[name].set_state(sampling[name])
    for name in _OF_LANE:
        setattr(lane, name, state[name])


# Class of a lane -> what gives its state, and what has a new one go on from that. A subclass is another kind.
KINDS: dict[type, tuple[Callable[[Any], State], Callable[[Any, Mapping[str, Any], Any], None]]] = {
    Lane: (_state_of_lane, _go_on_lane),
    ReadyLane: (_state_of_ready, _go_on_ready),
    DeviceLane: (_state_of_tensors, _go_on_tensors),
}
