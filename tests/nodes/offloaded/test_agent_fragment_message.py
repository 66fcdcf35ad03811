"""A fragment of several agents is the same behind the wire, and what makes no sense of one is refused."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from drawn_agents import Drawn, drawn_settings, fragments_of, made
from fragment_equality import assert_alike
from hypothesis import Phase, given, settings, strategies as st
from property_examples import examples

from rollflow.nodes.offloaded.fragment_message import agents_of_message, message_of
from rollflow.sinks.trainer.messages import UNKNOWN, RolloutDescription, parts_of
from rollflow.stream.data.errors import WireError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment
from rollflow.stream.wire import Fragment, FrameDecoder, decode, encode

DRAWN = Drawn(2, 1, 4, 1, 9, False, 6, 1, True, 0)
Path = tuple[Any, ...]


def description_of(drawn: Drawn) -> RolloutDescription:
    """Return a rollout's description, as a trainer reads it."""
    _, rollout = made(drawn)
    told = replace(UNKNOWN, parts=parts_of(rollout), published=list(rollout.module)).plain()
    rollout.environments.close()
    return RolloutDescription.of(told)


def behind_the_wire(message: Fragment) -> Fragment:
    buffers = encode(message)
    decoder = FrameDecoder(sum(map(len, buffers)))
    [frame] = decoder.feed(b"".join(map(bytes, buffers)))
    came = decode(frame)
    assert isinstance(came, Fragment)
    return came


@cache
def message_here() -> tuple[Fragment, RolloutDescription]:
    """A message with ends, agents that wait and infos, as it comes."""
    description = description_of(DRAWN)
    fragment = next(each for each in fragments_of(DRAWN) if each.clock.ends and each.parts[1].waits.any())
    return behind_the_wire(message_of(1, fragment, description.parts, {})), description


@settings(max_examples=examples(20), phases=[Phase.explicit, Phase.generate])
@given(drawn=drawn_settings)
def test_a_fragment_is_the_same(drawn: Drawn) -> None:
    parts, here = description_of(drawn).parts, fragments_of(drawn)
    messages = [behind_the_wire(message_of(1, fragment, parts, {})) for fragment in here]
    there = [agents_of_message(message, parts) for message in messages]
    assert_alike(there, here)
    for mine, theirs in zip(here, there, strict=True):
        assert (mine.num_steps, mine.module_ids) == (theirs.num_steps, theirs.module_ids)
        assert mine.policy_versions() == theirs.policy_versions()


@pytest.mark.parametrize("is_before", [False, True])
def test_lost_environments_are_known_behind_the_wire(is_before: bool) -> None:
    """Lost before the first step, in another life, the first episodes have number 0, and the lost ones that before."""
    _, rollout = made(DRAWN)
    with rollout:
        here = next(iter(rollout.fragments()))
        if is_before:
            here.begin_after_loss("a crash")
        else:
            lane = rollout.environments.lanes[0]
            lane.lose("a crash")
            here = lane.cut()
    parts = description_of(DRAWN).parts
    message = behind_the_wire(message_of(1, here, parts, {}))
    there = agents_of_message(message, parts)
    assert there.clock.ends == here.clock.ends
    assert [is_lost for *_, is_lost in here.clock.ends[: here.num_envs]] == [True] * here.num_envs
    assert there.losses == here.losses == [(here.clock.first, "a crash")]
    assert here.clock.numbers.tolist() == [-1 if is_before else 0] * here.num_envs
    assert_alike([there], [here])
    if is_before:
        with pytest.raises(WireError, match=r"numbers is .*, expected numbers from 0 to"):
            agents_of_message(replace(message, rest={**message.rest, "losses": []}), parts)


def places_in(value: Any, path: Path = ()) -> Iterator[Path]:
    """The way to every value within a tree of maps and lists."""
    yield path
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places_in(part, (*path, key))


def changed(value: Any, path: Path, new: Any) -> Any:
    """A tree with another value in one place."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, list):
        return [changed(part, tuple(rest), new) if index == key else part for index, part in enumerate(value)]
    return {name: changed(part, tuple(rest), new) if name == key else part for name, part in value.items()}


def read_all(fragment: MultiAgentFragment) -> None:
    """Whatever somebody may read of a fragment."""
    for episode in fragment.episodes():
        episode.get_state()
    for module_id in fragment.policy_versions():
        for chunk in fragment.agent_episodes(module_id):
            chunk.get_state()


NONSENSE = [
    None, -1, 3, 1 << 40, "x", [], {}, [[1, 2, 3]], np.zeros(3), np.zeros((2, 3), np.int64), np.full(6, -1),
]  # fmt: skip


@settings(max_examples=examples(300), phases=[Phase.explicit, Phase.generate], deadline=None)
@given(data=st.data())
def test_whatever_is_told_is_refused_or_can_be_read(data: st.DataObject) -> None:
    message, description = message_here()
    is_in_rest = data.draw(st.booleans())
    told = message.rest if is_in_rest else message.columns
    path = data.draw(st.sampled_from([each for each in places_in(told) if each]))
    old: Any = told
    for key in path:
        old = old[key]
    with np.errstate(invalid="ignore"):  # rows of agents that did not act hold any bits
        values = NONSENSE + (
            [old + 1, old - 1, old[:-1], np.zeros(old.shape, np.int32)] if isinstance(old, np.ndarray) else []
        )
    new = changed(told, path, data.draw(st.sampled_from(values)))
    message = replace(message, rest=new) if is_in_rest else replace(message, columns=new)
    try:
        fragment = agents_of_message(message, description.parts)
    except WireError:
        return
    read_all(fragment)


@pytest.mark.parametrize(
    ("path", "new", "told"),
    [
        (("num_rows",), 7, r"num_rows is 7, expected a whole number from 0 to 6"),
        (("layout", "num_slots"), 3, r"started is .*, expected int64\[3\]"),
        (("layout",), None, "layout is None, expected a map"),
        (("parts",), [], r"rest.parts is \[\], expected a list of 2 parts"),
        (("losses",), [[13, "gone"]], "losses: step|losses are .*, expected only those that ended episodes"),
        (("parts", 0, "waits"), np.ones(3, np.bool_), r"waits is .*, expected bool\[2\]"),
        (("parts", 0, "ends"), np.zeros((0, 3), np.int64), "ends of some chunks are missing"),
        (("parts", 1, "outputs"), {}, r"modules \[.*\] acted, expected some of \[\]"),
    ],
)
def test_what_is_wrong_is_told(path: Path, new: Any, told: str) -> None:
    message, description = message_here()
    with pytest.raises(WireError, match=told):
        agents_of_message(replace(message, rest=changed(message.rest, path, new)), description.parts)


@pytest.mark.parametrize(
    ("path", "new", "told"),
    [
        (("parts", 0, "agents"), [[1]], r"parts\[0\].agents\[0\] is \[1\], expected an id"),
        (("parts", 0, "spaces"), [], r"parts\[0\] is .*, expected agents and spaces"),
        (("to_train",), [1], r"to_train\[0\] is 1, expected a string"),
    ],
)
def test_a_description_that_is_none_is_refused(path: Path, new: Any, told: str) -> None:
    with pytest.raises(WireError, match=told):
        RolloutDescription.of(changed(description_of(DRAWN).plain() | {"to_train": []}, path, new))
