"""Masks of actions: what one rules out is chosen by nobody, in whatever way and place actions are chosen."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extras import needs
from gymnasium import spaces
from small_env import SmallEnv
from together import Together

from rollflow import ConnectorV2, EpsilonGreedy, MultiAgentRollout, Policy, RLModule, Rollout
from rollflow.nodes import LambdaConnector, Linear, RandomModule, Temperature, mask_logits
from rollflow.nodes.connectors.module_to_env.action_pieces import GetActions
from rollflow.nodes.modules.distribution import distribution_for
from rollflow.policy import OnnxPolicy
from rollflow.stream import ConnectorError, ModuleError, PolicyError

LEAST = torch.finfo(torch.float32).min
SMALL = {"fcnet_hiddens": (8,)}


class Masked(SmallEnv):
    """Allows one action of three in each step, none in step `idle`; pays 1 for one that is not allowed."""

    observation_space = spaces.Dict({"seen": spaces.Box(0, 1, (2,)), "action_mask": spaces.MultiBinary(3)})
    action_space: Any = spaces.Discrete(3, start=2)
    length, truncates = 10, True

    def __init__(self, idle: int = -1) -> None:
        self.idle, self.steps = idle, 0

    def look(self) -> Any:
        self.mask = np.eye(3, dtype=np.int8)[self.np_random.integers(3)] * (self.steps != self.idle)
        return {"seen": np.ones(2, np.float32), "action_mask": self.mask.copy()}

    def pay(self, action: Any) -> float:
        assert self.action_space.contains(action)
        self.steps += 1
        return float(self.mask[action - 2] == 0)


class Own(RLModule):
    """Masks with a number of one's own; prefers the last action."""

    ruled_out = -1e9

    def setup(self) -> None:
        self.scale = torch.nn.Parameter(torch.ones(1))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        mask = batch["obs"]["action_mask"]
        values = torch.arange(3.0).expand(len(mask), 3) * self.scale
        return {"action_dist_inputs": values.masked_fill(mask == 0, self.ruled_out)}


MODULES: dict[str, Any] = {"default": None, "random": RandomModule, "1e9": Own} | {
    name: type(name, (Own,), {"ruled_out": ruled_out}) for name, ruled_out in (("least", LEAST), ("inf", -torch.inf))
}
PIECES: dict[str, Callable[[], list[ConnectorV2]]] = {
    "none": list,
    "greedy": lambda: [EpsilonGreedy(schedule=0.0)],
    "random": lambda: [EpsilonGreedy(schedule=1.0)],
    "line": lambda: [EpsilonGreedy(schedule=Linear(1.0, 0.0, 50))],
    "cold": lambda: [Temperature(schedule=1e-3)],
    "hot": lambda: [Temperature(schedule=1e12)],
}


def rollout_of(*pieces: ConnectorV2, env: Any = Masked, module: Any = None, **options: Any) -> Rollout:
    """A rollout with a small default network, or with a module, and pieces behind the choice of an action."""
    config = {} if module else {"model_config": SMALL}
    connector = lambda envs: list(pieces)  # noqa: E731
    return Rollout(env, module=module, seed=0, module_to_env_connector=connector, **config, **options)


def assert_nothing_was_chosen(batch: dict[str, Any]) -> None:
    """Each action was the one that its mask allows."""
    assert batch["rewards"].sum() == 0
    assert batch["action_logp"].unique().tolist() == [0.0]


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("module", MODULES)
def test_nobody_chooses_what_is_ruled_out(module: str, pieces: str, explore: bool) -> None:
    options: Any = {"num_envs": 4, "fragment_length": 25, "num_fragments": 1, "explore": explore}
    with rollout_of(*PIECES[pieces](), module=MODULES[module], **options) as rollout:
        [batch] = rollout.batches()
    assert_nothing_was_chosen(batch)
    assert not torch.isnan(batch["action_dist_inputs"]).any()


