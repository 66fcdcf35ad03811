"""What connector pieces are shown of agents, and what becomes of what they write."""

from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from agent_logs import steps_of
from drawn_agents import Drawn, drawn_settings, made, mapping_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from serial_module import at_of

from rollflow.nodes import ConnectorV2
from rollflow.stream import EpisodeError

few = settings(max_examples=25)
COUNT = st.integers(1, 5)


class Noting(ConnectorV2):
    """Keeps who was shown, with all ids, and which observations they had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            ids = episode.id_, episode.multi_agent_episode_id, episode.agent_id, episode.module_id
            at = tuple(at_of(episode.get_observations(-1)).tolist())
            self.seen.append((*ids, at, episode.t, episode.is_done))
            with pytest.raises(EpisodeError):
                episode.add_env_reset(None)
        return batch


@few
@given(drawn_settings, COUNT)
def test_a_piece_sees_every_observation_once_as_its_agents(drawn: Drawn, count: int) -> None:
    pieces: list[Noting] = []

    def noting(part: Any) -> Noting:
        pieces.append(Noting())
        return pieces[-1]

    envs, rollout = made(drawn, env_to_module_connector=noting)
    fragments = run(rollout, count)
    module_of = mapping_of(drawn)
    seen = [each for piece in pieces for each in piece.seen]
    parents = {
        chunk.id_: chunk.multi_agent_episode_id
        for fragment in fragments
        for module_id in fragment.module_ids
        for chunk in fragment.agent_episodes(module_id)
    }
    for id_, parent, agent, module_id, at, t, _ in seen:
        assert agent == f"agent {at[1]}"
        assert module_id == module_of(agent, type("Episode", (), {"id_": parent}))
        assert t in (at[4], at[4] + 1)
        assert parents.get(id_, parent) == parent
    observed = [at for env in envs for told in env.log for at in told.observations.values()]
    ongoing = [each[4] for each in seen if not each[6]]
    assert len(set(ongoing)) == len(ongoing)
    steps = [step for env in envs for step in steps_of(env.log)[0]]
    ends = [(step.next_at, step.at[4] + 1) for step in steps if any(step[4:]) and step.next_at != step.at]
    assert sorted((each[4], each[5]) for each in seen if each[6]) == sorted(ends)
    assert {each[4] for each in seen} <= set(observed)
    assert len(seen) >= sum(len(told.actions) for env in envs for told in env.log)


class Marks(ConnectorV2):
    """Adds a million to the slot in every observation: marked twice, or not at all, one would show."""

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=marked(episode.get_observations(-1)), at_indices=-1)
        return batch


class MarksAsFloats(Marks):
    """The same, in another type."""

    def recompute_output_observation_space(self, in_obs: Any, in_act: Any) -> Any:
        return gym.spaces.Box(0, 2**31, (5,), np.float64)

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            numbers = at_of(marked(episode.get_observations(-1))).astype(np.float64)
            episode.set_observations(new_data=numbers, at_indices=-1)
        return batch


def marked(observation: Any) -> Any:
    at = np.array(at_of(observation))
    at[0] += 1_000_000
    return {**observation, "at": at} if isinstance(observation, dict) else at


@few
@given(drawn_settings, COUNT, st.sampled_from([Marks, MarksAsFloats]))
def test_pieces_rewrite_every_observation_once(drawn: Drawn, count: int, piece: type[ConnectorV2]) -> None:
    envs, rollout = made(drawn, env_to_module_connector=lambda part: piece())
    emitted = []
    for fragment in run(rollout, count):
        for module_id in fragment.module_ids:
            for chunk in fragment.agent_episodes(module_id):
                at = np.asarray(at_of(chunk.get_observations()))
                np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), at[:-1])
                assert (at[:, 0] >= 1_000_000).all()
                unmarked = (at - [1_000_000, 0, 0, 0, 0]).astype(int).tolist()
                emitted += pairwise(map(tuple, unmarked))
    assert sorted(emitted) == sorted((step.at, step.next_at) for env in envs for step in steps_of(env.log)[0])
