"""Pieces that look back see an episode's earlier steps in every place, or are refused; zeros stand before its first."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from feeding_rollouts import fed, trainer
from replayed import write_dataset
from small_env import SmallEnv
from together import Together

from rollflow import ConnectorV2, DatasetSource, FrameStacking, MultiAgentRollout, Replay, Rollout, SingleAgentEpisode
from rollflow.nodes import LearnerConnectorPipeline, RandomModule
from rollflow.sinks import Batches, LearnerPipeline, Storage
from rollflow.stream import ConnectorError, ReplayError

SEEN, CHOSEN = gym.spaces.Box(0, 99, (1,)), gym.spaces.Discrete(2)
LENGTH = 11


class Count(SmallEnv):
    """Episodes of 11 steps; the observation counts them from 1."""

    observation_space, action_space = SEEN, CHOSEN
    length, truncates = LENGTH, True

    def look(self) -> Any:
        return np.full(1, self.t + 1, np.float32)


class Before(ConnectorV2):
    """A user's piece, which stacks by episode."""

    changes_episodes = False
    lookback = 3

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        return gym.spaces.Box(0, 99, (4,))

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            seen = [
                np.concatenate(
                    [
                        episode.get_observations(t - back, neg_index_as_lookback=True, fill=0.0)
                        for back in range(3, -1, -1)
                    ]
                )
                for t in range(len(episode))
            ]
            self.add_n_batch_items(batch, "obs", seen, len(seen), episode)
        return batch


PIECES: dict[str, Any] = {
    "columnar": lambda obs_space, act_space: FrameStacking(num_frames=4, as_learner_connector=True),
    "by episode": lambda obs_space, act_space: Before(),
}
pytestmark = pytest.mark.filterwarnings("ignore:the module is given observations")  # it acts without the stacks
TAUGHT = pytest.mark.parametrize("pieces", PIECES)


def rollout(fragment_length: int, num_fragments: int, *, several: bool = False, **options: Any) -> Any:
    given: dict[str, Any] = {"fragment_length": fragment_length, "num_fragments": num_fragments, "seed": 0, **options}
    if not several:
        return Rollout(Count, module=RandomModule, num_envs=2, **given)
    given |= {"module": {"one": RandomModule}, "agent_to_module_mapping_fn": dict.fromkeys("ab", "one")}
    return MultiAgentRollout(lambda: Together({agent: Count() for agent in "ab"}), num_envs=1, **given)


def observations(batches: Any, *, several: bool = False) -> Any:
    """The observations of all batches, of the module "one" where there are several agents."""
    return np.concatenate([(batch["one"] if several else batch)["obs"] for batch in batches if batch])


def assert_stacks(rows: Any, least: int) -> None:
    """Each row has the three observations before the last, and zeros before the episode's first."""
    rows = np.asarray(rows)
    assert len(rows) >= least
    expected = np.maximum(rows[:, -1:] + np.arange(-3, 1), 0)
    assert np.array_equal(rows, expected)


@TAUGHT
@pytest.mark.parametrize(("several", "length"), [(False, 1), (False, 2), (False, 5), (True, 5)])
def test_train_batches_of_a_rollout(pieces: str, length: int, several: bool) -> None:
    with rollout(length, 10, several=several, learner_connector=PIECES[pieces]) as made:
        assert_stacks(observations(made.batches(), several=several), 20 * length - 2 * several)


@TAUGHT
@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("several", [False, True])
def test_batches_of_a_dataset(
    pieces: str, batch_size: int, shuffle_seed: int | None, several: bool, tmp_path: Path
) -> None:
    with rollout(5, 5, several=several) as made:
        write_dataset(made.fragments(), tmp_path / "set", rollout=made)
    options: Any = {"batch_size": batch_size, "learner_connector": PIECES[pieces], "shuffle_seed": shuffle_seed}
    source = DatasetSource(tmp_path / "set", window_steps=8, **options)
    assert_stacks(observations(source.batches(), several=several), 50 - 2 * several)


def test_a_piece_that_joins_a_datasets_pipeline_later_is_counted(tmp_path: Path) -> None:
    with rollout(11, 1) as made:
        write_dataset(made.fragments(), tmp_path / "set", rollout=made)
    source = DatasetSource(tmp_path / "set", batch_size=4)
    source.learner_pipeline.prepend(FrameStacking(num_frames=4, as_learner_connector=True))
    assert_stacks(observations(source.batches()), 22)


