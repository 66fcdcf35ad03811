"""Our SingleAgentEpisode beside Ray's: the same operations must give the same data, or be refused by both."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from both import ask, assert_same_answer
from episodes import OUTPUTS, Pair, Setting, any_setting, arguments, numbers, quads
from gymnasium.spaces import Dict, Tuple
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from property_examples import examples

from rollflow.stream.data.tree import leaves_of, stack_trees as batch

bounds = st.none() | st.integers(-8, 8)
slices = st.builds(slice, bounds, bounds)
stepped = st.builds(slice, bounds, bounds, st.sampled_from([None, 1, 2, 3, -1, -2]))
ints = st.integers(-8, 8)
indices = st.none() | ints | st.lists(ints, max_size=4) | slices | stepped


GETTERS = ["get_observations", "get_actions", "get_rewards", "get_infos", "get_extra_model_outputs"]


def at_odds(where: Any, lookback: int, count: int, arrays: bool, *, left: bool = False, fill: bool = False) -> bool:
    """Return True for a request that the two read differently: see `test_differences`, and the tests of our own.

    `lookback` and `count` items are there, as lists or as arrays; `left` is `neg_index_as_lookback`.
    """
    if isinstance(where, list):
        beyond = arrays and left and not fill and any(index < -lookback for index in where)
        return beyond or (arrays and not where)
    if isinstance(where, int):
        return arrays and left and not fill and where < -lookback
    if where is None:
        return False
    total = lookback + count

    def position(bound: int) -> int:
        return bound + (lookback if bound >= 0 or left else total)

    step = 1 if where.step is None else where.step
    if not total and any(bound is not None and bound < 0 for bound in (where.start, where.stop)):
        return True
    if step < 0:
        return fill or where.start is None or where.stop is None
    start = lookback if where.start is None else position(where.start)
    stop = total if where.stop is None else position(where.stop)
    return fill and (step != 1 or stop < start or (start < 0 and stop > total))


@pytest.mark.parametrize("arrays", [False, True], ids=["lists", "arrays"])
@pytest.mark.parametrize("left", [False, True], ids=["", "neg_index_as_lookback"])
@pytest.mark.parametrize("fill", [None, 99], ids=["", "fill"])
def test_every_slice_of_a_short_episode_is_the_same(arrays: bool, left: bool, fill: int | None) -> None:
    asked = {"neg_index_as_lookback": left, "fill": fill}
    compared = 0
    for lookback, count in itertools.product(range(3), range(4)):
        steps = lookback + count
        data = {"observations": list(range(steps + 1)), "actions": list(range(steps)), "rewards": [0.0] * steps}
        pair = Pair.of({**data, "len_lookback_buffer": lookback}, arrays)
        bounds = [None, *range(-6, 7)]
        for start, stop, step in itertools.product(bounds, bounds, [None, 1, 2, 3, -1, -2]):
            where = slice(start, stop, step)
            if at_odds(where, lookback, count, arrays and count > 0, left=left, fill=fill is not None):
                continue
            pair.check(lambda episode, where=where: episode.get_actions(where, **asked), (lookback, count, where))
            compared += 1
    assert compared > 1900


@given(setting=any_setting, data=st.data(), numpy=st.booleans())
@settings(max_examples=examples(300))
def test_a_constructed_episode_is_the_same(setting: Setting, data: st.DataObject, numpy: bool) -> None:
    Pair.of(data.draw(arguments(setting)), numpy).check_all()


@dataclass(frozen=True)
class Told:
    """What is called of an episode, and how it reads in a failure."""

    name: str
    do: Callable[[Any], Any] = field(repr=False)

    def __call__(self, episode: Any) -> Any:
        return self.do(episode)


def call_of(name: str, *given_: Any, **asked: Any) -> Told:
    """The call of a method with copies of these arguments."""
    return Told(
        f"{name}(*{given_}, **{asked})", lambda e: getattr(e, name)(*copy.deepcopy(given_), **copy.deepcopy(asked))
    )


def draw_request(data: st.DataObject, pair: Pair, setting: Setting) -> tuple[Told, dict[str, Any], bool]:
    """A getter's call, what is asked by name, and whether its data are arrays."""
    name = data.draw(st.sampled_from(GETTERS))
    key = [data.draw(st.sampled_from(setting.outputs or ("unknown",)))] if name == "get_extra_model_outputs" else []
    buffer = getattr(pair.ours, "observations" if name in ("get_observations", "get_infos") else "rewards")
    arrays = buffer.is_numpy and name != "get_infos"
    where, left = data.draw(indices), data.draw(st.booleans())
    asked: dict[str, Any] = {"neg_index_as_lookback": left}
    space_known = name == "get_rewards" or (setting.spaces_given and not key)
    if (space_known or not arrays) and data.draw(st.booleans()):
        asked["fill"] = data.draw(st.integers(0, 1))
    if name in ("get_observations", "get_actions") and setting.spaces_given:
        asked["one_hot_discrete"] = data.draw(st.booleans())
    assume(not at_odds(where, buffer.lookback, len(buffer), arrays, left=left, fill="fill" in asked))
    return call_of(name, *key, where, **asked), asked, arrays


