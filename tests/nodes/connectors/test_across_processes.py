"""Connector states that several worker processes have counted become one state."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
from rollout_process import roll

from rollflow import MeanStdFilter
from rollflow.nodes import MetricsLogger


@pytest.mark.slow
def test_states_of_rollouts_in_their_own_processes_merge_into_those_of_a_single_pass() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        filters, metrics, seen = zip(*processes.map(roll, (0, 1)), strict=True)
    rows = np.concatenate(seen).astype(np.float64)
    merged = MeanStdFilter(gym.make("CartPole-v1").observation_space)
    merged.set_state(merged.merge_states([*reversed(filters), filters[0]]))
    assert merged.count == len(rows)
    np.testing.assert_allclose(merged.mean, rows.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(merged.deviation, rows.std(0, ddof=1), rtol=1e-9)
    logger = MetricsLogger()
    logger.merge(metrics)
    assert logger.reduce() == {"observations": len(rows), "least": {"position": np.float32(rows[:, 0].min())}}
