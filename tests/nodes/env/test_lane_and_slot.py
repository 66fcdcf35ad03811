"""Lane and slot of an episode: on the episode itself and, for those who ask, in batches."""

from typing import Any

import numpy as np
import pytest
import torch
from numbered_agents import NumberedAgents
from numbered_env import NumberedEnv

from rollflow import ConnectorV2, DefaultModelConfig, MultiAgentRollout, RLModule, Rollout, SingleAgentEpisode
from rollflow.nodes import EnvToModulePipeline, LambdaConnector, LearnerConnectorPipeline, RandomModule
from rollflow.nodes.connectors.common.episode_columns import AddLaneAndSlotToBatch
from rollflow.stream.data.errors import ConnectorError

PLACES = ["inline", "threads", "processes", "rollouts"]
FIRST_SLOTS = [0, 2, 3]  # of four slots in three lanes


def numbered(count: int) -> list[Any]:
    """Environments whose observations begin with the number of their slot in the whole rollout."""
    return [lambda slot=slot: NumberedEnv(slot) for slot in range(count)]


class Acts(RLModule):
    """Gives back what its batch says of lane and slot."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        assert batch["lane"].dtype == batch["slot"].dtype == torch.int64
        place = 100 * batch["lane"] + batch["slot"]
        return {"actions": torch.zeros_like(place), "place": place}


def check_places(episodes: Any, shared_data: Any) -> None:
    """Hold what episodes say of lane and slot against what their environments do."""
    for episode in episodes:
        assert episode.lane == shared_data["lane"]
        assert FIRST_SLOTS[episode.lane] + episode.slot == episode.get_observations(-1)[0]


@pytest.mark.parametrize("where", PLACES)
def test_episodes_modules_and_batches_know_lane_and_slot(where: Any) -> None:
    acts: Any = {"env_to_module_connector": lambda env: [AddLaneAndSlotToBatch(), LambdaConnector(check_places)]}
    learns: Any = {"learner_connector": lambda *spaces: AddLaneAndSlotToBatch(as_learner_connector=True)}
    options: Any = {"fragment_length": 9, "num_fragments": 2, "seed": 1}
    with Rollout(numbered(4), lanes=3, where=where, module=Acts, **acts, **learns, **options) as rollout:
        for batch in rollout.batches():
            assert batch["lane"].dtype == batch["slot"].dtype == torch.int64
            firsts = torch.tensor(FIRST_SLOTS)[batch["lane"]]
            assert (firsts + batch["slot"] == batch["obs"][:, 0]).all()
            assert (100 * batch["lane"] + batch["slot"] == batch["place"]).all()
            assert set(batch["lane"].tolist()) == {0, 1, 2}


def test_with_several_agents_the_slot_is_the_environments() -> None:
    seen = []

    class Sees(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            agents = self.single_agent_episode_iterator(episodes)
            seen.extend((each.lane, each.slot, int(each.get_observations(-1)[0])) for each in agents)
            return batch

    makers = [lambda env=env: NumberedAgents(env, agents=2, nested=0) for env in range(3)]
    options: Any = {"fragment_length": 12, "num_fragments": 1, "seed": 0, "joint_connector": lambda env: Sees()}
    options["learner_connector"] = lambda *spaces: AddLaneAndSlotToBatch(as_learner_connector=True)
    options["env_to_module_connector"] = lambda part: [AddLaneAndSlotToBatch(), Sees()]
    with MultiAgentRollout(makers, lanes=2, module=RandomModule, **options) as rollout:
        for fragment in rollout.fragments():
            for whole in fragment.episodes():
                assert whole.lane == fragment.lane
                for episode in whole.agent_episodes.values():
                    assert (episode.lane, episode.slot) == (whole.lane, whole.slot)
                    assert [0, 2][whole.lane] + whole.slot == episode.get_observations(0)[0]
    assert seen
    assert all([0, 2][lane] + slot == env for lane, slot, env in seen)


def test_rows_of_a_stateful_module_have_their_place_in_every_step() -> None:
    options: Any = {"model_config": DefaultModelConfig(use_lstm=True, max_seq_len=4), "seed": 0}
    options["learner_connector"] = lambda *spaces: AddLaneAndSlotToBatch(as_learner_connector=True)
    with Rollout(numbered(2), fragment_length=10, num_fragments=1, **options) as rollout:
        [batch] = rollout.batches()
        mask = batch["loss_mask"]
        assert (batch["slot"][mask] == batch["obs"][mask][:, 0]).all()


def test_a_list_of_episodes_gives_what_columns_give() -> None:
    with Rollout(numbered(3), fragment_length=20, num_fragments=1, seed=0) as rollout:
        [fragment] = rollout.fragments()
    pipeline = LearnerConnectorPipeline.default(None, None, [AddLaneAndSlotToBatch(as_learner_connector=True)])
    columns = pipeline(rl_module=None, episodes=fragment.episodes())
    listed = pipeline(rl_module=None, episodes=list(fragment.episodes()))
    for name in ("lane", "slot"):
        np.testing.assert_array_equal(columns[name], listed[name])


def test_an_episode_built_by_hand_has_no_place() -> None:
    episode = SingleAgentEpisode(observations=[0, 1], actions=[0], rewards=[0.0])
    assert episode.lane is None
    assert episode.slot is None
    pipeline = EnvToModulePipeline(connectors=[AddLaneAndSlotToBatch()])
    with pytest.raises(ConnectorError, match=r"has no lane, expected an episode that a rollout hands out"):
        pipeline(rl_module=None, batch={}, episodes=[episode], explore=False)


def test_nobody_who_does_not_ask_is_given_them() -> None:
    names = []

    class Looks(RLModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            names.append(set(batch))
            return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64)}

    with Rollout(numbered(1), module=Looks, fragment_length=2, num_fragments=1) as rollout:
        [batch] = rollout.batches()
    assert names[0] == {"obs"}
    assert not {"lane", "slot"} & set(batch)
