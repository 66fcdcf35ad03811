"""Forward passes as flat lists of operations: the same numbers up to rounding, or none of it."""

import re
from collections import OrderedDict
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from drawn_agents import Drawn as DrawnAgents, fragments_of as agent_fragments
from fragment_equality import assert_alike
from gymnasium import spaces
from hypothesis import given, strategies as st
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule, numbered_envs

from rollflow import Forward, MultiAgentRollout, RLModule, Rollout
from rollflow.nodes import DefaultModule, RandomModule
from rollflow.nodes.connectors.common.batches import NumpyToTensor
from rollflow.nodes.modules.flat_forward import FlatForward
from rollflow.stream.data.tree import leaves_of, map_tree, stack_trees

BOX, TWO = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)
KINDS: dict[str, tuple[gym.Space[Any], gym.Space[Any], dict[str, Any]]] = {
    "box": (BOX, TWO, {}),
    "apart": (BOX, spaces.Box(-1, 1, (3,)), {"vf_share_layers": False, "free_log_std": True}),
    "numbers": (spaces.MultiDiscrete([2, 3]), TWO, {}),
    "nested": (spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(3), BOX])}), TWO, {}),
    "image": (spaces.Box(0, 255, (42, 42, 3), np.uint8), TWO, {}),
    "LSTM": (BOX, TWO, {"use_lstm": True, "lstm_cell_size": 8}),
}


def batch_for(module: DefaultModule, space: gym.Space[Any], count: int) -> dict[str, Any]:
    lead = (count, 1) if module.is_stateful() else (count,)
    rows = stack_trees([space.sample() for _ in range(count)])
    batch = {"obs": map_tree(lambda leaf: torch.from_numpy(leaf.reshape(*lead, *leaf.shape[1:])), rows)}
    if module.is_stateful():
        batch["state_in"] = map_tree(lambda leaf: torch.randn(count, *leaf.shape), module.get_initial_state())
    return batch


def check_same(flat: FlatForward, module: RLModule, batch: dict[str, Any]) -> None:
    torch.testing.assert_close(flat(batch), module.forward_exploration(batch))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_default_modules_give_the_same_numbers(kind: str) -> None:
    observation_space, action_space, config = KINDS[kind]
    observation_space.seed(7)
    module = DefaultModule(observation_space, action_space, model_config=config).eval()
    flat = FlatForward(module.forward_exploration)
    for count in (3, 3, 5, 1, 3):
        check_same(flat, module, batch_for(module, observation_space, count))
    weights = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(weights)
    check_same(flat, module, batch_for(module, observation_space, 3))
    assert flat.reason is None


class Drawn(RLModule):
    """Goes a way that was drawn: each operation takes one of the results before it, and any of them may be given."""

    def __init__(self, operations: list[tuple[str, int]], given: list[int]) -> None:
        super().__init__(BOX, TWO)
        self.operations, self.given = operations, given
        self.linear, self.bare = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias=False)
        self.conv = torch.nn.Conv2d(6, 6, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        ways: dict[str, Any] = {
            "linear": self.linear,
            "bare": self.bare,
            "conv": lambda x: self.conv(x.reshape(-1, 1, 1, 6).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).reshape(-1, 6),
            "tanh": torch.tanh,
            "relu": torch.nn.functional.relu,
            "sigmoid": torch.sigmoid,
            "half": lambda x: x / 2,
            "float": lambda x: x.float(),
            "same": lambda x: x.view(-1, 6),
            "twice": lambda x: x + x.tanh(),
            "sorted": lambda x: x.sort(-1)[0],
            "long": lambda x: x.to(torch.int64).float() / 3,
        }
        found = [batch["obs"]]
        for name, index in self.operations:
            found.append(ways[name](found[-1 - index % len(found)]))
        return {f"column {i}": found[i % len(found)] for i in self.given}


NAMES = ("linear", "bare", "conv", "tanh", "relu", "sigmoid", "half", "float", "same", "twice", "sorted", "long")


@given(
    operations=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), min_size=1, max_size=9),
    given_out=st.lists(st.integers(-2, 9), min_size=1, max_size=3),
    rows=st.integers(1, 5),
)
@torch.inference_mode()
def test_whatever_is_done_faster_gives_the_same_and_leaves_what_others_see(
    operations: list[tuple[str, int]], given_out: list[int], rows: int
) -> None:
    with torch.inference_mode(False):
        module = Drawn(operations, given_out)
    flat = FlatForward(module.forward_exploration)
    for _ in range(3):
        obs = torch.randn(rows, 6)
        before = obs.clone()
        check_same(flat, module, {"obs": obs})
        assert torch.equal(obs, before)


def test_weights_that_change_in_place_are_those_of_the_next_pass() -> None:
    module = Drawn([("linear", 0), ("conv", 0), ("bare", 0)], [-1])
    flat = FlatForward(module.forward_exploration)
    obs = torch.randn(3, 6)
    for layer in (module.linear, module.conv, module.bare, module.linear):
        with torch.inference_mode():
            check_same(flat, module, {"obs": obs})
            check_same(flat, module, {"obs": obs[:2]})
        with torch.no_grad():
            layer.weight.add_(1)
    with torch.inference_mode():
        check_same(flat, module, {"obs": obs[:2]})
        check_same(flat, module, {"obs": obs})