@pytest.mark.parametrize("pieces", ["none", "random", "hot"])
@pytest.mark.parametrize("place", ["rollouts", "agents", "evaluate", "saved"])
def test_nor_in_any_other_place(place: str, pieces: str, tmp_path: Path) -> None:
    make = PIECES[pieces]
    options: Any = {"num_envs": 2, "fragment_length": 20, "num_fragments": 1, "seed": 0, "model_config": SMALL}
    options["module_to_env_connector"] = lambda env: make()
    if place == "agents":
        with MultiAgentRollout(lambda: Together({"a": Masked(), "b": Masked()}), **options) as agents:
            [batches] = agents.batches()
        [batch] = batches.values()
        assert_nothing_was_chosen(batch)
        return
    with Rollout(Masked, where="rollouts" if place == "rollouts" else "inline", **options) as rollout:
        [batch] = rollout.batches()
        if place == "evaluate":
            assert rollout.evaluate(episodes=10, explore=True).mean == 0
        if place == "saved":
            rollout.save_policy(tmp_path / "policy", explore=True)
            assert Policy.load(tmp_path / "policy").evaluate(Masked, 10).mean == 0
    assert batch["rewards"].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_mask_leaves_the_other_logits_and_is_known_in_each_type(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=dtype)
    masked = mask_logits(logits, torch.tensor([[1, 0, 1], [0, 0, 2]]))
    assert masked.dtype == dtype
    assert masked[0, [0, 2]].tolist() + masked[1, [2]].tolist() == [1.0, 3.0, 6.0]
    assert (masked.float() <= -1e9).tolist() == [[False, True, False], [True, True, False]]
    distribution: Any = distribution_for(spaces.Discrete(3)).from_logits(masked)
    assert distribution.logp(torch.tensor([2, 2]))[1] == 0.0
    # softmax(1, 3): 0.1192 and 0.8808, whose entropy is 0.3653; that of a single choice is 0.
    entropy, expected = distribution.entropy().double(), torch.tensor([0.36533, 0.0]).double()
    torch.testing.assert_close(entropy, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(distribution.kl(distribution), torch.zeros(2, dtype=distribution.kl(distribution).dtype))


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("module_class", [None, RandomModule])
def test_masks_of_several_numbers_have_the_parts_end_to_end(module_class: Any, as_tuple: bool) -> None:
    parts = [spaces.MultiBinary(2), spaces.MultiBinary(3)]
    mask: Any = spaces.Tuple(parts) if as_tuple else spaces.MultiBinary(5)

    class Several(SmallEnv):
        observation_space = spaces.Dict({"seen": spaces.Box(0, 1, (1,)), "action_mask": mask})
        action_space = spaces.MultiDiscrete([2, 3])

        def look(self) -> Any:
            self.place = int(self.np_random.integers(3))
            masks = np.array([0, 1], np.int8), np.eye(3, dtype=np.int8)[self.place]
            return {"seen": np.zeros(1, np.float32), "action_mask": masks if as_tuple else np.concatenate(masks)}

        def pay(self, action: Any) -> float:
            return float(action.tolist() != [1, self.place])

    options: Any = {"num_envs": 2, "fragment_length": 30, "num_fragments": 1}
    with rollout_of(Temperature(schedule=5.0), env=Several, module=module_class, **options) as rollout:
        [batch] = rollout.batches()
    assert_nothing_was_chosen(batch)


@pytest.mark.parametrize("pieces", ["none", "random", "hot"])
@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("module", MODULES)
def test_a_mask_that_allows_nothing_is_refused(module: str, explore: bool, pieces: str) -> None:
    options: Any = {"lanes": 1, "fragment_length": 25, "explore": explore}
    envs: Any = [Masked, partial(Masked, idle=3)]
    wanted = "'action_dist_inputs' rules out every action in lane 0, vector step 3, slot 1"
    rollout = rollout_of(*PIECES[pieces](), env=envs, module=MODULES[module], **options)
    with pytest.raises(ModuleError, match=wanted), rollout:
        next(rollout.fragments())


@pytest.mark.parametrize(
    ("space", "inputs"),
    [
        (spaces.MultiDiscrete([2, 2]), [0.0, 1.0, -1e9, LEAST]),
        (spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.Discrete(2)]), [0.0, 0.0, -torch.inf, -1e9]),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,))}), [-1e9, -1e9, 0.0, 0.0]),
    ],
)
def test_so_is_one_that_allows_nothing_in_a_part(space: Any, inputs: list[float]) -> None:
    piece = GetActions(None, space)
    logits = torch.tensor([[0.0] * 4, inputs])
    for explore in (True, False):
        with pytest.raises(ModuleError, match="rules out every action in lane 0, vector step unknown, slot 1"):
            piece(rl_module=None, batch={"action_dist_inputs": logits}, episodes=[], explore=explore)


def test_means_of_a_box_are_no_mask() -> None:
    batch: Any = {"action_dist_inputs": torch.tensor([[-2e9, -30.0]])}
    GetActions(None, spaces.Box(-np.inf, np.inf, (1,)))(rl_module=None, batch=batch, episodes=[], explore=True)
    assert batch["actions"].tolist() == [[-2e9]]


def test_padded_rows_may_be_learnt_from() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    masked = mask_logits(logits, torch.tensor([[0, 0, 0], [1, 0, 1]]))
    distribution: Any = distribution_for(spaces.Discrete(3)).from_logits(masked)
    (distribution.logp(torch.tensor([0, 2])) + distribution.entropy()).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.slow
def test_an_onnx_program_refuses_what_the_policy_does(tmp_path: Path) -> None:
    needs("onnx", "onnxruntime", "onnxscript")
    with rollout_of(num_envs=1) as rollout:
        policy = rollout.policy()
    policy.export_onnx(tmp_path / "policy.onnx")
    program = OnnxPolicy.load(tmp_path / "policy.onnx")
    seen = np.zeros(2, np.float32)
    for allowed in range(3):
        observation = {"seen": seen, "action_mask": np.eye(3, dtype=np.int8)[allowed]}
        assert program.act(observation) == policy.act(observation) == 2 + allowed
    nothing = {"seen": seen, "action_mask": np.zeros(3, np.int8)}
    with pytest.raises(ModuleError, match="rules out every action"):
        policy.act(nothing)
    with pytest.raises(PolicyError, match="'action_dist_inputs' rules out every action of session 'default'"):
        program.act(nothing)


def allow_nothing(batch: Any) -> None:
    """Rule out all, behind the choice of an action."""
    batch["action_dist_inputs"] = np.full_like(batch["action_dist_inputs"], -1e9)


@pytest.mark.parametrize("explores", [EpsilonGreedy, Temperature])
def test_what_a_piece_before_rules_out_counts(explores: Any) -> None:
    rollout = rollout_of(LambdaConnector(allow_nothing, columnar=True), explores(schedule=1.0), num_envs=1)
    with pytest.raises(ModuleError, match="rules out every action in lane 0, vector step 0, slot 0"), rollout:
        next(rollout.fragments())


def test_exploration_behind_what_the_environments_get_is_refused() -> None:
    for_env = LambdaConnector(lambda batch: batch | {"actions_for_env": batch["actions"]})
    rollout = rollout_of(for_env, EpsilonGreedy(schedule=1.0), num_envs=1)
    with pytest.raises(ConnectorError, match="EpsilonGreedy stands behind a piece that made 'actions_f"), rollout:
        next(rollout.fragments())
