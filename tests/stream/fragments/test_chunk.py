"""Chunks as they come out of a fragment: episodes over views, which nobody may write to."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numbered_module import NumberedModule, numbered_envs

from rollflow import Fragment, Rollout, SingleAgentEpisode
from rollflow.stream import ColumnError, EpisodeError
from rollflow.stream.fragments.fragment import EpisodeIds, FragmentLayout
from rollflow.stream.fragments.lane import Lane


def fragments_of(count: int, mode: AutoresetMode = AutoresetMode.SAME_STEP, **kwargs: Any) -> list[Fragment]:
    env = SyncVectorEnv(numbered_envs(3, lengths=(6, 6))[1], autoreset_mode=mode)
    options = {"fragment_length": 4, "lookback": 2, "seed": 0, "num_fragments": count, **kwargs}
    with Rollout(env, module=NumberedModule(), **options) as rollout:
        return list(rollout.fragments())


def test_a_chunk_is_a_view_of_its_fragments_columns() -> None:
    first, second, *_ = fragments_of(3)
    chunk = second.episodes()[0]
    assert np.shares_memory(chunk.get_rewards(), second.columns["rewards"].tree)
    assert np.shares_memory(chunk.get_observations(slice(0, 2)), second.columns["obs"].tree)
    assert chunk.is_numpy
    assert (chunk.t_started, chunk.t, chunk.rewards.lookback, chunk.is_done) == (4, 6, 2, True)
    assert chunk.get_observations()[:, 2].tolist() == [4, 5, 6]
    assert chunk.get_observations([-1, -5, 0])[:, 2].tolist() == [6, 2, 4]
    assert chunk.get_infos([-1, 0]) == [{"number": 6}, {"number": 4}]
    assert first.episodes()[0].id_ == chunk.id_


@pytest.mark.parametrize("what", ["observations", "actions", "rewards"])
def test_what_came_out_of_a_rollout_is_read_only(what: str) -> None:
    for chunk in fragments_of(2)[1].episodes():
        data = getattr(chunk, f"get_{what}")(-1)
        with pytest.raises(EpisodeError, match="read-only"):
            getattr(chunk, f"set_{what}")(new_data=data, at_indices=-1)
    with pytest.raises(EpisodeError, match="infos of a fragment are read-only"):
        chunk.infos[0] = {}


def test_a_copy_can_be_stepped_on_cut_and_joined_by_hand() -> None:
    first, second, *_ = fragments_of(3)
    whole = SingleAgentEpisode.from_state(first.episodes()[1].get_state())
    whole.concat_episode(second.episodes()[2])
    assert (len(whole), whole.is_done) == (6, True)
    assert whole.get_observations()[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6]
    going_on = SingleAgentEpisode.from_state(first.episodes()[0].get_state())
    going_on.set_rewards(new_data=9.0, at_indices=-1)
    assert (going_on.get_rewards(-1), first.episodes()[0].get_rewards(-1)) == (9.0, 4.0)
    outputs = {name: going_on.get_extra_model_outputs(name, -1) for name in going_on.extra_model_outputs}
    going_on.add_env_step(np.array([0, 0, 5]), 1, 5.0, {"own": True}, extra_model_outputs=outputs)
    assert going_on.get_infos([-2, -1]) == [{"number": 4}, {"own": True}]
    assert going_on.cut().t_started == 5
    with pytest.raises(EpisodeError, match="a fragment's chunk is read-only; write to a copy"):
        first.episodes()[0].concat_episode(second.episodes()[0])
    with pytest.raises(EpisodeError, match="a fragment's chunk is read-only; write to a copy"):
        first.episodes()[0].add_env_step(np.array([0, 0, 5]), 1, 5.0)


def test_a_fragment_names_the_column_that_it_does_not_have() -> None:
    fragment = fragments_of(1)[0]
    with pytest.raises(ColumnError, match=r"<Fragment 0 of lane 0: 4 vector steps × 3 slots> has no column 'nope'"):
        fragment.column("nope")
    assert fragment.nbytes == sum(column.nbytes for column in fragment.columns.values())
    episodes = fragment.episodes()
    assert episodes[0:2] == [episodes[0], episodes[1]]
    with pytest.raises(IndexError):
        episodes[99]


def lane_of_two(rows: int) -> Lane:
    layout = FragmentLayout(2, rows, 0, gym.spaces.Discrete(2), False, EpisodeIds("lane"))
    return Lane(0, layout, gym.spaces.Box(-1, 1, (1,), np.float32))


def test_a_dict_of_infos_that_is_empty_is_not_kept_for_what_comes_later() -> None:
    lane, reused, flags = lane_of_two(3), dict[str, Any](), np.zeros(2, np.bool_)
    lane.reset(np.zeros((2, 1), np.float32), {})
    for step in range(3):
        lane.record_actions({"actions": np.zeros(2, np.int64)})
        if step == 2:
            reused["bonus"] = np.ones(2)
        lane.record_step(np.zeros((2, 1), np.float32), np.zeros(2, np.float32), flags, flags, reused)
    infos = lane.cut().episodes()[0].get_infos()
    assert infos == [{}, {}, {}, {"bonus": 1.0}]


def test_rows_that_were_never_written_are_in_no_sum() -> None:
    lane, flags = lane_of_two(2), np.zeros(2, np.bool_)
    lane.reset(np.zeros((2, 1), np.float32), {})
    for _ in range(2):
        lane.record_actions({"actions": np.zeros(2, np.int64)})
        lane.record_step(np.zeros((2, 1), np.float32), np.ones(2, np.float32), flags, flags, {})
    fragment = lane.fragment
    fragment.columns["rewards"].tree.view(np.uint32)[:, 0] = 0x7F800001  # a signalling NaN, as memory may have
    fragment.seal_at(np.array([0, 2]))
    with np.errstate(all="raise"):
        assert fragment.chunk_sums("rewards").tolist() == [2.0]
    assert "nan" not in fragment._repr_html_().lower()
