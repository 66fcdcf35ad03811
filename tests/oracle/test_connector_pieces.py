"""Our connector pieces beside Ray's: random episodes must give the same batch, and be left the same."""

import copy
from typing import Any

import numpy as np
import ray.rllib.connectors.common as ray_common
import ray.rllib.connectors.env_to_module as ray_env_to_module
import ray.rllib.connectors.learner as ray_learner
import ray.rllib.connectors.module_to_env as ray_module_to_env
import torch
from both import assert_same, assert_same_answer
from episodes import KINDS, Kind, numbers
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import LEARNER, NONE, STATES, Module, Setup, Values, chosen, ids, setups, values
from ray.rllib.connectors.common.frame_stacking import FrameStacking as RayFrameStacking
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode as RayEpisode

from rollflow import nodes
from rollflow.nodes.distribution import distribution_for


@given(setup=setups(), names=st.permutations(list(LEARNER)), count=st.integers(1, 4))
@settings(max_examples=200)
def test_columns_are_added_from_the_episodes(setup: Setup, names: list[str], count: int) -> None:
    setup.check(*chosen(names[:count]))


@given(setup=setups(), names=st.permutations(list(LEARNER)), count=st.integers(1, 4))
@settings(max_examples=200)
def test_batches_are_made_of_them(setup: Setup, names: list[str], count: int) -> None:
    ours, theirs = chosen(names[:count])
    batched = (nodes.BatchIndividualItems(), nodes.NumpyToTensor())
    setup.check([*ours, *batched], [*theirs, ray_common.BatchIndividualItems(), ray_common.NumpyToTensor()])


@given(setup=setups(numpy=st.just(False)))
@settings(max_examples=100)
def test_observations_are_added_while_acting(setup: Setup) -> None:
    setup.check([nodes.AddObservationsFromEpisodesToBatch()], [ray_common.AddObservationsFromEpisodesToBatch()])


