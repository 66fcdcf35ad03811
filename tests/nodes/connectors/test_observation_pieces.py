"""Pieces that rewrite observations, and functions as pieces, on episodes written out by hand."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, strategies as st
from numbered_env import numbered_envs

from rollflow import ConnectorV2, FrameStacking, Rollout, SingleAgentEpisode
from rollflow.nodes import (
    ClipActions,
    EnvToModulePipeline,
    FlattenObservations,
    LambdaConnector,
    ObservationPreprocessor,
    OneHotObservations,
    PrevActionsPrevRewards,
)
from rollflow.nodes.connectors.env_to_module.observation_pieces import WriteObservationsToEpisodes
from rollflow.stream import ColumnError, ConnectorError

SPACES = [
    spaces.Box(-1, 1, (2, 3)),
    spaces.Discrete(4, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Tuple([spaces.Box(0, 1, (1,)), spaces.MultiDiscrete([3, 2])])}),
]


def call(piece: ConnectorV2, episodes: Any = (), batch: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    return piece(**{"rl_module": None, "batch": {} if batch is None else batch, "episodes": episodes, **kwargs})


def ongoing(*observations: Any) -> list[SingleAgentEpisode]:
    return [SingleAgentEpisode(observations=[each], len_lookback_buffer=0) for each in observations]


# Preprocessors


class OneHot(ObservationPreprocessor):
    """As an older page of RLlib's has it: `preprocess(observation)`."""

    def recompute_output_observation_space(self, in_obs_space: Any, in_act_space: Any) -> gym.Space[Any]:
        return spaces.Box(0.0, 1.0, (in_obs_space.n,), np.float32)

    def preprocess(self, observation: Any) -> Any:  # type: ignore[override]
        assert self.observation_space is not None
        new_obs = np.zeros(shape=self.observation_space.shape, dtype=np.float32)
        new_obs[observation] = 1.0
        return new_obs


