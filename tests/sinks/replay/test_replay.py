"""What is sampled from a replay is what was inserted, by its learner pieces too."""

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from newest_sampler import Newest
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv
from numbered_module import NumberedModule, numbered_envs
from property_examples import examples, strategies
from replayed import Played, insert_all, plays, rows_of, write_dataset
from replayed_agents import fragments_of
from shapes_env import FixedModule, Shapes
from small_env import SmallEnv

from rollflow import DatasetSource, GeneralAdvantageEstimation, MultiAgentRollout, Replay, RLModule, Rollout
from rollflow.nodes import ConnectorPipelineV2, LambdaConnector, NStepReturns, RandomModule
from rollflow.sinks import (
    Draw,
    Episodes,
    HindsightGoals,
    Prioritized,
    SampledNStepReturns,
    Sampler,
    SamplesPerInsert,
    Sequences,
    Storage,
    Uniform,
)
from rollflow.stream import ReplayError
from rollflow.stream.data.tree import leaves_of, map_tree

SINGLE: list[Callable[[], Sampler]] = [
    Uniform,
    Newest,
    Prioritized,
]


@settings(max_examples=examples(25), deadline=None)
@given(**strategies(played=plays(), make=st.sampled_from(SINGLE), room=(0, 30), frames=(1, 4), seed=(0, 99)))
def test_every_single_step_that_is_sampled_was_made_so(
    played: Played, make: Callable[[], Sampler], room: int, frames: int, seed: int
) -> None:
    largest = max(2 * fragment.num_steps for fragment in played.fragments)
    replay = Replay(largest + room, sampler=make(), storage=Storage(frames=frames), seed=seed)
    for fragment in played.fragments:
        replay.insert(fragment)
        if len(replay):
            batch = replay.sample(16)
            for row in rows_of(batch):
                played.check_row(row, frames)
            if make is Prioritized:
                replay.update_priorities(batch["ids"], torch.rand(len(batch["ids"])))


@settings(max_examples=examples(25), deadline=None)
@given(played=plays(), room=st.integers(0, 20), frames=st.integers(1, 4))
def test_the_newest_rows_are_kept_when_the_ring_is_full_and_all_with_room(
    played: Played, room: int, frames: int
) -> None:
    capacity = max(2 * fragment.num_steps for fragment in played.fragments) + room
    replay = Replay(capacity, sampler=Newest())
    everything = Replay(1000, sampler=Newest(), storage=Storage(frames=frames))
    for fragment in played.fragments:
        replay.insert(fragment)
        everything.insert(fragment)
        kept, made = replay.sample(1000), everything.sample(1000)
        assert len(kept["rewards"]) == len(replay) <= capacity
        # Both give the newest first: what is kept is the beginning of all.
        assert torch.equal(kept["seen"], made["seen"][: len(replay)])
        ended = torch.count_nonzero(kept["terminateds"] | kept["truncateds"])
        assert len(replay) == len(everything) or len(replay) + ended >= capacity - 1
    report, emitted = replay.report(), sum(fragment.num_steps for fragment in played.fragments)
    assert report.inserted - report.removed == len(replay)
    assert len({played.check_row(row, frames) for row in rows_of(made)}) == len(everything) == emitted
    assert report.inserted == everything.report().inserted == emitted


@settings(max_examples=examples(25), deadline=None)
@given(**strategies(played=plays(), length=(1, 6), burn_in=(0, 4), room=(0, 30), of=[Uniform, Prioritized]))
def test_sequences_are_consecutive_steps_of_one_episode(
    played: Played, length: int, burn_in: int, room: int, of: Callable[[], Sampler]
) -> None:
    capacity = max(2 * fragment.num_steps for fragment in played.fragments) + room
    replay = Replay(capacity, sampler=Sequences(length, burn_in, of=of()), seed=0)
    everything = Replay(1000, sampler=Newest())
    for fragment in played.fragments:
        replay.insert(fragment)
        everything.insert(fragment)
        if not len(replay):
            continue
        made = {tuple(seen) for seen in everything.sample(1000)["seen"].tolist()}
        newest = {tuple(seen) for seen in everything.sample(len(replay))["seen"].tolist()}
        batch = replay.sample(8)
        assert batch["loss_mask"].shape == (8, length + burn_in)
        for place, size in enumerate(batch["seq_lens"].tolist()):
            columns = {name: data for name, data in batch.items() if name not in ("ids", "weights", "seq_lens")}
            row = map_tree(lambda leaf, place=place, size=size: leaf[place, :size], columns)
            steps = [played.check_row(each) for each in rows_of(row)]
            slot, episode, first = steps[0]
            assert steps == [(slot, episode, first + k) for k in range(size)]
            assert not batch["rewards"][place, size:].any()
            trained = batch["loss_mask"][place].nonzero().flatten().tolist()
            before = trained[0]
            assert trained == list(range(before, min(before + length, size)))
            # Fewer than asked for only where there are no more.
            assert before == burn_in or first == 0 or (slot, episode, first - 1) not in newest
            assert size == before + length or (slot, episode, first + size) not in made


