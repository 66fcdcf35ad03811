"""A column's rows chunk by chunk, and the memory that they are gathered in."""

from dataclasses import fields
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from numbered_env import NumberedEnv

from rollflow import Fragment, Rollout
from rollflow.stream.data.column import Column
from rollflow.stream.fragments.fragment import ChunkIndex, EpisodeIds, FragmentLayout

T = 70


def fragment_of(num_slots: int, shape: tuple[int, ...] = (), dtype: Any = np.float32, ends: Any = ()) -> Fragment:
    """A fragment with a column of numbers, and episodes under NEXT_STEP that end at (row, slot)."""
    columns = {name: np.zeros((T + 1, num_slots), np.bool_) for name in ("terminateds", "truncateds")}
    for row, slot in ends:
        columns["terminateds"][row, slot] = True
    count = (T + 1) * num_slots * int(np.prod(shape))
    columns["values"] = np.arange(count).astype(dtype).reshape(T + 1, num_slots, *shape)
    layout = FragmentLayout(num_slots, T, 1, gym.spaces.Discrete(2), True, EpisodeIds("lane"))
    return Fragment(layout, 0, 0, {name: Column(name, values) for name, values in columns.items()})


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(), (2,), (3,), (0,)])
@pytest.mark.parametrize("ends", [(), [(5, 1), (68, 2), (70, 0)]], ids=["whole", "with dead rows"])
@pytest.mark.parametrize("num_slots", [3, 40])
@pytest.mark.parametrize("every", [1, 2])
def test_rows_come_chunk_by_chunk(num_slots: int, ends: Any, shape: tuple[int, ...], dtype: Any, every: int) -> None:
    fragment = fragment_of(num_slots, shape, dtype, ends)
    kept = fragment.chunks.slot % every == 0
    fragment.chunks = ChunkIndex(
        **{each.name: getattr(fragment.chunks, each.name)[kept] for each in fields(ChunkIndex)}
    )
    chunks = zip(fragment.chunks.start, fragment.chunks.stop, fragment.chunks.slot, strict=True)
    rows = [fragment.columns["values"].tree[start:stop, slot] for start, stop, slot in chunks]
    gathered = fragment.gather("values")
    assert gathered.dtype == dtype
    np.testing.assert_array_equal(gathered, np.concatenate(rows))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_columns_by_time_and_slot_have_each_transition_and_the_observation_after_it(mode: AutoresetMode) -> None:
    def make() -> Any:
        return TimeLimit(NumberedEnv(0), 5)

    envs = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    with Rollout(envs, fragment_length=20, num_fragments=2, seed=0) as rollout:
        for fragment in rollout.fragments():
            steps, mask = fragment.time_major(), fragment.time_major()["loss_mask"]
            assert mask.shape == (20, 3)
            assert mask.all() == (mode is AutoresetMode.SAME_STEP)
            assert steps["rewards"].base is not None  # a view
            turned = {
                name: np.concatenate([rows[:, slot][mask[:, slot]] for slot in range(3)])
                for name, rows in steps.items()
            }
            episodes = fragment.episodes()
            for name, items in (
                ("obs", [each.get_observations(slice(0, len(each))) for each in episodes]),
                ("new_obs", [each.get_observations(slice(1, len(each) + 1)) for each in episodes]),
                ("actions", [each.get_actions() for each in episodes]),
            ):
                np.testing.assert_array_equal(turned[name], np.concatenate(items))


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    fragment = fragment_of(400)
    first = torch.from_numpy(fragment.gather("values"))
    place, expected = first.data_ptr(), first.clone()
    others = [fragment.gather("values") for _ in range(2)]
    assert len({place, *(other.ctypes.data for other in others)}) == 3
    part = first[7:]
    del first
    assert fragment.gather("values").ctypes.data != place  # a view holds it
    torch.testing.assert_close(part, expected[7:])
    del part
    assert place in {fragment.gather("values").ctypes.data for _ in range(4)}