@given(setting=any_setting, data=st.data(), numpy=st.booleans())
@settings(max_examples=examples(1000))
def test_every_getter_gives_the_same(setting: Setting, data: st.DataObject, numpy: bool) -> None:
    pair = Pair.of(data.draw(arguments(setting)), numpy)
    request, asked, arrays = draw_request(data, pair, setting)
    ours, theirs = pair.ask(request)
    if arrays and asked.get("one_hot_discrete") and ours.error is None:
        assume(np.size(leaves_of(ours.value)[0]))
    # What is filled in decides on Ray's dtype.
    assert_same_answer(ours, theirs, request, dtypes="fill" not in asked)


@given(setting=any_setting, data=st.data(), numpy=st.booleans())
@settings(max_examples=examples(1000))
def test_every_setter_does_the_same(setting: Setting, data: st.DataObject, numpy: bool) -> None:
    pair = Pair.of(data.draw(arguments(setting)), numpy)
    request = draw_write(data, pair, setting)
    pair.check(request, request)
    pair.check_all(request)


def draw_write(data: st.DataObject, pair: Pair, setting: Setting) -> Told:
    name, items, buffer = data.draw(
        st.sampled_from(
            [
                ("set_observations", setting.observation.item, pair.ours.observations),
                ("set_actions", setting.action.item, pair.ours.actions),
                ("set_rewards", lambda i: i / 2, pair.ours.rewards),
                *(
                    ("set_extra_model_outputs", OUTPUTS[key], pair.ours.extra_model_outputs[key])
                    for key in pair.ours.extra_model_outputs
                ),
            ]
        )
    )
    key = {}
    if name == "set_extra_model_outputs":
        key = {"key": next(key for key, each in pair.ours.extra_model_outputs.items() if each is buffer)}
    where, left = data.draw(indices), data.draw(st.booleans())
    assume(not at_odds(where, buffer.lookback, len(buffer), buffer.is_numpy, left=left))
    # Ray takes the number of a dict's keys for the number of items.
    assume(not (buffer.is_numpy and isinstance(items(0), dict | tuple)))
    given_: dict[str, Any] = {**key, "at_indices": where, "neg_index_as_lookback": left}
    if isinstance(where, int):
        return call_of(name, **given_, new_data=items(data.draw(numbers)))
    places = ask(lambda: buffer.get(where, neg_index_as_lookback=left))
    assume(places.error is None)
    count = len(places.value) if isinstance(places.value, list) else len(leaves_of(places.value)[0])
    new = [items(data.draw(numbers)) for _ in range(count)]
    if not buffer.is_numpy:
        return call_of(name, **given_, new_data=new)
    assume(new)
    return call_of(name, **given_, new_data=batch(new))


