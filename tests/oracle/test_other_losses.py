"""Examples with the losses of other packages learn what they were written for."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["sb3_ppo", "torchrl_ppo"])
def test_an_example_with_anothers_loss_learns(name: str) -> None:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    main.__globals__["TARGET_RETURN"] = 100.0
    assert main() >= 100
