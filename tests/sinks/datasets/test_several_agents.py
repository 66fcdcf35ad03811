"""Datasets of several agents: what is read is what was made, of every agent, environment and module."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from drawn_agents import Drawn, drawn_settings, made, mapping_of, run
from ending_agent_envs import DoomedAgents
from hypothesis import example, given, settings, strategies as st
from killed_sinks import write_and_be_killed
from lost_agents import agent_chunks, check_continuity, check_multi_agent_chunks, numbers
from numbered_agents import NumberedAgents
from property_examples import examples
from replayed import write_dataset
from replayed_agents import TURNS, fragments_of
from serial_module import SerialModule, at_of

from rollflow import (
    DatasetSink,
    DatasetSource,
    GeneralAdvantageEstimation,
    MultiAgentEpisode,
    MultiAgentRollout,
)
from rollflow.nodes import DefaultModule
from rollflow.stream import DatasetError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


def steps_in(fragments: Sequence[MultiAgentFragment]) -> Counter[Any]:
    """Every step of an agent, with ids, its module and what that gave, and the ends that the environment has set."""
    found: Counter[Any] = Counter()
    for _, chunk in agent_chunks(fragments):
        at = at_of(chunk.get_observations())
        outputs = {name: chunk.get_extra_model_outputs(name) for name in ("weight", "policy_version", "vf_preds")}
        whose = chunk.id_, chunk.multi_agent_episode_id, chunk.agent_id, chunk.module_id
        for i in range(len(chunk)):
            is_end = i == len(chunk) - 1 and "cut" not in chunk.custom_data
            flags = is_end and chunk.is_terminated, is_end and chunk.is_truncated
            values = chunk.get_actions(i), chunk.get_rewards(i), *(each[i] for each in outputs.values())
            found[*whose, chunk.t_started + i, numbers(at[i]), numbers(at[i + 1]), *map(float, values), *flags] += 1
    return found


def env_steps_in(fragments: Sequence[MultiAgentFragment]) -> Counter[Any]:
    """Every env step of every episode, and how the episode ended there."""
    found: Counter[Any] = Counter()
    for fragment in fragments:
        for env in range(fragment.num_envs):
            clock = fragment.clock
            for nth in range(clock.count(env)):
                start, end = clock.start(env, nth), clock.end_of(env, nth)
                key = env, int(clock.numbers[env]) + nth
                is_cut = "cut" in fragment.custom_data.get(key, {})
                last = clock.first + fragment.num_rows if end is None else end[0]
                for step in range(max(clock.first, start), last):
                    how = end[1] if end is not None and step == end[0] - 1 and not is_cut else None
                    found[fragment.episode_id(*key), step - start, how] += 1
    return found


def check_chunks(fragments: Sequence[MultiAgentFragment]) -> None:
    """Every chunk of an environment's episode joins the one before; observations stand at the env steps they name."""
    check_multi_agent_chunks(fragments)
    for fragment in fragments:
        for episode in fragment.episodes():
            for agent, of_agent in episode.agent_episodes.items():
                indices = range(episode.env_t_started, episode.env_t + 1)
                for step in indices:
                    seen = episode.get_observations(step - episode.env_t_started, agent_ids=[agent])
                    if agent in seen and not (of_agent.is_terminated and step == episode.env_t):
                        assert numbers(at_of(seen[agent]))[3] <= step
                assert of_agent.multi_agent_episode_id == episode.id_
                assert episode.module_for(agent) == of_agent.module_id