@settings(max_examples=examples(25), deadline=None)
@given(played=plays(), room=st.integers(0, 40))
def test_whole_episodes_begin_with_their_first_step_and_end_with_their_last(played: Played, room: int) -> None:
    capacity = max(2 * fragment.num_steps for fragment in played.fragments) + room
    replay, everything = Replay(capacity, sampler=Episodes(), seed=0), Replay(capacity, sampler=Newest())
    for fragment in played.fragments:
        replay.insert(fragment)
        everything.insert(fragment)
        kept = {tuple(step) for step in everything.sample(1000)["seen"].tolist()}
        whole = {
            (slot, episode)
            for slot, episode, step in kept
            if any(played.steps[slot, episode, step][2:]) and all((slot, episode, k) in kept for k in range(step))
        }
        if not whole:
            with pytest.raises(ReplayError, match=r"no episode that has ended (yet|is there as a whole)"):
                replay.sample(4)
            continue
        batch = replay.sample(40 * len(whole))
        drawn = set()
        for place, size in enumerate(batch["seq_lens"].tolist()):
            steps = [tuple(step) for step in batch["seen"][place, :size].tolist()]
            slot, episode, _ = steps[0]
            assert steps == [(slot, episode, k) for k in range(size)]
            assert batch["terminateds"][place, size - 1] or batch["truncateds"][place, size - 1]
            drawn.add((slot, episode))
        assert drawn <= whole
        assert len(drawn) > len(whole) / 2


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_episodes_of_whole_rollouts_in_workers_are_joined_over_their_fragments(several: bool) -> None:
    replay = Replay(1000, sampler=Episodes(), seed=0)
    options: Any = {"num_envs": 2, "fragment_length": 8, "num_fragments": 6, "where": "rollouts", "workers": 1}
    agents = partial(NumberedAgents, 0, nested=0, length=20, at_once=True)
    rollout: Any = MultiAgentRollout(agents, module=RandomModule, **options) if several else None
    with rollout or Rollout(partial(NumberedEnv, 0, lengths=(20, 20)), **options) as running:
        for fragment in running.fragments():
            replay(fragment)
    drawn: Any = replay.sample(8)
    [batch] = drawn.values() if several else [drawn]
    assert 8 < max(batch["seq_lens"].tolist()) <= 20


@pytest.mark.parametrize("make", [*SINGLE, lambda: Sequences(3, 2, of=Prioritized()), Episodes])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_replay_that_is_restored_goes_on_exactly(make: Callable[[], Sampler], several: bool, tmp_path: Path) -> None:
    fragments: Any = fragments_of(count=8) if several else Played(3, 12, nested=True).fragments
    options: Any = {"storage": Storage(frames=1 if several else 2)}
    first, second = (Replay(60, sampler=make(), seed=seed, **options) for seed in (5, 6))
    insert_all(first, fragments[:6])
    drawn = first.sample(8)
    for module_id, batch in drawn.items() if several else [(None, drawn)]:
        if first.sampler.has_priorities:
            first.update_priorities(batch["ids"], np.arange(8.0), module_id)
    first.save(tmp_path / "replay")
    second.load(tmp_path / "replay")
    for fragment in fragments[6:]:
        for replay in (first, second):
            replay.insert(fragment)
        torch.testing.assert_close(first.sample(8), second.sample(8), rtol=0, atol=0)
    assert first.report() == second.report()


