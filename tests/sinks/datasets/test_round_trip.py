"""What is read from a dataset is what was made."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings, strategies as st
from property_examples import examples
from replayed import Played, numbers_of, plays, write_dataset
from shapes_env import FixedModule, Shapes

from rollflow import DatasetSink, DatasetSource, DefaultModelConfig, GeneralAdvantageEstimation, Graph, Rollout
from rollflow.nodes import RandomModule
from rollflow.sinks import LearnerPipeline, TrainerSink
from rollflow.sinks.datasets import dataset_sink, episode_block
from rollflow.stream import GraphError


def check_episode(episode: Any, played: Played) -> set[tuple[int, int, int]]:
    """Hold an episode against the environments' logs; returns its steps."""
    observations = numbers_of(episode.get_observations())
    slot, number, first = observations[0].tolist()
    assert first == episode.t_started
    steps = [(slot, number, first + each) for each in range(len(episode))]
    assert observations.tolist() == [*map(list, steps), [slot, number, first + len(episode)]]
    made = [played.steps[step] for step in steps]
    assert episode.get_actions().tolist() == [action for action, *_ in made]
    assert episode.get_rewards().tolist() == [reward for _, reward, *_ in made]
    assert episode.get_extra_model_outputs("seen").tolist() == observations[:-1].tolist()
    *_, terminated, truncated = made[-1]
    is_cut = "cut" in episode.custom_data
    assert (episode.is_terminated, episode.is_truncated) == (terminated, truncated or is_cut)
    assert is_cut == (not terminated and not truncated)
    return set(steps)


def steps_of(fragments: list[Any]) -> set[tuple[int, int, int]]:
    return {
        tuple(numbers.tolist())
        for fragment in fragments
        if fragment.num_steps
        for numbers in numbers_of(fragment.gather("obs"))
    }


@settings(max_examples=examples(20), deadline=None)
@given(
    played=plays(),
    file_bytes=st.sampled_from([1, 10_000, 1 << 20]),
    shuffle_seed=st.sampled_from([None, 3]),
    window=st.sampled_from([1, 10, 1000]),
)
def test_every_episode_is_read_once_and_whole(
    played: Played, file_bytes: int, shuffle_seed: int | None, window: int
) -> None:
    with TemporaryDirectory() as folder:
        write_dataset(played.fragments, Path(folder, "data"), max_file_bytes=file_bytes)
        source = DatasetSource(Path(folder, "data"), shuffle_seed=shuffle_seed, window_steps=window)
        found = [check_episode(episode, played) for episode in source.episodes()]
    everything = steps_of(played.fragments)
    assert sum(map(len, found)) == len(everything) == source.num_steps
    assert set().union(*found) == everything
    assert len(found) == source.num_episodes == len({step[:2] for step in everything})


@settings(max_examples=examples(20), deadline=None)
@given(
    played=plays(),
    size=st.integers(1, 20),
    lookback=st.integers(0, 3),
    window=st.sampled_from([1, 10, 1000]),
    complete=st.booleans(),
    group_bytes=st.sampled_from([1, 1 << 20]),
    joined_bytes=st.sampled_from([0, 512]),
)
def test_chunks_join_with_their_lookback_and_batches_have_every_step_once(
    played: Played, size: int, lookback: int, window: int, complete: bool, group_bytes: int, joined_bytes: int
) -> None:
    options: dict[str, Any] = {
        "batch_size": size, "window_steps": window, "lookback": lookback, "complete_episodes": complete,
    }  # fmt: skip
    with (
        TemporaryDirectory() as folder,
        patch.object(dataset_sink, "_GROUP_BYTES", group_bytes),
        patch.object(episode_block, "_JOINED_BYTES", joined_bytes),
    ):
        write_dataset(played.fragments, Path(folder, "data"))
        fragments = list(DatasetSource(Path(folder, "data"), **options).fragments())
        batches = list(DatasetSource(Path(folder, "data"), **options).batches())
    reached: dict[tuple[int, int], int] = {}
    for fragment in fragments:
        for chunk in fragment.episodes():
            slot, number, first = numbers_of(chunk.get_observations())[0].tolist()
            assert chunk.t_started == first == reached.get((slot, number), 0)
            assert chunk.rewards.lookback == min(lookback, first)
            before = slice(-chunk.rewards.lookback, 0)
            if chunk.rewards.lookback:
                seen = numbers_of(chunk.get_observations(before, neg_index_as_lookback=True))
                assert seen[:, 2].tolist() == list(range(first - len(seen), first))
                rewards = chunk.get_rewards(before, neg_index_as_lookback=True)
                assert rewards.tolist() == [played.steps[slot, number, step][1] for step in seen[:, 2].tolist()]
            assert numbers_of(chunk.get_observations())[-1].tolist() == [slot, number, first + len(chunk)]
            reached[slot, number] = first + len(chunk)
    rows = [len(batch["rewards"]) for batch in batches]
    assert complete or all(count == size for count in rows[:-1])
    assert [fragment.num_steps for fragment in fragments] == rows
    steps = [tuple(step) for batch in batches for step in numbers_of(batch["obs"]).tolist()]
    assert sorted(steps) == sorted(steps_of(played.fragments))
    rewards = [reward for batch in batches for reward in batch["rewards"].tolist()]
    assert rewards == [played.steps[step][1] for step in steps]


def test_nested_observations_actions_and_outputs_come_back_with_their_types(tmp_path: Path) -> None:
    with (
        Rollout([Shapes, Shapes], module=FixedModule(), fragment_length=8, num_fragments=3, seed=0) as rollout,
        DatasetSink(tmp_path) as sink,
    ):
        fragments = list(rollout.fragments())
        for fragment in fragments:
            sink(fragment)
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
    if isinstance(tree, dict):
        return {key: _tensors(part) for key, part in tree.items()}
    return tuple(map(_tensors, tree)) if isinstance(tree, tuple) else torch.from_numpy(np.array(tree))


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
    with DatasetSink(tmp_path) as other:  # the first one is closed
        for fragment in DatasetSource(tmp_path).fragments():
            other(fragment)
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
        *("run", "t", "obs.list.element", "actions", "policy_version", "seen.list.element")
    }


class Dotted(gym.Env[Any, Any]):
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
    action_space = gym.spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(seed=kwargs.get("seed"))
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


def test_parts_that_share_a_path_are_written_and_read(tmp_path: Path) -> None:
    with Rollout(Dotted, module=RandomModule, fragment_length=16, num_fragments=1, seed=0) as rollout:
        [fragment] = rollout.fragments()
    write_dataset([fragment], tmp_path)
    [again] = DatasetSource(tmp_path).fragments()
    for name in ("a", "a.b", "x", "x.list"):
        one, other = fragment.gather("obs")[name], again.gather("obs")[name]
        np.testing.assert_equal(one, other)
