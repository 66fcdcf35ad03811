"""Statistics that merge into those of a single pass, whatever the order, and a filter that uses them."""

import copy
import itertools
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, given, strategies as st

from rollflow import MeanStdFilter, Rollout, SingleAgentEpisode
from rollflow.nodes import ConnectorPipelineV2, LambdaConnector
from rollflow.nodes.connectors.env_to_module.observation_pieces import RunningStatistics
from rollflow.stream import ConnectorError
from rollflow.stream.data.tree import equal_trees

NESTED = spaces.Dict({"at": spaces.Box(-1e6, 1e6, (2,), np.float64), "kind": spaces.Discrete(3)})
FLAT = spaces.Box(-np.inf, np.inf, (2,), np.float64)


def filtered(piece: MeanStdFilter, rows: Any) -> list[Any]:
    """Run a filter over observations that come one step at a time."""
    return [filtered_together(piece, [row])[0] for row in rows]


def filtered_together(piece: MeanStdFilter, rows: Any) -> list[Any]:
    items = [row if isinstance(row, dict) else np.asarray(row) for row in rows]
    episodes = [SingleAgentEpisode(observations=[item], len_lookback_buffer=0) for item in items]
    piece(rl_module=None, batch={}, episodes=episodes)
    return [episode.get_observations(-1) for episode in episodes]


def fed(rows: Any, space: gym.Space[Any] = FLAT) -> MeanStdFilter:
    piece = MeanStdFilter(space)
    if len(rows):
        filtered_together(piece, rows)
    return piece


def restored(state: dict[str, Any]) -> MeanStdFilter:
    piece = MeanStdFilter(FLAT)
    piece.set_state(state)
    return piece


def test_every_observation_is_counted_before_it_is_filtered() -> None:
    piece = MeanStdFilter(spaces.Box(-np.inf, np.inf, (1,), np.float32))
    out = filtered(piece, [np.array([1.0]), np.array([3.0]), np.array([8.0])])
    # Means 1, 2, 4; sums of squares 0, 2, 26; sample deviations 0, √2, √13.
    assert [item.tolist() for item in out] == [[0.0], [pytest.approx(1 / 2**0.5)], [pytest.approx(4 / 13**0.5)]]
    assert all(item.dtype == np.float32 for item in out)
    assert (piece.count, piece.mean.tolist()) == (3, [4.0])
    assert piece.deviation.tolist() == [pytest.approx(13**0.5)]


def test_slots_of_one_step_are_counted_one_after_the_other() -> None:
    rows = np.random.default_rng(0).normal(size=(7, 2))
    one_by_one, together = MeanStdFilter(FLAT), MeanStdFilter(FLAT)
    np.testing.assert_allclose(filtered(one_by_one, rows), filtered_together(together, rows), rtol=1e-6, atol=1e-7)


def test_boxes_alone_change_and_the_space_says_so() -> None:
    piece = MeanStdFilter(NESTED, clip_by_value=2.0)
    out = filtered_together(piece, [{"at": np.array([1.0, 2.0]), "kind": 2}, {"at": np.array([3.0, 2.0]), "kind": 1}])
    assert [item["kind"] for item in out] == [2, 1]
    assert out[0]["at"].tolist() == [0.0, 0.0]
    at = piece.observation_space["at"]
    assert (at.low.tolist(), at.high.tolist(), at.dtype) == ([-2.0, -2.0], [2.0, 2.0], np.float32)
    assert piece.observation_space["kind"] == NESTED["kind"]


def test_outliers_are_clipped() -> None:
    piece = MeanStdFilter(FLAT, clip_by_value=0.5)
    assert filtered(piece, [[0.0, 0.0], [1.0, -1.0]])[1].tolist() == [0.5, -0.5]


def test_what_is_switched_off_is_not_done() -> None:
    rows = [[0.0, 0.0], [2.0, 4.0]]
    assert filtered(MeanStdFilter(FLAT, de_std_to_one=False), rows)[1].tolist() == [1.0, 2.0]
    assert filtered(MeanStdFilter(FLAT, de_mean_to_zero=False), rows)[1].tolist() == pytest.approx([2**0.5, 2**0.5])
    still = MeanStdFilter(FLAT, update_stats=False)
    assert np.array_equal(filtered(still, rows), rows)
    assert (still.count, still.get_state()) == (0, {})


def test_what_has_not_varied_yet_is_not_divided() -> None:
    piece = MeanStdFilter(FLAT, de_mean_to_zero=False)
    assert np.array_equal(filtered(piece, [[2.0, 3.0], [2.0, 3.0]]), [[2.0, 3.0], [2.0, 3.0]])


# Merging

ROWS = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), max_size=12)