def test_a_state_of_another_sampler_is_refused_by_name() -> None:
    plain, weighed = Replay(20), Replay(20, sampler=Prioritized())
    assert repr(weighed) == "<Replay 0 steps, capacity 20, sampler Prioritized>"
    with pytest.raises(ReplayError, match="with sampler=<one without a state>, expected Prioritized"):
        weighed.set_state(plain.get_state())
    with pytest.raises(ReplayError, match="with sampler=Prioritized, expected one without a state, such as"):
        plain.set_state(weighed.get_state())
    with pytest.raises(ReplayError, match=r"of a sampler with alpha=0.6, expected 0.0"):
        Replay(20, sampler=Prioritized(alpha=0.0)).set_state(weighed.get_state())
    with pytest.raises(ReplayError, match="with max_samples=2, which there is no longer"):
        plain.set_state({**plain.get_state(), "max_samples": 2})
    with pytest.raises(ReplayError, match="with capacity=20, expected 21"):
        Replay(21).set_state(plain.get_state())


def test_a_file_mapped_into_memory_gives_the_same_batches(tmp_path: Path) -> None:
    played, path = Played(3, 10), tmp_path / "rows"
    here, there, other = (Replay(50, seed=1, storage=Storage(path=each)) for each in (None, path, path))
    for fragment in played.fragments:
        here.insert(fragment)
        there.insert(fragment)
        other.insert(played.fragments[0])  # whose rows are its own, by the same path
        ours, theirs = here.sample(32), there.sample(32)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not list(tmp_path.iterdir())  # it goes with the process


def test_rows_whose_file_can_not_be_made_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print()")
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for name, told in {
        "train.py": r"train.py'\): a file is there already, expected a path where nothing is",
        "none/rows": r"a file of [0-9,]+ bytes can't be made: No such file or directory",
        "full": r"a file of [0-9,]+ bytes can't be made: No space left on device",
    }.items():
        with monkeypatch.context() as patch, pytest.raises(ReplayError, match=told):
            if name == "full":
                patch.setattr(os, "posix_fallocate", full)
            Replay(50, storage=Storage(path=tmp_path / name)).insert(Played(3, 1).fragments[0])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"train.py": "print()"}


def test_columns_keep_their_types_and_each_observation_stands_once() -> None:
    replay, options = Replay(400, sampler=Newest()), {"fragment_length": 20, "num_fragments": 1, "seed": 0}
    with Rollout([Shapes], module=FixedModule(), **options) as rollout:  # type: ignore[arg-type]
        (fragment,) = rollout.fragments()
    replay.insert(fragment)
    batch = replay.sample(fragment.num_steps)
    for name in ("obs", "actions", "memory"):
        for ours, theirs in zip(leaves_of(batch[name]), leaves_of(fragment.gather(name)), strict=True):
            np.testing.assert_array_equal(ours.flip(0), theirs)
            assert ours.numpy().dtype == theirs.dtype
    kept = [name for name in fragment.columns if name != "obs"]
    step = sum(leaf[0].nbytes for name in kept for leaf in leaves_of(fragment.gather(name)))
    seen = sum(leaf[0].nbytes for leaf in leaves_of(fragment.gather("obs")))
    assert replay.nbytes <= 400 * step + (400 + 64) * seen


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda count: Draw(np.full(count, 11), np.full(count, 11)), "position 11, which holds no step"),
        (lambda count: Draw(np.full(count, -5), np.full(count, -5)), "position -5, which holds no step"),
        (lambda count: Draw(np.zeros(3, np.int64), np.zeros(5, np.int64)), "3 rows and 5 ids, expected one for each"),
        (lambda count: Draw([0], [0]), r"positions \[0\], expected an array i64"),
        (lambda count: None, r"has returned None, expected a Draw"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: Sequences(2, of=own)])