@given(setup=setups(), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
@settings(max_examples=100)
def test_returns_to_go_are_the_same_numbers(setup: Setup, gamma: float) -> None:
    # Ray's are f64.
    pieces = [nodes.ComputeReturnsToGo(gamma=gamma)], [ray_learner.ComputeReturnsToGo(gamma=gamma)]
    setup.check(*pieces, dtypes=False, rtol=1e-5)


@given(setup=setups(stateful=st.just(True), numpy=st.just(False)))
@settings(max_examples=200)
def test_states_are_added_while_acting(setup: Setup) -> None:
    ours = [nodes.AddObservationsFromEpisodesToBatch(), nodes.AddTimeDimToBatchAndZeroPad()]
    theirs = [ray_common.AddObservationsFromEpisodesToBatch(), ray_common.AddTimeDimToBatchAndZeroPad()]
    setup.check(
        [*ours, nodes.AddStatesFromEpisodesToBatch(), nodes.BatchIndividualItems()],
        [*theirs, ray_common.AddStatesFromEpisodesToBatch(), ray_common.BatchIndividualItems()],
    )


@given(setup=setups(stateful=st.just(True), numpy=st.just(True)), names=st.permutations(list(LEARNER)))
@settings(max_examples=200)
def test_rows_of_several_steps_and_their_states_are_the_same(setup: Setup, names: list[str]) -> None:
    ours, theirs = chosen(names)
    setup.check([*ours, *STATES[0]()], [*theirs, *STATES[1]()])


@given(setup=setups(numpy=st.just(False)), data=st.data())
@settings(max_examples=100)
def test_observations_are_written_back(setup: Setup, data: st.DataObject) -> None:
    items = {(pair.ours.id_,): [setup.setting.observation.item(data.draw(numbers))] for pair in setup.pairs}
    pieces = [nodes.WriteObservationsToEpisodes()], [ray_env_to_module.WriteObservationsToEpisodes()]
    setup.check(*pieces, batch={"obs": items})


@given(setup=setups(done=True))
@settings(max_examples=100)
def test_one_step_is_added_to_episodes_that_are_done(setup: Setup) -> None:
    setup.check([nodes.AddOneTsToEpisodesAndTruncate()], [ray_learner.AddOneTsToEpisodesAndTruncate()])


@given(setup=setups(numpy=st.just(False)))
@settings(max_examples=100)
def test_observations_are_flattened(setup: Setup) -> None:
    setup.check([nodes.FlattenObservations()], [ray_env_to_module.FlattenObservations()])


class RayValues(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
    def setup(self) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(()))  # tells the device

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return values(batch)


@given(
    setup=setups(KINDS[1:2], KINDS[:1], numpy=st.just(True)),
    gamma=st.sampled_from([0.0, 0.5, 0.99]),
    lambda_=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=50)
def test_value_targets_are_the_same_numbers(setup: Setup, gamma: float, lambda_: float) -> None:
    """Ray's need a step more at each episode's end, which the mask takes out again."""
    spec = RLModuleSpec(RayValues, observation_space=setup.spaces[0], action_space=setup.spaces[1], model_config={})
    module, batch, shared = MultiRLModuleSpec(rl_module_specs={"default_policy": spec}).build(), {}, {}
    pieces = (
        ray_learner.AddOneTsToEpisodesAndTruncate(),
        *chosen(["AddObservations", "AddColumns"])[1],
        ray_common.BatchIndividualItems(),
        ray_common.NumpyToTensor(),
        ray_learner.GeneralAdvantageEstimation(gamma=gamma, lambda_=lambda_),
    )
    for piece in pieces:
        piece.input_observation_space, piece.input_action_space = setup.spaces
        batch = piece(rl_module=module, batch=batch, episodes=[pair.theirs for pair in setup.pairs], shared_data=shared)
    theirs = batch["default_policy"]
    estimation = nodes.GeneralAdvantageEstimation(gamma=gamma, lambda_=lambda_)
    ours = estimation(rl_module=Values(), batch={}, episodes=[pair.ours for pair in setup.pairs], shared_data={})
    targets = nodes.BatchIndividualItems()(rl_module=None, batch=ours, episodes=[pair.ours for pair in setup.pairs])[
        "value_targets"
    ]
    assert_same(targets, np.asarray(theirs["value_targets"])[np.asarray(theirs["loss_mask"])], rtol=1e-4)


IMAGES = [
    Kind(spaces.Box(0, 255, (2, 3, 1), np.uint8), lambda i: np.full((2, 3, 1), i, np.uint8)),
    Kind(spaces.Box(-9.0, 99.0, (1, 2, 1), np.float32), lambda i: np.array([[[i], [i + 0.5]]], np.float32)),
]


@given(setup=setups(IMAGES, numpy=st.just(False)), num_frames=st.integers(1, 5))
@settings(max_examples=100)
def test_frames_are_stacked_while_acting(setup: Setup, num_frames: int) -> None:
    setup.check([nodes.FrameStacking(num_frames=num_frames)], [RayFrameStacking(num_frames=num_frames)])


@given(setup=setups(IMAGES, numpy=st.just(True)), num_frames=st.integers(1, 5))
@settings(max_examples=100)
def test_frames_are_stacked_for_training(setup: Setup, num_frames: int) -> None:
    options: Any = {"num_frames": num_frames, "as_learner_connector": True}
    setup.check([nodes.FrameStacking(**options)], [RayFrameStacking(**options)])


@given(
    setup=setups(actions=KINDS[:1], numpy=st.just(False)),
    n_prev_actions=st.integers(1, 4),
    n_prev_rewards=st.integers(1, 4),
)
@settings(max_examples=100)
def test_earlier_actions_and_rewards_are_shown(setup: Setup, n_prev_actions: int, n_prev_rewards: int) -> None:
    options: Any = {"n_prev_actions": n_prev_actions, "n_prev_rewards": n_prev_rewards}
    ours, theirs = [nodes.PrevActionsPrevRewards(**options)], [ray_env_to_module.PrevActionsPrevRewards(**options)]
    assert_same_answer(*setup.run(ours, theirs))
    for pair in setup.pairs:
        mine, other = (dict(episode.get_observations(-1)) for episode in (pair.ours, pair.theirs))
        # f32[n, A] there, which does not lie in their own space.
        other["prev_n_actions"] = other["prev_n_actions"].reshape(-1)
        assert_same(mine, other, dtypes=False)


@given(
    setup=setups(KINDS[1:3], numpy=st.just(False)), clip=st.sampled_from([0.5, 10.0, 100.0]), times=st.integers(1, 3)
)
@settings(max_examples=100)
def test_observations_are_filtered(setup: Setup, clip: float, times: int) -> None:
    pieces = [nodes.MeanStdFilter(clip_by_value=clip)], [ray_env_to_module.MeanStdFilter(clip_by_value=clip)]
    for _ in range(times):
        assert_same_answer(*setup.run(*pieces))
    for pair in setup.pairs:
        pair.check(lambda episode: episode.get_observations(-1), rtol=1e-4)  # they add 1e-6 to the deviation


# By agents and modules


@st.composite
def by_agent(draw: st.DrawFn) -> dict[str, Any]:
    """Column -> (episode, agent, module) -> items."""
    modules = draw(st.dictionaries(st.tuples(ids, ids), ids, min_size=1, max_size=5))
    keys = [(*key, module) for key, module in modules.items()]
    counts = {key: draw(st.integers(1, 3)) for key in keys}
    return {
        column: {key: [draw(numbers) for _ in range(counts[key])] for key in keys}
        for column in draw(st.sampled_from([["obs"], ["obs", "rewards"]]))
    }


@given(batch=by_agent())
def test_agents_are_mapped_to_modules(batch: dict[str, Any]) -> None:
    ours, theirs = nodes.AgentToModuleMapping, ray_common.AgentToModuleMapping
    options: Any = {"rl_module_specs": dict.fromkeys("abc"), "agent_to_module_mapping_fn": None}
    NONE.check([ours(**options, as_learner_connector=True)], [theirs(**options, as_learner_connector=True)], batch)


@given(batch=by_agent())
def test_outputs_of_modules_come_back_to_the_agents(batch: dict[str, Any]) -> None:
    batch = {"obs": {key: items[:1] for key, items in batch["obs"].items()}}
    options: Any = {"rl_module_specs": dict.fromkeys("abc"), "agent_to_module_mapping_fn": None}
    answers = []
    for mapping, behind, episodes in (
        (nodes.AgentToModuleMapping, nodes, []),
        (ray_common.AgentToModuleMapping, ray_module_to_env, [MultiAgentEpisode(id_) for id_ in "abc"]),
    ):
        call: Any = {"rl_module": Module(), "episodes": episodes, "explore": True, "shared_data": {}}
        by_module = mapping(**options, as_learner_connector=True)(batch=copy.deepcopy(batch), **call)
        made = {module: {"actions": np.array(columns["obs"])} for module, columns in by_module.items()}
        for piece in (behind.UnBatchToIndividualItems(), behind.ModuleToAgentUnmapping()):
            made = piece(batch=made, **call)
        answers.append({name: {str(key): items for key, items in data.items()} for name, data in made.items()})
    assert_same(*answers)


# Behind the module


@given(setup=setups(KINDS[:1], numpy=st.just(False), stateful=st.booleans()))
def test_batches_are_taken_apart_again(setup: Setup) -> None:
    """The observations that went in come out, for want of a module."""
    ours = [
        nodes.AddObservationsFromEpisodesToBatch(),
        nodes.AddTimeDimToBatchAndZeroPad(),
        nodes.BatchIndividualItems(),
        nodes.NumpyToTensor(),
        nodes.TensorToNumpy(),
        nodes.UnBatchToIndividualItems(),
        nodes.RemoveSingleTsTimeRankFromBatch(),
    ]
    theirs = [
        ray_common.AddObservationsFromEpisodesToBatch(),
        ray_common.AddTimeDimToBatchAndZeroPad(),
        ray_common.BatchIndividualItems(),
        ray_common.NumpyToTensor(),
        ray_common.TensorToNumpy(),
        ray_module_to_env.UnBatchToIndividualItems(),
        ray_module_to_env.RemoveSingleTsTimeRankFromBatch(),
    ]
    setup.check(ours, theirs)


BOUNDED = [
    Kind(spaces.Box(-2.0, 4.0, (2,), np.float32), lambda i: np.array([i / 10 - 1, 1 - i / 10], np.float32)),
    Kind(
        spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 9.0], np.float32)),
        lambda i: np.array([i, -i], np.float32),
    ),
    Kind(
        spaces.Dict({"a": spaces.Box(-2.0, 4.0, (1,), np.float32), "b": spaces.Discrete(3)}),
        lambda i: {"a": np.array([i / 5 - 2], np.float32), "b": i % 3},
    ),
    *KINDS[:1],
]


