"""A connector piece of one's own, which looks at every episode: beside RLlib's runner with the same piece.

The piece scales each observation and writes it back, at 64 slots of gymnasium's vectorized CartPole. Needs Ray.

    python -m benchmarks.connector [--quick]
"""

import importlib.util
import sys
from typing import Any

import numpy as np

from benchmarks.command import run
from benchmarks.pairs import Record, Sizes, paired
from rollflow import ConnectorV2, Rollout

SLOTS, FRAGMENT_LENGTH = 64, 128
SCALE = np.array([0.5, 0.5, 5.0, 0.5], np.float32)


class Scale(ConnectorV2):
    """Scales the newest observation of every episode."""

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            episode.set_observations(new_data=episode.get_observations(-1) * SCALE, at_indices=-1)
        return batch


def measure(sizes: Sizes) -> list[Record]:
    """One line; none without Ray."""
    if importlib.util.find_spec("ray") is None:
        print("a connector of one's own: left out, Ray is not installed here", file=sys.stderr)
        return []
    from benchmarks.peers.rllib import Runner

    runner = Runner(SLOTS, FRAGMENT_LENGTH, scale=SCALE)
    connector: Any = lambda env: Scale()  # noqa: E731
    options: Any = {"num_envs": SLOTS, "fragment_length": FRAGMENT_LENGTH, "seed": 0}
    with Rollout("CartPole-v1", env_to_module_connector=connector, **options) as rollout:
        batches = iter(rollout.batches())
        told = {"beside_name": "RLlib's SingleAgentEnvRunner"}
        return [
            paired(
                "a connector of one's own",
                SLOTS,
                lambda: len(next(batches)["obs"]),
                runner.fragment,
                aim=3.0,
                sizes=sizes,
                **told,
            )
        ]


if __name__ == "__main__":
    run(measure)
