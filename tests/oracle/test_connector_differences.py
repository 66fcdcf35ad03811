"""Deliberate differences between our connector pieces and Ray's: what each does, and why."""

from typing import Any

import numpy as np
import pytest
import ray.rllib.connectors.common as ray_common
import ray.rllib.connectors.env_to_module as ray_env_to_module
import ray.rllib.connectors.learner as ray_learner
from both import Answer, ask, assert_same, assert_same_answer
from episodes import KINDS, OUTPUTS, Pair, Setting
from gymnasium import spaces
from pieces import NONE, Module, Setup, Values, chosen, in_items, pieces_named
from ray.rllib.connectors.common.frame_stacking import FrameStacking as RayFrameStacking
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2 as RayPipeline
from ray.rllib.connectors.connector_v2 import ConnectorV2 as RayConnectorV2

from rollflow import ConnectorV2, SingleAgentEpisode, nodes
from rollflow.nodes import ConnectorPipelineV2
from rollflow.stream import ConnectorError


def one_setup(numpy: bool = False, *, stateful: bool = False, **given_: Any) -> Setup:
    """One episode of two steps after one of lookback; observations, actions and rewards are the step's number."""
    outputs = ("state_out",) if stateful else ()
    steps = range(3)
    data = {
        "observations": [np.array([i, i], np.float32) for i in range(4)],
        "actions": list(steps),
        "rewards": [float(i) for i in steps],
        "extra_model_outputs": {name: [OUTPUTS[name](i) for i in steps] for name in outputs},
        "len_lookback_buffer": 1,
        "t_started": 1,
        "observation_space": KINDS[1].space,
        "action_space": KINDS[0].space,
    }
    data = {**data, **given_}
    kinds = Setting(KINDS[1], KINDS[0], True, outputs)
    return Setup(kinds, [Pair.of(data, numpy, id_="e")], stateful, (KINDS[1].space, KINDS[0].space))


def differ(answers: tuple[Answer, Answer], ours: Any, theirs: Any) -> None:
    """Both answers are as told; an error type stands for being refused."""
    for answer, told in zip(answers, (ours, theirs), strict=True):
        if isinstance(told, type):
            assert isinstance(answer.error, told), answer
        else:
            assert answer.error is None, answer
            assert_same(answer.value, told, dtypes=False)


def test_ids_stay() -> None:
    """Ray adds the place in the list to the ids of a train batch's episodes, so that none comes twice."""
    setup = one_setup()
    setup.run(*chosen(["AddObservations"]))
    assert (setup.pairs[0].ours.id_, setup.pairs[0].theirs.id_) == ("e", "e_0")


def test_finalized_episodes_may_act_too() -> None:
    setup = one_setup(numpy=True)
    answers = setup.run([nodes.AddObservationsFromEpisodesToBatch()], [ray_common.AddObservationsFromEpisodesToBatch()])
    differ(answers, {"obs": [np.array([3, 3])]}, AssertionError)


def test_returns_and_rewards_are_f32_as_all_losses_are() -> None:
    answers = one_setup().run([nodes.ComputeReturnsToGo(gamma=1.0)], [ray_learner.ComputeReturnsToGo(gamma=1.0)])
    assert [answer.value["returns_to_go"][0].dtype for answer in answers] == [np.float32, np.float64]


def test_a_chunk_that_goes_on_is_not_told_as_truncated() -> None:
    """Ray marks the last real step of an ongoing episode as truncated: the value that comes after would be lost."""
    answers = one_setup().run([nodes.AddOneTsToEpisodesAndTruncate()], [ray_learner.AddOneTsToEpisodesAndTruncate()])
    both = {"loss_mask": [True, True, False], "terminateds": [False] * 3}
    differ(answers, {**both, "truncateds": [False] * 3}, {**both, "truncateds": [False, True, False]})


def test_a_column_of_returns_that_is_there_stays() -> None:
    batch = {"returns_to_go": {("e",): [7, 7]}}
    answers = one_setup().run([nodes.ComputeReturnsToGo(gamma=0.0)], [ray_learner.ComputeReturnsToGo(gamma=0.0)], batch)
    differ(answers, {"returns_to_go": [7, 7]}, {"returns_to_go": [7, 7, 1.0, 2.0]})


def test_infos_have_no_time_axis() -> None:
    """They are dicts of whatever an environment tells; Ray makes arrays of the numbers in them."""
    setup = one_setup(stateful=True)
    batch = {"infos": {("e",): [{"n": 1}]}}
    answers = setup.run([nodes.AddTimeDimToBatchAndZeroPad()], [ray_common.AddTimeDimToBatchAndZeroPad()], batch)
    differ(answers, {"infos": [{"n": 1}]}, {"infos": [{"n": np.array([1])}]})