def test_what_a_sampler_of_ones_own_draws_has_steps(draw: Any, told: str, wrap: Any) -> None:
    ways = [draw, lambda count: Draw(np.arange(count), np.arange(count))]

    class Own(Sampler):
        def draw(self, rows: Any, count: int, generator: np.random.Generator) -> Draw:
            made: Draw = ways.pop(0)(count)
            return made

    replay = Replay(100, sampler=wrap(Own()))
    replay.insert(Played(2, 1, lengths=(100, 100), fragment_length=5).fragments[0])
    with pytest.raises(ReplayError, match=rf"Own.draw .*{told}"):
        replay.sample(4)
    assert replay.sample(4)["ids"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Replay(0), "capacity is 0"),
        (lambda: Replay(10, storage=Storage(frames=0)), "frames is 0"),
        (lambda: Replay(10, sampler="prioritized"), "sampler is 'prioritized', expected a sampler such as Prioritized"),  # type: ignore[arg-type]
        (lambda: Replay(10, sampler=Prioritized), "sampler is <class .*, expected a sampler such as Prioritized"),  # type: ignore[arg-type]
        (lambda: Replay(10, rate=4.0), "rate is 4.0, expected a SamplesPerInsert"),  # type: ignore[arg-type]
        (lambda: SamplesPerInsert(0.0), "ratio is 0.0, expected a number above 0"),
        (lambda: SamplesPerInsert(1.0, 0), "min_size is 0, expected a whole number from 1 on"),
        (lambda: Replay(10, rate=SamplesPerInsert(1.0, 11)), "min_size is 11, but the capacity is 10"),
        (lambda: Replay(10, pieces=[3]), "pieces is 3, expected connector pieces"),  # type: ignore[list-item]
        (lambda: Sequences(4, of=Uniform), "of: got <class .*, expected a sampler"),  # type: ignore[arg-type]
        (lambda: Storage(extra="action_logp"), "extra is 'action_logp', expected None, or a list of names"),  # type: ignore[arg-type]
        (lambda: Replay(10, storage="rows.bin"), "storage is 'rows.bin', expected a Storage"),  # type: ignore[arg-type]
        (lambda: Prioritized(alpha=2), "alpha is 2"),
        (lambda: [Replay(10, sampler=each) for each in 2 * [Prioritized()]], "belongs to another replay"),
        (lambda: Sequences(0), "length is 0"),
    ],
)
def test_arguments_out_of_bounds_are_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_fragments_that_do_not_fit_are_refused_and_nothing_is_lost() -> None:
    played, other = Played(2, 3), Played(2, 1, nested=True)
    replay = Replay(40, seed=0)
    with pytest.raises(ReplayError, match="the replay has no steps"):
        replay.sample(4)
    replay.insert(played.fragments[0])
    there = len(replay)
    with pytest.raises(ReplayError, match="column 'obs': the replay holds"):
        replay.insert(other.fragments[0])
    large = Played(8, 1, fragment_length=16)
    with pytest.raises(ReplayError, match="but the replay has 40: expected a capacity of several fragments"):
        replay.insert(large.fragments[0])
    with pytest.raises(ReplayError, match="Uniform has no priorities to be updated"):
        replay.update_priorities([0], [1.0])
    with pytest.raises(ReplayError, match="takes fragments, got dict"):
        replay.insert({})  # type: ignore[arg-type]
    replay.insert(played.fragments[1])
    for row in rows_of(replay.sample(16)):
        played.check_row(row)
    assert len(replay) == there + played.fragments[1].num_steps


def test_rollouts_with_one_seed_are_not_joined() -> None:
    one, other = Played(2, 4, lengths=(9, 12)), Played(2, 4, lengths=(9, 12))
    replay = Replay(100, sampler=Sequences(12), seed=0)
    for ours, theirs in zip(one.fragments, other.fragments, strict=True):
        replay.insert(ours)
        replay.insert(theirs)
    chunks = [len(chunk) for fragment in one.fragments + other.fragments for chunk in fragment.episodes()]
    assert replay.sample(200)["seq_lens"].max() <= max(chunks)
    alone = Replay(100, sampler=Sequences(12), seed=0)
    insert_all(alone, one.fragments)
    assert alone.sample(200)["seq_lens"].max() >= 9


def test_whole_episodes_of_a_rollout_are_taken_as_they_are() -> None:
    played = Played(1, 1)
    envs, makers = numbered_envs(3, lengths=(2, 6))
    replay = Replay(300, sampler=Newest())
    with Rollout(makers, module=NumberedModule(), fragment_length=5, num_fragments=8, seed=0) as rollout:
        insert_all(replay, rollout.fragments(complete_episodes=True))
    played.steps = {(env.slot, entry[0], entry[1]): tuple(entry[2:]) for env in envs for entry in env.log}
    made = {played.check_row(row) for row in rows_of(replay.sample(300))}
    ended = {(slot, episode) for (slot, episode, _), entry in played.steps.items() if any(entry[2:])}
    assert made == {step for step in played.steps if step[:2] in ended}


