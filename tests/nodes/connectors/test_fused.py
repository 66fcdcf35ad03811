"""Default pieces called as one give what they give one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule, logits_of
from piece_forms import OneByOne, equal
from property_examples import examples
from small_env import SmallEnv

from rollflow import Columns, DefaultModelConfig, Forward, RLModule, Rollout
from rollflow.nodes import LambdaConnector, ModuleToEnvPipeline
from rollflow.nodes.modules.distribution import Categorical, DistributionType, distribution_for
from rollflow.stream import ConnectorError, ModuleError

KINDS = ["plain", "masked", "nested", "half", "brain float", "actions"]
JOINT = ["plain", "masked", "actions"]


class Odd(NumberedModule):
    """Gives outputs of a kind, of which the fused function leaves some to the pieces: nested, of half precision."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        at = obs["at"] if isinstance(obs, dict) else obs
        output = {"action_dist_inputs": logits_of(at.float()), "vf_preds": at[:, 2].float()}
        if self.kind == "nested":
            output["more"] = {"at": at, "twice": 2 * at}  # type: ignore[assignment]
        elif self.kind == "half":
            output["action_dist_inputs"] = output["action_dist_inputs"].half()
        elif self.kind == "brain float":
            output["more"] = at.to(torch.bfloat16)
        elif self.kind == "masked":
            is_odd = (at[:, 2:3] % 2 == 1).expand(-1, 3)
            output["action_dist_inputs"][:, :3].masked_fill_(is_odd, -torch.inf)
        elif self.kind == "actions":
            output = {"actions": at[:, 2] % 7}
        return output


class Annealed(Odd):
    """Its distribution is another one at each step."""

    passes = 0

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        return super()._forward(batch, **kwargs)

    def get_exploration_action_dist_cls(self) -> DistributionType:
        made, passes = super().get_exploration_action_dist_cls(), self.passes
        return replace(made, _make=lambda logits: Categorical(logits * (passes % 3)))


