"""The replay buffer in docs/how_to/graphs.md is a sink as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered_module import NumberedModule, numbered_envs

from rollflow import Graph, Rollout

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "graphs.md"


def replay_class() -> Any:
    [code] = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "class Replay" in code]
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["Replay"]


async def test_the_replay_buffer_of_the_page_keeps_the_newest_chunks_and_samples_them() -> None:
    envs, makers = numbered_envs(3)
    rollout = Rollout(makers, module=NumberedModule(), fragment_length=6, seed=0, num_fragments=4)
    everything, newest = replay_class()(1000), replay_class()(2)
    graph = Graph("replay")
    graph.add(rollout=rollout, everything=everything, newest=newest)
    graph.connect("rollout.fragments", "everything")
    graph.connect("rollout.fragments", "newest")
    async with graph.run() as run:
        await run.wait()
    rewards = np.concatenate([chunk.get_rewards() for chunk in everything.chunks])
    assert sorted(rewards.tolist()) == sorted(entry[3] for env in envs for entry in env.log)
    steps = [(chunk.id_, chunk.t_started, len(chunk)) for chunk in everything.chunks]
    assert [(chunk.id_, chunk.t_started, len(chunk)) for chunk in newest.chunks] == steps[-2:]
    assert len(newest.sample(2)) == 2
