"""One meaning: a piece gives the same on columns and on episodes one by one, in rollouts that are otherwise equal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, strategies as st
from numbered_module import NumberedEnv
from piece_forms import MODES, OneByOne, OnTensors, equal

from rollflow import ConnectorV2, FrameStacking, MeanStdFilter, RLModule, Rollout
from rollflow.nodes import (
    AddNextObservationsFromEpisodesToTrainBatch,
    FlattenObservations,
    LambdaConnector,
    OneHotObservations,
    PrevActionsPrevRewards,
)
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.env_to_module.observation_pieces import WriteObservationsToEpisodes
from rollflow.stream.data.tree import leaves_of, map_tree

Make = Callable[[], list[ConnectorV2]]


def halve(batch: dict[str, Any]) -> None:
    """Halve what is in the batch's `obs`, in whatever form."""
    batch["obs"] = map_tree(lambda leaf: leaf // 2, batch["obs"])


class Sees(RLModule):
    """Chooses by a number made of all that it sees, and records it."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        parts = [
            leaf.double().flatten(1) if leaf.ndim > 1 else leaf.double()[:, None] for leaf in leaves_of(batch["obs"])
        ]
        seen = torch.cat(parts, 1)
        weights = torch.arange(1, seen.shape[1] + 1, dtype=torch.float64)
        number = (seen * weights).sum(1)
        return {"actions": number.long().remainder(7), "seen": seen}


PIECES: dict[str, Make] = {
    "FrameStacking": lambda: [FrameStacking(num_frames=3)],
    "FlattenObservations": lambda: [FlattenObservations()],
    "OneHotObservations": lambda: [OneHotObservations()],
    "PrevActionsPrevRewards": lambda: [PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=3)],
    "MeanStdFilter": lambda: [MeanStdFilter()],
    "WriteObservationsToEpisodes": lambda: [
        AddObservationsFromEpisodesToBatch(),
        LambdaConnector(halve, columnar=True),
        WriteObservationsToEpisodes(),
    ],
    "several": lambda: [OneHotObservations(), PrevActionsPrevRewards(), FlattenObservations(), MeanStdFilter()],
}
# Stacks of single numbers, which nested observations have, make no sense, and are refused.
FLAT_ALONE = {"FrameStacking"}


def fragments_of(
    pieces: list[ConnectorV2], *, slots: int, mode: AutoresetMode, nested: bool, **options: Any
) -> list[Any]:
    env = SyncVectorEnv(
        [lambda slot=slot: NumberedEnv(slot, nested=nested) for slot in range(slots)],  # type: ignore[misc]
        autoreset_mode=mode,
    )
    with Rollout(env, module=Sees(), seed=5, env_to_module_connector=lambda env: pieces, **options) as rollout:
        return list(rollout.fragments())


def without_last(make: Make, name: str) -> list[ConnectorV2]:
    pieces = make()
    if name == "WriteObservationsToEpisodes":  # `halve` takes arrays: one by one they are made by hand
        return [LambdaConnector(write_one_by_one)]
    return [*pieces, OneByOne()]


def write_one_by_one(rl_module: Any, batch: dict[str, Any], episodes: Any) -> Any:
    """Do episode by episode what `WriteObservationsToEpisodes` does behind `halve`."""
    for episode in episodes:
        halved = map_tree(lambda leaf: leaf // 2, episode.get_observations(-1))
        ConnectorV2.add_batch_item(batch, "obs", halved, episode)
    return WriteObservationsToEpisodes()(rl_module=rl_module, batch=batch, episodes=episodes)


def options_drawn(name: str, data: st.DataObject) -> dict[str, Any]:
    return {
        "slots": data.draw(st.integers(1, 4)),
        "mode": data.draw(st.sampled_from(MODES)),
        "nested": name not in FLAT_ALONE and data.draw(st.booleans()),
        "fragment_length": data.draw(st.integers(1, 9)),
        "lookback": data.draw(st.sampled_from([None, 5])),
        "num_fragments": data.draw(st.integers(1, 3)),
    }


@pytest.mark.parametrize("name", [name for name in PIECES if len(PIECES[name]()) == 1])
@given(data=st.data())
def test_tensors_and_arrays_give_the_same(name: str, data: st.DataObject) -> None:
    compared = OnTensors(lambda: PIECES[name]()[0], bound=1e-6 if name == "MeanStdFilter" else 0.0)
    fragments_of([compared], **options_drawn(name, data))
    assert compared.compared


@pytest.mark.parametrize("name", PIECES)
@given(data=st.data())
def test_columns_and_episodes_one_by_one_give_the_same(name: str, data: st.DataObject) -> None:
    options = options_drawn(name, data)
    columnar = fragments_of(PIECES[name](), **options)
    plain = fragments_of(without_last(PIECES[name], name), **options)
    assert len(columnar) == len(plain) == options["num_fragments"]
    for one, other in zip(columnar, plain, strict=True):
        assert one.columns.keys() == other.columns.keys()
        for column in one.columns:
            equal(one.column(column), other.column(column))
        equal(one.last_observations(), other.last_observations())


def test_fragments_keep_as_much_lookback_as_pieces_need() -> None:
    rollout = Rollout("CartPole-v1", env_to_module_connector=lambda env: FrameStacking(num_frames=6))
    assert rollout.environments.lanes[0].layout.lookback == 5
    assert Rollout("CartPole-v1").environments.lanes[0].layout.lookback == 1
    with pytest.raises(ValueError, match="lookback is 2, expected at least 5: FrameStacking looks back as far"):
        Rollout("CartPole-v1", lookback=2, env_to_module_connector=lambda env: FrameStacking(num_frames=6))
    learner = lambda obs_space, act_space: FrameStacking(num_frames=4, as_learner_connector=True)  # noqa: E731
    assert Rollout("CartPole-v1", learner_connector=learner).environments.lanes[0].layout.lookback == 3
    behind = LambdaConnector(lambda batch: batch, lookback=5)
    rollout = Rollout("CartPole-v1", module_to_env_connector=lambda env: behind)
    assert rollout.environments.lanes[0].layout.lookback == 5
    both: Any = {"env_to_module_connector": lambda env: FrameStacking(num_frames=3), "learner_connector": learner}
    assert Rollout("CartPole-v1", **both).environments.lanes[0].layout.lookback == 3


@given(length=st.integers(1, 9), rows=st.integers(1, 7), frames=st.integers(1, 5))
def test_the_learner_sees_the_stacks_that_the_module_saw(length: int, rows: int, frames: int) -> None:
    def learns(obs_space: Any, act_space: Any) -> list[ConnectorV2]:
        stacks = FrameStacking(num_frames=frames, as_learner_connector=True)
        return [stacks, AddNextObservationsFromEpisodesToTrainBatch()]

    makers: Any = [lambda: NumberedEnv(0, lengths=(length, length + 1)), lambda: NumberedEnv(1)]
    acts: Any = {"module": Sees(), "env_to_module_connector": lambda env: FrameStacking(num_frames=frames)}
    rollout = Rollout(makers, fragment_length=rows, num_fragments=3, learner_connector=learns, **acts)
    with rollout:
        for fragment in rollout.fragments():
            batch = rollout.learner_pipeline.of_fragments([fragment], rollout.module)
            assert batch["obs"].tolist() == batch["seen"].tolist()
            chunks = list(fragment.episodes())
            one_by_one = rollout.learner_pipeline(rl_module=rollout.module, episodes=chunks)
            ours, theirs = ({name: each[name].numpy() for name in each} for each in (batch, one_by_one))
            equal(ours, theirs)
            ends = np.cumsum([len(chunk) for chunk in chunks]) - 1
            newest = [chunk.get_observations(-1).tolist() for chunk in chunks]
            assert batch["new_obs"][ends, -3:].tolist() == newest
            assert batch["new_obs"][ends, :-3].tolist() == batch["obs"][ends, 3:].tolist()
