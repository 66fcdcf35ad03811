"""No fragment is older than the bound: held back, dropped, masked or refused, as the trainer wants it."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feeding_rollouts import feeding, graph_over, running, sequences_of, trainer, weights
from held_envs import Held, await_held, let_go
from hypothesis import Phase, given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import examples
from remote_rollouts import await_that

from rollflow import Columns, Rollout, TrainerStream
from rollflow.stream import LagError


def arrived_at(stream: TrainerStream) -> int:
    """Return the number of fragments of the one rollout that have come."""
    [source] = stream._listener.sources.values()
    return source.session.taken


@settings(max_examples=examples(12), phases=[Phase.explicit, Phase.generate])
@given(
    max_lag=st.integers(0, 3),
    lanes=st.integers(1, 3),
    where=st.sampled_from(["inline", "threads"]),
    per_batch=st.sampled_from([None, 1, 2, 4]),
)
def test_under_pace_every_action_is_as_new_as_it_must_be_and_nothing_is_lost(
    max_lag: int, lanes: int, where: Any, per_batch: int | None
) -> None:
    """Of fragments, and of train batches of so many of them that are made where the rollout is."""
    sink = {} if per_batch is None else {"sends": "batches", "fragments_per_batch": per_batch}
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        stream.publish(weights(1.0))
        with feeding(stream.address, (0, 1, 2), lanes=lanes, where=where, num_fragments=8, sink=sink) as feed:
            steps = 0
            for batch in stream:
                assert int(batch[Columns.POLICY_VERSION].min()) >= stream.version - max_lag
                # What acted was what had been published under this version.
                np.testing.assert_array_equal(batch["weight"], batch[Columns.POLICY_VERSION])
                assert all((each.lag or 0) <= max_lag for each in stream.handed)
                assert len(stream.handed) == (lanes if per_batch is None else 1)
                steps += len(batch[Columns.REWARDS])
                stream.publish(weights(stream.version + 1.0))
    assert steps == feed.rollout.num_steps
    assert stream.lost == {}


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_lane_that_is_slow_makes_no_other_run_ahead(max_lag: int, tmp_path: Path) -> None:
    slow = partial(Held, 0, tmp_path, steps=[20], lengths=(100, 100))
    with trainer(max_lag=max_lag, on_excess="pace") as stream:
        rollout = Rollout(
            [slow, partial(NumberedEnv, 1)],
            module=NumberedModule(),
            lanes=2,
            where="threads",
            fragment_length=8,
            num_fragments=8,
        )
        with running(*graph_over(rollout, stream.address)) as feed:
            batches = iter(stream)
            for _ in range(2):
                next(batches)
                stream.publish(weights(stream.version + 1.0))
            stream._begin_next()  # the trainer has moved on from the second batch
            await_held(tmp_path, 0)  # in its third fragment, beyond which the other lane may go as far as is allowed
            await_that(lambda: feed.sink._rollout_end.lanes.given(1) == 2 + 1 + max_lag)
            let_go(tmp_path, 0)
            for _ in batches:
                assert max(each.lag or 0 for each in stream.handed) <= max_lag
                stream.publish(weights(stream.version + 1.0))
    assert stream.lost == {}


def test_where_weights_are_published_too_often_pace_says_so() -> None:
    with trainer(max_lag=0, on_excess="pace") as stream, feeding(stream.address):
        batches = iter(stream)
        next(batches)
        next(batches)
        with pytest.raises(
            LagError,
            match=r"fragment \d of lane 0 of rollout feed .* is 2 policy versions old, expected at most max_lag=0: "
            "publish at most once per batch, before the next is asked for",
        ):
            publish_behind_its_back(stream, batches)


def publish_behind_its_back(stream: Any, batches: Any) -> None:
    """Publish twice when the next fragment has begun."""
    stream._begin_next()
    await_that(lambda: arrived_at(stream) == 3)
    stream.publish(weights(1.0))
    stream.publish(weights(2.0))
    next(batches)


def test_what_is_too_old_is_dropped_and_counted() -> None:
    with trainer(yields="fragments", max_lag=1, prefetch=3) as stream:
        with feeding(stream.address, lanes=1, num_fragments=8) as feed:
            fragments = iter(stream)
            taken = [next(fragments)]
            await_that(lambda: arrived_at(stream) == 4)
            for version in range(1, 4):
                stream.publish(weights(version))
            taken += fragments
    assert sequences_of(taken)[0][0] == 0
    assert 1 not in sequences_of(taken)[0]
    assert stream.lost == {"max_lag": feed.rollout.num_steps - sum(fragment.num_steps for fragment in taken)}
    assert stream.lost["max_lag"] >= 3 * 8


def test_what_is_too_old_is_an_error_where_it_is_to_be_one() -> None:
    with trainer(yields="fragments", max_lag=0, prefetch=1, on_excess="raise") as stream:
        with feeding(stream.address):
            fragments = iter(stream)
            next(fragments)
            await_that(lambda: arrived_at(stream) == 2)
            stream.publish(weights(1.0))
            with pytest.raises(LagError, match=r"is 1 policy versions old, expected at most max_lag=0\nsee "):
                next(fragments)


def test_older_steps_are_masked() -> None:
    with trainer(max_lag=0, on_excess="mask", prefetch=1) as stream, feeding(stream.address, num_fragments=12) as feed:
        masked = young = 0
        for batch in stream:
            expected = batch[Columns.POLICY_VERSION] >= stream.version
            np.testing.assert_array_equal(batch[Columns.LOSS_MASK], expected)
            masked += int((~expected).sum())
            young += int(expected.sum())
            stream.publish(weights(stream.version + 1.0))
    assert masked
    assert stream.lost == {"masked": masked}
    assert masked + young == feed.rollout.num_steps


def test_wrong_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="on_excess is 'wait', expected one of 'drop', 'pace', 'mask', 'raise'"):
        trainer(on_excess="wait")
    with pytest.raises(ValueError, match="is for batches, expected another one with yields='fragments'"):
        trainer(on_excess="mask", yields="fragments")
    with pytest.raises(ValueError, match="a batch is one fragment of every lane, expected no fragments_per_batch"):
        trainer(on_excess="pace", fragments_per_batch=3)
    with pytest.raises(ValueError, match="max_lag is -1, expected a whole number from 0 on"):
        trainer(max_lag=-1)
