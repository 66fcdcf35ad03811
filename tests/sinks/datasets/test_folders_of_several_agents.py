"""Folders of datasets of several agents: ids, modules that come later, and sinks one after the other."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pettingzoo.classic.tictactoe import tictactoe

from rollflow.nodes import MultiAgentRollout, RandomModule
from rollflow.sinks import DatasetSink, DatasetSource
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


def written(fragments: Sequence[MultiAgentFragment], path: Path, **options: Any) -> None:
    with DatasetSink(path, **options) as sink:
        for fragment in fragments:
            sink(fragment)


def committed(path: Path) -> Counter[str]:
    """How many files of each kind there are."""
    return Counter(str(each.parent.relative_to(path)) for each in path.rglob("*.parquet"))


def test_a_first_sink_whose_agents_have_ended_no_step_is_added_to(tmp_path: Path) -> None:
    """In a game of turns no agent has ended a step at first: the dataset has env steps, but no modules yet."""
    options: dict[str, Any] = {"fragment_length": 1, "num_fragments": 12, "seed": 0}
    with MultiAgentRollout(tictactoe.env, module={"default_policy": RandomModule}, **options) as rollout:
        fragments = list(rollout.fragments())
    assert [each.num_steps for each in fragments[:2]] == [0, 1]
    written(fragments[:1], tmp_path)
    source = DatasetSource(tmp_path)
    assert (source.num_steps, len(source.columns)) == (1, 0)
    assert sum(each.num_env_steps for each in source.fragments()) == 1
    assert len(list(source.batches())) == 1
    written(fragments[1:], tmp_path)
    assert committed(tmp_path)["env_episodes"] == 2
    source = DatasetSource(tmp_path)
    assert source.num_steps == sum(each.num_env_steps for each in fragments)
    assert sum(each.num_steps for each in source.fragments()) == sum(each.num_steps for each in fragments)
