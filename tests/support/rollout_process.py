"""A rollout in a process of its own, that tells what it counted and what there was to count."""

from typing import Any

import gymnasium as gym
import numpy as np

from rollflow import ConnectorV2, MeanStdFilter, Rollout


class Noting(ConnectorV2):
    """Keeps every observation, and logs how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __call__(self, *, batch: Any, episodes: Any, metrics: Any, **kwargs: Any) -> Any:
        rows = [np.array(episode.get_observations(-1)) for episode in episodes]
        self.seen += rows
        metrics.log_value("observations", len(rows), reduce="sum")
        metrics.log_value(("least", "position"), min(row[0] for row in rows), reduce="min")
        return batch


def roll(seed: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The states of a filter and of the metrics, and all observations, f32[B, 4]."""
    noting, filter_ = Noting(), MeanStdFilter()
    with Rollout(
        lambda: gym.make("CartPole-v1"),
        num_envs=3,
        fragment_length=20,
        num_fragments=2,
        seed=seed,
        env_to_module_connector=lambda env: [noting, filter_],
    ) as rollout:
        for _ in rollout.fragments():
            pass
    return filter_.get_state(), rollout.metrics.get_state(), np.stack(noting.seen)
