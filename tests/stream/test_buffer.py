"""Index rules, by hand and against plain lists. L L | 0 1 2 3 4 stands for a lookback of two, then five items."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.stream import ColumnError, EpisodeIndexError, LookbackBuffer

FORMS = ["list", "numpy"]


def letters(form: str, space: gym.Space[Any] | None = None) -> LookbackBuffer:
    """Items 10 … 16: 10 and 11 are the lookback, 12 … 16 are current."""
    items = list(range(10, 17))
    return LookbackBuffer(items if form == "list" else np.array(items), 2, space, name="actions")


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (None, [12, 13, 14, 15, 16]),
        (0, 12),
        (4, 16),
        (-1, 16),
        (-5, 12),
        (-6, 11),
        (-7, 10),
        ([0, -1, -7, 2], [12, 16, 10, 14]),
        ([3], [15]),
        ([], []),
        (slice(None, None), [12, 13, 14, 15, 16]),
        (slice(1, 3), [13, 14]),
        (slice(-2, None), [15, 16]),
        (slice(-7, -4), [10, 11, 12]),
        (slice(None, 2), [12, 13]),
        (slice(None, None, 2), [12, 14, 16]),
        (slice(None, None, -1), [16, 15, 14, 13, 12]),
        (slice(-1, -8, -3), [16, 13, 10]),
        (slice(3, -100, -1), [15, 14, 13, 12, 11, 10]),
        (slice(-100, 1), [10, 11, 12]),
        (slice(3, 100), [15, 16]),
        (slice(7, 9), []),
        (slice(3, 1), []),
    ],
)
def test_indices_are_read_from_the_end_and_into_the_lookback(form: str, indices: Any, expected: Any) -> None:
    assert plain(letters(form).get(indices)) == expected
    assert plain(letters(form)[indices]) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (-1, 11),
        (-2, 10),
        (0, 12),
        ([-2, 0, -1], [10, 12, 11]),
        (slice(-2, 2), [10, 11, 12, 13]),
        (slice(-1, None), [11, 12, 13, 14, 15, 16]),
        (slice(1, -3, -1), [13, 12, 11, 10]),
    ],
)
def test_negative_indices_may_mean_the_lookback(form: str, indices: Any, expected: Any) -> None:
    assert plain(letters(form).get(indices, neg_index_as_lookback=True)) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "lookback", "expected"),
    [
        (5, False, 0),
        (-8, False, 0),
        (2, False, 14),
        ([-9, 1, 7], False, [0, 13, 0]),
        (slice(-9, -5), False, [0, 0, 10, 11]),
        (slice(3, 8), False, [15, 16, 0, 0, 0]),
        (slice(6, 9), False, [0, 0, 0]),
        (slice(-12, -9), False, [0, 0, 0]),
        (slice(9, 6), False, [0, 0, 0]),
        (slice(-4, 1), True, [0, 0, 10, 11, 12]),
        (slice(None, None), False, [12, 13, 14, 15, 16]),
    ],
)
def test_fill_stands_in_for_what_lies_outside(form: str, indices: Any, lookback: bool, expected: Any) -> None:
    assert plain(letters(form).get(indices, neg_index_as_lookback=lookback, fill=0)) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "lookback"), [(5, False), (-8, False), ([0, 5], False), (-3, True), (np.int64(-8), False)]
)
def test_an_index_outside_is_refused_with_what_is_there(form: str, indices: Any, lookback: bool) -> None:
    with pytest.raises(EpisodeIndexError, match=r"of 'actions' is outside -7 … 4 \(lookback 2, length 5\)"):
        letters(form).get(indices, neg_index_as_lookback=lookback)


@pytest.mark.parametrize("form", FORMS)
def test_numpy_integers_are_indices(form: str) -> None:
    assert plain(letters(form).get(np.int32(-1))) == 16
    assert plain(letters(form).get(np.array([0, -7]))) == [12, 10]


def test_a_filled_item_has_the_structure_of_the_space() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,), np.float32), "b": gym.spaces.Discrete(3)})
    buffer = LookbackBuffer([{"a": np.ones(2, np.float32), "b": 1}], 0, space)
    item = buffer.get(7, fill=5)
    assert item["a"].tolist() == [5.0, 5.0]
    assert item["a"].dtype == np.float32
    assert (int(item["b"]), item["b"].dtype) == (5, np.int64)


@pytest.mark.parametrize("form", FORMS)
def test_discrete_items_may_come_as_one_hot_vectors(form: str) -> None:
    data: Any = [2, 0, 1]
    buffer = LookbackBuffer(data if form == "list" else np.array(data), 1, gym.spaces.Discrete(3))
    assert plain(buffer.get(0, one_hot_discrete=True)) == [1.0, 0.0, 0.0]
    assert np.asarray(buffer.get(one_hot_discrete=True)).tolist() == [[1, 0, 0], [0, 1, 0]]
    filled = buffer.get([-4, -3], fill=0, one_hot_discrete=True)
    assert np.asarray(filled).tolist() == [[0, 0, 0], [0, 0, 1]]


def test_one_hot_without_a_space_is_refused() -> None:
    with pytest.raises(ValueError, match="one_hot_discrete on 'actions' needs a space"):
        letters("list").get(0, one_hot_discrete=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "lookback", "new", "expected"),
    [
        (0, False, 99, [10, 11, 99, 13, 14, 15, 16]),
        (-7, False, 99, [99, 11, 12, 13, 14, 15, 16]),
        (-1, True, 99, [10, 99, 12, 13, 14, 15, 16]),
        (None, False, [1, 2, 3, 4, 5], [10, 11, 1, 2, 3, 4, 5]),
        ([0, -1], False, [1, 2], [10, 11, 1, 13, 14, 15, 2]),
        (slice(1, 3), False, [1, 2], [10, 11, 12, 1, 2, 15, 16]),
        (slice(-2, 1), True, [1, 2, 3], [1, 2, 3, 13, 14, 15, 16]),
        (slice(None, None, -2), False, [1, 2, 3], [10, 11, 3, 13, 2, 15, 1]),
    ],
)
def test_setters_read_indices_as_getters_do(form: str, indices: Any, lookback: bool, new: Any, expected: Any) -> None:
    buffer = letters(form)
    given = np.array(new) if form == "numpy" and isinstance(new, list) else new
    buffer.set(given, indices, neg_index_as_lookback=lookback)
    assert plain(buffer.items(slice(0, 7))) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("indices", "new", "told"),
    [
        (slice(0, 2), [1], "1 new items for 2 places"),
        (None, [1, 2, 3, 4, 5, 6], "6 new items for 5 places"),
        ([0], [1, 2], "2 new items for 1 places"),
        (5, 1, "index 5 of 'actions' is outside -7 … 4"),
        (slice(3, 7), [1, 2, 3, 4], "4 new items for 2 places"),
    ],
)
def test_setters_refuse_what_does_not_fit(form: str, indices: Any, new: Any, told: str) -> None:
    buffer = letters(form)
    with pytest.raises(EpisodeIndexError, match=told):
        buffer.set(new, indices)
    assert plain(buffer.items(slice(0, 7))) == list(range(10, 17))


def test_an_item_of_another_shape_is_refused_by_arrays() -> None:
    buffer = LookbackBuffer(np.zeros((3, 2)), 0, name="observations")
    with pytest.raises(ColumnError, match=r"'observations': new data is float64\[3\], expected float64\[2\]"):
        buffer.set(np.zeros(3), -1)


@pytest.mark.parametrize("form", FORMS)
def test_items_may_be_assigned_by_index(form: str) -> None:
    buffer = letters(form)
    buffer[0] = 1
    buffer[-2:] = [2, 3]
    assert plain(buffer.get()) == [1, 13, 14, 2, 3]


@pytest.mark.parametrize("form", FORMS)
def test_length_iteration_and_equality_leave_the_lookback_out(form: str) -> None:
    buffer = letters(form)
    assert len(buffer) == 5
    assert [plain(item) for item in buffer] == [12, 13, 14, 15, 16]
    assert buffer == letters(form)
    assert buffer == LookbackBuffer(plain(buffer.get()) if form == "list" else buffer.get())
    assert buffer != letters(form).get(slice(0, 4))


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


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(0, 9),
    indices_drawn,
    st.booleans(),
    st.none() | st.just(0),
    st.sampled_from(FORMS),
)
def test_getting_agrees_with_plain_lists(
    items: list[int], lookback: int, indices: Any, as_lookback: bool, fill: int | None, form: str
) -> None:
    lookback = min(lookback, len(items))
    buffer = LookbackBuffer(items if form == "list" else np.array(items), lookback)
    expected = naive(items, lookback, indices, as_lookback, fill)
    if expected is IndexError:
        with pytest.raises(EpisodeIndexError):
            buffer.get(indices, neg_index_as_lookback=as_lookback, fill=fill)
    else:
        assert plain(buffer.get(indices, neg_index_as_lookback=as_lookback, fill=fill)) == expected


def naive(items: list[int], lookback: int, indices: Any, as_lookback: bool, fill: int | None) -> Any:
    """The index rules in the plainest words: a dict from position to item, and one position at a time."""
    there = dict(enumerate(items, start=-lookback))  # position 0 is the first current item
    length = len(items) - lookback

    def place(index: int) -> int:
        return index if index >= 0 or as_lookback else length + index

    if indices is None:
        return items[lookback:]
    if isinstance(indices, int):
        found = there.get(place(indices), fill)
        return IndexError if found is None else found
    if isinstance(indices, list):
        several = [there.get(place(index), fill) for index in indices]
        return IndexError if None in several else several
    step = indices.step or 1
    start = (0 if step > 0 else length - 1) if indices.start is None else place(indices.start)
    stop = (length if step > 0 else -1) if indices.stop is None else place(indices.stop)
    if fill is not None and step == 1 and stop < start and (stop >= length or start <= -lookback):
        start, stop = stop, start
    if fill is None:  # clipped as Python clips
        low, high = (-lookback, length) if step > 0 else (-lookback - 1, length - 1)
        start, stop = min(max(start, low), high), min(max(stop, low), high)
    return [there.get(position, fill) for position in range(start, stop, step)]