@pytest.mark.slow
def test_uniform_draws_are_uniform() -> None:
    played = Played(4, 5, lengths=(1, 3))
    counts = np.zeros(200, np.int64)
    for seed in range(400):
        replay = Replay(200, sampler=Uniform(), seed=seed)
        insert_all(replay, played.fragments)
        counts += np.bincount(replay.sample(10)["ids"].numpy(), minlength=200)
    steps = replay.report().inserted
    drawn = counts[counts > 0]
    assert len(drawn) == steps
    assert 60 <= steps <= 80
    # With 79 degrees of freedom, 130 is exceeded once in 4,000 times.
    assert ((drawn - 4000 / steps) ** 2 / (4000 / steps)).sum() < 130


# States of a module with memory, as a replay keeps them: the one before each step, whatever the steps come from


class Counter(RLModule):
    """A module whose state is the number of steps in the episode so far, which observations name as well."""

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        return {"steps": torch.zeros(1)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs, steps = batch["obs"], batch["state_in"]["steps"]
        made = obs.shape[1] if obs.ndim == 3 else 1
        return {"actions": torch.zeros(obs.shape[:-1], dtype=torch.long), "state_out": {"steps": steps + made}}


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(2, 12, lengths=(1, 12), module=Counter)


def filled(fragments: Any, **options: Any) -> Replay:
    replay = Replay(500, seed=0, **options)
    insert_all(replay, fragments)
    return replay


def test_each_step_and_sequence_has_the_state_before_it_of_a_dataset_too(played: Played, tmp_path: Path) -> None:
    write_dataset(played.fragments, tmp_path)
    for fragments in (played.fragments, DatasetSource(tmp_path, batch_size=4).fragments()):
        batch = filled(fragments, sampler=Newest()).sample(80)
        assert batch["state_in"]["steps"][:, 0].tolist() == batch["obs"][:, 2].tolist()
        assert {0.0, 3.0, 5.0} < set(batch["state_in"]["steps"][:, 0].tolist())
    batch = filled(played.fragments, sampler=Sequences(3, burn_in=2)).sample(64)
    assert batch["state_in"]["steps"][:, 0].tolist() == batch["obs"][:, 0, 2].tolist()
    with pytest.raises(ReplayError, match="expected a lookback of 1 or more"):
        filled(DatasetSource(tmp_path, batch_size=4, lookback=0).fragments())


@settings(max_examples=examples(25), deadline=None)
@given(n_step=st.integers(1, 6), frames=st.integers(1, 3), seed=st.integers(0, 50), room=st.integers(0, 40))
def test_rewards_over_n_steps_are_those_of_the_episode(n_step: int, frames: int, seed: int, room: int) -> None:
    played = Played(3, 8, seed=seed)
    piece = SampledNStepReturns(n_step=n_step, gamma=0.5)
    replay = Replay(30 + room, pieces=[piece], storage=Storage(frames=frames), seed=seed)
    newest: dict[tuple[int, int], int] = {}
    for fragment in played.fragments:
        replay.insert(fragment)
        for slot, episode, step in fragment.gather("seen").tolist():
            newest[slot, episode] = step
        batch = replay.sample(32)
        for place, (slot, episode, step) in enumerate(batch["seen"].tolist()):
            span = int(batch["n_step"][place])
            assert span == min(n_step, newest[slot, episode] - step + 1)
            rewards = [played.steps[slot, episode, step + k][1] for k in range(span)]
            assert batch["rewards"][place] == pytest.approx(sum(0.5**k * r for k, r in enumerate(rewards)), rel=1e-5)
            last = batch["new_obs"][place] if frames == 1 else batch["new_obs"][place, -1]
            assert last.tolist() == [slot, episode, step + span]
            if frames > 1:
                before = step + span - 1
                assert batch["new_obs"][place, -2].tolist() == [slot, episode, before]
            ends = played.steps[slot, episode, step + span - 1][2:]
            assert (bool(batch["terminateds"][place]), bool(batch["truncateds"][place])) == ends


GOAL = gym.spaces.Box(-1, 999, (1,), np.int32)
SEEN = {"observation": gym.spaces.Box(-1, 999, (3,), np.float32), "achieved_goal": GOAL}
DESIRED = gym.spaces.Box(-1, 999, (1,), np.float64)


class Walk(SmallEnv):
    """A goal environment on a line: one further each step, from 0 to an end that is drawn, terminated or truncated.

    The "observation" is [slot, episode, at]. Rewards are -2, which no function of the tests computes.
    """

    def __init__(self, slot: int = 0, desired: gym.spaces.Box = DESIRED) -> None:
        self.slot, self.episode = slot, -1
        self.observation_space = gym.spaces.Dict({**SEEN, "desired_goal": desired})
        self.goal = np.full(desired.shape, 500 if desired is DESIRED else 0, desired.dtype)

    def look(self) -> Any:
        if not self.t:
            self.length, self.episode = int(self.np_random.integers(1, 9)), self.episode + 1
            self.truncates = self.length % 2 == 1
        achieved, seen = np.array([self.t], np.int32), np.array([self.slot, self.episode, self.t], np.float32)
        return {"observation": seen, "achieved_goal": achieved, "desired_goal": self.goal}

    def pay(self, action: Any) -> float:
        return -2.0


def walked(slots: int = 2, **options: Any) -> list[Any]:
    makers = [partial(Walk, slot) for slot in range(slots)]
    options = {"module": RandomModule, "fragment_length": 4, "num_fragments": 30, "seed": 0} | options
    with Rollout(makers, **options) as rollout:
        return list(rollout.fragments())


def goal_reward(achieved: Any, desired: Any, info: Any) -> Any:
    return np.where(achieved[:, 0] == desired[:, 0], 0.0, -1.0)


def goal_reached(achieved: Any, desired: Any, info: Any) -> Any:
    return achieved[:, 0] == desired[:, 0]


@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_goals_in_hindsight_are_what_the_episode_reached_later(share: float) -> None:
    replay = Replay(2000, pieces=[HindsightGoals(goal_reward, share=share)], seed=0)
    insert_all(replay, walked(4, num_fragments=60))
    batch = replay.sample(20_000)
    goals, achieved = batch["obs"]["desired_goal"][:, 0], batch["new_obs"]["achieved_goal"][:, 0]
    assert torch.equal(batch["obs"]["desired_goal"], batch["new_obs"]["desired_goal"])
    is_new = goals != 500
    assert abs(float(is_new.float().mean()) - share) < 0.015
    assert bool((goals[is_new] >= achieved[is_new]).all())
    assert torch.equal(batch["rewards"][is_new], torch.where(goals == achieved, 0.0, -1.0)[is_new])
    if share:
        assert set((goals - achieved)[is_new & (achieved == 2)].tolist()) == set(range(7))


def sampled_of_walks(replay: Replay) -> Iterator[Any]:
    """Sampled once, or in a small ring after each insert: of episodes that go on, or whose first steps are gone."""
    for fragment in walked():
        replay.insert(fragment)
        if replay.capacity < 100:
            yield replay.sample(100)
    if replay.capacity > 100:
        yield replay.sample(1000)


@pytest.mark.parametrize("ends_at_goal", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"sampler": Prioritized}, {"capacity": 24}])
def test_n_steps_behind_goals_sum_up_the_rewards_for_the_goal_of_the_row(
    options: dict[str, Any], share: float, ends_at_goal: bool
) -> None:
    ends = goal_reached if ends_at_goal else None
    goals = HindsightGoals(goal_reward, share=share, compute_terminated=ends)
    pieces = [goals, SampledNStepReturns(n_step=3, gamma=0.5)]
    options = {name: make() if callable(make) else make for name, make in options.items()}
    replay = Replay(**({"capacity": 2000} | options), pieces=pieces, seed=0)
    goals_met: set[int] = set()
    for batch in sampled_of_walks(replay):
        seen = batch["obs"]["observation"].long().tolist()
        after = batch["new_obs"]["observation"].long().tolist()
        goals = batch["obs"]["desired_goal"]
        newest: dict[tuple[int, int], int] = {}  # observation of each episode in the replay
        for slot, episode, at in after:
            newest[slot, episode] = max(at, newest.get((slot, episode), 0))
        expected = []
        for (slot, episode, at), goal in zip(seen, goals[:, 0].tolist(), strict=True):
            steps = list(range(at + 1, min(at + 3, newest[slot, episode]) + 1))  # what is achieved after each
            if goal == 500:
                rewards = [-2.0] * len(steps)
            else:
                assert at < goal <= newest[slot, episode]
                steps = [reached for reached in steps if not ends_at_goal or reached <= goal]
                rewards = [0.0 if reached == goal else -1.0 for reached in steps]
                goals_met.add(int(goal) - at)
            summed = sum(0.5**k * reward for k, reward in enumerate(rewards))
            ends_there = ends_at_goal and steps[-1] == goal
            expected.append((len(steps), summed, [slot, episode, steps[-1]], ends_there))
        found = [batch[name].tolist() for name in ("n_step", "rewards", "terminateds")]
        assert list(zip(*found[:2], after, strict=True)) == [each[:3] for each in expected]
        assert all(flag for flag, (*_, ends_there) in zip(found[2], expected, strict=True) if ends_there)
        assert torch.equal(batch["new_obs"]["desired_goal"], goals)
        assert batch["rewards"].dtype == torch.float32
    assert {1, 2, 3, 4} <= goals_met