class Places(NumberedModule):
    """Records whether what it is given begins at a multiple of 16 bytes."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        is_aligned = batch["obs"].data_ptr() % 16 == 0
        return super()._forward(batch, **kwargs) | {"is_aligned": torch.full((len(batch["obs"]),), is_aligned)}


@pytest.mark.parametrize("custom", [False, True])
def test_each_observation_begins_where_products_of_matrices_round_in_the_same_way(custom: bool) -> None:
    options: Any = {"env_to_module_connector": lambda env: OneByOne()} if custom else {}
    makers = [partial(NumberedEnv, slot) for slot in range(3)]
    with Rollout(makers, module=Places(), fragment_length=8, num_fragments=1, **options) as rollout:
        [fragment] = rollout.fragments()
    assert any(row.ctypes.data % 16 for row in fragment.columns["obs"].tree)
    assert fragment.columns["is_aligned"].tree[fragment.first_row : fragment.last_row].all()


def fragments(
    fuses: bool, nested: bool, kind: str, custom: bool, explore: bool, seed: int, **more: Any
) -> list[dict[str, Any]]:
    makers = [partial(NumberedEnv, slot, nested=nested) for slot in range(3)]
    options: Any = {"fragment_length": 5, "num_fragments": 2, "explore": explore, "seed": seed, **more}
    if custom:
        options["env_to_module_connector"] = options["module_to_env_connector"] = lambda env: OneByOne()
    module = Annealed(kind) if kind == "annealed" else Odd(kind)
    with Rollout(makers, module=module, **options) as rollout:
        rollout.env_to_module.fuses = rollout.module_to_env.fuses = fuses
        made = [{name: fragment.column(name) for name in fragment.columns} for fragment in rollout.fragments()]
        for pipeline in (rollout.env_to_module, rollout.module_to_env):
            timers = pipeline.timers()
            as_one = sum(timers.pop(name).calls for name in list(timers) if "…" in name)
            first = pipeline._fused_from
            calls = {timer.calls + as_one * (place >= first) for place, timer in enumerate(timers.values())}
            assert len(calls) == 1
            assert calls.pop() >= 10
    return made


DRAWN: dict[str, Any] = {"nested": st.booleans(), "kind": st.sampled_from(KINDS), "custom": st.booleans()}
DRAWN |= {"explore": st.booleans(), "seed": st.integers(0, 100)}


def check_same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(some, others, strict=True):
        assert list(one) == list(other)
        equal(one, other)


@given(**DRAWN)
@settings(max_examples=examples(40))
def test_pieces_called_as_one_give_the_same(**drawn: Any) -> None:
    check_same(fragments(True, **drawn), fragments(False, **drawn))


def test_a_distribution_that_changes_from_step_to_step_is_that_of_the_step() -> None:
    one, other = (fragments(fuses, False, "annealed", False, True, 3) for fuses in (True, False))
    check_same(one, other)
    flat = np.log(1 / 7)  # by logits times 0, in one step of three
    assert [np.allclose(row, flat) for row in one[0]["action_logp"]] == [False, False, True, False, False]


class Steered(gym.Env[Any, Any]):
    """Its observations are the actions that it has got, behind a count of steps; a Box of these bounds."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, low: float, high: float) -> None:
        self.action_space = gym.spaces.Box(low, high, (2,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.array([self.count, *action], np.float32), float(action[0]), self.count == 4, False, {}


class Steers(RLModule):
    """Gives means and deviations, actions of its own, or means and what environments get, by the observation."""

    def __init__(self, gives: str = "means") -> None:
        super().__init__()
        self.gives = gives

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        wide = obs[:, :1] > 2
        inputs = torch.cat([obs[:, 1:].tanh(), torch.where(wide, 30.0, 0.0), torch.where(wide, -30.0, 0.0)], -1)
        output = {"actions": 3 * obs[:, 1:]} if self.gives == "actions" else {"action_dist_inputs": inputs}
        return output | ({"actions_for_env": obs[:, 1:] / 2} if self.gives == "both" else {})


@pytest.mark.parametrize("bounds", [(-1.0, 3.0), (-np.inf, np.inf), (-0.5, np.inf)], ids=["both", "none", "one"])
@pytest.mark.parametrize("gives", ["means", "actions", "both"])
@pytest.mark.parametrize("explore", [True, False], ids=["explore", "greedy"])
def test_actions_of_a_box_from_pieces_called_as_one_are_the_same(bounds: Any, gives: str, explore: bool) -> None:
    def made(fuses: bool) -> list[dict[str, Any]]:
        options: Any = {"fragment_length": 5, "num_fragments": 3, "explore": explore, "seed": 3}
        rollout = Rollout([lambda: Steered(*bounds)] * 3, module=Steers(gives), **options)
        rollout.module_to_env.fuses = fuses
        with rollout:
            each = [{name: fragment.column(name) for name in fragment.columns} for fragment in rollout.fragments()]
            assert any("…" in name for name in rollout.module_to_env.timers()) == fuses or gives == "both"
        return each

    check_same(made(True), made(False))


class Numbers(SmallEnv):
    """Gives how many observations it has made, in observations of a space."""

    count, length = 0, 7

    def __init__(self, space: gym.Space[Any]) -> None:
        self.observation_space = space

    def look(self) -> Any:
        self.count += 1
        one = partial(np.full, fill_value=self.count, dtype=np.float32)
        if isinstance(self.observation_space, gym.spaces.Dict):
            return {name: one(part.shape) for name, part in self.observation_space.items()}
        return one(self.observation_space.shape)


class Tells(RLModule):
    """Gives the first number of each observation, and the bytes that the observations' storage has."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs = batch["obs"]
        leaf = obs["b"] if isinstance(obs, dict) else obs
        size = leaf.untyped_storage().nbytes()
        first = leaf.flatten(1)[:, 0]
        return {"actions": first.long() % 2, "seen": first, "bytes": torch.full_like(first, size)}


BOX = partial(gym.spaces.Box, -np.inf, np.inf)
PARTS = gym.spaces.Dict({"b": BOX((4,)), "a": BOX((8,))})


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize(
    "space", [BOX((4,)), BOX((3,)), BOX((64, 64)), PARTS], ids=["aligned", "between", "large", "dict"]
)
def test_a_module_sees_the_newest_row_and_no_large_storage_around_it(space: gym.Space[Any], length: int) -> None:
    options: Any = {"fragment_length": length, "lookback": 2, "num_fragments": 3, "module": Tells, "seed": 0}
    with Rollout([partial(Numbers, space)] * 2, **options) as rollout:
        for fragment in rollout.fragments():
            obs = fragment.column("obs")
            leaf = obs["b"] if isinstance(obs, dict) else obs
            np.testing.assert_array_equal(fragment.column("seen"), leaf.reshape(*leaf.shape[:2], -1)[..., 0])
            assert fragment.column("bytes").max() <= 1 << 20


class Spread(RLModule):
    """Has a deviation whose logarithm is of this size from the third step on."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        late = (batch["obs"][:, :1] > 1).float()
        return {"action_dist_inputs": torch.cat([torch.zeros(len(late), 3), late * self.size], -1)}


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("size", [100.0, -100.0])
def test_deviations_that_are_0_or_infinite_are_refused(size: float, fuses: bool) -> None:
    rollout = Rollout([lambda: Steered(-1.0, 1.0)] * 2, module=Spread(size), fragment_length=5, seed=3)
    rollout.module_to_env.fuses = fuses
    told = "'action_logp' is not finite, .* in lane 0, vector step 2, slot 0, 1"
    with rollout, pytest.raises(ModuleError, match=told) as caught:
        next(iter(rollout.fragments()))
    assert any("connector piece 'GetActions' (1 of" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_a_default_dtype_of_torch_changes_no_actions(kind: torch.dtype) -> None:
    inputs, distribution = torch.zeros(4, 6), distribution_for(gym.spaces.Box(-1, 1, (3,), np.float32))
    torch.set_default_dtype(kind)
    try:
        actions, logp = distribution.from_logits(inputs).sample_with_logp(torch.Generator().manual_seed(1))
        drawn = distribution.from_logits(inputs).sample(torch.Generator().manual_seed(1))
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(actions, drawn.numpy())
    assert (actions.dtype, logp.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("column", ["actions", "actions_for_env"])
def test_a_piece_that_makes_nan_of_actions_is_named(column: str) -> None:
    def broken(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {column: np.full((2, 2), np.nan, np.float32)}

    piece = LambdaConnector(broken)
    options: Any = {"fragment_length": 5, "seed": 3, "module_to_env_connector": lambda env: piece}
    told = f"'{column}' is NaN in row 0, 1 of a lane's batch, behind the connector pieces GetActions, .*broken, "
    made = Rollout([lambda: Steered(-1.0, 1.0)] * 2, module=Steers(), **options)
    with pytest.raises(ConnectorError, match=told), made as rollout:
        next(iter(rollout.fragments()))


@given(fuses=st.booleans(), lanes=st.integers(2, 3), **DRAWN)
@settings(max_examples=examples(40))
def test_passes_over_several_lanes_give_what_each_lane_gets_by_itself(lanes: int, **drawn: Any) -> None:
    with noting_joint_runs() as joint:
        together = fragments(**drawn, lanes=lanes, forward=Forward(max_batch=3))
    is_joint = drawn["fuses"] and not drawn["custom"]
    assert joint
    assert set(joint) == {is_joint and drawn["kind"] in JOINT}
    check_same(together, fragments(**drawn, lanes=lanes))


@contextmanager
def noting_joint_runs() -> Iterator[list[bool]]:
    """Note for each pass over several lanes if its actions were made for all of them together."""
    joint: list[bool] = []
    run_jointly = ModuleToEnvPipeline.run_jointly

    def noting(self: Any, *given: Any) -> Any:
        made = run_jointly(self, *given)
        joint.append(made is not None)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleToEnvPipeline, "run_jointly", noting)
        yield joint


def test_lanes_of_a_stateful_module_in_one_pass_give_what_each_lane_gets_by_itself() -> None:
    def made(**options: Any) -> list[Any]:
        config = DefaultModelConfig(use_lstm=True, lstm_cell_size=8, fcnet_hiddens=(8,))
        settings: Any = {"num_envs": 3, "lanes": 3, "fragment_length": 8, "num_fragments": 3, "seed": 3}
        with Rollout(lambda: gym.make("CartPole-v1"), model_config=config, **settings, **options) as rollout:
            return list(rollout.fragments())

    for one, other in zip(made(forward=Forward(max_batch=3)), made(), strict=True):
        np.testing.assert_array_equal(one.column(Columns.ACTIONS), other.column(Columns.ACTIONS))
        np.testing.assert_allclose(one.column(Columns.ACTION_LOGP), other.column(Columns.ACTION_LOGP), rtol=1e-5)


def test_lanes_with_other_columns_are_not_put_into_one_pass() -> None:
    makers = [partial(NumberedEnv, slot) for slot in range(2)]
    rollout = Rollout(makers, module=NumberedModule(), lanes=2, forward=Forward(max_batch=2), seed=0)
    masks = lambda batch, shared_data: batch | ({"mask": torch.ones(1)} if shared_data["lane"] else {})  # noqa: E731
    rollout.env_to_module.append(LambdaConnector(masks))
    told = r"batches of \['mask', 'obs'\]; \['obs'\], expected the same columns"
    with pytest.raises(ModuleError, match=told) as caught, rollout:
        next(iter(rollout.fragments()))
    assert any(note.startswith("lanes 0, 1") for note in caught.value.__notes__)


class Wrong(NumberedModule):
    """Has no sound logits from a certain row of the batch on, once the first steps are done."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        logits = torch.zeros(len(batch["obs"]), 7)
        if self.passes > 2:
            logits[-1] = torch.nan
        return {"action_dist_inputs": logits}


@pytest.mark.parametrize("explore", [True, False])
def test_of_a_pass_over_several_lanes_the_lane_is_named_that_is_wrong(explore: bool) -> None:
    makers = [partial(NumberedEnv, slot) for slot in range(3)]
    with Rollout(makers, module=Wrong(), lanes=3, forward=Forward(max_batch=3), seed=0, explore=explore) as rollout:
        with pytest.raises(ModuleError, match=r"'action_dist_inputs' is NaN in lane 2, vector step 2, slot 0"):
            next(iter(rollout.fragments()))


def test_debugging_calls_every_piece() -> None:
    with Rollout("CartPole-v1", debug=True, num_fragments=1, fragment_length=2, seed=0) as rollout:
        list(rollout.fragments())
    for pipeline in (rollout.env_to_module, rollout.module_to_env):
        timers = pipeline.timers()
        assert list(timers) == pipeline.names
        assert all(timer.calls for timer in timers.values())