@TAUGHT
def test_a_lookback_of_a_dataset_that_is_too_small_is_refused(pieces: str, tmp_path: Path) -> None:
    with rollout(5, 1) as made:
        write_dataset(made.fragments(), tmp_path / "set", rollout=made)
    with pytest.raises(ValueError, match=r"lookback is 2, expected at least 3: (FrameStacking|Before) looks back"):
        DatasetSource(tmp_path / "set", lookback=2, learner_connector=PIECES[pieces])


@TAUGHT
def test_an_episode_without_its_beginning_is_refused(pieces: str, tmp_path: Path) -> None:
    with rollout(5, 2) as made:
        write_dataset([fragment for fragment in made.fragments() if fragment.sequence == 1], tmp_path / "set")
    source = DatasetSource(tmp_path / "set", learner_connector=PIECES[pieces])
    with pytest.raises(ConnectorError, match=r"looks back 3 steps, but the chunk that begins at step 5 of .* shows 0"):
        list(source.batches())


@TAUGHT
@pytest.mark.parametrize("place", ["by hand", "node"])
def test_fragments_with_too_little_lookback_are_refused(pieces: str, place: str) -> None:
    pipeline = LearnerConnectorPipeline.default(SEEN, CHOSEN, [PIECES[pieces](None, None)])
    node = LearnerPipeline(pipeline, None)
    with rollout(5, 2, lookback=2) as made:
        first, second = made.fragments()
    name = "FrameStacking" if pieces == "columnar" else "Before"
    with pytest.raises(ConnectorError, match=rf"{name} looks back 3 steps, .* shows 2 before it, expected 3") as error:
        if place == "node":
            node(first)
            node(second)
        else:
            pipeline.of_fragments([second], None)
    assert "\n" not in str(error.value).split("\nsee ")[0]


def test_episodes_by_hand_with_too_little_lookback_are_refused() -> None:
    pipeline = LearnerConnectorPipeline.default(SEEN, CHOSEN, [PIECES["columnar"](None, None)])
    episode = SingleAgentEpisode(observation_space=SEEN, action_space=CHOSEN)
    episode.add_env_reset(np.ones(1, np.float32))
    for t in range(2, 7):
        episode.add_env_step(np.full(1, t, np.float32), 0, 0.0)
    enough, short = episode.cut(len_lookback_buffer=3), episode.cut(len_lookback_buffer=1)
    for chunk in (enough, short):
        chunk.add_env_step(np.full(1, 7, np.float32), 0, 0.0)
    assert np.asarray(pipeline(rl_module=None, episodes=[enough])["obs"]).tolist() == [[3, 4, 5, 6]]
    with pytest.raises(ConnectorError, match="shows 1 before it, expected 3"):
        pipeline(rl_module=None, episodes=[short])


@TAUGHT
@pytest.mark.parametrize("lookback", [1, 3])
def test_a_trainer_elsewhere_refuses_the_first_fragment_with_too_little_kept(pieces: str, lookback: int) -> None:
    stream = trainer(yields=Batches(learner_connector=PIECES[pieces]))
    with fed(stream, rollout(5, 3, lookback=lookback)):
        if lookback == 3:
            assert_stacks(observations(stream), 30)
        else:
            with pytest.raises(ConnectorError, match="looks back 3 steps, but fragments keep 1"):
                next(iter(stream))


def test_a_replay_refuses_a_piece_that_looks_back_and_names_its_own_stacks() -> None:
    piece = FrameStacking(num_frames=4, as_learner_connector=True)
    with pytest.raises(ReplayError, match=r"FrameStacking looks back 3 steps.*expected Storage\(frames=4\)"):
        Replay(100, pieces=[piece])


def test_a_replay_of_stacks_leaves_out_steps_whose_history_is_missing() -> None:
    replay = Replay(200, storage=Storage(frames=4), batch_size=500, seed=0)
    with rollout(3, 4) as made:
        for fragment in made.fragments():
            if fragment.sequence != 1:
                replay.insert(fragment)
    rows = replay.sample()["obs"].reshape(500, 4)
    assert_stacks(rows, 500)
    assert set(rows[:, -1].tolist()) == {1.0, 2.0, 3.0, 10.0, 11.0}
