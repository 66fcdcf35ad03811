"""The default network: what it takes, what it gives, what it refuses."""

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollflow.nodes.modules.default_module import DefaultModelConfig, DefaultModule, model_config_of
from rollflow.stream import ModuleError
from rollflow.stream.data.tree import map_tree, stack_trees

VECTOR = spaces.Box(-1, 1, (3,))
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)
CHOICE = spaces.Discrete(2)
SMALL = {"fcnet_hiddens": [8], "lstm_cell_size": 6, "conv_filters": [(4, 3, 2), (6, 3, 1)]}

SEEN = {
    "a vector": VECTOR,
    "doubles": spaces.Box(-1, 1, (3,), np.float64),
    "one number": spaces.Box(-1, 1, ()),
    "a choice": spaces.Discrete(4, start=3),
    "choices": spaces.MultiDiscrete([2, 3]),
    "choices in rows": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 5]]),
    "bits": spaces.MultiBinary(5),
    "bits in rows": spaces.MultiBinary([2, 3]),
    "an image": IMAGE,
    "an image of floats": spaces.Box(0, 1, (12, 9, 1)),
    "a dict": spaces.Dict({"see": IMAGE, "feel": VECTOR, "know": spaces.Discrete(3)}),
    "a tuple": spaces.Tuple((spaces.MultiBinary(2), VECTOR)),
    "a nest": spaces.Dict({"a": spaces.Tuple((IMAGE, spaces.Dict({"b": spaces.Discrete(2)}))), "c": VECTOR}),
}
CHOSEN = {
    "a choice": (CHOICE, 2),
    "choices": (spaces.MultiDiscrete([2, 3]), 5),
    "bits": (spaces.MultiBinary([2, 2]), 4),
    "a vector": (spaces.Box(-1, 1, (2, 2)), 8),
    "a nest": (spaces.Dict({"a": spaces.Tuple((VECTOR, CHOICE)), "b": spaces.Box(-1, 1, (1,))}), 10),
}
each_seen = pytest.mark.parametrize("space", SEEN.values(), ids=SEEN.keys())


def observations(space: gym.Space[Any], *lead: int) -> Any:
    """Samples with leading axes, as tensors."""
    space.seed(7)
    rows = stack_trees([space.sample() for _ in range(int(np.prod(lead)))])
    return map_tree(lambda leaf: torch.from_numpy(leaf.reshape(*lead, *leaf.shape[1:])), rows)


def made(seen: Any = VECTOR, chosen: Any = CHOICE, **config: Any) -> DefaultModule:
    torch.manual_seed(3)
    return DefaultModule(seen, chosen, model_config={**SMALL, **config})


def state(module: DefaultModule, rows: int) -> dict[str, torch.Tensor]:
    return {name: zeros.expand(rows, -1) for name, zeros in module.get_initial_state().items()}


def test_a_vector_goes_through_two_dense_layers_and_a_head_each() -> None:
    module = DefaultModule(VECTOR, CHOICE)
    shapes = [tuple(weight.shape) for name, weight in module.named_parameters() if name.endswith("weight")]
    assert shapes == [(256, 3), (256, 256), (2, 256), (1, 256)]
    obs = observations(VECTOR, 4)
    output = module.forward_exploration({"obs": obs})
    w = list(module.parameters())
    hidden = torch.tanh(torch.tanh(obs @ w[0].T + w[1]) @ w[2].T + w[3])
    torch.testing.assert_close(output["action_dist_inputs"], hidden @ w[4].T + w[5])
    torch.testing.assert_close(output["vf_preds"], (hidden @ w[6].T + w[7])[:, 0])
    assert not module.is_stateful()