def test_ends_of_steps_with_goals_are_those_that_were_inserted_and_those_at_the_goal() -> None:
    for ends_at_goal in (False, True):
        ends = goal_reached if ends_at_goal else None
        replay = Replay(2000, pieces=[HindsightGoals(goal_reward, share=0.5, compute_terminated=ends)], seed=0)
        with_goals = Replay(2000, seed=0)
        for each in replay, with_goals:
            insert_all(each, walked())
        stored = with_goals.sample(2000)
        flags = zip(stored["terminateds"].tolist(), stored["truncateds"].tolist(), strict=True)
        inserted = dict(zip(map(tuple, stored["obs"]["observation"].tolist()), flags, strict=True))
        batch = replay.sample(2000)
        names = batch["obs"]["observation"].tolist()
        is_there = batch["obs"]["desired_goal"][:, 0] == batch["new_obs"]["achieved_goal"][:, 0]
        terminateds = torch.tensor([inserted[tuple(at)][0] for at in names])
        assert torch.equal(batch["terminateds"], terminateds | is_there if ends_at_goal else terminateds)
        assert batch["truncateds"].tolist() == [inserted[tuple(at)][1] for at in names]


@pytest.mark.parametrize("piece", [SampledNStepReturns(n_step=2), HindsightGoals(goal_reward)])
def test_a_piece_does_not_undo_what_another_one_changes(piece: Any) -> None:
    def change(batch: Any) -> None:
        batch["rewards"] = batch["rewards"] * 2

    scaling: Any = LambdaConnector(change, columnar=True, changes_episodes=False)
    nested = ConnectorPipelineV2(connectors=[scaling])
    for before in ([scaling], [nested], [ConnectorPipelineV2(connectors=[nested])]):
        with pytest.raises(ReplayError, match=rf"{piece.name} takes what it changes .* but {scaling.name} stands"):
            Replay(2000, pieces=[*before, piece])
    behind, alone = Replay(2000, pieces=[piece, scaling], seed=0), Replay(2000, pieces=[piece], seed=0)
    for each in (behind, alone):
        each.insert(walked(num_fragments=1)[0])
    assert torch.equal(behind.sample(8)["rewards"], 2 * alone.sample(8)["rewards"])


