"""Folders of datasets of several agents: ids, modules that come later, and sinks one after the other."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numbered_agents import NumberedAgents
from pettingzoo.classic.tictactoe import tictactoe
from replayed import write_dataset
from serial_module import SerialModule

from rollflow import DatasetSink, DatasetSource, MultiAgentRollout
from rollflow.nodes import RandomModule
from rollflow.sinks.datasets.dataset_folder import DatasetFolder
from rollflow.stream import DatasetError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


def committed(path: Path) -> Counter[str]:
    """How many files of each kind there are."""
    return Counter(str(each.parent.relative_to(path)) for each in path.rglob("*.parquet"))


def test_a_first_sink_whose_agents_have_ended_no_step_is_added_to(tmp_path: Path) -> None:
    """In a game of turns no agent has ended a step at first: the dataset has env steps, but no modules yet."""
    options: dict[str, Any] = {"fragment_length": 1, "num_fragments": 12, "seed": 0}
    with MultiAgentRollout(tictactoe.env, module={"default_policy": RandomModule}, **options) as rollout:
        fragments = list(rollout.fragments())
    assert [each.num_steps for each in fragments[:2]] == [0, 1]
    write_dataset(fragments[:1], tmp_path)
    source = DatasetSource(tmp_path)
    assert (source.num_steps, len(source.columns)) == (1, 0)
    assert sum(each.num_rows * each.num_envs for each in source.fragments()) == 1
    assert len(list(source.batches())) == 1
    write_dataset(fragments[1:], tmp_path)
    assert committed(tmp_path)["env_episodes"] == 2
    source = DatasetSource(tmp_path)
    assert source.num_steps == sum(each.num_rows * each.num_envs for each in fragments)
    assert sum(each.num_steps for each in source.fragments()) == sum(each.num_steps for each in fragments)


def of_modules(*ids: Any) -> MultiAgentFragment:
    """A fragment of two agents that act by two modules of these ids."""
    modules = {each: SerialModule() for each in ids}

    def module_of(agent: str, episode: Any) -> Any:
        return ids[int(agent.split()[1])]

    envs = [partial(NumberedAgents, 0, agents=2, nested=0, at_once=True)]
    options: dict[str, Any] = {"agent_to_module_mapping_fn": module_of, "fragment_length": 4, "num_fragments": 1}
    with MultiAgentRollout(envs, module=modules, seed=0, **options) as rollout:
        (fragment,) = rollout.fragments()
    return fragment


SAME = r"the modules 1 and '1' have one text as their ids, expected another text for each module"


def test_modules_whose_ids_have_one_text_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    both, one, other = of_modules(1, "1"), of_modules(1, "plain"), of_modules("plain", "1")
    with DatasetSink(tmp_path) as sink:
        with pytest.raises(DatasetError, match=SAME):
            sink(both)
        assert not list(tmp_path.rglob("*.parquet"))
        sink(one)
        with pytest.raises(DatasetError, match=SAME):
            sink(other)
    with DatasetSink(tmp_path) as sink, pytest.raises(DatasetError, match=SAME):
        sink(other)
    source = DatasetSource(tmp_path)
    assert sum(each.num_steps for each in source.fragments()) == one.num_steps
    assert len(source.description["runs"]) == 1


def test_agents_whose_ids_have_one_text_are_refused(tmp_path: Path) -> None:
    fragment = of_modules("first", "second")
    (part,) = fragment.parts
    part.part = part.part._replace(agents=("1", 1))
    with DatasetSink(tmp_path) as sink, pytest.raises(DatasetError, match=r"the agents '1' and 1 have one text"):
        sink(fragment)
    assert not (tmp_path / "dataset.json").exists()


@pytest.mark.slow
def test_what_a_sink_adds_while_a_source_is_made_does_not_disturb_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run and a module that come at any moment between a source's look at the files and at the description."""
    one, other = of_modules("first", "second"), of_modules("first", "third")
    write_dataset([one], tmp_path)
    left = 0  # looks until the sink comes
    names = "read", "numbers"
    before = {name: getattr(DatasetFolder, name) for name in names}

    def after_look(name: str, folder: DatasetFolder) -> Any:
        nonlocal left
        found, left = before[name](folder), left - 1
        if left == 0:
            with monkeypatch.context() as usual:
                for each in names:
                    usual.setattr(DatasetFolder, each, before[each])
                write_dataset([other], tmp_path)
        return found

    for name in names:
        monkeypatch.setattr(DatasetFolder, name, lambda folder, name=name: after_look(name, folder))
    for late in range(1, 8):
        left = late
        source = DatasetSource(tmp_path)
        runs = {int(each) for fragment in source.fragments() for each in fragment.runs}
        assert runs == set(range(len(runs)))
        assert len(source.description["runs"]) >= len(runs)
        assert len(runs) in (late, late + 1)
    assert set(DatasetSource(tmp_path).columns) == {"first", "second", "third"}
