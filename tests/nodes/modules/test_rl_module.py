"""A module's three ways forward, its values, its states and the distributions it names."""

from typing import Any

import pytest
import torch
from gymnasium import spaces

from rollflow import RLModule
from rollflow.nodes import MultiRLModule
from rollflow.stream import ModuleError

SEEN = spaces.Box(-1, 1, (3,))


class Policy(RLModule):
    """One layer for the actions and one for the values."""

    def setup(self) -> None:
        width = self.model_config.get("width", 3)
        self.action_layer = torch.nn.Linear(width, 2)
        self.value_layer = torch.nn.Linear(width, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        return {"action_dist_inputs": self.action_layer(obs), "vf_preds": self.value_layer(obs).squeeze(-1)}


class Echo(RLModule):
    """Says which way it went."""

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"way": "exploration", **kwargs}

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"way": "inference", **kwargs}

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"way": "train", **kwargs}


def test_one_way_forward_serves_all_three() -> None:
    module = Policy(SEEN, spaces.Discrete(2))
    batch = {"obs": torch.ones(4, 3)}
    expected = module.action_layer(batch["obs"])
    for forward in (module.forward_exploration, module.forward_inference, module.forward_train, module):
        assert torch.equal(forward(batch)["action_dist_inputs"], expected)


def test_each_way_forward_may_be_its_own_and_gets_the_keywords() -> None:
    module = Echo()
    assert module.forward_exploration({}, t=1) == {"way": "exploration", "t": 1}
    assert module.forward_inference({}, t=2) == {"way": "inference", "t": 2}
    assert module.forward_train({}, t=3) == {"way": "train", "t": 3}
    assert module({}, t=4) == {"way": "train", "t": 4}


@pytest.mark.parametrize("name", ["forward_exploration", "forward_inference", "forward_train", "forward"])
def test_a_module_without_a_way_forward_says_what_to_override(name: str) -> None:
    told = "RLModule does not say how it goes forward: override _forward, or _forward_exploration"
    with pytest.raises(ModuleError, match=told):
        getattr(RLModule(), name)({})


def test_setup_sees_what_the_constructor_was_given() -> None:
    module = Policy(SEEN, spaces.Discrete(2), inference_only=True, model_config={"width": 7})
    assert module.action_layer.in_features == 7
    assert (module.observation_space, module.inference_only) == (SEEN, True)
    assert len(list(module.parameters())) == 4
    assert RLModule().model_config == {}
    assert RLModule.framework == "torch"


def test_values_are_those_of_the_training_pass() -> None:
    module = Policy()
    batch = {"obs": torch.ones(4, 3)}
    values = module.compute_values(batch)
    assert values.shape == (4,)
    assert torch.equal(values, module.forward_train(batch)["vf_preds"])


def test_a_module_without_values_says_what_it_gave() -> None:
    with pytest.raises(ModuleError, match=r"Echo.forward_train gave \['way'\], expected 'vf_preds' among them"):
        Echo().compute_values({})


def test_a_module_names_the_distribution_of_its_action_space() -> None:
    module = Policy(SEEN, spaces.Discrete(2))
    for name in ("exploration", "inference", "train"):
        get = getattr(module, f"get_{name}_action_dist_cls")
        assert get().required_input_dim == 2
        assert get() is get()
    module.action_space = spaces.MultiDiscrete([2, 3])
    assert module.get_train_action_dist_cls().required_input_dim == 5


def test_a_module_without_an_action_space_has_no_distribution() -> None:
    with pytest.raises(ModuleError, match="Policy has no action_space: give it to the constructor, or set it"):
        Policy(SEEN).get_exploration_action_dist_cls()


# `MultiRLModule` by itself


class Scales(RLModule):
    """Multiplies observations by its weight, and says which way it went."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))
        self.dropout = torch.nn.Dropout(0.5)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"scaled": batch["obs"] * self.weight}

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"explored": batch["obs"] + self.weight}


class NoNetwork:
    """Has no weights."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        assert not state


def both(**others: Any) -> MultiRLModule:
    return MultiRLModule({"a": Scales(2.0), "b": Scales(3.0), **others})


def test_it_is_a_mapping() -> None:
    modules = both()
    assert (list(modules), list(modules.keys()), len(modules)) == (["a", "b"], ["a", "b"], 2)
    assert [module.weight.item() for module in modules.values()] == [2.0, 3.0]
    assert dict(modules.items())["b"] is modules["b"] is modules.get("b")
    assert "a" in modules
    assert "c" not in modules
    assert modules.get("c") is None
    assert modules.get("c", 4) == 4
    assert repr(modules) == "<MultiRLModule 'a': Scales, 'b': Scales>"
    with pytest.raises(ModuleError, match=r"there is no module 'c', expected one of \['a', 'b'\]"):
        modules["c"]


def test_modules_come_and_go() -> None:
    modules = both()
    modules.add_module("c", Scales(4.0))
    with pytest.raises(ModuleError, match="there is a module 'c' already"):
        modules.add_module("c", Scales(5.0))
    modules.add_module("c", Scales(5.0), override=True)
    assert modules["c"].weight.item() == 5.0
    assert modules.remove_module("c").weight.item() == 5.0
    with pytest.raises(ModuleError, match="there is no module 'c'"):
        modules.remove_module("c")
    assert modules.remove_module("c", raise_err_if_not_found=False) is None
    assert list(modules) == ["a", "b"]


@pytest.mark.parametrize("way", ["forward_train", "forward_inference", "__call__"])
def test_batches_go_forward_each_by_its_own_module(way: str) -> None:
    out = getattr(both(), way)({"b": {"obs": torch.ones(2)}})
    assert {module_id: own["scaled"].tolist() for module_id, own in out.items()} == {"b": [3.0, 3.0]}


def test_exploring_goes_its_own_way() -> None:
    out = both().forward_exploration({"a": {"obs": torch.ones(1)}, "b": {"obs": torch.ones(1)}})
    assert {module_id: own["explored"].tolist() for module_id, own in out.items()} == {"a": [3.0], "b": [4.0]}


def test_a_batch_for_nobody_is_refused() -> None:
    with pytest.raises(ModuleError, match="there is no module 'c'"):
        both().forward_train({"c": {}})


def test_networks_are_handled_together() -> None:
    modules = both(none=NoNetwork())
    assert [name for name, _ in modules.named_parameters()] == ["a.weight", "b.weight"]
    assert [parameter.item() for parameter in modules.parameters()] == [2.0, 3.0]
    assert modules.eval() is modules
    assert not modules["a"].dropout.training
    assert modules.train()["b"].dropout.training
    assert modules.to("meta")["a"].weight.is_meta


def test_weights_are_taken_over_for_the_modules_that_are_named() -> None:
    modules, others = both(none=NoNetwork()), MultiRLModule({"a": Scales(7.0)})
    modules.load_state_dict(others.state_dict())
    assert [parameter.item() for parameter in modules.parameters()] == [7.0, 3.0]
    others.set_state({"a": modules.get_state()["b"]})
    assert others["a"].weight.item() == 3.0