@each_seen
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_every_space_is_seen_in_full(space: gym.Space[Any], shared: bool) -> None:
    module = made(space, vf_share_layers=shared)
    output = module.forward_train({"obs": observations(space, 16)})
    assert sorted(output) == ["action_dist_inputs", "vf_preds"]
    assert (output["action_dist_inputs"].shape, output["vf_preds"].shape) == ((16, 2), (16,))
    assert output["action_dist_inputs"].dtype == output["vf_preds"].dtype == torch.float32
    assert output["action_dist_inputs"][:, 0].std() > 1e-5
    assert output["vf_preds"].std() > 1e-3
    (output["action_dist_inputs"][:, 0].sum() + output["vf_preds"].sum()).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in module.parameters())


@each_seen
def test_an_lstm_step_by_step_does_what_it_does_in_one_pass(space: gym.Space[Any]) -> None:
    module = made(space, use_lstm=True)
    assert module.is_stateful()
    obs = observations(space, 3, 5)
    whole = module.forward_train({"obs": obs, "state_in": state(module, 3)})
    assert (whole["action_dist_inputs"].shape, whole["vf_preds"].shape) == ((3, 5, 2), (3, 5))
    carried = state(module, 3)
    for t in range(5):
        step = map_tree(lambda leaf, t=t: leaf[:, t : t + 1], obs)
        batch = {"obs": step, "state_in": carried}
        torch.testing.assert_close(module.compute_values(batch), whole["vf_preds"][:, t : t + 1])
        output = module.forward_exploration(batch)
        carried = output["state_out"]
        for name in ("action_dist_inputs", "vf_preds"):
            torch.testing.assert_close(output[name], whole[name][:, t : t + 1])
    assert {name: tuple(part.shape) for name, part in carried.items()} == {"h": (3, 6), "c": (3, 6)}
    torch.testing.assert_close(carried, whole["state_out"])


def test_a_loss_reaches_all_of_an_lstm() -> None:
    module = made(use_lstm=True, head_fcnet_hiddens=[4], head_fcnet_activation="silu")
    output = module.forward_train({"obs": observations(VECTOR, 3, 5), "state_in": state(module, 3)})
    (output["action_dist_inputs"][..., 0].sum() + output["vf_preds"].sum()).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in module.parameters())


def test_an_lstm_begins_at_zeros_and_its_past_counts() -> None:
    module = made(use_lstm=True)
    initial = module.get_initial_state()
    assert {name: part.tolist() for name, part in initial.items()} == {"h": [0.0] * 6, "c": [0.0] * 6}
    obs = observations(VECTOR, 2, 1)
    past = {name: part + 1 for name, part in state(module, 2).items()}
    fresh, later = ({"obs": obs, "state_in": given} for given in (state(module, 2), past))
    assert not torch.equal(module.compute_values(fresh), module.compute_values(later))


@pytest.mark.parametrize(("space", "width"), CHOSEN.values(), ids=CHOSEN.keys())
def test_the_inputs_fit_the_distribution_of_the_action_space(space: gym.Space[Any], width: int) -> None:
    module = made(chosen=space)
    inputs = module.forward_train({"obs": observations(VECTOR, 4)})["action_dist_inputs"]
    assert inputs.shape == (4, width)
    distribution = module.get_train_action_dist_cls().from_logits(inputs)
    assert distribution.logp(distribution.sample()).shape == (4,)


def test_one_hot_vectors_begin_at_a_space_s_start_and_are_joined_end_to_end() -> None:
    module = made(spaces.MultiDiscrete([[2], [3]], start=[[1], [0]]), fcnet_hiddens=[], use_lstm=False)
    encoded = module.encoder(torch.tensor([[[1], [2]], [[2], [0]]]))
    assert encoded.tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
    assert made(spaces.Discrete(3, start=5), fcnet_hiddens=[]).encoder(torch.tensor([6])).tolist() == [[0, 1, 0]]


def test_the_leaves_of_a_space_are_joined_in_its_order() -> None:
    space = spaces.Dict({"b": spaces.Tuple((CHOICE, spaces.Box(-9, 9, ()))), "a": spaces.MultiBinary(2)})
    obs = {"a": torch.tensor([[1, 0]], dtype=torch.int8), "b": (torch.tensor([1]), torch.tensor([7.0]))}
    assert made(space, fcnet_hiddens=[]).encoder(obs).tolist() == [[1, 0, 0, 1, 7]]


