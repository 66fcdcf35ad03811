"""`rollflow policy adapt`: a saved policy for an environment with other spaces."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rollflow import Policy
from rollflow.cli.main import main
from rollflow.nodes import DefaultModule

SPACES: dict[str, Any] = {
    "observation_space": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "action_space": spaces.Discrete(3),
}


class Newer(gym.Env[Any, Any]):
    """Environment with a third number to see."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Discrete(3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved policy for two numbers."""
    Policy(DefaultModule, **SPACES).save(tmp_path / "old")
    return tmp_path / "old"


def adapt(saved: Path, *options: str) -> int:
    """Run the command; what it writes goes beside the policy."""
    where = [] if {"--spaces", "--env"} & set(options) else ["--env", f"{__name__}:Newer"]
    return main(["policy", "adapt", str(saved), "--out", str(saved.parent / "new"), *where, *options])


FIELDS = ["--field", "observation[0]=observation[0]", "--field", "observation[1]=observation[1],0.5,0.25"]


def test_what_does_not_match_is_listed_and_fields_settle_it(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt(saved) == 1
    text = capsys.readouterr().err
    assert (
        "field observation has no origin, expected one for all of observation in Box(-1.0, 1.0, (2,), float32)" in text
    )
    assert "nothing takes observation in Box(-1.0, 1.0, (3,), float32)" in text
    assert not (saved.parent / "new").exists()
    assert adapt(saved, *FIELDS) == 0
    assert "test_adapt:Newer as" in capsys.readouterr().out
    old, new = Policy.load(saved), Policy.load(saved.parent / "new")
    for row in np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3):
        assert new.act(row) == old.act(np.array([row[0], 0.5 * row[1] + 0.25], np.float32))


def test_the_spaces_may_come_from_a_policy(saved: Path) -> None:
    spaces_of = {"observation_space": Newer.observation_space, "action_space": spaces.Discrete(4)}
    Policy(DefaultModule, **spaces_of).save(saved.parent / "other")
    fields = ("observation[0]=observation[2]", "observation[1]=0.5", "action=action")
    options = [text for field in fields for text in ("--field", field)]
    assert adapt(saved, "--spaces", str(saved.parent / "other"), *options) == 0
    old, new = Policy.load(saved), Policy.load(saved.parent / "new")
    assert new.action_space == spaces.Discrete(4)
    for row in np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3):
        assert new.act(row) == old.act(np.array([row[2], 0.5], np.float32))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--field", "speed"], "--field 'speed', expected FIELD=FROM"),
        (["--field", "=0"], "--field '=0', expected FIELD=FROM"),
        (["--field", "speed=turn,2"], "--field 'speed=turn,2', expected FIELD=FROM"),
        (["--field", "speed=turn,fast,0"], "--field 'speed=turn,fast,0', expected FIELD=FROM"),
        ([*FIELDS, "--field", "speed=1"], "field speed is not there"),
        (["--env", "Nowhere-v3"], "--env Nowhere-v3: "),
        (["--spaces", "nowhere"], "nowhere"),
    ],
)
def test_options_that_can_not_be_are_refused(
    options: list[str], text: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert adapt(saved, *options) == 1
    assert text in capsys.readouterr().err
    assert not (saved.parent / "new").exists()
