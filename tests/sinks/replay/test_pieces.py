"""Learner pieces of a replay: n-step returns, and goals in hindsight."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from replayed import Played

from rollflow.nodes import GeneralAdvantageEstimation, NStepReturns, RLModule, Rollout
from rollflow.sinks import HindsightGoals, Replay, SampledNStepReturns, Sequences, Storage
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


class Line(gym.Env[Any, Any]):
    """A goal environment on a line: each step goes one further; the goal is out of reach."""

    observation_space = gym.spaces.Dict(
        {name: gym.spaces.Box(-100, 100, (1,), np.float32) for name in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.end = 0, int(self.np_random.integers(2, 15))
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self._seen(), -1.0, False, self.at == self.end, {}

    def _seen(self) -> Any:
        at = np.array([self.at], np.float32)
        return {"observation": np.array([self.end], np.float32), "achieved_goal": at, "desired_goal": at * 0 - 50}


class Coin(RLModule):
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {"action_dist_inputs": torch.zeros(len(batch["obs"]["observation"]), 2)}


def reached(achieved: Any, desired: Any, info: Any) -> Any:
    return -(np.abs(achieved - desired) > 0.5).astype(np.float32)[:, 0]


@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_goals_in_hindsight_are_what_the_episode_reached_later(share: float) -> None:
    replay = Replay(2000, pieces=[HindsightGoals(reached, share=share)], seed=0)
    with Rollout(Line, module=Coin(), num_envs=4, fragment_length=5, num_fragments=40, seed=0) as rollout:
        for fragment in rollout.fragments():
            replay.insert(fragment)
    batch = replay.sample(20_000)
    obs, new_obs = batch["obs"], batch["new_obs"]
    goals, achieved = obs["desired_goal"][:, 0], new_obs["achieved_goal"][:, 0]
    assert torch.equal(obs["desired_goal"], new_obs["desired_goal"])
    is_new = goals != -50
    assert abs(float(is_new.float().mean()) - share) < 0.015
    assert bool((goals[is_new] >= achieved[is_new]).all())
    assert bool((goals[is_new] <= obs["observation"][is_new, 0]).all())
    assert torch.equal(batch["rewards"], torch.where(goals == achieved, 0.0, -1.0))
    if share:
        # Of the steps k with k to go before the end, each later one is as likely: a mean half-way.
        ahead = (goals - achieved)[is_new & (obs["observation"][:, 0] == 10) & (achieved == 2)]
        assert set(ahead.tolist()) == set(range(9))


def test_pieces_of_a_replay_say_where_they_belong() -> None:
    played = Played(2, 3)
    piece = SampledNStepReturns(n_step=2)
    with pytest.raises(ReplayError, match=r"got list, expected what a replay has sampled: Replay\(pieces="):
        piece(batch={}, episodes=[], rl_module=None)
    replay = Replay(100, pieces=[piece], sampler=Sequences(3))
    replay.insert(played.fragments[0])
    with pytest.raises(ReplayError, match="works on single steps, but the sampler draws sequences"):
        replay.sample(4)
    replay = Replay(100, pieces=[HindsightGoals(reached)])
    replay.insert(played.fragments[0])
    with pytest.raises(ReplayError, match="observations have no 'achieved_goal' and 'desired_goal'"):
        replay.sample(4)


@pytest.mark.parametrize("piece", [NStepReturns(n_step=3), GeneralAdvantageEstimation()])
def test_a_piece_that_goes_through_episodes_is_told_of_those_for_replays(piece: Any) -> None:
    replay = Replay(100, pieces=[piece])
    replay.insert(Played(2, 1).fragments[0])
    with pytest.raises(ReplayError, match="such as SampledNStepReturns in the place of NStepReturns") as caught:
        replay.sample(4)
    assert f"in piece {type(piece).__name__} of the replay" in caught.value.__notes__
