"""Lane and slot of an episode: on the episode itself and, for those who ask, in batches."""

from typing import Any

import pytest
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv

from rollflow import ConnectorV2, MultiAgentRollout, Rollout, SingleAgentEpisode
from rollflow.nodes import LambdaConnector, RandomModule

PLACES = ["inline", "threads", "processes", "rollouts"]
FIRST_SLOTS = [0, 2, 3]  # of four slots in three lanes


def numbered(count: int) -> list[Any]:
    """Environments whose observations begin with the number of their slot in the whole rollout."""
    return [lambda slot=slot: NumberedEnv(slot) for slot in range(count)]


def check_places(episodes: Any, shared_data: Any) -> None:
    """Hold what episodes say of lane and slot against what their environments do."""
    for episode in episodes:
        assert episode.lane == shared_data["lane"]
        assert FIRST_SLOTS[episode.lane] + episode.slot == episode.get_observations(-1)[0]


@pytest.mark.parametrize("where", PLACES)
def test_episodes_know_lane_and_slot(where: Any) -> None:
    """While they go on, before pieces, and as chunks of fragments."""
    acts: Any = {"env_to_module_connector": lambda env: LambdaConnector(check_places)}
    options: Any = {"fragment_length": 9, "num_fragments": 2, "seed": 1, **acts}
    with Rollout(numbered(4), lanes=3, where=where, **options) as rollout:
        chunks = [chunk for fragment in rollout.fragments() for chunk in fragment.episodes()]
    assert {chunk.lane for chunk in chunks} == {0, 1, 2}
    assert all(FIRST_SLOTS[chunk.lane] + chunk.slot == chunk.get_observations(0)[0] for chunk in chunks)


def test_with_several_agents_the_slot_is_the_environments() -> None:
    seen = []

    class Sees(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            agents = self.single_agent_episode_iterator(episodes)
            seen.extend((each.lane, each.slot, int(each.get_observations(-1)[0])) for each in agents)
            return batch

    makers = [lambda env=env: NumberedAgents(env, agents=2, nested=0) for env in range(3)]
    options: Any = {"fragment_length": 12, "num_fragments": 1, "seed": 0, "joint_connector": lambda env: Sees()}
    options["env_to_module_connector"] = lambda part: Sees()
    with MultiAgentRollout(makers, lanes=2, module=RandomModule, **options) as rollout:
        for fragment in rollout.fragments():
            for whole in fragment.episodes():
                assert whole.lane == fragment.lane
                for episode in whole.agent_episodes.values():
                    assert (episode.lane, episode.slot) == (whole.lane, whole.slot)
                    assert [0, 2][whole.lane] + whole.slot == episode.get_observations(0)[0]
    assert seen
    assert all([0, 2][lane] + slot == env for lane, slot, env in seen)


def test_an_episode_built_by_hand_has_no_place() -> None:
    episode = SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[0.0])
    assert (episode.lane, episode.slot) == (None, None)