def test_a_preprocessor_rewrites_each_last_observation_and_leaves_the_batch() -> None:
    episodes = ongoing(1, 2)
    assert call(OneHot(spaces.Discrete(3)), episodes) == {}
    assert [episode.get_observations(-1).tolist() for episode in episodes] == [[0, 1, 0], [0, 0, 1]]
    assert episodes[0].observation_space == spaces.Box(0.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize(
    ("preprocess", "made"),
    [
        (lambda self, obs, ep: obs * 0 + len(ep), 0),
        (lambda self, obs, **others: obs * 0 + len(others["episode"]) + 1, 1),
        (lambda self, obs, scale=3.0: obs * scale, 3),
        (lambda self, obs, *args: obs * 0 + len(args) + 4, 4),
        (lambda self, obs, *args, **others: obs * 0 + len(others["episode"]) + 5, 5),
        (lambda self, obs, ep, /: obs * 0 + len(ep) + 6, 6),
    ],
    ids=["positional", "keywords", "a default", "arguments", "arguments and keywords", "by place"],
)
def test_a_preprocessors_parameters_may_have_other_names(preprocess: Any, made: int) -> None:
    episode = SingleAgentEpisode(observations=[np.ones(3, np.float32)])
    call(type("Own", (ObservationPreprocessor,), {"preprocess": preprocess})(), [episode])
    assert episode.get_observations(-1).tolist() == [made] * 3


def write_floats(episodes: Any, added: float = 100.0) -> None:
    """Add a hundred to the newest observation and to the action before it, as floats."""
    for episode in episodes:
        episode.set_observations(new_data=episode.get_observations(-1) + added, at_indices=-1)
        if len(episode):
            episode.set_actions(new_data=[float(episode.get_actions(-1) + 100)], at_indices=[-1])
            episode.set_rewards(new_data=[episode.get_rewards(-1) + 0.5], at_indices=slice(-1, None))


def write_fractions(episodes: Any) -> None:
    write_floats(episodes, 100.5)


def write_fractional_actions(episodes: Any) -> None:
    for episode in episodes:
        if len(episode) > 1:
            episode.set_actions(new_data=[50.0, 1.5], at_indices=[-2, -1])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_rollouts_integer_columns_take_whole_number_floats(mode: str) -> None:
    envs, makers = numbered_envs(2, lengths=(1, 4))
    vector = gym.vector.SyncVectorEnv(makers, autoreset_mode=mode)
    writes = LambdaConnector(write_floats)
    with Rollout(vector, fragment_length=8, num_fragments=3, env_to_module_connector=lambda _: writes) as run:
        chunks = [chunk for fragment in run.fragments() for chunk in fragment.episodes()]
    steps = 0
    for chunk in chunks:
        observations, actions = chunk.get_observations(), chunk.get_actions()
        assert observations.dtype == actions.dtype == np.int64
        assert (observations[:, 0] >= 100).all()
        assert (observations[:, 0] < 102).all()
        # The newest action of a fragment is rewritten after the next has begun, in its lookback.
        assert (actions[:-1] >= 100).all()
        steps += len(chunk)
    assert steps
    assert all(isinstance(each[2], int) and each[2] < 7 for env in envs for each in env.log)


@pytest.mark.parametrize("write", [write_fractions, write_fractional_actions])
def test_a_rollouts_integer_columns_refuse_fractions(write: Any) -> None:
    _, makers = numbered_envs(2, lengths=(5, 9))
    made = Rollout(makers, fragment_length=8, env_to_module_connector=lambda _: LambdaConnector(write))
    with pytest.raises(ColumnError, match=r"column '(obs|actions)': got float64\[.*\], expected int64"), made:
        next(iter(made.fragments()))


# Flat and one-hot observations


@pytest.mark.parametrize("space", SPACES, ids=str)
@given(seed=st.integers(0, 2**16))
def test_flat_observations_are_gymnasiums(space: gym.Space[Any], seed: int) -> None:
    space.seed(seed)
    item = space.sample()
    piece = FlattenObservations(space)
    episodes = ongoing(item)
    call(piece, episodes)
    flat = episodes[0].get_observations(-1)
    assert (flat.dtype, flat.shape) == (np.float32, piece.observation_space.shape)
    np.testing.assert_array_equal(flat, np.asarray(spaces.flatten(space, item), np.float32))


def test_keys_may_be_left_out_of_a_flat_observation() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 9, (2,)), "b": spaces.Discrete(2)})
    given = {"b"}
    piece = FlattenObservations(space, keys_to_remove=given)
    given.clear()
    episodes = ongoing({"a": np.array([1.0, 2.0], np.float32), "b": 1})
    call(piece, episodes)
    assert episodes[0].get_observations(-1).tolist() == [1.0, 2.0]
    with pytest.raises(ConnectorError, match=r"keys_to_remove has \['c'\], but Dict.* has keys: \['a', 'b'\]"):
        FlattenObservations(space, keys_to_remove=["c"]).observation_space  # noqa: B018
    with pytest.raises(ConnectorError, match=r"keys_to_remove has all keys of Dict.*, expected at least one left"):
        FlattenObservations(space, keys_to_remove=["b", "a"]).observation_space  # noqa: B018
    with pytest.raises(ColumnError, match=r"space Dict\(\) has no parts, expected at least one"):
        FlattenObservations(spaces.Dict({})).observation_space  # noqa: B018


def test_before_a_learner_flat_observations_go_into_the_batch() -> None:
    episode = SingleAgentEpisode(observations=[0, 1, 2], actions=[0, 0], rewards=[0.0, 0.0], len_lookback_buffer=0)
    batch = call(FlattenObservations(spaces.Discrete(3), as_learner_connector=True), [episode])
    assert [item.tolist() for item in batch["obs"][(episode.id_,)]] == [[1, 0, 0], [0, 1, 0]]
    assert episode.get_observations() == [0, 1, 2]


