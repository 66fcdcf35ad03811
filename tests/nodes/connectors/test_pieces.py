"""The connector pieces one by one, on batches and episodes written out by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from piece_forms import OneByOne, Torch, call, ongoing

from rollflow import ConnectorV2, RLModule, SingleAgentEpisode
from rollflow.nodes import ModuleToEnvPipeline, NormalizeAndClipActions
from rollflow.nodes.connectors.common.batches import BatchIndividualItems, NumpyToTensor, TensorToNumpy
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.learner.train_columns import AddColumnsFromEpisodesToTrainBatch
from rollflow.nodes.connectors.module_to_env.action_pieces import (
    GetActions,
    ListifyDataForVectorEnv,
    UnBatchToIndividualItems,
)
from rollflow.nodes.modules.distribution import Races
from rollflow.stream import ConnectorError, ModuleError
from rollflow.stream.data.tree import leaves_of


def episode(id_: str, steps: int, *, terminated: bool = False, first: int = 0) -> SingleAgentEpisode:
    """Observations first, first + 1, …; actions ten times and rewards half of the observation they follow."""
    seen = range(first, first + steps)
    outputs = {"vf_preds": [float(number) for number in seen], "state_out": [0 for _ in seen]}
    acted: Any = {"actions": [10 * number for number in seen], "rewards": [0.5 * number for number in seen]}
    ends: Any = {"terminated": terminated, "truncated": not terminated, "len_lookback_buffer": 0}
    return SingleAgentEpisode(id_, observations=[*seen, first + steps], extra_model_outputs=outputs, **acted, **ends)


# Observations and other columns out of the episodes


@pytest.mark.parametrize("as_learner_connector", [False, True])
def test_observations_that_a_piece_put_there_stay(as_learner_connector: bool) -> None:
    piece = AddObservationsFromEpisodesToBatch(as_learner_connector=as_learner_connector)
    assert call(piece, {"obs": [7]}, [episode("a", 2)]) == {"obs": [7]}


def test_a_train_batch_gets_every_other_column_but_states_and_infos() -> None:
    episodes = [episode("a", 2, terminated=True), episode("b", 3)]
    batch = call(AddColumnsFromEpisodesToTrainBatch(), {}, episodes)
    assert batch.keys() == {"actions", "rewards", "terminateds", "truncateds", "vf_preds"}
    batch = call(BatchIndividualItems(), batch, episodes)
    assert batch["actions"].tolist() == [0, 10, 0, 10, 20]
    assert batch["rewards"].tolist() == [0.0, 0.5, 0.0, 0.5, 1.0]
    assert batch["vf_preds"].tolist() == [0, 1, 0, 1, 2]
    assert batch["terminateds"].tolist() == [False, True, False, False, False]
    assert batch["truncateds"].tolist() == [False, False, False, False, True]
    assert (batch["rewards"].dtype, batch["terminateds"].dtype) == (np.float32, bool)


def test_a_column_that_a_piece_put_there_stays_while_the_others_are_added() -> None:
    batch = call(AddColumnsFromEpisodesToTrainBatch(), {"rewards": {("a",): [9.0, 9.0]}}, [episode("a", 2)])
    assert batch["rewards"] == {("a",): [9.0, 9.0]}
    assert batch["actions"] == {("a",): [0, 10]}


# Items and arrays


def test_items_become_arrays_whatever_they_are_kept_under() -> None:
    batch = call(
        BatchIndividualItems(),
        {
            "plain": [1, 2, 3],
            "by_episode": {("a",): [1.0], ("b",): [2.0, 3.0]},
            "nested": {("a",): [{"x": np.array([1]), "y": (2,)}], ("b",): [{"x": np.array([3]), "y": (4,)}]},
            "array": np.arange(3),
            "tree": {"x": np.arange(3)},
        },
    )
    assert batch["plain"].tolist() == [1, 2, 3]
    assert batch["by_episode"].tolist() == [1.0, 2.0, 3.0]
    assert batch["nested"]["x"].tolist() == [[1], [3]]
    assert batch["nested"]["y"][0].tolist() == [2, 4]
    assert batch["array"].tolist() == batch["tree"]["x"].tolist() == [0, 1, 2]


def test_items_added_as_arrays_are_joined_to_those_added_one_by_one() -> None:
    batch: dict[str, Any] = {}
    ConnectorV2.add_n_batch_items(batch, "x", np.array([[1, 2], [3, 4]]), 2)
    ConnectorV2.add_batch_item(batch, "x", np.array([5, 6]))
    joined = call(BatchIndividualItems(), batch)["x"]
    assert joined.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert type(joined) is np.ndarray


def test_rows_come_in_the_order_of_the_episodes_not_of_the_keys() -> None:
    episodes = ongoing("a", "b", "c")
    batch = call(BatchIndividualItems(), {"x": {("c",): [3], ("a",): [1], ("b",): [2]}}, episodes)
    assert batch["x"].tolist() == [1, 2, 3]


def test_infos_stay_a_list() -> None:
    episodes = ongoing("b", "a")
    batch = call(BatchIndividualItems(), {"infos": {("a",): [{"x": 1}], ("b",): [{}]}}, episodes)
    assert batch == {"infos": [{}, {"x": 1}]}
    assert call(NumpyToTensor(), {"infos": [{"x": np.zeros(1)}]})["infos"][0]["x"].tolist() == [0.0]


def test_items_of_different_shapes_are_refused_with_their_column() -> None:
    told = r"column 'x': items of shapes \(2,\), \(3,\) make no batch"
    with pytest.raises(ConnectorError, match=told):
        call(BatchIndividualItems(), {"x": [np.zeros(2), np.zeros(3)]})
    batch: dict[str, Any] = {}
    ConnectorV2.add_n_batch_items(batch, "x", np.zeros((4, 2)), 4)
    ConnectorV2.add_n_batch_items(batch, "x", np.zeros((4, 3)), 4)
    with pytest.raises(ConnectorError, match=r"column 'x': items of shapes \(4, 2\), \(4, 3\) make no batch"):
        call(BatchIndividualItems(), batch)


@pytest.mark.parametrize(
    ("data", "shape"), [(np.zeros((3, 2)), r"\[3, 2\]"), (np.float32(1), r"\[\]"), ({"a": np.zeros(1)}, r"\[1\]")]
)
def test_arrays_without_a_row_for_each_episode_are_refused(data: Any, shape: str) -> None:
    told = f"column 'x' has an array of shape {shape}, expected 2 rows: one per episode"
    with pytest.raises(ConnectorError, match=told):
        call(UnBatchToIndividualItems(), {"x": data}, ongoing("a", "b"))


ROWS = arrays.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
ARRAYS = arrays.arrays(st.sampled_from([np.float32, np.int64, np.bool_, np.uint8]), ROWS)


@given(ARRAYS)
def test_what_is_taken_apart_and_batched_again_is_the_same(array: np.ndarray[Any, Any]) -> None:
    episodes = ongoing(*map(str, range(len(array))))
    apart = call(UnBatchToIndividualItems(), {"x": {"y": array}}, episodes)
    again = call(BatchIndividualItems(), apart, episodes)["x"]["y"]
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


# Arrays and tensors


@given(ARRAYS)
def test_what_becomes_a_tensor_and_an_array_again_is_the_same_memory(array: np.ndarray[Any, Any]) -> None:
    tensors = call(NumpyToTensor(), {"x": array, "y": {"z": (array,)}})
    assert torch.is_tensor(tensors["x"])
    assert torch.is_tensor(tensors["y"]["z"][0])
    again = call(TensorToNumpy(), tensors)
    for each in (again["x"], again["y"]["z"][0]):
        assert each.dtype == array.dtype
        assert np.shares_memory(each, array)
        np.testing.assert_array_equal(each, array)


@pytest.mark.parametrize(
    "view",
    [lambda array: array[:, ::-1], lambda array: array[::-1], lambda array: array.T, lambda array: array[:, ::2]],
    ids=["mirrored", "upside down", "transposed", "every other"],
)
def test_views_become_tensors_of_the_same_numbers(view: Callable[[Any], Any]) -> None:
    array = view(np.arange(12.0).reshape(3, 4))
    np.testing.assert_array_equal(call(NumpyToTensor(), {"x": array})["x"].numpy(), array)


def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    call(NumpyToTensor(), {"x": array})["x"][0] = 1.0
    assert array.tolist() == [0.0, 0.0, 0.0]


def test_an_array_without_numbers_is_refused_with_its_column() -> None:
    with pytest.raises(ConnectorError, match="column 'x' can't become a tensor: can't convert"):
        call(NumpyToTensor(), {"x": np.array(["left", "right"])})


@pytest.mark.parametrize("module", [None, SimpleNamespace(framework="jax")], ids=["none", "jax"])
def test_arrays_stay_for_a_module_that_is_not_torchs(module: Any) -> None:
    batch = {"x": np.zeros(2)}
    assert call(NumpyToTensor(), batch, rl_module=module)["x"] is batch["x"]
    assert isinstance(batch["x"], np.ndarray)


def test_tensors_move_to_the_device_asked_for() -> None:
    assert call(NumpyToTensor(device="meta"), {"x": np.zeros(2)})["x"].device.type == "meta"


def test_tensors_of_a_computation_become_arrays_too() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    batch = call(TensorToNumpy(), {"x": weight * 2, "weight": weight, "rest": {"name": "n", "half": weight.bfloat16()}})
    assert batch["x"].tolist() == [2.0, 2.0]
    assert batch["weight"].tolist() == [1.0, 1.0]
    assert batch["rest"]["name"] == "n"
    assert batch["rest"]["half"].dtype == np.float32


# Actions


def test_actions_are_sampled_with_their_log_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    module = RLModule(action_space=spaces.Discrete(2))
    batch = call(GetActions(), {"action_dist_inputs": logits}, rl_module=module, explore=True)
    chosen = np.array([[0.25, 0.75], [0.5, 0.5]])[[0, 1], batch["actions"]]
    assert batch["action_logp"].exp().tolist() == pytest.approx(chosen.tolist())
    assert batch["action_logp"].dtype == torch.float32


@pytest.mark.parametrize("explore", [False, None])
def test_without_exploration_actions_are_the_likeliest(explore: bool | None) -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    piece = GetActions(None, spaces.Discrete(2, start=5))
    batch = call(piece, {"action_dist_inputs": logits}, explore=explore)
    assert batch["actions"].tolist() == [6, 5]
    assert batch["action_logp"].tolist() == [0.0, 0.0]


def test_actions_of_the_module_itself_are_passed_on() -> None:
    batch = {"actions": torch.tensor([1]), "action_dist_inputs": torch.tensor([[torch.nan]])}
    assert call(GetActions(), dict(batch), explore=True) == batch


def test_a_log_probability_of_the_module_itself_stays() -> None:
    logp = torch.tensor([-7.0])
    batch = {"action_dist_inputs": torch.zeros(1, 2), "action_logp": logp}
    assert call(GetActions(None, spaces.Discrete(2)), batch, explore=True)["action_logp"] is logp


@pytest.mark.parametrize("made", [torch.tensor, np.array])
@pytest.mark.parametrize("races", [{}, {"races": Races(np.random.default_rng(0))}], ids=["sampled", "by races"])
@pytest.mark.parametrize(
    ("wrong", "told"),
    [([np.nan, 0.0], "is NaN"), ([np.inf, 0.0], r"is \+inf"), ([-np.inf, -np.inf], "rules out every action")],
)
def test_unusable_logits_are_told_with_lane_step_and_slots(
    wrong: list[float], told: str, races: dict[str, Any], made: Any
) -> None:
    batch = {"action_dist_inputs": made([[0.0, -np.inf], wrong, [0.0, 0.0], wrong])}
    with pytest.raises(ModuleError, match=f"'action_dist_inputs' {told} in lane 3, vector step 7, slot 1, 3"):
        call(GetActions(None, spaces.Discrete(2)), batch, explore=True, shared_data={**races, "lane": 3, "step": 7})


LOGITS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


@pytest.mark.parametrize("shared", [{}, {"races": 5}])
@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize(
    ("space", "logits"),
    [
        (spaces.Discrete(3, start=2), LOGITS),
        (spaces.Discrete(3), np.broadcast_to(LOGITS, LOGITS.shape)),  # which is read-only
        (spaces.Discrete(3), LOGITS[::-1]),
        (spaces.Discrete(3), LOGITS.astype(np.float64)),
        (spaces.Discrete(3), LOGITS.astype(">f4")),
        (spaces.Discrete(3), LOGITS.astype(np.int64)),
        (spaces.Box(-1, 1, (2,)), np.concatenate([LOGITS, LOGITS], 1)[:, :4]),
        (spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(1)]), LOGITS),
    ],
)
def test_logits_as_arrays_give_the_actions_of_the_same_tensor(
    space: spaces.Space[Any], logits: np.ndarray[Any, Any], explore: bool, shared: dict[str, Any]
) -> None:
    def acted(inputs: Any) -> dict[str, Any]:
        torch.manual_seed(1)
        given = {name: Races(np.random.default_rng(seed)) for name, seed in shared.items()}
        batch = call(GetActions(None, space), {"action_dist_inputs": inputs}, explore=explore, shared_data=given)
        return call(TensorToNumpy(), batch)

    plain = logits.astype(np.float64 if logits.dtype == np.float64 else np.float32)
    ours, expected = acted(logits), acted(torch.from_numpy(np.ascontiguousarray(plain)))
    assert ours["action_dist_inputs"] is logits
    np.testing.assert_array_equal(ours["action_logp"], expected["action_logp"])
    for one, other in zip(leaves_of(ours["actions"]), leaves_of(expected["actions"]), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_a_distribution_from_elsewhere_is_given_arrays_as_they_are() -> None:
    class Highest:
        """Works with arrays alone."""

        def __init__(self, logits: Any) -> None:
            assert logits is LOGITS
            self.logits = logits

        from_logits = classmethod(lambda cls, logits: cls(logits))

        def sample(self) -> Any:
            return self.logits.argmax(-1)

        def logp(self, value: Any) -> Any:
            return self.logits[np.arange(len(value)), value]

        def to_deterministic(self) -> "Highest":
            return self

    class Module:
        def get_exploration_action_dist_cls(self) -> type[Highest]:
            return Highest

        get_inference_action_dist_cls = get_exploration_action_dist_cls

    for explore in (True, False):
        shared = {"generator": torch.Generator()}  # of which the distribution knows nothing
        batch = {"action_dist_inputs": LOGITS}
        batch = call(GetActions(), batch, rl_module=Module(), explore=explore, shared_data=shared)
        np.testing.assert_array_equal(batch["actions"], LOGITS.argmax(-1))
        np.testing.assert_array_equal(batch["action_logp"], LOGITS.max(-1))


@pytest.mark.parametrize("logits", [{"a": LOGITS}, "logits", None, np.float32(1.0), [[1.0], [1.0, 2.0]]])
def test_logits_that_are_no_numbers_are_refused(logits: Any) -> None:
    with pytest.raises(ModuleError, match=r"'action_dist_inputs'"):
        call(GetActions(None, spaces.Discrete(3)), {"action_dist_inputs": logits}, explore=True)


def test_an_action_space_set_later_is_the_one_that_counts() -> None:
    piece = GetActions(None, spaces.Discrete(2))
    assert call(piece, {"action_dist_inputs": torch.tensor([[0.0, 1.0]])})["actions"].tolist() == [1]
    piece.input_action_space = spaces.Discrete(3, start=10)
    assert call(piece, {"action_dist_inputs": torch.tensor([[0.0, 1.0, 0.0]])})["actions"].tolist() == [11]


def test_an_output_without_actions_or_their_distribution_is_refused() -> None:
    told = "the output of Torch has ['logits', 'vf_preds'], expected 'actions' or 'action_dist_inputs'"
    with pytest.raises(ModuleError) as raised:
        call(GetActions(), {"vf_preds": torch.zeros(1), "logits": torch.zeros(1, 2)})
    assert str(raised.value) == told


def test_a_module_without_distributions_needs_an_action_space() -> None:
    told = r"Torch has no get_exploration_action_dist_cls\(\), and GetActions was given"
    with pytest.raises(ModuleError, match=told):
        call(GetActions(), {"action_dist_inputs": torch.zeros(1, 2)}, explore=True)


def test_logits_that_rule_actions_out_are_no_error() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    batch = call(GetActions(None, spaces.Discrete(2)), {"action_dist_inputs": logits}, explore=True)
    assert batch["actions"].tolist() == [0, 1]
    assert batch["action_logp"].tolist() == [0.0, 0.0]


# Actions for the environments

BOX = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32))
ACTIONS = arrays.arrays(np.float32, (3, 2), elements=st.floats(-5, 5, width=32))


def brought(actions: Any, space: spaces.Space[Any] = BOX, *, normalize: bool = False, clip: bool = True) -> Any:
    """The actions for the environments, brought into a space."""
    piece = NormalizeAndClipActions(None, space, normalize_actions=normalize, clip_actions=clip)
    return call(piece, {"actions": actions})["actions_for_env"]


@given(ACTIONS, st.booleans())
def test_bounded_actions_come_to_lie_in_their_space(actions: np.ndarray[Any, Any], normalize: bool) -> None:
    bounded = brought(actions, normalize=normalize, clip=not normalize)
    assert all(action in BOX for action in bounded)
    if not normalize:
        np.testing.assert_array_equal(brought(bounded), bounded)


@given(ACTIONS, st.booleans())
def test_rows_at_once_and_items_one_by_one_come_to_the_same(actions: np.ndarray[Any, Any], normalize: bool) -> None:
    at_once = brought(actions, normalize=normalize)
    for items in ({("a",): list(actions)}, list(actions)):
        one_by_one = brought(items, normalize=normalize)
        stacked = np.stack(one_by_one if isinstance(one_by_one, list) else one_by_one[("a",)])
        assert stacked.dtype == at_once.dtype
        np.testing.assert_array_equal(stacked, at_once)


WHOLE_BOX = spaces.Box(np.array([-128, 0], np.int8), np.array([127, 10], np.int8), dtype=np.int8)


@pytest.mark.parametrize(
    ("space", "normalize", "actions", "expected"),
    [
        (BOX, True, [[-1, -1], [0.0, 0], [1, 1], [7, -7]], [[-1.0, 0.0], [1.0, 0.25], [3.0, 0.5], [3.0, 0.0]]),
        # -128 + 255 / 2 = -0.5, -128 + 1.5 * 255 / 2 = 63.25, -128 + 0.5 * 255 / 2 = -64.25; and 5, 7.75, 2.25
        (WHOLE_BOX, True, [[0.0, 0.0], [0.5, 0.55], [-0.5, -0.55]], [[0, 5], [63, 8], [-64, 2]]),
        (spaces.Box(-5, 100, (1,), np.int8), False, [[-300], [-5], [99], [2**40]], [[-5], [-5], [99], [100]]),
    ],
    ids=["floats", "whole numbers", "a wider type"],
)
def test_actions_are_brought_into_their_box_by_hand(space: Any, normalize: bool, actions: Any, expected: Any) -> None:
    given = brought(np.array(actions), space, normalize=normalize, clip=not normalize)
    assert (given.dtype, given.tolist()) == (space.dtype, expected)


def test_parts_of_an_action_are_brought_into_bounds_each_by_itself() -> None:
    space = spaces.Dict({"go": BOX, "turn": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (1,))])})
    batched = brought({"go": np.array([[9.0, 9.0]]), "turn": (np.array([2]), np.array([[-4.0]]))}, space)
    assert batched["go"].tolist() == [[3.0, 0.5]]
    assert [part.tolist() for part in batched["turn"]] == [[2], [[-1.0]]]
    item = {"go": np.array([9.0, 9.0]), "turn": (2, np.array([-4.0]))}
    one = brought({("a",): [item]}, space)[("a",)][0]
    assert (one["go"].tolist(), one["turn"][0], one["turn"][1].tolist()) == ([3.0, 0.5], 2, [-1.0])


def test_a_box_with_some_bounds_is_clipped_to_those_and_never_normalized() -> None:
    space = spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([np.inf, np.inf], np.float32))
    actions = np.array([[-3.0, -3.0]], np.float32)
    for normalize in (False, True):
        assert brought(actions, space, normalize=normalize).tolist() == [[0.0, -3.0]]
    assert brought(actions, space, normalize=True, clip=False).tolist() == [[-3.0, -3.0]]
    piece = NormalizeAndClipActions(None, space, normalize_actions=False, clip_actions=False)
    assert call(piece, {"actions": actions}).keys() == {"actions"}


def test_actions_for_the_environments_that_a_piece_put_there_stay() -> None:
    piece = NormalizeAndClipActions(None, BOX, normalize_actions=True, clip_actions=True)
    batch = {"actions": np.zeros((1, 2)), "actions_for_env": np.ones((1, 2))}
    assert call(piece, batch)["actions_for_env"].tolist() == [[1.0, 1.0]]


WHOLE = [np.uint8, np.int8, np.uint16, np.int32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", WHOLE)
def test_floats_for_a_box_of_whole_numbers_are_rounded_and_clipped(dtype: Any) -> None:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    space = spaces.Box(low, high, (1,), dtype)
    actions = np.array([[-1e30], [-3.4], [0.5], [1.5], [300.0], [1e30]])
    clipped = brought(actions, space)
    assert clipped.dtype == dtype
    assert [int(number) for number in clipped.ravel()] == [
        min(max(number, low), high) for number in (-(10**30), -3, 0, 2, 300, 10**30)
    ]
    ends = brought(np.array([[-1.0], [1.0], [-7.0], [7.0]], np.float32), space, normalize=True)
    assert [int(number) for number in ends.ravel()] == [low, high, low, high]


def test_whole_numbers_are_not_normalized() -> None:
    text = r"'actions' are uint8\[2, 1\], expected floats from -1 to 1 to be normalized"
    with pytest.raises(ConnectorError, match=text):
        brought(np.zeros((2, 1), np.uint8), spaces.Box(0, 9, (1,), np.uint8), normalize=True)


# Items for the environments


@pytest.mark.parametrize("clip_actions", [True, False])
@pytest.mark.parametrize(
    ("space", "width"),
    [
        (spaces.Discrete(3, start=1), 3),
        (spaces.MultiDiscrete([2, 2]), 4),
        (spaces.MultiBinary(2), 2),
        (spaces.Box(-np.inf, np.inf, (2,)), 4),
        (spaces.Box(-1, 1, (2,)), 4),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-np.inf, np.inf, (1,))}), 4),
    ],
)
@pytest.mark.parametrize("by_item", [False, True])
def test_a_pipeline_gives_actions_for_the_environments_of_any_space(
    space: spaces.Space[Any], width: int, clip_actions: bool, by_item: bool
) -> None:
    pieces = [OneByOne()] if by_item else []
    pipeline = ModuleToEnvPipeline.default(None, space, pieces, clip_actions=clip_actions)
    episodes = ongoing("a", "b")
    call_it: dict[str, Any] = {"rl_module": Torch(), "episodes": episodes, "explore": True}
    batch = pipeline(batch={"action_dist_inputs": torch.zeros(2, width)}, **call_it)
    chosen, given_ = leaves_of(batch["actions"]), leaves_of(batch["actions_for_env"])
    for one, other in zip(chosen, given_, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if space.is_np_flattenable and not (isinstance(space, spaces.Box) and clip_actions):
            np.testing.assert_array_equal(one, other)
    actions = batch["actions_for_env"]
    for slot in range(2 if clip_actions else 0):
        action = {key: part[slot] for key, part in actions.items()} if isinstance(actions, dict) else actions[slot]
        assert action in space


def test_items_for_the_environments_are_in_lists_of_their_own() -> None:
    piece = NormalizeAndClipActions(None, spaces.Discrete(9), normalize_actions=False, clip_actions=True)
    batch = call(piece, {"actions": {("a",): [1], ("b",): [2]}})
    ConnectorV2.foreach_batch_item_change_in_place(batch, "actions_for_env", lambda item, *ids: item + 5)
    assert batch == {"actions": {("a",): [1], ("b",): [2]}, "actions_for_env": {("a",): [6], ("b",): [7]}}


def test_items_come_in_the_order_of_the_environments() -> None:
    batch = {
        "actions": {("b",): [np.array([2.0])], ("a",): [np.array([1.0])]},
        "vf_preds": {("b",): [20.0], ("a",): [10.0]},
        "seen": np.array([0, 1]),
        "state_out": {},
    }
    batch = call(ListifyDataForVectorEnv(), batch, ongoing("a", "b"))
    assert batch["actions"].tolist() == [[1.0], [2.0]]
    assert batch["vf_preds"] == [10.0, 20.0]
    assert batch["seen"].tolist() == [0, 1]
    assert batch["state_out"] == {}


@pytest.mark.parametrize("data", [{("a",): [1]}, {("a",): [1], ("c",): [2]}, {("a",): [1, 2], ("b",): [3]}])
def test_items_that_are_not_one_for_each_environment_are_refused(data: Any) -> None:
    with pytest.raises(ConnectorError, match=r"column 'x' has \d items for episodes .*, expected one for each of"):
        call(ListifyDataForVectorEnv(), {"x": data}, ongoing("a", "b"))
