"""Rewards of agents before their first observation: they count in the episode's return, and are in no step."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from places import rollout_at

from rollflow import MultiAgentEpisode, MultiAgentRollout, Replay
from rollflow.nodes import MultiAgentEnv, RandomModule

LENGTH = 7


class Team(MultiAgentEnv):
    """All are rewarded in every step, from the first one on, whether they have come or not.

    "a" is there from the reset on, "b" comes with step 4, and acts in every second step, "c" never comes, and "d" comes
    and ends with step 2. Every agent has 10 times the reward of the one before, and counts by steps.
    """

    possible_agents = "a", "b", "c", "d"
    observation_spaces = dict.fromkeys("abcd", gym.spaces.Box(0, 9, (1,), np.float32))
    action_spaces = dict.fromkeys("abcd", gym.spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return {"a": self._seen()}, {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        who = "a" + "b" * (self.t >= 4 and self.t % 2 == 0) + "d" * (self.t == 2)
        rewards = {agent: float(10**place) for place, agent in enumerate("abc")}
        if self.t <= 2:
            rewards["d"] = 1000.0
        return dict.fromkeys(who, self._seen()), rewards, {"__all__": self.t == LENGTH, "d": self.t == 2}, {}, {}

    def _seen(self) -> Any:
        return np.full(1, self.t, np.float32)


WHOLE = 7 * 1.0 + 7 * 10.0 + 7 * 100.0 + 2 * 1000.0
STEPS = {"a": [1.0] * 7, "b": [20.0, 10.0]}  # b acts on the observations of steps 4 and 6; the episode ends in step 7


PLACES = ["inline", "threads", "processes", "rollouts", "hosts", "hosted rollouts"]


@pytest.mark.parametrize(
    ("where", "fragment_length"), [*(("inline", each) for each in (1, 2, 7, 50)), *((each, 3) for each in PLACES)]
)
def test_the_return_of_an_episode_has_them(where: str, fragment_length: int) -> None:
    finished: list[Any] = []
    options: Any = {"kind": MultiAgentRollout, "acts": {"module": RandomModule}, "seed": 0}
    options |= {"fragment_length": fragment_length, "num_fragments": -(-3 * LENGTH // fragment_length)}
    with rollout_at(where, [Team, Team], **options) as rollout, rollout:
        rollout.on_episode(finished.append)
        fragments = list(rollout.fragments())
    assert rollout.lost == {}
    assert rollout.returns.count == len(finished) >= 3
    assert {each.episode_return for each in finished} == set(rollout.returns.returns) == {WHOLE}
    steps: dict[tuple[str, Any], list[float]] = {}
    for fragment in fragments:
        for chunk in fragment.agent_episodes("default_policy"):
            if len(chunk):
                steps.setdefault((chunk.id_, chunk.agent_id), []).extend(chunk.get_rewards().tolist())
    assert {agent for _, agent in steps} == {"a", "b"}
    assert all(rewards == STEPS[agent][: len(rewards)] for (_, agent), rewards in steps.items())


def by_hand(cut_after: int | None = None) -> list[MultiAgentEpisode]:
    """The chunks of an episode of the environment."""
    env, chunks = Team(), [MultiAgentEpisode()]
    chunks[0].add_env_reset(observations=env.reset()[0])
    while not chunks[-1].is_done:
        if env.t == cut_after:
            chunks.append(chunks[-1].cut())
        actions = dict.fromkeys(chunks[-1].get_agents_to_act(), 0)
        observations, rewards, terminateds, truncateds, _ = env.step(actions)
        chunks[-1].add_env_step(observations, actions, rewards, terminateds=terminateds, truncateds=truncateds)
    return chunks


def test_an_episode_by_hand_has_them_if_hanging_rewards_count() -> None:
    [episode] = by_hand()
    assert episode.get_return() == sum(map(sum, STEPS.values()))
    assert episode.get_return(include_hanging_rewards=True) == WHOLE
    assert {agent: each.get_rewards() for agent, each in episode.agent_episodes.items()} == STEPS
    restored = MultiAgentEpisode.from_state(episode.get_state())
    assert restored.get_return(include_hanging_rewards=True) == WHOLE


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_chunks_of_a_fragment_have_them_as_those_that_are_cut_by_hand(length: int) -> None:
    with MultiAgentRollout(Team, module=RandomModule, fragment_length=length, num_fragments=2, seed=0) as rollout:
        chunks = [next(iter(fragment.episodes())) for fragment in rollout.fragments()]
    for chunk, expected in zip(chunks, by_hand(cut_after=length), strict=True):
        whole = expected if chunk.is_done or expected.env_t == chunk.env_t else expected[: len(chunk)]
        assert chunk.get_return(include_hanging_rewards=True) == whole.get_return(include_hanging_rewards=True)
    joined = MultiAgentEpisode.from_state(chunks[0].get_state())
    joined.concat_episode(MultiAgentEpisode.from_state(chunks[1].get_state()))
    [whole] = by_hand()
    expected = whole[: joined.env_t].get_return(include_hanging_rewards=True)
    assert joined.get_return(include_hanging_rewards=True) == expected


def test_an_agent_that_is_never_seen_keeps_one_number_in_a_long_episode() -> None:
    class Endless(Team):
        def step(self, actions: Any) -> Any:
            self.t = 0
            return {"a": self._seen()}, {"a": 1.0, "c": 100.0}, {}, {}, {}

    with MultiAgentRollout(Endless, module=RandomModule, fragment_length=5, num_fragments=9, seed=0) as rollout:
        for number, fragment in enumerate(rollout.fragments()):
            assert len(fragment.parts[0].early) <= 5 + 1
            [chunk] = fragment.episodes()
            assert chunk.get_return(include_hanging_rewards=True) == 5 * 1.0 + 500.0 * (number + 1)


def test_an_environment_that_is_lost_keeps_nothing_of_them_for_the_next_episode() -> None:
    with MultiAgentRollout(Team, module=RandomModule, fragment_length=3, num_fragments=1, seed=0) as rollout:
        list(rollout.fragments())
        lane = rollout.environments.lanes[0]
        lane.lose("a crash")
        assert [lane.cut().parts[0].early != [], lane.cut().parts[0].early] == [True, []]


def test_a_replay_takes_the_steps_alone() -> None:
    replay = Replay(100)
    with MultiAgentRollout(Team, module=RandomModule, fragment_length=7, num_fragments=1, seed=0) as rollout:
        for fragment in rollout.fragments():
            replay(fragment)
    assert sorted(replay.sample(200)["default_policy"]["rewards"].unique().tolist()) == [1.0, 10.0, 20.0]