def test_bytes_of_an_image_are_scaled_and_floats_are_not() -> None:
    bytes_seen, floats_seen = made(IMAGE), made(spaces.Box(0, 1, (12, 12, 3)))
    floats_seen.load_state_dict(bytes_seen.state_dict())
    obs = observations(IMAGE, 4)
    expected = floats_seen.forward_train({"obs": obs.double() / 255})["vf_preds"]
    torch.testing.assert_close(bytes_seen.forward_train({"obs": obs})["vf_preds"], expected)


def test_convolutions_are_those_of_torch_over_channels_first() -> None:
    module = made(IMAGE, conv_filters=[(4, (3, 2), (2, 1))])
    obs = observations(IMAGE, 2)
    weight, bias = list(module.parameters())[:2]
    plain = torch.nn.functional.conv2d(obs.permute(0, 3, 1, 2).contiguous() / 255, weight, bias, (2, 1))
    torch.testing.assert_close(module.encoder(obs), plain.relu().flatten(1))
    assert module.encoder.width == 4 * 5 * 11  # (12 - 3) // 2 + 1 rows of (12 - 2) // 1 + 1


def test_84_by_84_is_the_nature_network() -> None:
    module = DefaultModule(spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(6))
    shapes = [tuple(weight.shape) for name, weight in module.named_parameters() if name.endswith("weight")]
    convolutions = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert shapes == [*convolutions, (512, 64 * 7 * 7), (6, 512), (1, 512)]


SIZES = [(1, 1), (2, 5), (3, 3), (4, 84), (5, 5), (7, 7), (10, 30), (16, 16), (35, 35), (36, 36)]


@pytest.mark.parametrize("size", SIZES)
def test_an_image_of_any_size_has_filters(size: tuple[int, int]) -> None:
    space = spaces.Box(0, 255, (*size, 3), np.uint8)
    module = made(space, conv_filters=None)
    output = module.forward_train({"obs": observations(space, 8)})
    assert output["vf_preds"].std() > 1e-3
    assert output["action_dist_inputs"].shape == (8, 2)


def test_large_images_do_not_make_a_huge_last_layer() -> None:
    module = DefaultModule(spaces.Box(0, 255, (210, 160, 3), np.uint8), CHOICE)
    # 210x160 -> 51x39 -> 24x18 -> 22x16, then strides of 2 until no side is above 12: 10x7
    assert (512, 64 * 10 * 7) in [tuple(weight.shape) for weight in module.parameters()]


def test_layers_begin_orthogonal_with_gains_of_their_own() -> None:
    module = made(head_fcnet_hiddens=[8])
    w = {name: weight.detach() for name, weight in module.named_parameters()}
    assert all(not weight.any() for name, weight in w.items() if name.endswith("bias"))
    encoder, hidden = w["encoder.layers.0.weight"], w["policy_head.layers.0.weight"]
    torch.testing.assert_close(encoder.T @ encoder, 2 * torch.eye(3))
    torch.testing.assert_close(hidden @ hidden.T, 2 * torch.eye(8))
    policy, value = w["policy_head.layers.2.weight"], w["value_head.2.weight"]
    torch.testing.assert_close(policy @ policy.T, 1e-4 * torch.eye(2))
    torch.testing.assert_close(value @ value.T, torch.eye(1))


@pytest.mark.parametrize("lstm", [False, True])
def test_free_deviations_do_not_depend_on_the_observation(lstm: bool) -> None:
    module = made(chosen=VECTOR, free_log_std=True, use_lstm=lstm)
    with torch.no_grad():
        module.policy_head.log_std.copy_(torch.tensor([1.0, 2.0, 3.0]))
    lead = (4, 2) if lstm else (4,)
    output = module.forward_train({"obs": observations(VECTOR, *lead), "state_in": state(module, 4)})
    inputs = output["action_dist_inputs"]
    assert inputs.shape == (*lead, 6)
    assert inputs[..., 3:].reshape(-1, 3).unique(dim=0).tolist() == [[1, 2, 3]]
    assert inputs[..., :3].std() > 1e-5
    (inputs.sum() + output["vf_preds"].sum()).backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in module.parameters())