def test_whole_numbers_become_one_hot_wherever_they_are() -> None:
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.MultiDiscrete([2, 2]), "c": spaces.Box(0, 1, (1,))})
    piece = OneHotObservations(space)
    episodes = ongoing({"a": 1, "b": np.array([1, 0]), "c": np.array([0.5], np.float32)})
    call(piece, episodes)
    rewritten = episodes[0].get_observations(-1)
    assert {key: value.tolist() for key, value in rewritten.items()} == {"a": [0, 1, 0], "b": [0, 1, 1, 0], "c": [0.5]}
    assert piece.observation_space.contains(rewritten)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_say_what_pieces_leave(space: gym.Space[Any]) -> None:
    action_space = spaces.Discrete(3)
    for piece in (OneHotObservations(), FlattenObservations(), PrevActionsPrevRewards(n_prev_actions=2)):
        piece.set_input_spaces(space, action_space)
        episodes = ongoing(space.sample())
        call(piece, episodes)
        assert piece.observation_space.contains(episodes[0].get_observations(-1))


# Stacks, by hand


def test_stacks_are_joined_on_the_last_axis_oldest_first() -> None:
    frames = [np.full((2, 2, 1), number, np.uint8) for number in (1, 2, 3)]
    episode = SingleAgentEpisode(observations=frames, actions=[0, 0], rewards=[0.0, 0.0], len_lookback_buffer=0)
    piece = FrameStacking(spaces.Box(0, 255, (2, 2, 1), np.uint8), num_frames=4)
    item = call(piece, [episode])["obs"][(episode.id_,)][0]
    assert (item.shape, item.dtype) == ((2, 2, 4), np.uint8)
    assert item[0, 0].tolist() == [0, 1, 2, 3]
    assert piece.observation_space == spaces.Box(0, 255, (2, 2, 4), np.uint8)
    assert piece.observation_space.contains(item)


