"""Datasets of several agents, and their folders: train batches, files, ids, and modules that come later."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from drawn_agents import Drawn, drawn_settings, made, mapping_of
from ending_agent_envs import DoomedAgents
from fragment_equality import chunks_of
from hypothesis import example, given, settings, strategies as st
from lost_agents import check_continuity
from numbered_agents import NumberedAgents
from pettingzoo.classic.tictactoe import tictactoe
from property_examples import examples
from replayed import write_dataset
from replayed_agents import TURNS, fragments_of, of_two_modules
from serial_module import SerialModule, at_of
from stored_steps import env_steps_of, steps_in

from rollflow import DatasetSink, DatasetSource, GeneralAdvantageEstimation, MultiAgentEpisode, MultiAgentRollout
from rollflow.nodes import DefaultModule, RandomModule
from rollflow.sinks.datasets.dataset_folder import DATASET, DatasetFolder
from rollflow.sinks.datasets.parquet_episodes import ModuleEpisodes
from rollflow.stream import DatasetError
from rollflow.stream.data.column import Column
from rollflow.stream.data.tree import map_tree


@settings(max_examples=examples(6), deadline=None)
@example(Drawn(1, 1, 4, 0, 7, False, 2, 0, False, seed=4051), False)  # an action of a chunk without a step
@given(drawn=drawn_settings, with_advantages=st.booleans())
def test_a_chunk_read_in_the_same_cut_is_the_rollouts(drawn: Drawn, with_advantages: bool) -> None:
    """Of one environment, with batches as long as the fragments: chunks and train batches are the same."""
    drawn = drawn._replace(envs=1, lanes=1)

    def pieces(obs_space: Any, act_space: Any) -> Any:
        return GeneralAdvantageEstimation(gamma=0.5, lambda_=0.5) if with_advantages else []

    _, rollout = made(drawn, learner_connector=pieces, num_fragments=3)
    with rollout:
        fragments = list(rollout.fragments())
        online = [rollout.learner.batch_of([fragment]) for fragment in fragments]
    with TemporaryDirectory() as folder:
        write_dataset(fragments, Path(folder))
        source = DatasetSource(
            Path(folder), batch_size=drawn.fragment_length, lookback=drawn.lookback,
            module=rollout.module, learner_connector=pieces,
        )  # fmt: skip
        stored = list(source.fragments())
        offline = list(source.batches())
    check_continuity(stored)
    assert len(stored) == len(online) == len(offline)
    for one, other in zip(offline, online, strict=True):
        assert one.keys() == other.keys()
        for module_id in one:
            rows, expected = _in_order(one[module_id]), _in_order(other[module_id])
            for name in expected.keys() - {"truncateds"}:  # of the last episode, which is cut
                torch.testing.assert_close(rows[name], expected[name], rtol=0, atol=0)


def _in_order(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its rows sorted by where they were made."""
    places = np.lexsort(at_of(batch["obs"]).numpy().T)
    in_order: dict[str, Any] = map_tree(lambda leaf: leaf[places], batch)
    return in_order


