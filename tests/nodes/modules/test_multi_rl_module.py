"""`MultiRLModule` by itself."""

from typing import Any

import pytest
import torch

from rollflow import RLModule
from rollflow.nodes import MultiRLModule
from rollflow.stream import ModuleError


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


def test_a_function_is_called_for_each_and_may_change_them() -> None:
    modules = both()
    assert modules.foreach_module(lambda module_id, module: (module_id, module.weight.item())) == [
        ("a", 2.0),
        ("b", 3.0),
    ]
    assert modules.foreach_module(lambda module_id, module: module_id * 2, return_dict=True) == {"a": "aa", "b": "bb"}
    modules.foreach_module(lambda module_id, module: modules.add_module(module_id * 2, module))
    assert list(modules) == ["a", "b", "aa", "bb"]


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
