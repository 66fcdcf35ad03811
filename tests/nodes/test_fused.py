"""Default pieces called as one give what they give one after the other."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import NumberedEnv, NumberedModule, logits_of

from rollflow.nodes import ConnectorV2, Rollout
from rollflow.stream import ModuleError
from rollflow.stream.tree import map_tree


class Odd(NumberedModule):
    """Gives outputs that the fused function leaves to the pieces: nested, of half precision, or its own actions."""

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
        elif self.kind == "actions":
            output = {"actions": at[:, 2] % 7}
        return output


class Passing(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        return batch


def fragments(
    fuses: bool, nested: bool, kind: str, custom: bool, explore: bool, seed: int, **more: Any
) -> list[dict[str, Any]]:
    makers = [partial(NumberedEnv, slot, nested=nested) for slot in range(3)]
    options: Any = {"fragment_length": 5, "num_fragments": 2, "explore": explore, "seed": seed, **more}
    if custom:
        options["env_to_module_connector"] = options["module_to_env_connector"] = lambda env: Passing()
    with Rollout(makers, module=Odd(kind), **options) as rollout:
        rollout.env_to_module.fuses = rollout.module_to_env.fuses = fuses
        made = [{name: fragment.column(name) for name in fragment.columns} for fragment in rollout.fragments()]
        for pipeline in (rollout.env_to_module, rollout.module_to_env):
            calls = {timer.calls for timer in pipeline.timers().values()}
            assert len(calls) == 1
            assert calls.pop() >= 10
    return made


@given(
    nested=st.booleans(),
    kind=st.sampled_from(["plain", "nested", "half", "brain float", "actions"]),
    custom=st.booleans(),
    explore=st.booleans(),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_pieces_called_as_one_give_the_same(**drawn: Any) -> None:
    for one, other in zip(fragments(True, **drawn), fragments(False, **drawn), strict=True):
        assert list(one) == list(other)
        for name in one:
            map_tree(np.testing.assert_array_equal, one[name], other[name])
            map_tree(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), one[name], other[name])


@given(
    fuses=st.booleans(),
    nested=st.booleans(),
    kind=st.sampled_from(["plain", "nested", "half", "brain float", "actions"]),
    custom=st.booleans(),
    explore=st.booleans(),
    seed=st.integers(0, 100),
    max_batch=st.sampled_from([2, 3]),
)
@settings(max_examples=40)
def test_passes_over_several_lanes_give_what_each_lane_gets_by_itself(max_batch: int, **drawn: Any) -> None:
    together = fragments(**drawn, lanes=2, max_batch=max_batch)
    for one, other in zip(together, fragments(**drawn, lanes=2), strict=True):
        for name in other:
            map_tree(np.testing.assert_array_equal, one[name], other[name])
            map_tree(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), one[name], other[name])


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


def test_of_a_pass_over_several_lanes_the_lane_is_named_that_is_wrong() -> None:
    makers = [partial(NumberedEnv, slot) for slot in range(3)]
    with Rollout(makers, module=Wrong(), lanes=3, max_batch=3, seed=0) as rollout:
        with pytest.raises(ModuleError, match=r"'action_dist_inputs' is NaN in lane 2, vector step 2, slot 0"):
            next(iter(rollout.fragments()))


def test_debugging_calls_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def told(name: str, call: Any) -> Any:
        def noting(self: Any, **kwargs: Any) -> Any:
            called.append(name)
            return call(self, **kwargs)

        return noting

    with Rollout("CartPole-v1", debug=True, num_fragments=1, fragment_length=2, seed=0) as rollout:
        for pipeline in (rollout.env_to_module, rollout.module_to_env):
            for piece in pipeline:
                name = type(piece).__name__
                monkeypatch.setattr(type(piece), "__call__", told(name, type(piece).__call__))
        names = {
            type(piece).__name__ for pipeline in (rollout.env_to_module, rollout.module_to_env) for piece in pipeline
        }
        list(rollout.fragments())
    assert set(called) == names