@pytest.mark.parametrize(
    ("rewards", "count", "text"),
    [
        (lambda a, d, i: -1.0, 8, r"gave the shape \[\] for 8 rows of goals, of the shape \[8, 1\]; expected \[8\]"),
        (lambda a, d, i: np.ones(1), 8, r"the shape \[1\] for 8 rows"),
        (lambda a, d, i: np.ones((8, 1)), 8, r"the shape \[8, 1\] for 8 rows"),
        (lambda a, d, i: np.ones((1, 8)), 8, r"the shape \[1, 8\] for 8 rows"),
        (lambda a, d, i: np.ones((1, 1)), 1, r"the shape \[1, 1\] for 1 rows"),
        (lambda a, d, i: np.full(8, np.nan), 8, "gave float64 that is not finite, expected a finite float32"),
        (lambda a, d, i: np.full(8, 1e300), 8, "gave float64 that is not finite, expected a finite float32"),
        (lambda a, d, i: np.ones(8, complex), 8, "gave complex128, expected a finite float32 for each row"),
        (lambda a, d, i: np.array(["x"] * 8), 8, "gave <U1, expected a finite float32 for each row"),
        (lambda a, d, i: [None] * 8, 8, "gave object, expected a finite float32 for each row"),
    ],
)
def test_what_is_no_reward_of_each_row_is_refused(rewards: Any, count: int, text: str) -> None:
    replay = Replay(2000, pieces=[HindsightGoals(rewards, share=1.0)])
    replay.insert(walked(num_fragments=1)[0])
    with pytest.raises(ReplayError, match=f"compute_reward .*{text}"):
        replay.sample(count)