@given(setup=setups(actions=BOUNDED), data=st.data(), normalize_actions=st.booleans(), clip_actions=st.booleans())
@settings(max_examples=150)
def test_actions_are_brought_into_bounds_and_listed(
    setup: Setup, data: st.DataObject, normalize_actions: bool, clip_actions: bool
) -> None:
    batch = {"actions": {(pair.ours.id_,): [setup.setting.action.item(data.draw(numbers))] for pair in setup.pairs}}
    options: Any = {"normalize_actions": normalize_actions, "clip_actions": clip_actions}
    ours = [nodes.NormalizeAndClipActions(**options), nodes.ListifyDataForVectorEnv()]
    theirs = [ray_module_to_env.NormalizeAndClipActions(**options), ray_module_to_env.ListifyDataForVectorEnv()]
    for count in (1, 2):
        mine, other = setup.run(ours[:count], theirs[:count], batch)
        if isinstance(setup.setting.action.space, spaces.Discrete):  # no column for what stays as it is
            other.value.pop("actions_for_env", None)
        assert_same_answer(mine, other, rtol=1e-6)


@given(logits=st.lists(st.lists(st.integers(-5, 5), min_size=3, max_size=3, unique=True), min_size=1, max_size=4))
def test_the_likeliest_actions_are_taken(logits: list[list[int]]) -> None:
    class Ours(Module):
        get_inference_action_dist_cls = staticmethod(lambda: distribution_for(spaces.Discrete(3)))

    class Theirs(Module):
        get_inference_action_dist_cls = staticmethod(lambda: TorchCategorical)

    answers = []
    for piece, module in ((nodes.GetActions(), Ours()), (ray_module_to_env.GetActions(), Theirs())):
        batch = {"action_dist_inputs": torch.tensor(logits, dtype=torch.float32)}
        batch = piece(rl_module=module, batch=batch, episodes=[RayEpisode()], explore=False, shared_data={})
        answers.append({name: np.asarray(column) for name, column in batch.items()})
    assert_same(*answers, dtypes=False, rtol=1e-6)
