"""Prioritized sampling: frequencies, importance weights, and the sums that it draws by."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from property_examples import examples
from replayed import Played, insert_all, plays

from rollflow import Replay
from rollflow.sinks import Prioritized, Storage
from rollflow.sinks.replay.samplers import SumTree
from rollflow.stream import ReplayError

STEPS = 40


def filled(sampler: Prioritized) -> Replay:
    """A replay with 40 steps, whose ids are 0 … 39."""
    played = Played(4, 2, lengths=(100, 100), fragment_length=5)
    replay = Replay(100, sampler=sampler, seed=0)
    insert_all(replay, played.fragments)
    return replay


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_steps_are_drawn_as_often_as_their_priorities_ask(alpha: float) -> None:
    replay = filled(Prioritized(alpha=alpha, epsilon=0.1))
    values = np.random.default_rng(1).gamma(1.0, size=STEPS)
    replay.update_priorities(torch.arange(STEPS), torch.tensor(values))
    ids = torch.cat([replay.sample(2000)["ids"] for _ in range(50)]).numpy()
    priorities = (values + 0.1) ** alpha
    # With 39 degrees of freedom 81 is exceeded once in 10,000 times.
    assert chi_square(np.bincount(ids, minlength=STEPS), priorities / priorities.sum()) < 81


def test_importance_weights_worked_by_hand() -> None:
    replay = filled(Prioritized(alpha=1.0, beta=0.5, epsilon=1e-9))
    # Steps 0 … 19 have priority 1, the others 4: of 40 steps with a sum of 100, probabilities 0.01 and 0.04.
    replay.update_priorities(np.arange(STEPS), np.where(np.arange(STEPS) < 20, 1.0, 4.0))
    batch = replay.sample(500)
    # (40 * 0.01)**-0.5 and (40 * 0.04)**-0.5, over the larger: 1 and 0.5.
    wanted = torch.where(batch["ids"] < 20, 1.0, 0.5)
    torch.testing.assert_close(batch["weights"], wanted)


def test_new_steps_get_the_largest_priority_and_those_gone_are_passed_over() -> None:
    played = Played(4, 3, lengths=(100, 100), fragment_length=5)
    replay = Replay(40, sampler=Prioritized(alpha=1.0), seed=0)
    replay.insert(played.fragments[0])
    replay.update_priorities(np.arange(20), np.where(np.arange(20) == 3, 1e6, 1e-6))
    replay.insert(played.fragments[1])
    ids = replay.sample(4000)["ids"]
    assert set(ids.tolist()) == {3, *range(20, 40)}
    replay.insert(played.fragments[2])  # steps 0 … 19 make room
    replay.update_priorities(np.arange(20), np.full(20, 1e9))
    assert replay.sample(4000)["ids"].min() >= 20


@settings(max_examples=examples(25), deadline=None)
@given(played=plays(), room=st.integers(0, 30), frames=st.integers(1, 4))
def test_the_steps_that_may_be_drawn_have_priorities_and_no_others(played: Played, room: int, frames: int) -> None:
    largest = max(2 * fragment.num_steps for fragment in played.fragments)
    replay = Replay(largest + room, sampler=Prioritized(), storage=Storage(frames=frames), seed=0)
    for fragment in [*played.fragments, *played.fragments]:
        replay.insert(fragment)
        assert replay.sampler.get_state()["values"].sum() == len(replay)  # new steps have a priority of 1
        assert not len(replay) or len(replay.sample(16)["ids"]) == 16


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e308])
def test_a_priority_that_is_no_number_is_refused_and_the_others_stay(value: float) -> None:
    replay = filled(Prioritized())
    with pytest.raises(ReplayError, match=r"value 1 is (nan|inf|-1e\+308), expected finite numbers"):
        replay.update_priorities(np.arange(3), np.array([1.0, value, 1.0]))
    assert torch.isfinite(replay.sample(8)["weights"]).all()
    with pytest.raises(ReplayError, match=r"ids are \[3\] and values \[2\]"):
        replay.update_priorities(np.arange(3), np.ones(2))


@settings(max_examples=examples(100), deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 1000))
def test_the_tree_sums_up_what_was_set_and_draws_nothing_else(size: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    tree, values = SumTree(size), np.zeros(size)
    for _ in range(5):
        places = draws.integers(0, size, size=draws.integers(1, 50))
        values[places] = new = draws.choice([0.0, 1e-9, 1.0, 1e6], size=len(places))
        tree.set(places, new)
        begin, stop = sorted(draws.integers(0, size + 1, size=2).tolist())
        if begin < stop:
            values[begin:stop] = 0.25
            tree.set_range(begin, np.full(stop - begin, 0.25))
        np.testing.assert_array_equal(tree.values, values)
        assert tree.total == pytest.approx(values.sum(), rel=1e-12)
        if values.any():
            assert (values[tree.draw(100, draws)] > 0).all()