def test_a_persons_view_of_the_folder(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    _, rollout = made(TURNS, num_fragments=4)
    with rollout:
        fragments = list(rollout.fragments())
        sink = write_dataset(fragments, tmp_path, rollout=rollout)
    text = json.loads((tmp_path / "dataset.json").read_text())
    assert sorted(text["agents"]) == [f"agent {number}" for number in range(4)]
    assert text["modules"] == {name: name for name in text["modules"]}
    assert text["runs"][0]["rollout"]["module"].keys() >= text["modules"].keys()
    rows = [row for name in text["modules"] for row in pq.read_table(tmp_path / "modules" / name / "steps").to_pylist()]
    for row in rows:
        at = at_of(row["obs"])
        assert row["agent_id"] == f"agent {at[1]}"
        assert (row["env_t"], row["t"]) == (at[3], at[4])
        assert row["module_id"] == mapping_of(TURNS)(row["agent_id"], MultiAgentEpisode(row["env_eps_id"]))
    episodes = pq.read_table(tmp_path / "env_episodes").to_pylist()
    assert sum(row["agent_steps"] for row in episodes) == len(rows) == sink.num_steps
    assert {row["env_eps_id"] for row in rows} <= {row["eps_id"] for row in episodes}
    name = next(iter(text["modules"]))
    of_module = DatasetSource(tmp_path / "modules" / name)  # a dataset of one agent by itself
    assert of_module.num_steps == sum(len(each) for each in chunks_of(fragments) if each.module_id == name)
    with pytest.raises(DatasetError, match=r"is a module's part of the dataset at"):
        DatasetSink(tmp_path / "modules" / name)
    for path in tmp_path.rglob("dataset.json"):  # as older versions wrote it
        version = 2 if path.parent == tmp_path else 1
        old = DATASET.manifest_of(path.read_bytes()) | {"format": "rollflow dataset", "version": version}
        path.write_text(json.dumps(old))
    assert DatasetSource(tmp_path).num_steps == sum(map(env_steps_of, fragments))


def test_agents_of_one_kind_and_their_mistakes_are_refused(tmp_path: Path) -> None:
    (fragment,) = fragments_of(TURNS, 1)
    write_dataset([fragment], tmp_path)
    envs = [lambda: NumberedAgents(0, agents=1, nested=0)]
    with MultiAgentRollout(envs, module=DefaultModule, num_fragments=1, fragment_length=4, seed=0) as other:
        write_dataset(other.fragments(), tmp_path)  # another module, which is added
    assert "default_policy" in DatasetSource(tmp_path).columns
    part = next(iter(fragment.parts)).of_module(fragment.module_ids[0])
    with DatasetSink(tmp_path) as sink, pytest.raises(DatasetError, match="a fragment of one agent does not fit"):
        sink(part)


def test_agents_of_lost_environments_come_back_as_truncated_with_the_reason(tmp_path: Path) -> None:
    fate: dict[str, Any] = {"fate": "kill", "step": 5, "lives": 1, "agents": 2, "nested": 0, "length": 40}
    makers = [partial(DoomedAgents, 0, tmp_path, at_once=True, **fate)]
    modules = {"default_policy": SerialModule()}
    options: dict[str, Any] = {"fragment_length": 4, "num_fragments": 4, "seed": 4, "where": "processes"}
    with MultiAgentRollout(makers, module=modules, **options) as rollout:
        fragments = list(rollout.fragments())
    assert any(fragment.losses for fragment in fragments)
    write_dataset(fragments, tmp_path / "data")
    source = DatasetSource(tmp_path / "data", batch_size=100)
    stored = list(source.fragments())
    assert steps_in(stored) == steps_in(fragments)
    assert sum(map(env_steps_of, stored)) == sum(map(env_steps_of, fragments))
    lost = [each for each in DatasetSource(tmp_path / "data").episodes() if "lost" in each.custom_data]
    assert [each.is_truncated for each in lost] == [True]
    online = [each for fragment in fragments for each in fragment.episodes() if "lost" in each.custom_data]
    assert {each.custom_data["lost"] for each in lost} == {each.custom_data["lost"] for each in online}
    assert all("lost" in each.custom_data for each in lost[0].agent_episodes.values())


# Folders: ids, modules that come later, and sinks one after the other


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
    assert sum(map(env_steps_of, source.fragments())) == 1
    assert len(list(source.batches())) == 1
    write_dataset(fragments[1:], tmp_path)
    assert committed(tmp_path)["env_episodes"] == 2
    source = DatasetSource(tmp_path)
    assert source.num_steps == sum(map(env_steps_of, fragments))
    assert sum(each.num_steps for each in source.fragments()) == sum(each.num_steps for each in fragments)


def test_a_summary_reads_only_the_versions_that_modules_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fragments = of_two_modules()
    for fragment in fragments:
        for part in fragment.parts:
            versions = part.columns["policy_version"].tree
            part.columns["policy_version"] = Column("policy_version", np.full_like(versions, 3))
    write_dataset(fragments, tmp_path)
    returns = [sum(float(np.sum(each.get_rewards())) for each in episode.agent_episodes.values())
               for episode in DatasetSource(tmp_path).episodes()]  # fmt: skip
    path = tmp_path / "modules/b/dataset.json"
    description = DATASET.manifest_of(path.read_bytes())
    del description["columns"]["policy_version"]
    path.write_bytes(DATASET.manifest_bytes(description))
    asked: list[list[str]] = []
    read = ModuleEpisodes.read

    def noted(self: ModuleEpisodes, episodes: Any, names: Any, **options: Any) -> Any:
        asked.append(list(names))
        return read(self, episodes, names, **options)

    monkeypatch.setattr(ModuleEpisodes, "read", noted)
    summary = DatasetSource(tmp_path).summary()
    assert asked == [["policy_version"]]
    assert set(summary.oldest_version.tolist()) == set(summary.newest_version.tolist()) == {3}
    assert summary.returns == pytest.approx(returns)


SAME = r"the modules 1 and '1' have one text as their ids, expected another text for each module"


def test_modules_whose_ids_have_one_text_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    both, one, other = (of_two_modules(*ids)[0] for ids in ((1, "1"), (1, "plain"), ("plain", "1")))
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
    fragment = of_two_modules()[0]
    (part,) = fragment.parts
    part.part = part.part._replace(agents=("1", 1, 2, 3))
    with DatasetSink(tmp_path) as sink, pytest.raises(DatasetError, match=r"the agents '1' and 1 have one text"):
        sink(fragment)
    assert not (tmp_path / "dataset.json").exists()


@pytest.mark.slow
def test_what_a_sink_adds_as_a_source_is_made_disturbs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run and a module that come at any moment between a source's look at the files and at the description."""
    one, other = of_two_modules("first", "second")[0], of_two_modules("first", "third")[0]
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
