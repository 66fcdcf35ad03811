"""A policy computes, to the bit, what the rollout computed that it was taken from."""

from typing import Any

import numpy as np
import pytest
from drawn_policies import ACTIONS, FITTING, logged_rollout
from hypothesis import example, given, settings, strategies as st
from property_examples import examples, strategies

from rollflow import Policy
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import equal_trees, map_tree, stack_trees

SMALL = {"fcnet_hiddens": (8,), "lstm_cell_size": 6}
UNCOMPARED = {Columns.OBS, Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS, Columns.POLICY_VERSION}

cases = st.sampled_from([(space, pieces) for space, all_pieces in FITTING.items() for pieces in all_pieces])


def outputs_of(rollout: Any) -> dict[str, list[Any]]:
    """Column -> what the rollout recorded at each vector step, any[N, ...]."""
    columns: dict[str, list[Any]] = {}
    with rollout:
        for fragment in rollout.fragments():
            for name, column in fragment.columns.items():
                if name not in UNCOMPARED:
                    rows = range(fragment.first_row, fragment.last_row)
                    columns.setdefault(name, []).extend(map_tree(np.array, column.row(row)) for row in rows)
    return columns


DRAWN = strategies(case=cases, actions=st.sampled_from(list(ACTIONS)), lstm=bool, explore=bool, slots=(1, 4))
DRAWN |= strategies(seed=(0, 2**31))


@pytest.mark.slow
@settings(max_examples=examples(40))
@example(case=("box", "previous"), actions="discrete", lstm=True, explore=False, slots=3, seed=0)  # rows of 168 bytes
@given(**DRAWN)
def test_a_policy_computes_what_the_rollout_computed(
    case: tuple[str, str], actions: str, lstm: bool, explore: bool, slots: int, seed: int
) -> None:
    space, pieces = case
    if space == "masked":
        actions = "discrete"
    config = SMALL | {"use_lstm": lstm}
    envs, rollout = logged_rollout(space, actions, pieces, slots=slots, seed=seed, model_config=config, explore=explore)
    policy = Policy(rollout.module, rollout.env_to_module, rollout.module_to_env, explore=explore, seed=seed)
    recorded = outputs_of(rollout)
    steps = len(recorded[Columns.ACTIONS])
    assert steps == 40
    for step in range(steps):
        observations, rewards, begins = zip(*(env.log[step] for env in envs), strict=True)
        for session in np.flatnonzero(begins).tolist():
            policy.reset(session)
        policy.act_batch(stack_trees(observations), rewards)
        for name, column in recorded.items():
            assert equal_trees(policy.outputs[name], column[step]), (name, step)


@settings(max_examples=examples(20))
@given(case=cases, lstm=st.booleans(), seed=st.integers(0, 2**31), data=st.data())
def test_a_session_remembers_the_same_whoever_it_acts_with(
    case: tuple[str, str], lstm: bool, seed: int, data: st.DataObject
) -> None:
    """Alone, and in other company at every step, a session's outputs differ by rounding alone."""
    space, pieces = case
    config = SMALL | {"use_lstm": lstm}
    envs, rollout = logged_rollout(space, "discrete", pieces, slots=3, seed=seed, model_config=config)
    parts = rollout.module, rollout.env_to_module, rollout.module_to_env
    alone, together = Policy(*parts), Policy(*parts)
    outputs_of(rollout)
    for step in range(40):
        order = data.draw(st.permutations(range(3)))
        left = data.draw(st.integers(1, 3))
        for ids in (order[:left], order[left:]):
            if not ids:
                continue
            seen = [envs[slot].log[step] for slot in ids]
            for slot, (_, _, begins) in zip(ids, seen, strict=True):
                if begins:
                    alone.reset(slot)
                    together.reset(slot)
            rewards = [reward for _, reward, _ in seen]
            together.act_batch(stack_trees([observation for observation, _, _ in seen]), rewards, ids)
            logits = together.outputs[Columns.ACTION_DIST_INPUTS]
            for row, slot in enumerate(ids):
                alone.act(seen[row][0], rewards[row], slot)
                np.testing.assert_allclose(logits[row], alone.outputs[Columns.ACTION_DIST_INPUTS][0], atol=1e-5)


def test_the_module_that_trains_on_does_not_change_what_acts() -> None:
    _, rollout = logged_rollout("box", "discrete", "filter", slots=1, seed=3)
    policy = Policy(rollout.module, rollout.env_to_module, rollout.module_to_env)
    policy.act(np.ones(3, np.float32))
    before = policy.outputs[Columns.ACTION_DIST_INPUTS].copy()
    for weight in rollout.module.parameters():
        weight.data.add_(1.0)
    policy.reset()
    policy.act(np.ones(3, np.float32))
    np.testing.assert_array_equal(policy.outputs[Columns.ACTION_DIST_INPUTS], before)
    policy.publish(rollout.module.state_dict())
    policy.reset()
    policy.act(np.ones(3, np.float32))
    assert not np.array_equal(policy.outputs[Columns.ACTION_DIST_INPUTS], before)