@pytest.mark.parametrize("learner", [False, True], ids=["acting", "training"])
def test_a_stateful_module_s_episode_without_states_is_refused(learner: bool) -> None:
    """Ray takes the initial state for every step, and the module forgets all without a word."""
    setup = one_setup(numpy=learner)
    setup.stateful = True
    options = {"as_learner_connector": learner}
    answers = setup.run(
        [nodes.AddStatesFromEpisodesToBatch(**options)], [ray_common.AddStatesFromEpisodesToBatch(**options)]
    )
    differ(answers, ValueError, {"state_in": [Module().get_initial_state()]})


def test_an_episode_without_a_step_has_no_row_of_states() -> None:
    setup = one_setup(numpy=True, stateful=True, len_lookback_buffer=3, t_started=3)
    options = {"as_learner_connector": True}
    answers = setup.run(
        [nodes.AddStatesFromEpisodesToBatch(**options)], [ray_common.AddStatesFromEpisodesToBatch(**options)]
    )
    differ(answers, {}, ValueError)


def test_lists_and_arrays_may_be_in_one_batch() -> None:
    mixed = [one_setup(numpy=False).pairs[0], one_setup(numpy=True).pairs[0]]
    setup = one_setup()
    setup.pairs = mixed
    ours, theirs = chosen(["AddObservations"])
    answers = setup.run([*ours, nodes.BatchIndividualItems()], [*theirs, ray_common.BatchIndividualItems()])
    differ(answers, {"obs": np.array([[1, 1], [2, 2]] * 2)}, ValueError)


def test_every_observation_of_a_chunk_is_flattened_for_training() -> None:
    """Ray's gives the first one alone, in parts."""
    setup = one_setup(observations=[{"a": i} for i in range(4)], observation_space=spaces.Dict({"a": KINDS[0].space}))
    setup.spaces = (spaces.Dict({"a": spaces.Discrete(4)}), KINDS[0].space)
    options = {"as_learner_connector": True}
    answers = setup.run([nodes.FlattenObservations(**options)], [ray_env_to_module.FlattenObservations(**options)])
    differ(
        answers,
        {"obs": [np.array([0, 1, 0, 0]), np.array([0, 0, 1, 0])]},
        {"obs": [np.array([0, 1]), np.array([0, 0])]},
    )


def test_a_discrete_space_that_starts_elsewhere_is_flattened() -> None:
    setup = one_setup(observations=[5, 6, 7, 6], observation_space=spaces.Discrete(3, start=5))
    setup.spaces = (spaces.Discrete(3, start=5), KINDS[0].space)
    ours, theirs = setup.run([nodes.FlattenObservations()], [ray_env_to_module.FlattenObservations()])
    assert (ours.error, type(theirs.error)) == (None, AssertionError)
    assert setup.pairs[0].ours.get_observations(-1).tolist() == [0, 1, 0]


def test_frames_of_any_shape_are_stacked_in_either_form() -> None:
    ours, theirs = nodes.FrameStacking(num_frames=2), RayFrameStacking(num_frames=2)
    ours.input_observation_space = KINDS[1].space
    with pytest.raises(AssertionError):
        theirs.input_observation_space = KINDS[1].space
    batch = ours(rl_module=None, batch={}, episodes=[one_setup().pairs[0].ours])
    assert batch["obs"][("e",)][0].tolist() == [2, 2, 3, 3]
    space = spaces.Box(0, 9, (1, 1, 1), np.float32)
    setup = one_setup(observations=[np.full((1, 1, 1), i, np.float32) for i in range(4)], observation_space=space)
    setup.spaces = (space, KINDS[0].space)
    options = {"num_frames": 2, "as_learner_connector": True}
    answers = setup.run([nodes.FrameStacking(**options)], [RayFrameStacking(**options)])
    differ(answers, {"obs": [np.array([[[0, 1]]]), np.array([[[1, 2]]])]}, ValueError)


def test_actions_of_any_space_are_shown_and_spaces_may_be_given_at_once() -> None:
    box = KINDS[1].space
    assert nodes.PrevActionsPrevRewards(box, box, n_prev_actions=2).observation_space["prev_n_actions"].shape == (4,)
    for action_space in (box, KINDS[0].space):
        with pytest.raises(AttributeError):
            ray_env_to_module.PrevActionsPrevRewards(box, action_space, n_prev_actions=2)


def test_what_has_not_varied_yet_is_not_divided() -> None:
    """Ray divides by a deviation of 0 and a little more, so that the first observation is whatever clipping leaves."""
    options: Any = {"de_mean_to_zero": False}
    setup = one_setup()
    assert_same_answer(*setup.run([nodes.MeanStdFilter(**options)], [ray_env_to_module.MeanStdFilter(**options)]))
    pair = setup.pairs[0]
    differ(pair.ask(lambda episode: episode.get_observations(-1)), np.array([3, 3]), np.array([10, 10]))


