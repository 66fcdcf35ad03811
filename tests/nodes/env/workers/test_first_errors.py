"""Environments that raise in every lane before they have made a step: that is no accident, and the run ends at once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_envs import Doomed
from numbered_module import NumberedEnv, NumberedModule
from places import rollout_at
from remote_hosts import hosting, listening

from rollflow import Rollout
from rollflow.stream import EnvError

# A second try would not come within the test's time.
pytestmark = pytest.mark.wait_times(first_pause_s=1000.0, worker_pause_s=1000.0)

TOLD = r"the environments of every lane raised before they had made a step: lane 0: .*; lane 1: RuntimeError: it broke"


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("processes", "in a worker process:"),
        ("rollouts", "in a worker process:"),
        pytest.param("hosts", "on host sim (tcp://127.0.0.1:", id="a host"),
    ],
)
def test_a_first_step_that_raises_in_every_lane_is_reported_at_once(place: str, where: str, tmp_path: Path) -> None:
    makers = [partial(Doomed, slot, tmp_path, "raise", 0, 100) for slot in range(2)]
    options: Any = {"fragment_length": 4, "seed": 0} | ({} if place == "hosts" else {"workers": 2})
    acts = {"module": NumberedModule()}
    with rollout_at(place, makers, envs={"lanes": 2}, acts=acts, hosts={"name": "sim"}, **options) as made:
        with pytest.raises(EnvError, match=TOLD) as raised, made as rollout:
            next(iter(rollout.fragments()))
    assert [Doomed.lives(tmp_path, slot) for slot in range(2)] == [[0], [0]]
    [note] = [note for note in raised.value.__notes__ if note.startswith(f"lane 0, {where}")]
    assert "Traceback" in note
    assert "RuntimeError: it broke" in note


@pytest.mark.wait_times(first_pause_s=0.0)
def test_where_another_host_goes_on_it_is_an_accident(tmp_path: Path) -> None:
    envs = listening(hosts=2)
    makers = partial(Doomed, 0, tmp_path, "raise", 0, 2), partial(NumberedEnv, 1)
    one, other = (hosting(envs.addresses[0], [make]) for make in makers)
    options: Any = {"module": NumberedModule(), "fragment_length": 4, "num_fragments": 2, "seed": 0}
    with one, other, Rollout(envs, **options) as rollout:
        assert {fragment.lane for fragment in rollout.fragments()} == {0, 1}
    assert len(Doomed.lives(tmp_path, 0)) == 3
