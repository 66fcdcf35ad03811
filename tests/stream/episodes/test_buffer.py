"""Index rules, by hand and against plain lists. L L | 0 1 2 3 4 stands for a lookback of two, then five items."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from property_examples import examples

from rollflow.stream import ColumnError, EpisodeError, EpisodeIndexError
from rollflow.stream.episodes.buffer import LookbackBuffer

FORMS = ["list", "numpy"]


def letters(form: str) -> LookbackBuffer:
    """Items 10 … 16: 10 and 11 are the lookback, 12 … 16 are current."""
    items = list(range(10, 17))
    return LookbackBuffer(items if form == "list" else np.array(items), 2, name="actions")


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (np.int32(-1), 16),
        (np.array([0, -7]), [12, 10]),
        (slice(-7, -4), [10, 11, 12]),
        (slice(-1, -8, -3), [16, 13, 10]),
    ],
)
def test_indices_are_read_from_the_end_and_into_the_lookback(form: str, indices: Any, expected: Any) -> None:
    assert plain(letters(form).get(indices)) == plain(letters(form)[indices]) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "lookback"), [(5, False), (-8, False), ([0, 5], False), (-3, True), (np.int64(-8), False)]
)
def test_an_index_outside_is_refused_with_what_is_there(form: str, indices: Any, lookback: bool) -> None:
    with pytest.raises(EpisodeIndexError, match=r"of 'actions' is outside -7 … 4 \(lookback 2, length 5\)"):
        letters(form).get(indices, neg_index_as_lookback=lookback)


def test_a_filled_item_has_the_structure_of_the_space() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,), np.float32), "b": gym.spaces.Discrete(3)})
    buffer = LookbackBuffer([{"a": np.ones(2, np.float32), "b": 1}], 0, space)
    item = buffer.get(7, fill=5)
    assert item["a"].tolist() == [5.0, 5.0]
    assert item["a"].dtype == np.float32
    assert (int(item["b"]), item["b"].dtype) == (5, np.int64)


@pytest.mark.parametrize(("fill", "dtype"), [(0, np.uint8), (7.0, np.float64), (0.5, np.float64), (-1, np.int64)])
def test_arrays_without_a_space_are_filled_by_the_value_itself(fill: float, dtype: type) -> None:
    buffer = LookbackBuffer(np.array([[1, 2]], np.uint8))
    assert buffer.get(1, fill=fill).tolist() == [fill, fill]
    several = buffer.get(slice(-2, None), fill=fill)
    assert (several.tolist(), several.dtype) == ([[fill, fill], [1, 2]], dtype)


@pytest.mark.parametrize("form", FORMS)
def test_one_hot_goes_leaf_by_leaf_and_a_filled_item_is_full_of_the_fill(form: str) -> None:
    space = gym.spaces.Dict(
        {
            "d": gym.spaces.Discrete(3, start=5),
            "m": gym.spaces.MultiDiscrete([2, 3]),
            "b": gym.spaces.Box(-9, 9, (2,), np.float32),
        }
    )
    items = [
        {"d": np.int64(7), "m": np.array([1, 0]), "b": np.array([1, 2], np.float32)},
        {"d": np.int64(5), "m": np.array([0, 2]), "b": np.array([3, 4], np.float32)},
    ]
    buffer = LookbackBuffer(items, 1, space)
    if form == "numpy":
        buffer.to_numpy()
    newest = buffer.get(-1, one_hot_discrete=True)
    assert {key: plain(leaf) for key, leaf in newest.items()} == {"d": [1, 0, 0], "m": [1, 0, 0, 0, 1], "b": [3, 4]}
    for filler in (
        buffer.get(1, fill=0, one_hot_discrete=True),
        LookbackBuffer(buffer.get([-2, 1], fill=0, one_hot_discrete=True)).get(-1),
        LookbackBuffer(buffer.get(slice(-2, 2), fill=0, one_hot_discrete=True)).get(-1),
    ):
        assert {key: plain(leaf) for key, leaf in filler.items()} == {"d": [0, 0, 0], "m": [0] * 5, "b": [0, 0]}


def pair() -> dict[str, Any]:
    return {"a": np.zeros(3), "b": np.zeros(3)}


@pytest.mark.parametrize(
    ("data", "new", "at", "told"),
    [
        (np.zeros((3, 2)), np.zeros(3), -1, r"new data is float64\[3\], expected float64\[2\]"),
        (pair(), {"a": 1.0}, -1, "the structure of new data differs: .*missing key"),
        (pair(), [{"a": 1.0, "b": 1.0}, {"a": [1.0, 2.0], "b": 1.0}], [0, 1], "the items can't be stacked into arrays"),
        (pair(), {"a": np.ones(2), "b": np.ones(3)}, [0, 1], "the leaves of new data are not all 2 long"),
        (
            {"a": np.zeros(3, np.uint8)},
            {"a": np.array([1, 2, 300])},
            None,
            r"new data is int64\[\], expected uint8\[\]",
        ),
        *(
            (np.zeros(2, np.int64), unfit, 0, r"new data is float64\[\], expected int64\[\]")
            for unfit in (0.5, np.nan, np.inf, 2.0**63, -(2.0**64))
        ),
        (np.zeros(2, np.int64), [1.0, 2.5], None, r"new data is float64\[\], expected int64\[\]"),
        ({"a": np.zeros(2), "n": np.zeros(2, np.int64)}, {"a": 1.0, "n": 0.5}, 0, "new data is float64"),
        (np.zeros(2, np.uint8), 256, 0, "new data is .*, expected "),
        (np.zeros(2, np.uint8), -1, 0, "new data is .*, expected "),
        (np.zeros(2, np.bool_), 2, 0, "new data is .*, expected "),
        (np.array(["ab", "cd"]), "abc", 0, "new data is .*, expected "),
    ],
)
def test_what_arrays_refuse_changes_nothing(data: Any, new: Any, at: Any, told: str) -> None:
    buffer, before = LookbackBuffer(copy.deepcopy(data), name="observations"), LookbackBuffer(data)
    with pytest.raises(ColumnError, match=f"'observations': {told}"):
        buffer.set(new, at)
    assert buffer == before


def test_arrays_take_what_they_can_hold_in_their_own_dtype() -> None:
    image, reward = LookbackBuffer(np.zeros(2, np.uint8)), LookbackBuffer(np.zeros(2, np.float32))
    image[0] = 255
    reward[0] = 0.1
    image.append(3)
    reward.append(0.5)
    assert (image.get().tolist(), image.data.dtype) == ([255, 0, 3], np.uint8)
    assert (reward.get().tolist(), reward.data.dtype) == ([np.float32(0.1), 0, 0.5], np.float32)


def test_whole_number_floats_replace_integers_also_within_a_tree() -> None:
    buffer = LookbackBuffer({"a": np.zeros((3, 2), np.float32), "n": np.arange(3)})
    buffer.set({"a": np.full(2, 0.5), "n": 7353.0}, 1)
    buffer.set({"a": np.ones((2, 2)), "n": np.array([4.0, 5.0])}, [0, 2])
    assert (buffer.get()["a"].tolist(), buffer.get()["n"].tolist()) == ([[1, 1], [0.5, 0.5], [1, 1]], [4, 7353, 5])
    assert [leaf.dtype for leaf in buffer.data.values()] == [np.float32, np.int64]
    numbers = LookbackBuffer(np.zeros(3, np.int64))
    numbers.set([7.0, 8, np.float32(9.0)])
    assert (numbers.get().tolist(), numbers.data.dtype) == ([7, 8, 9], np.int64)


def test_a_longer_value_makes_the_arrays_wider_when_it_is_appended() -> None:
    names, counts = LookbackBuffer(np.array(["ab"])), LookbackBuffer(np.array([1]))
    small = LookbackBuffer(np.array([1], np.int8))
    names.append("abc")
    counts.append(0.5)
    small.append(300)
    assert (names.get().tolist(), counts.get().tolist()) == (["ab", "abc"], [1, 0.5])
    assert small.get().tolist() == [1, 300]


def test_items_may_be_views_of_what_they_replace() -> None:
    buffer = LookbackBuffer(np.array([[0, 1], [2, 3], [4, 5]]))
    buffer[1:] = buffer[:2]
    assert buffer.get().tolist() == [[0, 1], [0, 1], [2, 3]]
    buffer[:] = buffer[::-1]
    assert buffer.get().tolist() == [[2, 3], [0, 1], [0, 1]]


def test_read_only_arrays_say_what_to_write_to() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    for indices in (0, None):
        with pytest.raises(EpisodeError, match=r"'rewards' is read-only here; write to a copy: from_state"):
            LookbackBuffer(array, name="rewards").set(1.0 if indices == 0 else np.ones(3), indices)


@pytest.mark.parametrize("indices", [1.5, "a", [0.5], np.array([True, False])])
def test_an_index_is_an_int(indices: Any) -> None:
    for use in (letters("list").get, lambda at: letters("list").set([1], at)):
        with pytest.raises(TypeError, match="of 'actions' is no int, no slice and no list of ints"):
            use(indices)


def test_several_places_take_several_items() -> None:
    with pytest.raises(TypeError, match="'actions': expected a list of items, or a tree of arrays; got 5"):
        letters("list").set(5, [0])


@pytest.mark.parametrize("form", FORMS)
def test_length_iteration_and_equality_leave_the_lookback_out(form: str) -> None:
    buffer = letters(form)
    assert len(buffer) == 5
    assert [plain(item) for item in buffer] == [12, 13, 14, 15, 16]
    assert buffer == letters(form)
    assert buffer == LookbackBuffer(plain(buffer.get()) if form == "list" else buffer.get())
    assert buffer != letters(form).get(slice(0, 4))


def test_equality_goes_by_content_in_either_form() -> None:
    listed, arrays = letters("list"), letters("numpy")
    assert listed == arrays
    assert arrays == listed
    assert arrays == [12, 13, 14, 15, 16]
    assert listed == np.array([12, 13, 14, 15, 16])
    assert listed != None  # noqa: E711
    assert LookbackBuffer([{"a": np.zeros(2)}]) == [{"a": np.zeros(2)}]
    assert LookbackBuffer([{"a": np.zeros(2)}]) != [{"b": np.zeros(2)}]
    assert LookbackBuffer([np.nan, "x"]) == [float("nan"), "x"]
    assert LookbackBuffer(np.array([[1.0, np.nan]])) == [[1.0, float("nan")]]


def test_lists_as_items_become_rows() -> None:
    buffer = LookbackBuffer([[0.0, 1.0], [2.0, 3.0]], 1)
    buffer.to_numpy()
    buffer.append([4.0, 5.0])
    buffer[0] = [6.0, 7.0]
    assert buffer.is_numpy
    assert len(buffer) == 2
    assert buffer.get().tolist() == [[6, 7], [4, 5]]


def test_lists_as_items_of_a_tuple_space_become_tuples() -> None:
    space = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(0, 1, (2,), np.float32)])
    buffer = LookbackBuffer([[1, np.zeros(2)], [2, np.ones(2)]], 0, space)
    buffer.to_numpy()
    assert (buffer.get(-1)[0], buffer.get(-1)[1].tolist()) == (2, [1, 1])


@pytest.mark.parametrize("items", [[np.zeros(2), np.zeros(3)], [{"a": 1}, {"b": 1}], [[1, 2], [3]]])
def test_items_that_differ_in_shape_stay_a_list(items: list[Any]) -> None:
    buffer = LookbackBuffer(items, name="observations")
    with pytest.raises(ColumnError, match="'observations': the items can't be stacked into arrays"):
        buffer.to_numpy()
    assert buffer.data is items


def test_a_slice_of_arrays_is_a_view() -> None:
    array = np.arange(7)
    assert np.shares_memory(LookbackBuffer(array, 2).get(slice(1, 3)), array)


indices_drawn = st.one_of(
    st.none(),
    st.integers(-14, 14),
    st.lists(st.integers(-14, 14), max_size=5),
    st.builds(
        slice,
        st.none() | st.integers(-14, 14),
        st.none() | st.integers(-14, 14),
        st.none() | st.integers(-4, 4).filter(bool),
    ),
)


nested_space = gym.spaces.Dict(
    {"n": gym.spaces.Discrete(10), "v": gym.spaces.Box(-9, 9, (2,), np.int64)}  # v is [n, -n]
)


class Form(NamedTuple):
    """A way to store the numbers of a plain list, and to read them back."""

    buffer: Callable[[list[int], int], LookbackBuffer]
    new_data: Callable[[list[int]], Any]
    number: Callable[[Any], int]


def nested(number: int) -> dict[str, Any]:
    return {"n": number, "v": np.array([number, -number])}


def nested_arrays(numbers: list[int]) -> dict[str, Any]:
    array = np.array(numbers, np.int64)
    return {"n": array, "v": np.stack([array, -array], axis=-1)}


def number_of(item: dict[str, Any]) -> int:
    assert item["v"].tolist() == [item["n"], -item["n"]]
    return int(item["n"])


model_forms = {
    "list": Form(lambda numbers, lookback: LookbackBuffer(list(numbers), lookback), list, int),
    "numpy": Form(lambda numbers, lookback: LookbackBuffer(np.array(numbers), lookback), np.array, int),
    "nested list": Form(
        lambda numbers, lookback: LookbackBuffer([nested(number) for number in numbers], lookback, nested_space),
        lambda numbers: [nested(number) for number in numbers],
        number_of,
    ),
    "nested numpy": Form(
        lambda numbers, lookback: LookbackBuffer(nested_arrays(numbers), lookback, nested_space),
        nested_arrays,
        number_of,
    ),
}
some = {"numbers": st.lists(st.integers(1, 9), min_size=1, max_size=9), "lookback": st.integers(0, 9)}
some |= {"indices": indices_drawn, "as_lookback": st.booleans(), "form": st.sampled_from(list(model_forms.values()))}


def items_of(several: Any) -> list[Any]:
    """Items of a list, or rows of a tree of arrays."""
    return list(LookbackBuffer(several))


@settings(max_examples=examples(400))
@given(**some, fills=st.booleans())
def test_getting_agrees_with_plain_lists(
    numbers: list[int], lookback: int, indices: Any, as_lookback: bool, form: Form, fills: bool
) -> None:
    lookback = min(lookback, len(numbers))
    buffer = form.buffer(numbers, lookback)
    there = dict(enumerate(numbers, start=-lookback))
    wanted = places(-lookback, len(numbers) - lookback, indices, as_lookback, fills)
    if not fills and not set(wanted) <= set(there):
        with pytest.raises(EpisodeIndexError):
            buffer.get(indices, neg_index_as_lookback=as_lookback)
        return
    got = buffer.get(indices, neg_index_as_lookback=as_lookback, fill=0 if fills else None)
    expected = [there.get(place, 0) for place in wanted]
    assert [form.number(item) for item in ([got] if isinstance(indices, int) else items_of(got))] == expected


@settings(max_examples=examples(400))
@given(**some, surplus=st.sampled_from([0, 0, 0, 1]))
def test_setting_agrees_with_plain_lists(
    numbers: list[int], lookback: int, indices: Any, as_lookback: bool, form: Form, surplus: int
) -> None:
    lookback = min(lookback, len(numbers))
    buffer = form.buffer(numbers, lookback)
    there = dict(enumerate(numbers, start=-lookback))
    wanted = places(-lookback, len(numbers) - lookback, indices, as_lookback, fills=False)
    new = [20 + i for i in range(len(wanted) + surplus)]
    if isinstance(indices, int):
        new, new_data = new[:1], form.new_data([20])
        new_data = items_of(new_data)[0]
    else:
        new_data = form.new_data(new)
    if set(wanted) <= set(there) and len(new) == len(wanted):
        buffer.set(new_data, indices, neg_index_as_lookback=as_lookback)
        there.update(zip(wanted, new, strict=True))
    else:
        with pytest.raises(EpisodeIndexError):
            buffer.set(new_data, indices, neg_index_as_lookback=as_lookback)
    kept = items_of(buffer.items(slice(0, buffer.total())))
    assert [form.number(item) for item in kept] == list(there.values())


def places(first: int, length: int, indices: Any, as_lookback: bool, fills: bool) -> list[int]:
    """The index rules in the plainest words. Place 0 is the first current item, `first` the oldest of the lookback."""

    def place(index: int) -> int:
        return index if index >= 0 or as_lookback else length + index

    if indices is None:
        return list(range(length))
    if isinstance(indices, int):
        return [place(indices)]
    if isinstance(indices, list):
        return [place(index) for index in indices]
    step = indices.step or 1
    start = (0 if step > 0 else length - 1) if indices.start is None else place(indices.start)
    stop = (length if step > 0 else -1) if indices.stop is None else place(indices.stop)
    if fills and step == 1 and stop < start and (stop >= length or start <= first):
        start, stop = stop, start
    if not fills:  # clipped as Python clips
        low, high = (first, length) if step > 0 else (first - 1, length - 1)
        start, stop = min(max(start, low), high), min(max(stop, low), high)
    return list(range(start, stop, step))
