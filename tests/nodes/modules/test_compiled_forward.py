"""Forward passes by torch.compile, and on another device."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from drawn_agents import Drawn, assert_alike, fragments_of as agent_fragments
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule, numbered_envs

from rollflow import MultiAgentRollout, Rollout
from rollflow.nodes import RandomModule
from rollflow.nodes.connectors.common.tensors import NumpyToTensor


def fragments(**options: Any) -> list[dict[str, Any]]:
    made: Any = {"module": NumberedModule(), "fragment_length": 6, "num_fragments": 3, "seed": 0, **options}
    with Rollout(numbered_envs(3)[1], **made) as rollout:
        return [
            {name: np.array(fragment.column(name)) for name in fragment.columns} for fragment in rollout.fragments()
        ]


def same(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    pairs = [(one[name], other[name]) for one, other in zip(ours, others, strict=True) for name in one]
    return all(np.array_equal(one, other) for one, other in pairs)


def test_a_compiled_pass_gives_the_same() -> None:
    # torch's eager backend goes through all of torch.compile but the making of machine code.
    assert same(fragments(compile_forward={"backend": "eager"}), fragments())


@pytest.mark.slow
def test_compiled_passes_of_several_modules_give_the_same() -> None:
    drawn = Drawn(2, 2, 4, 1, 9, False, 6, 1, False, 3)
    assert_alike(agent_fragments(drawn, compile_forward={"backend": "eager"}), agent_fragments(drawn))
    # The shapes of batches differ from pass to pass where agents come and go.
    assert_alike(agent_fragments(drawn, compile_forward={"backend": "eager"}, max_batch=8), agent_fragments(drawn))


@pytest.mark.parametrize("several", [False, True])
def test_it_is_shown_and_refused_beside_a_flat_one(several: bool) -> None:
    def make(**options: Any) -> Any:
        return MultiAgentRollout(maker, **options) if several else Rollout("CartPole-v1", **options)

    def explained(**options: Any) -> str:
        with make(**options) as rollout:
            return str(rollout.explain())

    maker = partial(NumberedAgents, 0, nested=0)
    assert "forward pass compiled" in explained(compile_forward={"backend": "eager"})
    assert "forward pass flat" in explained()
    assert "forward pass" not in explained(flat_forward=False)
    if several:
        shown = explained(module={"default_policy": None, "agent 0": RandomModule})
        assert "'default_policy' forward pass flat" in shown
    with pytest.raises(ValueError, match="two ways of doing a pass"):
        make(compile_forward=True, flat_forward=True)


def test_main_memory_as_a_device_is_no_other_device() -> None:
    assert same(fragments(device="cpu"), fragments())
    with Rollout("CartPole-v1", device="cpu") as rollout:
        [piece] = rollout.env_to_module[NumpyToTensor]
        assert not piece.is_elsewhere
