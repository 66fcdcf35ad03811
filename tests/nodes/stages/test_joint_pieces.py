"""Connector pieces that look at all agents of an environment together."""

from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numbered_agents import NUM_ACTIONS, NumberedAgents
from property_examples import examples

from rollflow import ConnectorV2, MultiAgentEpisode, MultiAgentRollout, RLModule
from rollflow.nodes import LambdaConnector, MultiAgentEnv, RandomModule
from rollflow.stream import ConnectorError

SPACE = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)


class Counting(RLModule):
    """Acts by what it sees."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": batch["obs"].sum(1).long() % NUM_ACTIONS}


class Together(ConnectorV2):
    """Each agent sees its own number, how many observations there were at the step, and how often it was asked."""

    def recompute_output_observation_space(self, seen: Any, done: Any) -> Any:
        return gym.spaces.Dict(dict.fromkeys(seen.spaces, SPACE))

    def __init__(self, *args: Any, told: list[Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told = told

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            seen = episode.get_observations(-1)
            episode.custom_data["asked"] = episode.custom_data.get("asked", 0) + 1
            self.told.append((episode.id_, episode.env_t, {a: np.array(o) for a, o in seen.items()}, episode.is_done))
            made = {
                agent: np.array([int(agent[-1]), len(seen), episode.custom_data["asked"]], np.float32) for agent in seen
            }
            episode.set_observations(new_data=made, at_indices=-1)
        return batch


def rollout_of(joint: Any, envs: int = 1, length: int = 9, at_once: bool = False, **options: Any) -> MultiAgentRollout:
    """A rollout with a joint piece; None: with none."""
    makers = [partial(NumberedAgents, env, nested=0, length=length, at_once=at_once) for env in range(envs)]
    given = {"module": Counting(), "seed": 3, "num_fragments": 4, **options}
    return MultiAgentRollout(makers, joint_connector=None if joint is None else lambda env: joint, **given)


@pytest.mark.parametrize("at_once", [False, True])
@given(envs=st.integers(1, 3), length=st.integers(1, 9), rows=st.integers(1, 7), lookback=st.integers(0, 2))
@settings(max_examples=examples(30))
def test_every_observation_is_what_a_piece_made_of_all_agents_together(
    at_once: bool, envs: int, length: int, rows: int, lookback: int
) -> None:
    told: list[Any] = []
    with rollout_of(Together(told=told), envs, length, at_once, fragment_length=rows, lookback=lookback) as rollout:
        seen = [episode for fragment in rollout.fragments() for episode in fragment.episodes()]
    asked = {(id_, env_t): observations for id_, env_t, observations, _ in told}
    assert len(asked) == len(told)  # each step of each episode once
    assert any(is_done for *_, is_done in told) == any(episode.is_done for episode in seen)
    for episode in seen:
        for env_t in range(episode.env_t_started, episode.env_t + 1):
            left = episode.get_observations(env_t - episode.env_t_started)
            there = asked[episode.id_, env_t]
            for agent, observation in left.items():
                if agent not in there:  # it ended without a last observation: the one before counts once more
                    own = episode.agent_episodes[agent]
                    assert own.is_terminated
                    assert observation.tolist() == own.get_observations(-2).tolist()
                    continue
                assert observation.tolist() == [int(agent[-1]), len(there), env_t + 1]
                assert there[agent].shape == (5,)  # it saw what the environment gave


def test_what_pieces_keep_with_an_episode_goes_with_its_chunks() -> None:
    with rollout_of(Together(told=[]), 1, 9, True, fragment_length=2) as rollout:
        asked = [episode.custom_data["asked"] for fragment in rollout.fragments() for episode in fragment.episodes()]
    assert asked[0] == 3  # the reset and two steps
    assert len(asked) >= 4


def test_a_batch_that_is_not_left_empty_is_refused() -> None:
    with (
        pytest.raises(ConnectorError, match=r"put \['obs'\] into the batch, expected it to be left empty") as refused,
        rollout_of(LambdaConnector(lambda: {"obs": [1]})) as rollout,
    ):
        next(iter(rollout.fragments()))
    assert any("lane 0, vector step 0" in note for note in refused.value.__notes__)


def test_joint_pieces_that_write_nothing_leave_the_columns_type_as_it_is() -> None:
    def look(episodes: Any) -> None:
        """Write nothing."""

    floats = gym.spaces.Box(0, 2**31, (5,), np.float32)
    pieces = {"env_to_module_connector": lambda part: LambdaConnector(look, observation_space=lambda *_: floats)}
    types = []
    for joint in (None, LambdaConnector(look)):
        with rollout_of(joint, 2, fragment_length=8, num_fragments=2, **pieces) as rollout:
            types.append([each.columns["obs"].tree.dtype for made in rollout.fragments() for each in made.parts])
    assert set(types[0]) == {np.dtype(np.int64)}  # what they declare, they have not written
    assert types[1] == types[0]


def test_agents_with_the_same_spaces_are_left_with_the_same() -> None:
    def spaces(seen: Any, done: Any) -> Any:
        return gym.spaces.Dict({**seen.spaces, "agent 1": SPACE})

    with pytest.raises(ConnectorError, match=r"leaves observations of agent 'agent 1' in .* and those of 'agent 0'"):
        rollout_of(LambdaConnector(lambda batch: batch, observation_space=spaces))


def read(episode: Any, name: str, indices: Any, env_steps: bool) -> Any:
    try:
        return getattr(episode, name)(indices, env_steps=env_steps)
    except IndexError:
        return "outside"


@given(length=st.integers(2, 9), rows=st.integers(1, 7), lookback=st.integers(0, 2), seed=st.integers(0, 99))
@settings(max_examples=examples(15))
def test_what_hangs_can_be_read_as_in_a_copy(length: int, rows: int, lookback: int, seed: int) -> None:
    def read_all(episodes: Any) -> None:
        for episode in episodes:
            kept = MultiAgentEpisode.from_state(episode.get_state())
            for way in product(("get_actions", "get_rewards"), (None, -1, slice(-2, None), [-1]), (False, True)):
                np.testing.assert_equal(read(episode, *way), read(kept, *way))

    options: Any = {"seed": seed, "num_fragments": 3, "fragment_length": rows, "lookback": lookback}
    with rollout_of(LambdaConnector(read_all), 1, length, **options) as rollout:
        list(rollout.fragments())


def test_agents_keep_their_ids_in_spaces_whatever_these_are() -> None:
    agents: tuple[Any, ...] = (0, "0", (1, 2))
    space, seen = gym.spaces.Box(0, 9, (1,), np.float32), []

    class Ids(MultiAgentEnv):
        possible_agents = agents
        observation_spaces = dict.fromkeys(agents, space)
        action_spaces = dict.fromkeys(agents, gym.spaces.Discrete(2))

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {agent: np.zeros(1, np.float32) for agent in agents}, {}

        def step(self, actions: Any) -> Any:
            told = {agent: np.ones(1, np.float32) for agent in agents}
            return told, {}, {"__all__": True}, {"__all__": False}, {}

    def spaces(before: Any, done: Any) -> Any:
        seen.append((set(before.spaces), set(done.spaces)))
        return gym.spaces.Dict(dict.fromkeys(before.spaces, gym.spaces.Box(0, 9, (2,), np.float32)))

    def look(episodes: Any) -> None:
        for episode in episodes:
            made = {agent: np.full(2, agents.index(agent), np.float32) for agent in episode.get_observations(-1)}
            episode.set_observations(new_data=made, at_indices=-1)

    options: Any = {"module": RandomModule, "fragment_length": 2, "num_fragments": 1}
    with MultiAgentRollout(
        Ids, joint_connector=lambda env: LambdaConnector(look, observation_space=spaces), **options
    ) as rollout:
        [fragment] = rollout.fragments()
    assert seen
    assert all(each == (set(agents), set(agents)) for each in seen)
    for episode in fragment.episodes():
        for place, agent in enumerate(agents):
            assert episode.get_observations(0)[agent].tolist() == [place, place]