@pytest.mark.parametrize(
    ("desired", "text"),
    [
        (gym.spaces.Box(-1, 9, (3,), np.float64), r"'achieved_goal' is int32\[1\] and 'desired_goal' float64\[3\]"),
        (gym.spaces.Box(-1, 9, (1,), np.int8), r"'achieved_goal' is int32\[1\] and 'desired_goal' int8\[1\]"),
    ],
)
def test_goals_that_are_not_like_what_is_achieved_are_refused(desired: gym.spaces.Box, text: str) -> None:
    replay = Replay(2000, pieces=[HindsightGoals(goal_reward)])
    with Rollout(partial(Walk, 0, desired), module=RandomModule, fragment_length=8, num_fragments=1) as rollout:
        replay.insert(next(iter(rollout.fragments())))
    with pytest.raises(ReplayError, match=text):
        replay.sample(8)


GOALS, SUMS = HindsightGoals(goal_reward), SampledNStepReturns(n_step=2)


@pytest.mark.parametrize(
    ("options", "has_goals", "text"),
    [
        ({"pieces": [SUMS, GOALS]}, True, "HindsightGoals takes what it changes .*SampledNStepReturns stands before"),
        ({"pieces": [GOALS, GOALS]}, True, "but HindsightGoals stands before it"),
        ({"pieces": [GOALS, SUMS, SUMS]}, True, "but SampledNStepReturns stands before it"),
        (
            {"pieces": [HindsightGoals(goal_reward, share=1.0, compute_terminated=goal_reward)]},
            True,
            "compute_terminated gave float64, expected a bool for each row",
        ),
        ({"pieces": GOALS, "storage": Storage(frames=2)}, True, r"has 2 observations, by Storage\(frames=2\)"),
        ({"pieces": GOALS}, False, "observations have no 'achieved_goal' and 'desired_goal'"),
        ({"pieces": SUMS, "sampler": Sequences(3)}, False, "works on single steps, but the sampler draws sequences"),
    ],
)
def test_pieces_of_a_replay_say_where_they_belong(options: dict[str, Any], has_goals: bool, text: str) -> None:
    fragment = walked(num_fragments=1)[0] if has_goals else Played(2, 1).fragments[0]
    with pytest.raises(ReplayError, match=text):
        replay = Replay(2000, seed=0, **options)
        replay.insert(fragment)
        replay.sample(8)


def test_a_piece_of_a_replay_is_for_nothing_else() -> None:
    with pytest.raises(ReplayError, match=r"got list, expected what a replay has sampled: Replay\(pieces="):
        SUMS(batch={}, episodes=[], rl_module=None)


@pytest.mark.parametrize("piece", [NStepReturns(n_step=3), GeneralAdvantageEstimation()])
def test_a_piece_that_goes_through_episodes_is_told_of_those_for_replays(piece: Any) -> None:
    replay = Replay(100, pieces=[piece])
    replay.insert(Played(2, 1).fragments[0])
    with pytest.raises(ReplayError, match="such as SampledNStepReturns in the place of NStepReturns") as caught:
        replay.sample(4)
    assert f"in piece {type(piece).__name__} of the replay" in caught.value.__notes__