@given(parts=st.lists(ROWS, min_size=1, max_size=5), data=st.data())
def test_merged_states_are_those_of_a_single_pass(parts: list[Any], data: st.DataObject) -> None:
    states = [fed(part).get_state() for part in parts]
    # In any order, some of them more than once, and some merged with others before.
    order = data.draw(st.permutations(range(len(states))))
    given_states = [states[i] for i in order] + [states[i] for i in data.draw(st.lists(st.sampled_from(order)))]
    split = data.draw(st.integers(0, len(given_states)))
    early = MeanStdFilter(FLAT).merge_states(given_states[:split])
    merged = restored(MeanStdFilter(FLAT).merge_states([early, *given_states[split:], early]))
    rows = np.array([row for part in parts for row in part]).reshape(-1, 2)
    assert merged.count == len(rows)
    if len(rows):
        scale = max(1.0, float(np.abs(rows).max()))
        np.testing.assert_allclose(merged.mean, rows.mean(0), rtol=1e-9, atol=1e-9 * scale)
    if len(rows) > 1:
        np.testing.assert_allclose(merged.deviation**2, rows.var(0, ddof=1), rtol=1e-9, atol=1e-9 * scale**2)


@given(steps=st.lists(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=3, max_size=3), min_size=1))
def test_rows_of_a_tensor_that_do_not_count_are_as_if_they_were_not_there(steps: Any) -> None:
    assume(any(counts for _, counts in steps[0]))  # as after a reset
    alone, masked = RunningStatistics(1), RunningStatistics(1)
    for step in steps:
        rows, counted = np.array([[row] for row, _ in step]), np.array([counts for _, counts in step])
        made = masked.push_tensors(torch.from_numpy(rows), torch.from_numpy(counted))
        if counted.any():
            for mine, theirs in zip(made, alone.push(rows[counted]), strict=True):
                np.testing.assert_allclose(mine[torch.from_numpy(counted)], theirs, rtol=1e-15)  # torch's square roots
    assert equal_trees(masked.get_state(), alone.get_state())


def test_the_order_of_merging_shows_in_no_digit() -> None:
    rows = np.random.default_rng(1).normal(1e3, 1.0, (4, 9, 2))
    states = [fed(part).get_state() for part in rows]
    means = set()
    for order in itertools.permutations(states):
        piece = restored(MeanStdFilter(FLAT).merge_states(list(order)))
        means.add((piece.mean.tobytes(), piece.deviation.tobytes()))
    assert len(means) == 1


def test_a_variance_far_from_zero_keeps_its_digits() -> None:
    rows = 1e8 + np.random.default_rng(2).normal(size=(3000, 2))
    piece = MeanStdFilter(FLAT)
    for part in np.split(rows, 100):
        filtered_together(piece, part)
    np.testing.assert_allclose(piece.deviation, rows.std(0, ddof=1), rtol=1e-9)


def test_merging_takes_in_what_the_filter_itself_has_counted() -> None:
    mine, other = fed([[1.0, 1.0]] * 3), fed([[5.0, 5.0]])
    merged = restored(mine.merge_states([other.get_state(), mine.get_state()]))
    assert (merged.count, merged.mean.tolist()) == (4, [2.0, 2.0])
    alone = ConnectorPipelineV2(connectors=[mine])
    for resulting in (mine.merge_states([]), alone.merge_states([{}])["MeanStdFilter"]):
        merged.set_state(resulting)
        assert (merged.count, merged.mean.tolist()) == (3, [1.0, 1.0])


def test_rounds_of_merging_count_every_observation_once() -> None:
    filters = [MeanStdFilter(FLAT) for _ in range(3)]
    random = np.random.default_rng(3)
    seen: list[Any] = []

    def count(piece: MeanStdFilter) -> None:
        rows = random.normal(size=(int(random.integers(1, 6)), 2))
        seen.extend(rows)
        filtered_together(piece, rows)

    for number in range(5):
        for piece in filters:
            count(piece)
        filters.append(copy.deepcopy(filters[number]))  # which counts for itself from now on
        count(filters[number])
        count(filters[-1])
        merged = filters[0].merge_states([piece.get_state() for piece in filters])
        for piece in filters:
            piece.set_state(merged)
            assert piece.count == len(seen)
            np.testing.assert_allclose(piece.mean, np.mean(seen, 0), rtol=1e-9)
            np.testing.assert_allclose(piece.deviation, np.std(seen, 0, ddof=1), rtol=1e-9)
        before = len(seen)
        count(filters[1])  # after it has given its state
        filters[1].set_state(merged)
        assert filters[1].count == len(seen) > before
        filters[2] = restored(merged)  # goes on from the state of one that is no more


def test_a_reset_filter_has_seen_nothing() -> None:
    piece = fed([[1.0, 1.0]])
    state = piece.get_state()
    piece.reset_state()
    assert (piece.count, piece.get_state()) == (0, {})
    piece.set_state(state)
    assert piece.count == 1


def test_a_state_is_a_snapshot_that_can_be_sent() -> None:
    piece = fed([[1.0, 2.0]])
    state = piece.get_state()
    filtered_together(piece, [[5.0, 5.0]])
    packed = msgpack.packb(state, default=lambda array: array.tolist())
    other = restored(msgpack.unpackb(packed))
    assert (other.count, other.mean.tolist()) == (1, [1.0, 2.0])