def test_free_deviations_stand_where_a_nest_of_actions_has_them() -> None:
    box = spaces.Box(-1, 1, (2,))
    module = made(chosen=spaces.Tuple((box, CHOICE, spaces.Dict({"a": box}))), free_log_std=True)
    with torch.no_grad():
        module.policy_head.log_std.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        module.policy_head.layers[-1].weight.zero_()
        module.policy_head.layers[-1].bias.copy_(torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, 60.0]))
    inputs = module.forward_train({"obs": observations(VECTOR, 1)})["action_dist_inputs"]
    assert inputs.tolist() == [[10, 20, 1, 2, 30, 40, 50, 60, 3, 4]]


@pytest.mark.parametrize("shared", [True, False])
def test_values_alone_are_those_of_the_whole_pass(shared: bool) -> None:
    module = made(vf_share_layers=shared)
    batch = {"obs": observations(VECTOR, 4)}
    expected = module.forward_train(batch)["vf_preds"]
    assert torch.equal(module.compute_values(batch), expected)
    embeddings = (module.encoder if shared else module.value_encoder)(batch["obs"])
    assert torch.equal(module.compute_values({}, embeddings), expected)


@pytest.mark.parametrize("config", [{}, {"vf_share_layers": False}, {"use_lstm": True}], ids=str)
def test_inference_only_has_no_part_of_the_values(config: dict[str, Any]) -> None:
    whole = made(**config)
    module = DefaultModule(VECTOR, CHOICE, inference_only=True, model_config={**SMALL, **config})
    module.load_state_dict({name: w for name, w in whole.state_dict().items() if not name.startswith("value_")})
    batch = {"obs": observations(VECTOR, 4, 1) if "use_lstm" in config else observations(VECTOR, 4)}
    batch["state_in"] = state(module, 4)
    output, expected = module.forward_inference(batch), whole.forward_inference(batch)
    assert sorted(output) == sorted(set(expected) - {"vf_preds"})
    assert torch.equal(output["action_dist_inputs"], expected["action_dist_inputs"])
    with pytest.raises(ModuleError, match="is inference_only, expected inference_only=False for values"):
        module.compute_values(batch)


@each_seen
def test_copies_and_reloaded_weights_give_the_same(space: gym.Space[Any]) -> None:
    chosen = spaces.Tuple((VECTOR, CHOICE))
    module = made(space, chosen, free_log_std=True)
    batch = {"obs": observations(space, 4)}
    expected = module.forward_train(batch)
    reloaded = DefaultModule(space, chosen, model_config=module.model_config)
    reloaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), reloaded):
        torch.testing.assert_close(other.forward_train(batch), expected, rtol=0, atol=0)
        assert all(mine is not theirs for mine, theirs in zip(module.parameters(), other.parameters(), strict=True))