@settings(max_examples=examples(8), deadline=None)
@given(
    drawn=drawn_settings,
    file_bytes=st.sampled_from([1, 1 << 20]),
    shuffle_seed=st.sampled_from([None, 3]),
    window=st.sampled_from([1, 10, 1000]),
    size=st.integers(1, 20),
    lookback=st.integers(0, 3),
    complete=st.booleans(),
)
def test_every_agents_step_is_read_once(
    drawn: Drawn,
    file_bytes: int,
    shuffle_seed: int | None,
    window: int,
    size: int,
    lookback: int,
    complete: bool,
) -> None:
    _, rollout = made(drawn)
    fragments = run(rollout, 3)
    options: dict[str, Any] = {
        "shuffle_seed": shuffle_seed, "window_steps": window, "lookback": lookback, "complete_episodes": complete,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder, "data")
        write_dataset(fragments, path, max_file_bytes=file_bytes)
        source = DatasetSource(path, batch_size=size, **options)
        stored = list(source.fragments())
        again = Path(folder, "again")
        write_dataset(stored, again)
        copied = list(DatasetSource(again, batch_size=size, **options).fragments())
        batches = list(source.batches())
    assert steps_in(stored) == steps_in(copied) == steps_in(fragments)
    assert env_steps_in(stored) == env_steps_in(copied) == env_steps_in(fragments)
    assert source.num_steps == sum(fragment.num_rows * fragment.num_envs for fragment in fragments)
    check_chunks(stored)
    if not complete and shuffle_seed is None:
        assert [fragment.num_rows for fragment in stored[:-1]] == [size] * (len(stored) - 1)
    rows = Counter(numbers(at) for batch in batches for each in batch.values() for at in at_of(each["obs"]))
    assert rows == Counter(
        numbers(at) for _, chunk in agent_chunks(fragments) for at in at_of(chunk.get_observations())[:-1]
    )


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
            rows, expected = one[module_id], other[module_id]
            places = _order(rows), _order(expected)
            for name in expected.keys() - {"truncateds"}:  # of the last episode, which is cut
                torch.testing.assert_close(_at(rows[name], places[0]), _at(expected[name], places[1]), rtol=0, atol=0)


def _order(batch: dict[str, Any]) -> Any:
    rows = at_of(batch["obs"]).numpy()
    return np.lexsort(rows.T)


def _at(data: Any, places: Any) -> Any:
    return {name: _at(part, places) for name, part in data.items()} if isinstance(data, dict) else data[places]


def test_what_was_committed_is_whole_after_kills_and_the_next_sink_adds_to_it(tmp_path: Path) -> None:
    fragments = fragments_of(TURNS, 8)
    parts = [steps_in([fragment]) for fragment in fragments]
    write_dataset(fragments[:1], tmp_path, max_file_bytes=1)
    generator, expected = np.random.default_rng(0), [1]
    for _ in range(3):
        write_and_be_killed(fragments, tmp_path, 1, int(generator.integers(1, len(fragments))))
        source = DatasetSource(tmp_path)
        stored = steps_in(list(source.fragments()))
        counts = [_fragments_of(run, source, fragments) for run in range(len(source.description["runs"]))]
        assert counts[: len(expected)] == expected  # what was there stays as it is
        assert stored == sum((part for count in counts for part in parts[:count]), Counter())
        expected = counts
    write_dataset(fragments, tmp_path)
    source = DatasetSource(tmp_path)
    assert _fragments_of(len(expected), source, fragments) == len(fragments)
    left = [each.name for each in tmp_path.rglob("*") if each.is_file() and each.name.startswith(".")]
    assert left == [".lock"]


def _fragments_of(number: int, source: DatasetSource, fragments: Sequence[MultiAgentFragment]) -> int:
    """How many of the fragments, from the first on, stand in a run."""
    steps = int(source._store.num_steps[source._store.runs == number].sum())
    sizes = np.cumsum([0, *(fragment.num_rows * fragment.num_envs for fragment in fragments)]).tolist()
    assert steps in sizes, f"run {number} has {steps} env steps, which is no whole number of fragments"
    return sizes.index(steps)


def test_files_that_no_file_of_environments_commits_are_passed_over_and_removed(tmp_path: Path) -> None:
    fragments = fragments_of(TURNS, 2)
    write_dataset(fragments, tmp_path, max_file_bytes=1)
    (tmp_path / "env_episodes/000002.parquet").unlink()
    source = DatasetSource(tmp_path)
    assert steps_in(list(source.fragments())) == steps_in(fragments[:1])
    write_dataset(fragments, tmp_path)
    names = {each.name for each in tmp_path.rglob("*.parquet")}
    assert names == {"000001.parquet", "000002.parquet"}
    assert DatasetSource(tmp_path).num_steps == sum(
        each.num_rows * each.num_envs for each in [fragments[0], *fragments]
    )
    one = next((tmp_path / "modules").glob("*/steps/000002.parquet"))
    one.unlink()
    with pytest.raises(DatasetError, match=r"steps of agents, env_episodes says|is missing"):
        DatasetSource(tmp_path)