def test_boxes_in_nested_spaces_are_filtered() -> None:
    space = spaces.Dict({"a": KINDS[1].space, "b": spaces.Discrete(3)})
    setup = one_setup(
        observations=[{"a": np.array([i, i], np.float32), "b": 1} for i in range(4)], observation_space=space
    )
    setup.spaces = (space, KINDS[0].space)
    differ(setup.run([nodes.MeanStdFilter()], [ray_env_to_module.MeanStdFilter()]), {}, TypeError)
    assert setup.pairs[0].ours.get_observations(-1)["a"].tolist() == [0, 0]


def test_a_module_may_leave_the_length_of_its_rows_open() -> None:
    class Open(Module):
        model_config: dict[str, Any] = {}  # noqa: RUF012

    pair = one_setup(numpy=True, stateful=True).pairs[0]
    options = {"as_learner_connector": True}
    call: Any = {"rl_module": Open(True), "batch": {}, "shared_data": {}}
    batch = nodes.AddTimeDimToBatchAndZeroPad(**options)(episodes=[pair.ours], **call)
    assert in_items(batch)["loss_mask"][0].tolist() == [True] * 2 + [False] * 18
    with pytest.raises(ValueError, match="max_seq_len"):
        ray_common.AddTimeDimToBatchAndZeroPad(**options)(episodes=[pair.theirs], **call)


def test_all_columns_of_a_module_have_one_order() -> None:
    one, two = ("e", "a", "m"), ("e", "b", "m")
    batch = {"obs": {one: [1], two: [2]}, "rewards": {two: [20], one: [10]}}
    options: Any = {"rl_module_specs": {"m": None}, "agent_to_module_mapping_fn": None, "as_learner_connector": True}
    answers = NONE.run([nodes.AgentToModuleMapping(**options)], [ray_common.AgentToModuleMapping(**options)], batch)
    differ(answers, {"m": {"obs": [1, 2], "rewards": [10, 20]}}, {"m": {"obs": [1, 2], "rewards": [20, 10]}})


def test_advantages_are_normalised_over_the_steps_that_were_taken() -> None:
    """Ray's include the step that it added, whose advantage means nothing."""
    rewards = np.array([1.0, -1.0, 3.0], np.float32)
    chunk = SingleAgentEpisode(
        observations=[np.zeros(2, np.float32)] * 4, actions=[0] * 3, rewards=list(rewards), len_lookback_buffer=0
    )
    batch = nodes.GeneralAdvantageEstimation(gamma=0.0)(rl_module=Values(), batch={}, episodes=[chunk])
    advantages = nodes.BatchIndividualItems()(rl_module=None, batch=batch, episodes=[chunk])["advantages"]
    np.testing.assert_allclose(advantages, (rewards - 1.0) / rewards.std(), rtol=1e-6)


@pytest.mark.parametrize("as_array", [False, True])
def test_a_wrong_number_of_items_is_refused_also_of_an_array(as_array: bool) -> None:
    given_: Any = np.zeros(2) if as_array else [0, 0]
    answers = (
        ask(lambda: ConnectorV2.add_n_batch_items({}, "x", given_, 3)),
        ask(lambda: RayConnectorV2.add_n_batch_items({}, "x", given_, 3)),
    )
    differ(answers, ConnectorError, None if as_array else ValueError)


def test_a_piece_is_not_put_beside_one_that_is_not_there_or_one_of_several() -> None:
    """Ray puts it beside the last piece, or the first of several."""
    for base, pipeline in ((ConnectorV2, ConnectorPipelineV2()), (RayConnectorV2, RayPipeline(connectors=[]))):
        classes = pieces_named(base)
        for name in "ABA":
            pipeline.append(classes[name]())
        if base is ConnectorV2:
            with pytest.raises(ConnectorError, match="has no piece 'D'"):
                pipeline.insert_before("D", classes["C"]())
            with pytest.raises(ConnectorError, match="has 2 pieces of class 'A'"):
                pipeline.insert_after(classes["A"], classes["C"]())
            continue
        pipeline.insert_before("D", classes["C"]())
        pipeline.insert_after(classes["A"], classes["D"]())
        assert [type(piece).__name__ for piece in pipeline.connectors] == ["A", "D", "B", "C", "A"]


def test_the_states_of_two_pieces_of_one_class_are_both_kept() -> None:
    counts = []
    for base, make in ((ConnectorV2, ConnectorPipelineV2), (RayConnectorV2, RayPipeline)):
        methods = {
            "__call__": lambda self, **kwargs: None,
            "get_state": lambda self, *a, **k: {"n": 1},
            "set_state": lambda self, state: None,
        }
        kept: Any = type("Kept", (base,), methods)
        counts.append(len(make(connectors=[kept(), kept()]).get_state()))
    assert counts == [2, 1]
