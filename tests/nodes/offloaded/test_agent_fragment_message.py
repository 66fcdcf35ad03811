"""A fragment of several agents is the same behind the wire, and what makes no sense of one is refused."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from drawn_agents import Drawn, drawn_settings, fragments_of, made
from fragment_equality import assert_alike
from hypothesis import Phase, given, settings
from property_examples import examples

from rollflow.nodes.offloaded.fragment_message import agents_of_message, message_of
from rollflow.sinks.trainer.messages import UNKNOWN, RolloutDescription, parts_of
from rollflow.stream.data.errors import WireError
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


def changed(value: Any, path: Path, new: Any) -> Any:
    """A tree with another value in one place."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, list):
        return [changed(part, tuple(rest), new) if index == key else part for index, part in enumerate(value)]
    return {name: changed(part, tuple(rest), new) if name == key else part for name, part in value.items()}


@pytest.mark.parametrize(
    ("path", "new", "told"),
    [
        (("layout", "num_slots"), 3, r"started is .*, expected int64\[3\]"),
        (("layout",), None, "layout is None, expected a map"),
        (("parts",), [], "it is no fragment of agents: IndexError"),
        (("parts", 0, "waits"), np.ones(3, np.bool_), r"waits is .*, expected bool\[2\]"),
    ],
)
def test_what_is_wrong_is_told(path: Path, new: Any, told: str) -> None:
    message, description = message_here()
    with pytest.raises(WireError, match=told):
        agents_of_message(replace(message, rest=changed(message.rest, path, new)), description.parts)
