"""What is read from a dataset is what was made, with the runs that it was made in."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from drawn_agents import drawn_settings
from fragment_equality import chunks_of
from hypothesis import given, settings, strategies as st
from lost_agents import check_multi_agent_chunks, numbers
from property_examples import examples
from replayed import Played, plays, write_dataset
from replayed_agents import fragments_of
from serial_module import at_of
from shapes_env import FixedModule, Shapes
from small_env import SmallEnv
from stored_steps import env_steps_of, steps_in

from rollflow import (
    DatasetSink,
    DatasetSource,
    DefaultModelConfig,
    Fragment,
    GeneralAdvantageEstimation,
    Graph,
    Rollout,
)
from rollflow.nodes import RandomModule
from rollflow.sinks import LearnerPipeline, TrainerSink
from rollflow.sinks.datasets import dataset_sink, episode_block
from rollflow.stream import DatasetError, GraphError
from rollflow.stream.data.tree import map_tree
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


@st.composite
def rollouts(draw: Any) -> list[Any]:
    """The fragments of a rollout of one agent or of several."""
    return draw(plays()).fragments if draw(st.booleans()) else fragments_of(draw(drawn_settings), 3)


def env_steps_in(fragments: Sequence[Any]) -> Counter[Any]:
    """Every env step of every episode, and how the episode ended there."""
    found: Counter[Any] = Counter()
    for fragment in fragments:
        if isinstance(fragment, Fragment):  # whose steps are its agent's
            continue
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


def check_lookback(stored: Sequence[Any], fragments: Sequence[Any], lookback: int) -> None:
    """Every chunk shows so many steps before its first, as they were made."""
    paid = {
        (each.id_, each.t_started + i): each.get_rewards(i) for each in chunks_of(fragments) for i in range(len(each))
    }
    for chunk in chunks_of(stored):
        back = min(lookback, chunk.t_started)
        steps, before = range(chunk.t_started - back, chunk.t_started), slice(-back, 0)
        assert chunk.rewards.lookback == back
        if back:
            seen = at_of(chunk.get_observations(before, neg_index_as_lookback=True))
            assert seen[:, -1].tolist() == list(steps)
            rewards = chunk.get_rewards(before, neg_index_as_lookback=True)
            assert rewards.tolist() == [paid[chunk.id_, step] for step in steps]


def rows_in(batch: Any) -> Iterator[Any]:
    for each in [batch] if "obs" in batch else batch.values():
        yield from zip(map(numbers, at_of(each["obs"])), each["rewards"].tolist(), strict=True)


@settings(max_examples=examples(16), deadline=None)
@given(
    fragments=rollouts(),
    sizes=st.tuples(st.sampled_from([1, 10_000, 1 << 20]), st.sampled_from([1, 1 << 20]), st.sampled_from([0, 512])),
    size=st.integers(1, 20),
    shuffle_seed=st.sampled_from([None, 3]),
    window_steps=st.sampled_from([1, 10, 1000]),
    lookback=st.integers(0, 3),
    complete_episodes=st.booleans(),
)
def test_every_step_is_read_once(fragments: list[Any], sizes: tuple[int, int, int], size: int, **options: Any) -> None:
    file_bytes, group_bytes, joined_bytes = sizes
    with (
        TemporaryDirectory() as folder,
        patch.object(dataset_sink, "_GROUP_BYTES", group_bytes),
        patch.object(episode_block, "_JOINED_BYTES", joined_bytes),
    ):
        path, again = Path(folder, "data"), Path(folder, "again")
        write_dataset(fragments, path, max_file_bytes=file_bytes)
        source = DatasetSource(path, batch_size=size, **options)
        stored, episodes = list(source.fragments()), list(source.episodes())
        write_dataset(stored, again)
        copied = list(DatasetSource(again, batch_size=size, **options).fragments())
        batches = list(source.batches())
    assert steps_in(stored) == steps_in(copied) == steps_in(fragments)
    assert env_steps_in(stored) == env_steps_in(copied) == env_steps_in(fragments)
    assert source.num_steps == sum(map(env_steps_of, fragments))
    assert len({each.id_ for each in episodes}) == len(episodes) <= source.num_episodes
    assert all(each.is_done for each in episodes)
    if isinstance(fragments[0], Fragment):
        assert (len(episodes), sum(map(len, episodes))) == (source.num_episodes, source.num_steps)
    else:
        check_chunks(stored)
    check_lookback(stored, fragments, options["lookback"])
    if not options["complete_episodes"] and options["shuffle_seed"] is None:
        assert [env_steps_of(fragment) for fragment in stored[:-1]] == [size] * (len(stored) - 1)
    expected = Counter(
        (numbers(at), float(reward))
        for each in chunks_of(fragments)
        for at, reward in zip(at_of(each.get_observations()), each.get_rewards(), strict=False)
    )
    assert Counter(row for batch in batches for row in rows_in(batch)) == expected


def test_nested_observations_actions_and_outputs_come_back_with_their_types(tmp_path: Path) -> None:
    with Rollout([Shapes, Shapes], module=FixedModule(), fragment_length=8, num_fragments=3, seed=0) as rollout:
        fragments = list(rollout.fragments())
    write_dataset(fragments, tmp_path)
    source = DatasetSource(tmp_path)
    assert source.observation_space == Shapes.observation_space
    assert source.action_space == Shapes.action_space
    stored: dict[str, list[Any]] = {}
    for episode in source.episodes():
        stored.setdefault(episode.id_, []).append(episode)
    for fragment in fragments:
        for chunk in fragment.episodes():
            (episode,) = stored[chunk.id_]
            part = episode[chunk.t_started : chunk.t_started + len(chunk)]
            for read in (
                lambda each: each.get_observations(),
                lambda each: each.get_actions(),
                lambda each: each.get_extra_model_outputs("memory"),
            ):
                torch.testing.assert_close(_tensors(read(part)), _tensors(read(chunk)), rtol=0, atol=0)


def _tensors(tree: Any) -> Any:
    return map_tree(lambda leaf: torch.from_numpy(np.array(leaf)), tree)


@pytest.mark.parametrize("use_lstm", [False, True])
def test_offline_batches_are_those_of_the_rollout(tmp_path: Path, use_lstm: bool) -> None:
    def pieces(obs_space: Any, act_space: Any) -> Any:
        return GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)

    options: dict[str, Any] = {"fragment_length": 40, "num_fragments": 4, "seed": 0, "learner_connector": pieces}
    options["model_config"] = DefaultModelConfig(use_lstm=use_lstm)
    mode = gym.vector.AutoresetMode.SAME_STEP  # without dead rows, fragments have 40 steps
    with Rollout([lambda: gym.make("CartPole-v1")], autoreset_mode=mode, **options) as rollout:
        fragments = list(rollout.fragments())
        online = [rollout.learner_pipeline.of_fragments([fragment], rollout.module) for fragment in fragments]
        module = rollout.module
    write_dataset(fragments, tmp_path)
    offline = list(DatasetSource(tmp_path, batch_size=40, module=module, learner_connector=pieces).batches())
    assert len(offline) == len(online) == 4
    del online[-1]["truncateds"], offline[-1]["truncateds"]  # the dataset's last episode is cut
    for one, other in zip(offline, online, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.anyio
async def test_sink_and_source_stand_in_graphs(tmp_path: Path, anyio_backend: str) -> None:
    rollout = Rollout("CartPole-v1", num_envs=2, fragment_length=16, num_fragments=3, seed=0)
    sink = DatasetSink(tmp_path)
    graph = Graph("writes")
    graph.add(rollout=rollout, data=sink)
    graph.connect("rollout.fragments", "data")
    async with graph.run() as run:
        await run.wait()
    assert sink.num_steps == DatasetSource(tmp_path).num_steps > 0
    write_dataset(DatasetSource(tmp_path).fragments(), tmp_path)  # the first sink is closed
    assert DatasetSource(tmp_path).num_steps == 2 * sink.num_steps
    source = DatasetSource(tmp_path, batch_size=32, passes=2)
    (first, second) = source.description["runs"]
    assert (first["rollout"]["env"], first["rollout"]["seed"]) == ("CartPole-v1", 0)
    assert second == first
    assert any("NumpyToTensor" in name for name in first["rollout"]["env_to_module"])
    graph = Graph("reads")
    graph.add(source=source, learner=LearnerPipeline(source.learner_pipeline, None))
    graph.connect("source.fragments", "learner")
    graph.output("batches", "learner")
    async with graph.run() as run:
        assert sum([len(batch["obs"]) async for batch in run["batches"]]) == 2 * source.num_steps


@pytest.mark.anyio
async def test_a_trainer_elsewhere_wants_a_rollout(tmp_path: Path, anyio_backend: str) -> None:
    write_dataset(Played(slots=1, fragments=1).fragments, tmp_path)
    graph = Graph("sends")
    graph.add(source=DatasetSource(tmp_path), trainer=TrainerSink("unix:/nowhere"))
    graph.connect("source.fragments", "trainer")
    with pytest.raises(GraphError, match=r"no rollout leads to the TrainerSink to unix:/nowhere, but DatasetSource"):
        async with graph.run():
            pass


def test_a_file_says_that_there_are_no_nulls_and_has_whole_numbers_as_deltas(tmp_path: Path) -> None:
    write_dataset([Played(slots=2, fragments=1).fragments[0]], tmp_path)
    [name] = (tmp_path / "steps").glob("*.parquet")
    file = pq.ParquetFile(name)
    assert not any(field.nullable for field in file.schema_arrow)
    group = file.metadata.row_group(0)
    encodings = {each.path_in_schema: each.encodings for each in map(group.column, range(group.num_columns))}
    assert {path for path, of in encodings.items() if "DELTA_BINARY_PACKED" in of} == {
        *("run", "t", "actions", "policy_version")
    }


class Dotted(SmallEnv):
    """Has parts whose paths in a Parquet file are those of others."""

    whole, real = gym.spaces.Discrete(5), gym.spaces.Box(-1, 1, (), np.float32)
    observation_space = gym.spaces.Dict(
        {
            "a": gym.spaces.Dict({"b": whole, "c": whole}),
            "a.b": real,
            "x": gym.spaces.Box(0, 9, (2,), np.int64),
            "x.list": gym.spaces.Dict({"element": real}),
        }
    )

    def look(self) -> Any:
        return self.observation_space.sample()


def test_parts_that_share_a_path_are_written_and_read(tmp_path: Path) -> None:
    with Rollout(Dotted, module=RandomModule, fragment_length=16, num_fragments=1, seed=0) as rollout:
        [fragment] = rollout.fragments()
    write_dataset([fragment], tmp_path)
    [again] = DatasetSource(tmp_path).fragments()
    for name in ("a", "a.b", "x", "x.list"):
        one, other = fragment.gather("obs")[name], again.gather("obs")[name]
        np.testing.assert_equal(one, other)


def rollout(seed: int = 0, env: str = "CartPole-v1", fragments: int = 2) -> Rollout:
    return Rollout(env, num_envs=2, fragment_length=16, num_fragments=fragments, seed=seed)


def write(path: Path, *rollouts: Rollout, complete: bool = False, **options: Any) -> None:
    """Write the fragments of rollouts to one sink, a fragment of each in turn."""
    with DatasetSink(path, **options) as sink:
        made = [each.__enter__().fragments(complete_episodes=complete) for each in rollouts]
        for fragments in zip(*made, strict=True):
            for fragment in fragments:
                sink(fragment)
        for each in rollouts:
            each.close()


@pytest.mark.parametrize("complete", [False, True])
def test_two_rollouts_of_one_seed_are_two_runs_of_one_sink(tmp_path: Path, complete: bool) -> None:
    first = rollout(fragments=4)
    write(tmp_path, first, rollout(fragments=4), complete=complete, rollout=first)
    source = DatasetSource(tmp_path)
    assert [run["rollout"] is None for run in source.description["runs"]] == [False, True]
    rows = pq.read_table(tmp_path / "episodes").select(["run", "eps_id", "t_started"]).to_pylist()
    by_run = [sorted((row["eps_id"], row["t_started"]) for row in rows if row["run"] == run) for run in (0, 1)]
    assert by_run[0] == by_run[1] != []
    assert len({(row["run"], row["eps_id"], row["t_started"]) for row in rows}) == len(rows)


def test_runs_that_are_written_from_a_source_stay_runs_with_their_records(tmp_path: Path) -> None:
    fragments, path, other = Played(slots=2, fragments=6).fragments, tmp_path / "data", tmp_path / "other"
    for _ in range(2):
        write_dataset(fragments, path, metadata={"by": "us"})
    write_dataset(DatasetSource(path, batch_size=7, shuffle_seed=0).fragments(), other, metadata={"copied": True})
    before, after = DatasetSource(path), DatasetSource(other)
    assert [run["metadata"] for run in after.description["runs"]] == [{"by": "us", "copied": True}] * 2
    ids = [
        sorted((int(run), each.id_) for run, each in zip(source._store.runs, source.episodes(), strict=True))
        for source in (before, after)
    ]
    assert ids[0] == ids[1]
    assert steps_in(list(after.fragments())) == steps_in([*fragments, *fragments])


def test_another_environment_with_the_same_spaces_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for env in ("CartPole-v1", "CartPole-v1", "CartPole-v0"):
        one = rollout(env=env)
        write(tmp_path, one, rollout=one)
        expected = "expected one environment" if env == "CartPole-v0" else ""
        assert caplog.text.strip().endswith(expected)
        assert bool(caplog.text) == bool(expected)
    assert f"{tmp_path} has steps of CartPole-v1 and of CartPole-v0" in caplog.text


def test_a_bad_folder_is_refused_when_the_sink_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DatasetError, match=f"{file} is a file, expected a dataset, which is a folder"):
        DatasetSink(file)
    with pytest.raises(DatasetError, match=f"a dataset can't be written to {file}/below"):
        DatasetSink(file / "below")
    with pytest.raises(DatasetError, match=f"{file} is a file, expected the folder of a dataset"):
        DatasetSource(file)
    with pytest.raises(DatasetError, match="there is no dataset at"):
        DatasetSource(file / "below")


def test_a_sink_without_a_step_leaves_a_dataset_without_steps(tmp_path: Path) -> None:
    with DatasetSink(tmp_path / "data"):
        pass
    with pytest.raises(DatasetError, match=f"the dataset at {tmp_path}/data has no steps yet"):
        DatasetSource(tmp_path / "data")
    write(tmp_path / "data", rollout())
    assert DatasetSource(tmp_path / "data").num_steps > 0


def test_a_sink_that_nobody_has_any_more_lets_others_write(tmp_path: Path) -> None:
    sink = DatasetSink(tmp_path)
    del sink
    DatasetSink(tmp_path).close()


def test_what_can_be_no_module_or_state_is_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, rollout())
    with pytest.raises(ValueError, match="module is 3, expected a module"):
        DatasetSource(tmp_path, module=3)
    with pytest.raises(ValueError, match="learner_connector is 3, expected a function"):
        DatasetSource(tmp_path, learner_connector=3)  # type: ignore[arg-type]
    for state in ({}, {"files": [1]}, 3):
        with pytest.raises(DatasetError, match=r"the state is .*, expected what state_dict\(\) has given"):
            DatasetSource(tmp_path).load_state_dict(state)  # type: ignore[arg-type]
