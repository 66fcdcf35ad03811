"""Whole episodes: `complete_episodes=True` for `fragments()` and `batches()`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from drawn_rollouts import Setting, drawn_settings, rollout_of
from ending_envs import Doomed
from fragment_equality import in_time
from gymnasium.vector import AutoresetMode
from hypothesis import given, strategies as st
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv, numbered_envs
from numbered_module import NumberedModule
from piece_forms import equal

from rollflow import (
    DefaultModelConfig,
    FrameStacking,
    GeneralAdvantageEstimation,
    MultiAgentRollout,
    Rollout,
    SingleAgentEpisode,
)
from rollflow.nodes import AddNextObservationsFromEpisodesToTrainBatch, RandomModule
from rollflow.nodes.connectors.learner.train_columns import AddInfosFromEpisodesToTrainBatch
from rollflow.stream.data.errors import RunError


def copied(episode: SingleAgentEpisode) -> SingleAgentEpisode:
    return SingleAgentEpisode.from_state(episode.get_state())


def joined(chunks: Sequence[SingleAgentEpisode]) -> dict[str, SingleAgentEpisode]:
    """The episodes that chunks make, by id: each chunk without its lookback behind the one before."""
    whole: dict[str, SingleAgentEpisode] = {}
    for chunk in chunks:
        if chunk.id_ in whole:
            whole[chunk.id_].concat_episode(copied(chunk))
        else:
            whole[chunk.id_] = copied(chunk)
    return whole


def assert_same(one: SingleAgentEpisode, other: SingleAgentEpisode) -> None:
    """All of two episodes that does not depend on how they were put together."""
    for each in (one, other):
        assert each.t_started == 0
        assert each.is_numpy
    figures = [each.get_data_dict() for each in (one, other)]
    assert figures[0].pop("infos") == figures[1].pop("infos")
    equal(figures[0], figures[1])
    equal(one.get_observations(), other.get_observations())
    assert list(one.get_infos()) == list(other.get_infos())
    assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)
    assert one.custom_data == other.custom_data


@pytest.mark.slow
@given(drawn_settings, st.sampled_from([None, *AutoresetMode]))
def test_the_same_episodes_come_whole_and_none_of_their_transitions_is_lost(
    drawn: Setting, mode: AutoresetMode | None
) -> None:
    options: Any = {"prefetch": drawn.prefetch, "lanes": drawn.lanes, "autoreset_mode": mode}
    with rollout_of(drawn, **options) as rollout:
        chunks = [copied_in_place(chunk) for fragment in in_time(rollout.fragments()) for chunk in fragment.episodes()]
    expected = joined([chunk for chunk, _ in chunks])
    places = {chunk.id_: place for chunk, place in chunks}
    with rollout_of(drawn, **options) as rollout:
        whole = [
            each for fragment in in_time(rollout.fragments(complete_episodes=True)) for each in fragment.episodes()
        ]
        steps = rollout.num_steps
    assert {each.id_ for each in whole} == {id_ for id_, episode in expected.items() if episode.is_done}
    for episode in whole:
        assert_same(episode, expected[episode.id_])
        assert (episode.lane, episode.slot) == places[episode.id_]
    ended, open_steps = sum(map(len, whole)), sum(len(each) for each in expected.values() if not each.is_done)
    assert rollout.lost == ({"incomplete": open_steps} if open_steps else {})
    assert ended + open_steps == steps


def copied_in_place(chunk: SingleAgentEpisode) -> tuple[SingleAgentEpisode, tuple[int | None, int | None]]:
    return copied(chunk), (chunk.lane, chunk.slot)


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_a_batch_is_of_the_episodes_that_its_fragments_have_ended(where: Any) -> None:
    config = DefaultModelConfig(fcnet_hiddens=[4])
    pieces = lambda *spaces: [  # noqa: E731
        AddNextObservationsFromEpisodesToTrainBatch(),
        AddInfosFromEpisodesToTrainBatch(),
        GeneralAdvantageEstimation(gamma=1.0, lambda_=1.0),
    ]
    makers = [partial(NumberedEnv, slot, lengths=(3, 30)) for slot in range(4)]
    seen: list[tuple[int, int]] = []
    with Rollout(
        makers,
        lanes=2,
        where=where,
        model_config=config,
        fragment_length=7,
        num_fragments=12,
        learner_connector=pieces,
        seed=3,
    ) as rollout:
        for batch in rollout.batches(complete_episodes=True):
            slot, episode, step = batch["obs"].unbind(1)
            firsts = (step == 0).nonzero()[:, 0]
            ends = batch["terminateds"] | batch["truncateds"]
            assert step[0] == 0
            assert ends[-1]
            assert torch.equal(firsts[1:], ends.nonzero()[:-1, 0] + 1)  # every one begins where the last ended
            assert (step[1:][~ends[:-1]] == step[:-1][~ends[:-1]] + 1).all()
            assert torch.equal(batch["new_obs"][:, 2], step + 1)
            assert [info["number"] for info in batch["infos"]] == (10_000 * episode + step).tolist()
            assert batch["advantages"].isfinite().all()
            seen += zip(slot[firsts].tolist(), episode[firsts].tolist(), strict=True)
        steps = rollout.num_steps
    assert len(seen) == len(set(seen))
    assert steps == 12 * 7 * 4
    assert set(rollout.lost) == {"incomplete"}
    assert rollout.returns.count == len(seen)


def test_pieces_that_look_back_see_zeros_before_an_episode() -> None:
    stacks = lambda *spaces: FrameStacking(num_frames=3, as_learner_connector=True)  # noqa: E731
    with Rollout(
        partial(NumberedEnv, 1, lengths=(6, 6)),
        fragment_length=4,
        num_fragments=3,
        env_to_module_connector=lambda env: FrameStacking(num_frames=3),
        learner_connector=stacks,
        seed=0,
    ) as rollout:
        first, second = rollout.batches(complete_episodes=True)
    assert first["obs"][:, 2::3].tolist() == [[max(0, step - 2), max(0, step - 1), step] for step in range(6)]
    assert torch.equal(second["obs"][:, 2::3], first["obs"][:, 2::3])


def test_stateful_modules_begin_every_episode_with_the_initial_state() -> None:
    with Rollout(
        partial(NumberedEnv, 1, lengths=(6, 6)),
        model_config=DefaultModelConfig(use_lstm=True, max_seq_len=4),
        fragment_length=5,
        num_fragments=4,
        seed=0,
    ) as rollout:
        for batch in rollout.batches(complete_episodes=True):
            assert batch["seq_lens"].tolist() == [4, 2]
            for leaf in batch["state_in"].values():
                assert not leaf[0].any()
                assert leaf[1].any()


def test_what_is_held_is_the_open_episodes_alone() -> None:
    makers = numbered_envs(2, lengths=(50, 50))[1]
    with Rollout(makers, module=NumberedModule(), fragment_length=10, num_fragments=11, seed=0) as rollout:
        sizes = [fragment.num_steps for fragment in rollout.fragments(complete_episodes=True)]
        assert sizes == [100, 100]
    assert rollout.lost == {"incomplete": 20}


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_an_episode_whose_worker_is_lost_ends_as_truncated(where: Any, tmp_path: Path) -> None:
    maker = partial(Doomed, 0, tmp_path, "raise", 33, 1, lengths=(20, 20))
    with Rollout(maker, where=where, module=NumberedModule(), fragment_length=8, num_fragments=9, seed=0) as rollout:
        whole = [each for part in rollout.fragments(complete_episodes=True) for each in part.episodes()]
        steps = rollout.num_steps
    lost = [each for each in whole if "lost" in each.custom_data]
    assert len(lost) == 1
    assert "it broke" in lost[0].custom_data["lost"]
    assert lost[0].is_truncated
    assert not lost[0].is_terminated
    assert [len(each) for each in whole if each is not lost[0]] == [20] * (len(whole) - 1)
    assert all(each.get_observations(0)[2] == 0 for each in whole)
    assert sum(map(len, whole)) + rollout.lost["incomplete"] == steps


def test_loops_of_both_kinds_do_not_mix() -> None:
    with Rollout(numbered_envs(1)[1], module=NumberedModule(), fragment_length=8, seed=0) as rollout:
        for _ in rollout.batches(complete_episodes=True):
            break
        with pytest.raises(RunError, match="an earlier loop over the rollout had complete_episodes=True, expected"):
            next(iter(rollout.batches()))
        assert next(iter(rollout.fragments(complete_episodes=True))).num_steps


@pytest.mark.parametrize(
    ("rollout", "flag", "told"),
    [
        (partial(Rollout, "CartPole-v1", max_lag=1), True, "complete_episodes with max_lag=1: an episode may span"),
        *((partial(Rollout, "CartPole-v1"), flag, f"is {flag!r}, expected True or False") for flag in ("yes", 1, None)),
        (
            partial(MultiAgentRollout, partial(NumberedAgents, 0, nested=0), module=RandomModule),
            True,
            "complete_episodes is for environments of one agent",
        ),
    ],
    ids=["max_lag", "text", "number", "none", "several agents"],
)
@pytest.mark.parametrize("loop", ["batches", "fragments"])
def test_what_has_no_whole_episodes_is_refused(rollout: Any, flag: Any, told: str, loop: str) -> None:
    with rollout() as made, pytest.raises(ValueError, match=told):
        getattr(made, loop)(complete_episodes=flag)


def test_observations_of_a_dict_space_stay_one() -> None:
    makers = numbered_envs(1, nested=True, lengths=(5, 5))[1]
    with Rollout(makers, module=NumberedModule(), fragment_length=3, num_fragments=4, seed=0) as rollout:
        [whole, _] = rollout.fragments(complete_episodes=True)
        assert isinstance(whole.observation_space, gym.spaces.Dict)
        assert repr(whole) == "<WholeEpisodes 1 of lane 0: 1 episodes, 5 steps>"
        [episode] = whole.episodes()
        assert [step for _, _, step in episode.get_observations()["at"].tolist()] == list(range(6))