def test_the_config_may_be_a_record_a_dict_or_nothing() -> None:
    for given in (None, {}, DefaultModelConfig()):
        assert DefaultModule(VECTOR, CHOICE, model_config=given).model_config == DefaultModelConfig()
    config = model_config_of({"fcnet_hiddens": [4, 5], "conv_filters": [[16, [8, 4], 2]]})
    assert config == DefaultModelConfig(fcnet_hiddens=(4, 5), conv_filters=((16, (8, 4), 2),))
    assert hash(config) == hash(copy.deepcopy(config))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"fcnet_hiddens": [8, 0]}, r"fcnet_hiddens is \[8, 0\], expected a list of whole numbers, each 1 or more"),
        ({"head_fcnet_hiddens": 8}, "head_fcnet_hiddens is 8, expected a list of whole numbers"),
        ({"fcnet_hiddens": [True]}, r"fcnet_hiddens is \[True\], expected a list of whole numbers"),
        ({"fcnet_activation": "tanhh"}, "fcnet_activation is 'tanhh', expected one of: elu, gelu, .*relu.*tanh"),
        ({"conv_activation": None}, "conv_activation is None, expected one of"),
        ({"vf_share_layers": 1}, "vf_share_layers is 1, expected True or False"),
        ({"max_seq_len": 0}, "max_seq_len is 0, expected a whole number, 1 or more"),
        ({"lstm_cell_size": 2.5}, "lstm_cell_size is 2.5, expected a whole number, 1 or more"),
        ({"conv_filters": []}, r"conv_filters is \[\], expected None or a list of \(out_channels, kernel, stride\)"),
        ({"conv_filters": [(16, 8, 4), (16, 8)]}, r"conv_filters\[1\] is \(16, 8\), expected \(out_channels, kernel"),
        ({"conv_filters": [(16, (8, 0), 4)]}, r"conv_filters\[0\] is \(16, \(8, 0\), 4\), expected"),
        ([8], "model_config is a list, expected a DefaultModelConfig or a dict"),
        ({"fcnet_hidden": [8]}, r"unknown fields \['fcnet_hidden'\], expected some of: fcnet_hiddens, fcnet_act"),
    ],
    ids=str,
)
def test_a_config_that_can_not_be_is_refused(fields: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DefaultModule(VECTOR, CHOICE, model_config=fields)


def masked_space(mask: gym.Space[Any], key: str = "observations") -> gym.Space[Any]:
    return spaces.Dict({"action_mask": mask, key: VECTOR})


MANY, NAMED = spaces.Sequence(VECTOR), spaces.Dict({"a": CHOICE})
LSTM, DEEP = {"use_lstm": True}, {"conv_filters": [(4, 8, 2), (4, 4, 1)]}
WRONG_MASK = {"seen": masked_space(spaces.MultiBinary(3)), "chosen": spaces.Discrete(4)}
REFUSED: list[tuple[str, dict[str, Any], Any]] = [  # what is told, what it is made of, observations if it is called
    (
        r"has Box\(.*\(2, 3\), float32\) at 'obs', expected Discrete, .*, or a",
        {"seen": spaces.Box(-1, 1, (2, 3))},
        None,
    ),
    ("has Text.* at 'obs', expected Discrete, MultiDiscrete, MultiBinary, Box of", {"seen": spaces.Text(5)}, None),
    (r"has Sequence.* at 'obs\['a'\]\[1\]'", {"seen": spaces.Dict({"a": spaces.Tuple((CHOICE, MANY))})}, None),
    (r"has Box\(.*\(0,\), float32\) at 'obs', expected", {"seen": spaces.Box(-1, 1, (0,))}, None),
    (r"observation_space is Dict\(\), expected at least one leaf", {"seen": spaces.Dict({})}, None),
    ("got no observation_space, expected a gymnasium space", {"seen": None}, None),
    ("got no action_space, expected a gymnasium space", {"chosen": None}, None),
    (r"kernel of 4x4 where 3x3 are left of 'obs', Box.*expected no larger one", {"seen": IMAGE, **DEEP}, None),
    (
        "use_lstm=True and vf_share_layers=False, expected vf_share_layers=True",
        {**LSTM, "vf_share_layers": False},
        None,
    ),
    (r"free_log_std is True for actions in Discrete\(2\), expected a Box", {"free_log_std": True}, None),
    (r"'obs' has shape \[4, 2\], expected \[B, 3\]", {}, torch.zeros(4, 2)),
    (r"'obs' has shape \[4, 5, 3\], expected \[B, 3\]", {}, torch.zeros(4, 5, 3)),
    (r"'obs\['a'\]' has shape \[4\], expected \[B, T\]", {"seen": NAMED, **LSTM}, {"a": torch.zeros(4)}),
    (r"'obs' has nothing at \['a'\], expected it to be as the obs", {"seen": NAMED}, {"b": torch.zeros(4)}),
    (r"batch has columns \['obs'\], expected 'state_in' among them", LSTM, torch.zeros(4, 1, 3)),
    (r"'action_mask' in MultiBinary\(3\), expected shape \(4,\): a number for each", WRONG_MASK, None),
]


@pytest.mark.parametrize(("told", "made_of", "seen"), REFUSED)
def test_what_it_can_not_take_is_refused(told: str, made_of: dict[str, Any], seen: Any) -> None:
    with pytest.raises(ModuleError, match=told):
        made(**made_of)({"obs": seen})


# Action masks


MASKS = {
    "RLlib's": masked_space(spaces.Box(0, 1, (4,), np.float32)),
    "PettingZoo's": masked_space(spaces.Box(0, 1, (4,), np.int8), "observation"),
    "bits": masked_space(spaces.MultiBinary(4), "anything"),
}


@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("vf_share_layers", [False, True])
@pytest.mark.parametrize("seen", MASKS.values(), ids=MASKS)
def test_actions_that_are_masked_are_ruled_out_and_masks_are_not_seen(
    seen: gym.Space[Any], vf_share_layers: bool, lstm: bool
) -> None:
    module = made(seen, spaces.Discrete(4), use_lstm=lstm, vf_share_layers=vf_share_layers or lstm)
    lead = (5, 3) if lstm else (5,)
    batch = {"obs": observations(seen, *lead)} | ({"state_in": state(module, 5)} if lstm else {})
    batch["obs"]["action_mask"] = (torch.arange(20).reshape(5, 4) % 3).to(batch["obs"]["action_mask"].dtype)
    if lstm:
        batch["obs"]["action_mask"] = batch["obs"]["action_mask"][:, None].expand(5, 3, 4)
    free = {**batch, "obs": {**batch["obs"], "action_mask": torch.ones_like(batch["obs"]["action_mask"])}}
    masked, unmasked = module(batch), module(free)
    allowed = batch["obs"]["action_mask"] != 0
    logits = masked["action_dist_inputs"]
    assert torch.equal(logits[allowed], unmasked["action_dist_inputs"][allowed])
    assert (logits[~allowed] == torch.finfo(torch.float32).min).all()
    assert torch.equal(masked["vf_preds"], unmasked["vf_preds"])
    assert torch.equal(module.compute_values(batch), masked["vf_preds"])
    distribution = torch.distributions.Categorical(logits=logits)
    assert distribution.entropy().isfinite().all()
    assert allowed.gather(-1, distribution.sample().unsqueeze(-1)).all()
    logits.softmax(-1).square().sum().backward()
    assert all(each.grad.isfinite().all() for each in module.policy_head.parameters())


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        (masked_space(spaces.MultiBinary(4)), spaces.Box(-1, 1, (4,))),
        (spaces.Dict({"action_mask": spaces.MultiBinary(4)}), spaces.Discrete(4)),
    ],
)
def test_elsewhere_a_mask_is_an_observation(seen: gym.Space[Any], chosen: gym.Space[Any]) -> None:
    module, batch = made(seen, chosen), {"obs": observations(seen, 6)}
    before = module(batch)["action_dist_inputs"]
    batch["obs"]["action_mask"] = 1 - batch["obs"]["action_mask"]
    after = module(batch)["action_dist_inputs"]
    assert not torch.equal(before, after)
    assert after.abs().max() < 100


def test_a_mask_that_rules_nothing_out_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen = spaces.Dict({"seen": spaces.Box(0, 1, (1,)), "action_mask": spaces.MultiBinary(3)})
    DefaultModule(seen, spaces.Discrete(3))
    assert not caplog.records
    DefaultModule(seen, spaces.MultiDiscrete([2, 1]))
    assert not caplog.records
    DefaultModule(seen, spaces.MultiDiscrete([2, 2]))
    [record] = caplog.records
    assert "the default module heeds beside another observation, with one number for each of" in record.getMessage()
    assert "MultiDiscrete([2 2])" in record.getMessage()