def test_before_a_learner_there_is_a_stack_for_every_step_that_reaches_into_the_lookback() -> None:
    seen: Any = {"observations": [np.array([float(number)]) for number in range(6)], "len_lookback_buffer": 2}
    episode = SingleAgentEpisode(actions=[0] * 5, rewards=[0.0] * 5, t_started=7, **seen)
    batch = call(FrameStacking(num_frames=4, as_learner_conector=True), [episode])
    stacks = [item.tolist() for item in batch["obs"][(episode.id_,)]]
    assert stacks == [[0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


def test_observations_that_are_in_the_batch_are_not_stacked() -> None:
    assert call(FrameStacking(num_frames=2), ongoing(np.zeros(1)), {"obs": "mine"}) == {"obs": "mine"}


# Actions


@pytest.mark.parametrize(("steps", "back"), [(0, 2), (1, 1), (2, 0), (5, 0)])
def test_previous_actions_and_rewards_are_the_latest_behind_zeros(steps: int, back: int) -> None:
    piece = PrevActionsPrevRewards(spaces.Box(0, 9, ()), spaces.Discrete(3), n_prev_actions=2, n_prev_rewards=2)
    played = {"actions": [t % 3 for t in range(steps)], "rewards": [10.0 * t for t in range(1, steps + 1)]}
    episode = SingleAgentEpisode(observations=[7.0] * (steps + 1), **played, len_lookback_buffer=steps // 2)
    call(piece, [episode])
    newest = episode.get_observations(-1)
    rows = [[0.0] * 3] * back + [np.eye(3)[action].tolist() for action in played["actions"][-2:]]
    assert newest["prev_n_actions"].reshape(2, 3).tolist() == rows
    assert newest["prev_n_rewards"].tolist() == [0.0] * back + played["rewards"][-2:]
    alone = PrevActionsPrevRewards(spaces.Box(0, 9, ()), spaces.Discrete(3), n_prev_actions=0)
    assert alone.observation_space.keys() == {"_orig_obs", "prev_n_rewards"}


def test_clipped_actions_go_beside_the_chosen_ones() -> None:
    piece = ClipActions(None, spaces.Box(-1, 1, (2,)))
    batch = call(piece, batch={"actions": np.array([[-3.0, 0.5]])})
    assert (batch["actions"].tolist(), batch["actions_for_env"].tolist()) == ([[-3.0, 0.5]], [[-1.0, 0.5]])


# Functions


def test_a_function_gets_what_it_names_and_may_return_nothing() -> None:
    def count(batch: dict[str, Any], episodes: Any, explore: bool | None) -> None:
        batch["count"] = len(episodes), explore

    piece = LambdaConnector(count)
    assert piece.name == "count"
    assert call(piece, ongoing(1, 2), explore=True) == {"count": (2, True)}


def test_a_function_may_return_another_batch_and_take_everything() -> None:
    piece = LambdaConnector(lambda **given: {"got": sorted(given)}, name="all")
    assert call(piece) == {"got": ["batch", "episodes", "explore", "metrics", "rl_module", "shared_data"]}
    assert EnvToModulePipeline(connectors=[piece]).names == ["all"]


def test_a_function_works_in_a_rollout_and_says_what_it_leaves() -> None:
    def doubled(episodes: Any) -> None:
        episodes.set_observations(np.concatenate([episodes.observations()] * 2, axis=1))

    def space(observation_space: Any, action_space: Any) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (2 * observation_space.shape[0],), np.float32)

    piece = LambdaConnector(doubled, columnar=True, observation_space=space)
    with Rollout("CartPole-v1", num_envs=2, env_to_module_connector=lambda env: piece, num_fragments=1) as rollout:
        assert next(iter(rollout.batches()))["obs"].shape[1] == 8


def test_a_function_that_wants_something_else_is_refused() -> None:
    with pytest.raises(ConnectorError, match=r"function 'twice' takes \(data\), expected only, by name: rl_module"):

        def twice(data: Any) -> None: ...

        LambdaConnector(twice)


# What is refused


def test_numbers_can_not_be_stacked() -> None:
    told = "FrameStacking can't stack observations in .*; expected a Box of one"
    for space in (spaces.Discrete(3), spaces.Box(0, 1, ()), spaces.Dict({"a": spaces.Discrete(2)})):
        with pytest.raises(ConnectorError, match=told):
            FrameStacking(space, num_frames=2).observation_space  # noqa: B018
    with pytest.raises(ValueError, match="num_frames is 0, expected a whole number from 1 on"):
        FrameStacking(num_frames=0)


def test_spaces_without_numbers_can_not_be_flattened() -> None:
    with pytest.raises(ConnectorError, match="FlattenObservations can't flatten observations in Text"):
        FlattenObservations(spaces.Text(3)).observation_space  # noqa: B018
    for piece in (FlattenObservations(), OneHotObservations(), PrevActionsPrevRewards()):
        with pytest.raises(ConnectorError, match=f"{piece.name} has no input"):
            call(piece, ongoing(1))


def test_less_than_no_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="n_prev_actions is -1, expected a whole number from 0 on"):
        PrevActionsPrevRewards(n_prev_actions=-1)


def test_there_must_be_observations_to_write() -> None:
    with pytest.raises(ConnectorError, match="the batch has no column 'obs'; columns: x; does it stand behind"):
        call(WriteObservationsToEpisodes(), ongoing(1), {"x": 1})
    with pytest.raises(ValueError, match=r"column .obs. has 2 items, expected 1: one for each episode"):
        call(WriteObservationsToEpisodes(), ongoing(1), {"obs": [1, 2]})


@pytest.mark.parametrize("piece", [FrameStacking, FlattenObservations, PrevActionsPrevRewards])
def test_an_argument_that_a_piece_does_not_have_is_refused(piece: Any) -> None:
    with pytest.raises(TypeError, match="num_framse"):
        piece(num_framse=4)