def test_a_missing_fragment_in_between_ends_the_episodes_of_its_environments(tmp_path: Path) -> None:
    fragments = fragments_of(TURNS._replace(envs=1, length=30, fragment_length=3, at_once=True), 3)
    write_dataset([fragments[0], fragments[2]], tmp_path)
    episodes = list(DatasetSource(tmp_path).episodes())
    stored = list(DatasetSource(tmp_path, batch_size=100).fragments())
    assert steps_in(stored) == steps_in([fragments[0], fragments[2]])
    for episode in episodes:
        is_headless = episode.env_t_started > 0
        assert is_headless or episode.is_done
        assert all(each.is_done for each in episode.agent_episodes.values())
    assert any(each.env_t_started for each in episodes)
    assert any("cut" in each.custom_data for each in episodes)


def test_a_persons_view_of_the_folder(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    _, rollout = made(TURNS, num_fragments=4)
    with rollout, DatasetSink(tmp_path, rollout=rollout) as sink:
        fragments = list(rollout.fragments())
        for fragment in fragments:
            sink(fragment)
    text = json.loads((tmp_path / "dataset.json").read_text())
    assert sorted(text["agents"]) == [f"agent {number}" for number in range(4)]
    assert text["modules"] == {name: name for name in text["modules"]}
    assert text["runs"][0]["rollout"]["module"].keys() >= text["modules"].keys()
    rows = [row for name in text["modules"] for row in pq.read_table(tmp_path / "modules" / name / "steps").to_pylist()]
    for row in rows:
        at = row["obs"]["at"] if isinstance(row["obs"], dict) else row["obs"]
        assert row["agent_id"] == f"agent {at[1]}"
        assert (row["env_t"], row["t"]) == (at[3], at[4])
        assert row["module_id"] == mapping_of(TURNS)(row["agent_id"], MultiAgentEpisode(row["env_eps_id"]))
    episodes = pq.read_table(tmp_path / "env_episodes").to_pylist()
    assert sum(row["agent_steps"] for row in episodes) == len(rows) == sink.num_steps
    assert {row["env_eps_id"] for row in rows} <= {row["eps_id"] for row in episodes}
    name = next(iter(text["modules"]))
    of_module = DatasetSource(tmp_path / "modules" / name)  # a dataset of one agent by itself
    assert of_module.num_steps == sum(len(c) for _, c in agent_chunks(fragments) if c.module_id == name)
    with pytest.raises(DatasetError, match=r"is a module's part of the dataset at"):
        DatasetSink(tmp_path / "modules" / name)


def test_agents_of_one_kind_and_their_mistakes_are_refused(tmp_path: Path) -> None:
    (fragment,) = fragments_of(TURNS, 1)
    write_dataset([fragment], tmp_path)
    envs = [lambda: NumberedAgents(0, agents=1, nested=0)]
    with MultiAgentRollout(envs, module=DefaultModule, num_fragments=1, fragment_length=4, seed=0) as other:
        with DatasetSink(tmp_path) as sink:
            for each in other.fragments():
                sink(each)  # another module, which is added
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
    assert env_steps_in(stored) == env_steps_in(fragments)
    lost = [each for each in DatasetSource(tmp_path / "data").episodes() if "lost" in each.custom_data]
    assert [each.is_truncated for each in lost] == [True]
    online = [each for fragment in fragments for each in fragment.episodes() if "lost" in each.custom_data]
    assert {each.custom_data["lost"] for each in lost} == {each.custom_data["lost"] for each in online}
    assert all("lost" in each.custom_data for each in lost[0].agent_episodes.values())