def draw_operation(data: st.DataObject, pair: Pair, setting: Setting) -> Told:
    """The next thing to do; what is done returns the episode to go on with."""
    ours = pair.ours
    nested = any(isinstance(kind.space, Dict | Tuple) for kind in (setting.observation, setting.action))
    nested |= "state_out" in setting.outputs
    name = data.draw(
        st.sampled_from(["step"] * 6 + ["reset", "to_numpy", "cut", "slice", "halves", "state", "write", "flags"])
    )
    # Ray takes the keys of a dict of arrays for its items.
    assume(not (nested and ours.observations.is_numpy and name in ("step", "cut", "slice", "halves")))
    if name == "step":
        assume(ours.is_reset)
        flags = {key: True for key in ("terminated", "truncated") if data.draw(st.integers(0, 9)) == 9}
        step = setting.step(data.draw(quads), **flags)
        return Told(f"add_env_step(**{step})", lambda e: (e.add_env_step(**copy.deepcopy(step)), e)[1])
    if name == "reset":
        item, infos = setting.observation.item(data.draw(numbers)), data.draw(st.sampled_from([None, {"n": 0}]))
        return Told(f"add_env_reset({item}, {infos})", lambda e: (e.add_env_reset(copy.copy(item), infos), e)[1])
    if name == "to_numpy":
        assume(ours.is_reset)
        return Told("to_numpy()", lambda e: e.to_numpy())
    if name == "cut":
        k = data.draw(st.integers(-1, 5))
        return Told(f"cut({k})", lambda e: e.cut(k))
    if name == "slice":
        where, k = data.draw(slices), data.draw(st.none() | st.integers(0, 4))
        assume(ours.is_reset and _is_in_range(where, len(ours)))
        return Told(f"slice({where}, len_lookback_buffer={k})", lambda e: e.slice(where, len_lookback_buffer=k))
    if name == "halves":
        assume(ours.is_reset and not (ours.is_terminated and ours.is_truncated))
        at = data.draw(st.integers(0, len(ours)))

        def joined(episode: Any) -> Any:
            head, tail = episode[:at], episode[at:]
            head.concat_episode(tail)
            return head

        return Told(f"[:{at}] + [{at}:]", joined)
    if name == "state":
        assume(len(ours) or not ours.extra_model_outputs)
        return Told("from_state(get_state())", lambda e: type(e).from_state(e.get_state()))
    if name == "flags":
        return Told("is_truncated = not is_truncated", lambda e: (setattr(e, "is_truncated", not e.is_truncated), e)[1])
    write = draw_write(data, pair, setting)
    return Told(write.name, lambda e: (write(e), e)[1])


def _is_in_range(where: slice, count: int) -> bool:
    """Return True if both bounds lie inside, the first one first: out there, Ray counts `t_started` on and on."""
    start, stop = (0 if where.start is None else where.start), (count if where.stop is None else where.stop)
    if not -count <= start <= count or not -count <= stop <= count:
        return False
    return (start + count if start < 0 else start) <= (stop + count if stop < 0 else stop)


@given(setting=any_setting, data=st.data(), empty=st.booleans())
@settings(max_examples=examples(1000), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_the_same_operations_leave_the_same_episode(setting: Setting, data: st.DataObject, empty: bool) -> None:
    some: dict[str, Any] = {}
    if setting.spaces_given:
        some = {"observation_space": setting.observation.space, "action_space": setting.action.space}
    pair = Pair.of(some if empty else data.draw(arguments(setting)))
    done: list[Told] = []
    for _ in range(data.draw(st.integers(1, 12))):
        operation = draw_operation(data, pair, setting)
        before = pair
        done.append(operation)
        ours, theirs = pair.ask(operation)
        assert (ours.error is None) == (theirs.error is None), f"{done}\n  ours:   {ours}\n  theirs: {theirs}"
        if ours.error is not None:
            break  # what is left behind by a refused operation is each one's own affair
        before.check_all((done, "the episode that it came from"))
        pair = Pair(ours.value, theirs.value)
        pair.check_all(done)