@torch.inference_mode()
def test_the_first_pass_is_rounded_as_all_others() -> None:
    with torch.inference_mode(False):
        module = DefaultModule(spaces.Box(-1.0, 1.0, (300,)), TWO)
    flat = FlatForward(module.forward_exploration)
    batch = {"obs": torch.randn(2, 300)}
    first, second = flat(batch), flat(batch)
    assert all(torch.equal(first[name], second[name]) for name in first)


class Counts(RLModule):
    """Does `way` and counts its passes."""

    def __init__(self, way: Any) -> None:
        super().__init__(BOX, TWO)
        self.way, self.passes = way, 0

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        return {"action_dist_inputs": self.way(batch["obs"])}


def test_a_pass_is_gone_through_once_for_each_kind_of_batch() -> None:
    module = Counts(lambda obs: torch.cat([obs.sum(-1, keepdim=True), obs[:, :1].expand(len(obs), 1)], -1))
    flat = FlatForward(module.forward_exploration)
    for count in (2, 2, 4, 2, 4):
        flat({"obs": torch.ones(count, 4)})
    assert (module.passes, flat.reason) == (2, None)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (lambda obs: torch.from_numpy(obs.numpy()[:, :2]), "it calls numpy"),
        (lambda obs: obs[:, : int(obs[0, 0].abs() < 9) + 1], "it calls __int__"),
        (lambda obs: 3.0, "its output is not made of tensors"),
    ],
)
def test_a_pass_that_depends_on_numbers_is_done_as_it_is(way: Any, told: str) -> None:
    module = Counts(way)
    flat = FlatForward(module.forward_exploration)
    for number in (1.0, -2.0):
        obs = torch.full((2, 4), number)
        ours, theirs = flat({"obs": obs})["action_dist_inputs"], way(obs)
        assert ours == theirs if isinstance(theirs, float) else torch.equal(ours, theirs)
    assert flat.reason is not None
    assert flat.reason.startswith(told)


@pytest.mark.parametrize("way", [OrderedDict, lambda outputs: {"nested": torch.max(outputs["column"], 0)}])
def test_outputs_of_other_classes_are_those_of_their_own_batch(way: Any) -> None:
    flat = FlatForward(lambda batch: way({"column": batch["obs"] + 1}))
    for number in (0.0, 1.0):
        assert torch.equal(leaves_of(flat({"obs": torch.full((2, 4), number)}))[0].max(), torch.tensor(number + 1))
    assert flat.reason is not None


# Forward passes by torch.compile, and on another device


def fragments(**options: Any) -> list[Any]:
    made: Any = {"module": NumberedModule(), "fragment_length": 6, "num_fragments": 3, "seed": 0, **options}
    with Rollout(numbered_envs(3)[1], **made) as rollout:
        return list(rollout.fragments())


# torch's eager backend goes through all of torch.compile but the making of machine code.
EAGER = Forward(compile={"backend": "eager"})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"forward": Forward(flat=True)}, "forward pass flat"),
        ({"forward": Forward(flat=False)}, ""),
        ({"forward": EAGER}, "forward pass compiled"),
    ],
)
def test_a_rollout_gives_the_same_in_any_way_and_tells_which(options: Any, told: str) -> None:
    assert_alike(fragments(**options), fragments())
    explained = str(Rollout(numbered_envs(3)[1], module=NumberedModule(), **options).explain())
    assert re.findall("forward pass (?:flat|compiled)", explained) == [told] * bool(told)


@pytest.mark.slow
def test_compiled_passes_of_several_modules_give_the_same() -> None:
    drawn = DrawnAgents(2, 2, 4, 1, 9, False, 6, 1, False, 3)
    # The shapes of batches differ from pass to pass where agents come and go.
    for forward in (EAGER, Forward(compile={"backend": "eager"}, max_batch=8)):
        assert_alike(agent_fragments(drawn, forward=forward), agent_fragments(drawn))


@pytest.mark.parametrize("several", [False, True])
def test_it_is_shown_and_refused_beside_a_flat_one(several: bool) -> None:
    def make(**options: Any) -> Any:
        return MultiAgentRollout(maker, **options) if several else Rollout("CartPole-v1", **options)

    def explained(**options: Any) -> str:
        with make(**options) as rollout:
            return str(rollout.explain())

    maker = partial(NumberedAgents, 0, nested=0)
    assert "forward pass compiled" in explained(forward=EAGER)
    assert "forward pass flat" in explained()
    assert "forward pass" not in explained(forward=Forward(flat=False))
    assert "forward pass flat" not in explained(debug=True)
    if several:
        shown = explained(module={"default_policy": None, "agent 0": RandomModule})
        assert "'default_policy' forward pass flat" in shown


def test_main_memory_as_a_device_is_no_other_device() -> None:
    assert_alike(fragments(device="cpu"), fragments())
    with Rollout("CartPole-v1", device="cpu") as rollout:
        [piece] = rollout.env_to_module[NumpyToTensor]
        assert not piece.is_elsewhere