@pytest.mark.parametrize("autoreset", [False, True])
def test_two_rollouts_count_every_observation_that_their_environments_made(autoreset: bool) -> None:
    seen: list[Any] = []

    class Recording(gym.ObservationWrapper[Any, Any, Any]):
        def observation(self, observation: Any) -> Any:
            seen.append(np.array(observation, np.float64))
            return observation

    filters = [MeanStdFilter(), MeanStdFilter()]
    for seed, piece in enumerate(filters):
        make = [lambda: Recording(gym.make("CartPole-v1"))] * 3
        mode = gym.vector.AutoresetMode.NEXT_STEP if autoreset else gym.vector.AutoresetMode.SAME_STEP
        env = gym.vector.SyncVectorEnv(make, autoreset_mode=mode)
        options = {"seed": seed, "fragment_length": 50, "num_fragments": 3}
        with Rollout(env, env_to_module_connector=lambda env, piece=piece: piece, **options) as rollout:
            steps = sum(fragment.num_steps for fragment in rollout.fragments())
            assert steps == rollout.num_steps
    merged = filters[0].merge_states([piece.get_state() for piece in reversed(filters)])
    filters[1].set_state(merged)
    assert filters[1].count == len(seen)
    np.testing.assert_allclose(filters[1].mean, np.mean(seen, 0), rtol=1e-9)
    np.testing.assert_allclose(filters[1].deviation, np.std(seen, 0, ddof=1), rtol=1e-9)


# What is refused


def test_a_state_for_another_space_is_refused() -> None:
    state = fed([[1.0, 1.0]]).get_state()
    other = MeanStdFilter(spaces.Box(0, 1, (3,)))
    with pytest.raises(ConnectorError, match=r"a state of a filter for observations in Box\(-inf.*, expected Box\(0"):
        other.set_state(state)
    with pytest.raises(ConnectorError, match=r"MeanStdFilter: a state of a filter for observations in Box\(-inf"):
        other.merge_states([fed([[1.0, 1.0, 1.0]], spaces.Box(0, 1, (3,))).get_state(), state])


def test_a_state_of_another_piece_is_refused() -> None:
    with pytest.raises(ConnectorError, match=r"MeanStdFilter: a state with \['frames'\], expected 'space' and"):
        MeanStdFilter(FLAT).set_state({"frames": 3})


def test_a_space_without_numbers_and_a_clip_that_leaves_nothing_are_refused() -> None:
    with pytest.raises(ConnectorError, match=r"MeanStdFilter can't filter observations in Text"):
        MeanStdFilter(spaces.Text(5)).observation_space  # noqa: B018
    with pytest.raises(ValueError, match="clip_by_value is 0, expected None, or a number above 0"):
        MeanStdFilter(FLAT, clip_by_value=0)
    with pytest.raises(ConnectorError, match="no input observation space"):
        filtered(MeanStdFilter(), [[1.0]])
    with pytest.raises(ConnectorError, match="observations have 2 parts, expected 1 as Box"):
        filtered(MeanStdFilter(FLAT), [{"at": np.zeros(2), "kind": 1}])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda source: {**source, "mean": np.zeros(3)}, r"mean of shape \[3\], expected \[2\]"),
        (lambda source: {"count": 3}, "'sources' are no statistics of its: KeyError"),
        (lambda source: 3, "'sources' are no statistics of its"),
    ],
)
def test_a_state_that_is_none_is_refused(change: Any, told: str) -> None:
    piece = fed([[1.0, 1.0]])
    state = piece.get_state()
    state["sources"] = {source: change(each) for source, each in state["sources"].items()}
    with pytest.raises(ConnectorError, match=told):
        piece.set_state(state)
    with pytest.raises(ConnectorError, match="the state is 3, expected a dict"):
        ConnectorPipelineV2(connectors=[piece]).set_state({"MeanStdFilter": 3})
    with pytest.raises(ConnectorError, match="is given a state, but has no input observation space yet"):
        MeanStdFilter().set_state(fed([[1.0, 1.0]]).get_state())
    assert (piece.count, piece.mean.tolist()) == (1, [1.0, 1.0])


def test_statistics_are_not_lost_without_a_word() -> None:
    piece = fed([[1.0, 1.0]])
    pipeline = ConnectorPipelineV2(FLAT, connectors=[piece])
    wider = LambdaConnector(
        lambda batch: batch, name="wider", observation_space=lambda space, _: spaces.Box(-1, 1, (space.shape[0] + 1,))
    )
    with pytest.raises(ConnectorError, match=r"has counted 1 observations of 2 numbers, but .* have 3; .*reset_state"):
        pipeline.prepend(wider)
    assert (pipeline.names, piece.count) == (["MeanStdFilter"], 1)
    pipeline.reset_state()
    pipeline.prepend(wider)
    assert pipeline.observation_space.shape == (3,)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_is_refused_before_it_is_counted(number: float) -> None:
    piece = fed([[1.0, 1.0]])
    told = f"number 1 of the observation of slot 2 is {number}, expected a finite one"
    with pytest.raises(ConnectorError, match=told):
        filtered_together(piece, [[0.0, 0.0], [0.0, 0.0], [0.0, number]])
    assert piece.count == 1
    with pytest.raises(ConnectorError, match="observations of 3 numbers, expected 2, as Box"):
        filtered(piece, [[1.0, 1.0, 1.0]])
