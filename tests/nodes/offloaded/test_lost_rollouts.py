"""Workers that do whole rollouts, and are killed, stopped, or raise."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_envs import Doomed, lives_of, rewards_by_slot
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule
from piece_forms import Breaks
from remote_rollouts import await_that

from rollflow import Forward, MultiAgentRollout, Rollout, Timeouts, Watch
from rollflow.nodes.env.workers.lane_status import LanePhase
from rollflow.stream import RunError

pytestmark = [pytest.mark.slow, pytest.mark.wait_times(first_pause_s=0.01)]


def check_all_counted(fragments: list[Any], rollout: Rollout, folder: Path, most: int) -> None:
    """Every step that was made is in a chunk or counted as lost, with those under way: some, and at most `most`."""
    [(cause, lost)] = rollout.lost.items()
    assert cause == "workers"
    assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    ids = [(chunk.id_, chunk.t_started) for fragment in fragments for chunk in fragment.episodes()]
    assert len(set(ids)) == len(ids)
    missing = 0
    for slot, rewards in rewards_by_slot(fragments).items():
        made = [steps for steps in Doomed.lives(folder, slot) if steps]
        seen = lives_of(rewards)
        missing += sum(made[: len(seen)]) - sum(seen)
    assert 0 < lost <= most
    assert 0 <= missing <= lost


@pytest.mark.parametrize(
    ("fate", "prefetch", "victim", "options", "most"),
    [
        ("kill", 0, 0, {"num_fragments": 12}, 2 * 2 * 6),
        ("kill", 1, 0, {"num_fragments": 12}, 2 * 2 * 6),
        ("raise", 0, 0, {"num_fragments": 12}, 2 * 2),
        ("stop", 1, 0, {"num_fragments": 12}, 2 * 2 * 6),
        ("kill", 1, 1, {"lanes": 3, "workers": 1, "fragment_length": 4, "num_fragments": 6}, 3 * 2),
    ],
    ids=["killed", "killed ahead", "raises", "stopped", "killed with all its lanes"],
)
def test_every_step_of_a_lost_worker_is_in_a_chunk_or_counted(
    tmp_path: Path, fate: str, prefetch: int, victim: int, options: dict[str, Any], most: int
) -> None:
    given: dict[str, Any] = {"workers": 2, "fragment_length": 8, "seed": 0, "timeouts": Timeouts(step=1.0), **options}
    slots, step, lives = (4, 21, 2) if victim == 0 else (3, 13, 1)
    makers = [partial(Doomed, slot, tmp_path, fate, step, lives * (slot == victim)) for slot in range(slots)]
    with Rollout(makers, where="rollouts", module=NumberedModule(), prefetch=prefetch, **given) as rollout:
        fragments = list(rollout.fragments())
        check_all_counted(fragments, rollout, tmp_path, most)
    for lane in range(given.get("lanes", 2)):
        sequences = [fragment.sequence for fragment in fragments if fragment.lane == lane]
        assert sequences == list(range(given["num_fragments"]))


@pytest.mark.wait_times(first_pause_s=20.0)
def test_nothing_is_lost_with_a_worker_that_dies_between_two_turns_of_a_rollout_that_ends_then() -> None:
    with Rollout("CartPole-v1", where="rollouts", workers=1, lanes=1, fragment_length=4, seed=0) as rollout:
        next(iter(rollout.fragments()))
        node: Any = rollout.environments
        [link] = node.remotes
        await_that(lambda: link.phase is LanePhase.READY and not link.is_waited)
        os.kill(link.worker.process.pid, signal.SIGKILL)
        await_that(lambda: [*node._completed(), link.phase is LanePhase.LOST][-1])
        node.hand_over(link.lane)
        node.hasten()
        assert [lane.is_set_aside for lane in node._completed()] == [True]
        assert node.lost_steps == 0


def test_an_error_in_a_connector_ends_the_run() -> None:
    with Rollout("CartPole-v1", where="rollouts", env_to_module_connector=lambda env: Breaks(at=1)) as rollout:
        with pytest.raises(RunError, match="ZeroDivisionError: no more") as raised:
            next(iter(rollout.fragments()))
    assert any("in node 'env_to_module'" in note for note in raised.value.__notes__)


def test_the_report_tells_of_the_stages_in_the_workers() -> None:
    with Rollout("CartPole-v1", where="rollouts", workers=1, num_envs=2, fragment_length=20, seed=0) as rollout:
        fragments = iter(rollout.fragments())
        for _ in range(3):
            next(fragments)
        report = rollout.report()
    items = {node.name: node.items for node in report.nodes}
    assert items["env"] == items["module"] == items["module_to_env"] == 60
    assert set(items) == {"env", "env_to_module", "module", "module_to_env", "deal", "pace", "caller"}


@pytest.mark.parametrize(("kind", "env"), [(Rollout, "CartPole-v1"), (MultiAgentRollout, NumberedAgents)])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"forward": Forward(max_batch=4)},
            "max_batch and max_wait of Forward are for a pass over several lanes, "
            "but where='rollouts' has one for each; expected where='threads' or where='processes'",
        ),
        ({"watch": Watch(metrics={})}, "metrics is dict, expected a MetricsLogger"),
    ],
)
def test_what_has_no_effect_in_workers_is_refused(kind: Any, env: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        kind(env, where="rollouts", **options)
