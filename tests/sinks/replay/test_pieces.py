"""Learner pieces of a replay: n-step returns, and goals in hindsight."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from property_examples import examples
from replayed import Played, insert_all
from small_env import SmallEnv

from rollflow import GeneralAdvantageEstimation, Replay, Rollout
from rollflow.nodes import ConnectorPipelineV2, LambdaConnector, NStepReturns, RandomModule
from rollflow.sinks import HindsightGoals, Prioritized, SampledNStepReturns, Sequences, Storage
from rollflow.stream import ReplayError


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
        return {
            "observation": np.array([self.slot, self.episode, self.t], np.float32),
            "achieved_goal": np.array([self.t], np.int32),
            "desired_goal": self.goal,
        }

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
