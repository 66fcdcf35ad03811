"""Workers that do whole rollouts, and are killed, stopped, or raise."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ending_envs import Doomed, lives_of, rewards_by_slot
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule

from rollflow import ConnectorV2, MultiAgentRollout, Rollout
from rollflow.stream import EnvError, RunError

pytestmark = [pytest.mark.slow, pytest.mark.wait_times(first_pause_s=0.01)]


def check_all_counted(fragments: list[Any], rollout: Rollout, folder: Path, most: int) -> None:
    """Every step that was made is in a chunk or counted as lost, with those under way, `most` of them."""
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
        ("kill", 0, 0, {"num_fragments": 12}, 2 * 2),
        ("kill", 1, 0, {"num_fragments": 12}, 2 * 2),
        ("raise", 0, 0, {"num_fragments": 12}, 2 * 2),
        ("stop", 1, 0, {"num_fragments": 12}, 2 * 2),
        ("kill", 1, 1, {"lanes": 3, "workers": 1, "fragment_length": 4, "num_fragments": 6}, 3),
    ],
    ids=["killed", "killed ahead", "raises", "stopped", "killed with all its lanes"],
)
def test_every_step_of_a_lost_worker_is_in_a_chunk_or_counted(
    tmp_path: Path, fate: str, prefetch: int, victim: int, options: dict[str, Any], most: int
) -> None:
    given: dict[str, Any] = {"workers": 2, "fragment_length": 8, "seed": 0, "step_timeout": 1.0, **options}
    slots, step, lives = (4, 21, 2) if victim == 0 else (3, 13, 1)
    makers = [partial(Doomed, slot, tmp_path, fate, step, lives * (slot == victim)) for slot in range(slots)]
    with Rollout(makers, where="rollouts", module=NumberedModule(), prefetch=prefetch, **given) as rollout:
        fragments = list(rollout.fragments())
        check_all_counted(fragments, rollout, tmp_path, most)
    for lane in range(given.get("lanes", 2)):
        sequences = [fragment.sequence for fragment in fragments if fragment.lane == lane]
        assert sequences == list(range(given["num_fragments"]))


@pytest.mark.parametrize("fate", ["raise", "kill"])
def test_what_a_lost_environment_has_open_ends_as_truncated(tmp_path: Path, fate: str) -> None:
    maker = partial(Doomed, 0, tmp_path, fate, 5, 1, lengths=(100, 100))
    with Rollout(
        maker, where="rollouts", module=NumberedModule(), fragment_length=8, num_fragments=2, seed=0
    ) as rollout:
        first, second = rollout.fragments()
    [lost] = first.episodes()
    assert (len(lost), lost.is_truncated) == (5, True)
    reason = "RuntimeError: it broke" if fate == "raise" else "was killed by SIGKILL"
    assert reason in lost.custom_data["lost"]
    assert second.losses == []
    assert [int(row[2]) for row in second.chunk(0).get_observations(slice(None))] == list(range(9))


@pytest.mark.parametrize("fate", ["kill", "raise"])
def test_the_fragment_after_a_loss_says_what_was_lost_before_it(tmp_path: Path, fate: str) -> None:
    makers = [partial(Doomed, slot, tmp_path, fate, 8, 1, lengths=(100, 100)) for slot in range(2)]
    with Rollout(
        makers, lanes=1, where="rollouts", module=NumberedModule(), fragment_length=8, num_fragments=3, seed=0
    ) as rollout:
        fragments = list(rollout.fragments())
    [after] = [fragment for fragment in fragments if fragment.losses]
    [loss] = after.losses
    assert (loss.row, loss.slots.tolist(), loss.cut.tolist()) == (after.first_row, [0, 1], [])
    assert ("it broke" if fate == "raise" else "was killed by SIGKILL") in loss.reason
    place = fragments.index(after)
    ids = [{chunk.id_ for chunk in fragment.episodes()} for fragment in fragments]
    assert len(ids[place]) == 2
    assert all(len(ids[place] & later) == 2 for later in ids[place + 1 :])
    assert not any(ids[place] & before for before in ids[:place])
    assert after.num_steps == 16
    assert [int(row[2]) for row in after.chunk(0).get_observations(slice(0, None))] == list(range(9))


@pytest.mark.parametrize("fate", ["kill", "raise"])
def test_one_that_fails_again_and_again_is_set_aside_and_the_others_go_on(
    tmp_path: Path, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    makers = [partial(Doomed, slot, tmp_path, fate, 0, 100 * (slot == 1)) for slot in range(3)]
    options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 3, "seed": 0, "lanes": 3}
    with Rollout(makers, where="rollouts", workers=3 if fate == "kill" else 1, **options) as rollout:
        fragments = list(rollout.fragments())
    assert sorted((fragment.lane, fragment.sequence) for fragment in fragments) == [
        (lane, sequence) for lane in (0, 2) for sequence in range(3)
    ]
    assert "lane 1 is set aside, lost 6 times in a row" in caplog.text


def test_where_no_lane_is_left_the_run_ends_with_the_reasons(tmp_path: Path) -> None:
    told = r"every lane was lost 6 times in a row, the last time by: lane 0: process \d+ was killed by SIGKILL"
    maker = partial(Doomed, 0, tmp_path, "kill", 0, 100)
    with Rollout(maker, where="rollouts", workers=1, module=NumberedModule(), seed=0) as rollout:
        with pytest.raises(EnvError, match=told):
            next(iter(rollout.fragments()))


class Breaks(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("in a piece")


def test_an_error_in_a_connector_ends_the_run() -> None:
    connector: Any = lambda env: Breaks()  # noqa: E731
    told = "ZeroDivisionError: in a piece"
    with Rollout("CartPole-v1", where="rollouts", env_to_module_connector=connector) as rollout:
        with pytest.raises(RunError, match=told) as raised:
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
            {"max_batch": 4},
            "max_batch, max_wait and forward_in_thread are for a forward pass over several lanes, but",
        ),
        ({"max_wait": 0.01}, "but where='rollouts' has one for each; expected where='threads' or where='processes'"),
        ({"forward_in_thread": True}, "but where='rollouts' has one for each; expected"),
        ({"metrics": {}}, "metrics is dict, expected a MetricsLogger"),
    ],
)
def test_what_has_no_effect_in_workers_is_refused(kind: Any, env: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        kind(env, where="rollouts", **options)
