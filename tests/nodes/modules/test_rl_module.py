"""A module's three ways forward, its values, its states and the distributions it names."""

import copy
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rollflow import RLModule
from rollflow.stream import ModuleError

SEEN = spaces.Box(-1, 1, (3,))


class Policy(RLModule):
    """One layer for the actions and one for the values."""

    def setup(self) -> None:
        width = self.model_config.get("width", 3)
        self.action_layer = torch.nn.Linear(width, 2)
        self.value_layer = torch.nn.Linear(width, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {
            "action_dist_inputs": self.action_layer(batch["obs"]),
            "vf_preds": self.value_layer(batch["obs"]).squeeze(-1),
        }


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
    for get in (
        module.get_exploration_action_dist_cls,
        module.get_inference_action_dist_cls,
        module.get_train_action_dist_cls,
    ):
        assert get().required_input_dim == 2
        assert get() is get()
    module.action_space = spaces.MultiDiscrete([2, 3])
    assert module.get_train_action_dist_cls().required_input_dim == 5


def test_a_module_without_an_action_space_has_no_distribution() -> None:
    with pytest.raises(ModuleError, match="Policy has no action_space: give it to the constructor, or set it"):
        Policy(SEEN).get_exploration_action_dist_cls()


def test_a_copy_has_weights_of_its_own() -> None:
    module = Policy(SEEN, spaces.Discrete(2))
    module.get_train_action_dist_cls()
    other = copy.deepcopy(module)
    other.load_state_dict({name: weight + 1 for name, weight in module.state_dict().items()})
    assert not torch.equal(other.action_layer.weight, module.action_layer.weight)
    assert other.get_train_action_dist_cls().required_input_dim == 2


def test_losses_reach_the_weights_through_the_distribution() -> None:
    module = Policy(SEEN, spaces.Discrete(2))
    output = module.forward_train({"obs": torch.ones(4, 3)})
    distribution: Any = module.get_train_action_dist_cls().from_logits(output["action_dist_inputs"])
    distribution.logp(torch.tensor([0, 1, 0, 1])).sum().backward()
    # d logp / d bias is the action as one-hot less its probabilities; two of each action make 2 - 4 p.
    probabilities = torch.softmax(output["action_dist_inputs"][0], -1)
    torch.testing.assert_close(module.action_layer.bias.grad, 2 - 4 * probabilities)
